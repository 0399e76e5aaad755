"""Fixtures and helpers for sandboxes, and a check that none leaves a process, mount or folder."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from rollout.sandbox import NamespaceStartError, Sandbox, check_system
from rollout.sandbox._init_process import InitProcess
from rollout.sandbox._process_tree import pid_namespace


@functools.cache
def why_not():
    """Why there can be no sandbox on this machine, `None` if there can."""
    try:
        check_system()
    except NamespaceStartError as error:
        return str(error)
    rights = ["--user", "--map-root-user"] if not is_root() else []
    command = ["unshare", *rights, "--mount", "--pid", "--fork", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


def is_root():
    return os.geteuid() == 0


@pytest.fixture
def namespaces():
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def folders(parent):
    return set(Path(parent).glob("rollout-sandbox-*"))


def children():
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found |= set((task / "children").read_text().split())
    return found


def inside(numbers):
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if pid_namespace(pid) in numbers]


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch, tmp_path_factory):
    """After each test no process, mount or folder of a sandbox is left."""
    numbers = set()
    # The kernel gives the number of a namespace that is gone to the next one, anybody's.
    held = []
    start = InitProcess.start.__func__

    async def recorded(cls, *args, **kwargs):
        first = await start(cls, *args, **kwargs)
        held.append(os.dup(first.namespaces["pid"]))
        numbers.add(first.pid_namespace)
        return first

    monkeypatch.setattr(InitProcess, "start", classmethod(recorded))
    # Where nobody else makes sandboxes at the same time.
    own = tmp_path_factory.mktemp("sandboxes")
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    before = children()
    yield numbers
    assert children() <= before
    left = inside(numbers)
    for descriptor in held:
        os.close(descriptor)
    assert left == []
    assert folders(own) == set()
    assert "rollout-sandbox-" not in Path("/proc/self/mountinfo").read_text()


@pytest.fixture
def sandbox(namespaces):
    """Opens a sandbox with two folders more: `async with sandbox() as box`."""

    @contextlib.asynccontextmanager
    async def opened(**options):
        async with Sandbox(**options) as box:
            await says(box, "mkdir -p /app /tests")
            yield box

    return opened


@pytest.fixture
def run():
    """Runs a coroutine function to its end, with a bound on how long that may take."""

    def run(main, *args):
        async def bounded():
            async with asyncio.timeout(120):
                return await main(*args)

        return asyncio.run(bounded())

    return run


def bash(box, command, **options):
    return box.run(["bash", "-c", command], **options)


async def says(box, command, **options):
    """What a command wrote, which must succeed."""
    result = await bash(box, command, **options)
    assert result.return_code == 0, result
    return result.stdout


async def until(box, condition):
    """Wait inside until a shell condition holds; a FIFO or a file tells, not the time."""
    await says(box, f"until {condition}; do sleep 0.01; done")


def others(box_numbers):
    """Processes in a pid namespace that live, but for the first, as `stat` shows them."""
    number, first = box_numbers
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal() or pid_namespace(int(path.name)) != number:
            continue
        with contextlib.suppress(OSError):
            line = (path / "stat").read_text()
            if int(path.name) != first and line.rpartition(")")[2].split()[0] not in "ZX":
                found.append(line[:60])
    return found
