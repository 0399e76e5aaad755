"""Sandboxes for tests, and the check that none leaves a process, a mount or a folder behind."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

if sys.platform != "linux":
    collect_ignore_glob = ["test_*.py"]

from rollout.backend.harbor._namespace import processes
from rollout.backend.harbor._namespace.errors import NamespaceStartError
from rollout.backend.harbor._namespace.holder import Holder, find_tools
from rollout.backend.harbor._namespace.sandbox import Sandbox

HERE = Path(__file__).parent
if str(HERE / "modules") not in sys.path:
    sys.path.insert(0, str(HERE / "modules"))


@functools.cache
def why_not():
    """Why there can be no sandbox on this machine, `None` if there can."""
    try:
        tools = find_tools()
    except NamespaceStartError as error:
        return str(error)
    rights = ["--user", "--map-root-user"] if not is_root() else []
    command = [tools["unshare"], *rights, "--mount", "--pid", "--fork", "true"]
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
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found |= set((task / "children").read_text().split())
    return found


def inside(numbers):
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if processes.pid_namespace(pid) in numbers]


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch, tmp_path_factory):
    """After each test no process, mount or folder of a sandbox is left."""
    numbers = set()
    # The kernel gives the number of a namespace that is gone to the next one, anybody's.
    held = []
    start = Holder.start.__func__

    async def recorded(cls, *args, **kwargs):
        holder = await start(cls, *args, **kwargs)
        held.append(os.dup(holder.namespaces["pid"]))
        numbers.add(holder.pid_namespace)
        return holder

    monkeypatch.setattr(Holder, "start", classmethod(recorded))
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
    """Opens a started sandbox: `async with sandbox() as box`."""

    @asynccontextmanager
    async def opened(**options):
        box = Sandbox(**options)
        await box.start()
        try:
            yield box
        finally:
            await box.stop()

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
