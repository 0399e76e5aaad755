"""A server in a process of its own, and what is left when it ends, however it does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trial_support import KEY, TESTS, Rollouts, files_with, mounts

from rollout.client import RolloutClient
from rollout.types import RolloutStatus

SERVER = """\
from rollout import AgentWorkflowConfig, ConcurrencyConfig
from rollout.backend.harbor import HarborBackend
from rollout.server import create_rollout_server

backend = HarborBackend(
    agent="oracle",
    agent_config=AgentWorkflowConfig(
        name="tested", concurrency=ConcurrencyConfig(max_concurrent=None)
    ),
    tasks_dir={tasks!r},
    environment={environment!r},
    artifact_root={kept!r},
    trials_dir={trials!r},
)
app = create_rollout_server(backend=backend)
"""


def descendants(pid):
    """All processes below one, as file descriptors that become readable when they end."""
    found, unseen = [], [pid]
    while unseen:
        process = Path(f"/proc/{unseen.pop()}")
        for task in (process / "task").iterdir():
            unseen += (children := (task / "children").read_text().split())
            found += [os.pidfd_open(int(child)) for child in children]
    return found


async def all_end(processes):
    with trio.fail_after(120):
        for process in processes:
            await trio.lowlevel.wait_readable(process)
            os.close(process)


class Process:
    def __init__(self, process, lines):
        self.process = process
        self.lines = lines

    @property
    def log(self):
        return "".join(self.lines)


@asynccontextmanager
async def server_process(file, tmp_path):
    """`rollout serve`, and a client of it; reads its log all the while."""
    lines: list[str] = []
    send, receive = trio.open_memory_channel(1)
    environ = os.environ | {
        "TMPDIR": str(tmp_path / "tmp"),
        "HOME": str(tmp_path / "home"),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "rollout.cli", "serve", f"{file}:app"]
    async with trio.open_nursery() as nursery:
        process = await nursery.start(
            lambda task_status: trio.run_process(
                [*command, "--bind", "127.0.0.1:0", "--drain-sec", "0.1"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environ,
                check=False,
                task_status=task_status,
            )
        )

        async def read(stream):
            rest = ""
            async for data in stream:
                *whole, rest = (rest + data.decode()).split("\n")
                for line in whole:
                    lines.append(line + "\n")
                    if "http://127.0.0.1:" in line and not announced:
                        announced.append(True)
                        await send.send(line)

        announced: list[bool] = []
        nursery.start_soon(read, process.stdout)
        nursery.start_soon(read, process.stderr)
        with trio.fail_after(120):
            line = await receive.receive()
        url = next(word for word in line.split() if word.startswith("http")).rstrip(".,")
        async with RolloutClient(url=url) as client:
            yield Process(process, lines), Rollouts(url, client, None)
        nursery.cancel_scope.cancel()


@pytest.fixture
def server_file(make_task, tmp_path):
    def make(pipe):
        make_task(solution=f"sleep 3600 & {pipe.say}; sleep 3600", tests=TESTS)
        (tmp_path / "home").mkdir()
        file = tmp_path / "harbor_server.py"
        file.write_text(
            SERVER.format(
                tasks=str(tmp_path / "tasks/answer"),
                environment={"type": "namespace", "mounts": [pipe.mount]},
                kept=str(tmp_path / "kept"),
                trials=str(tmp_path / "trials"),
            )
        )
        return file

    return make


class Gate:
    """Reads a pipe that many trials write to, until all of them have."""

    def __init__(self, pipe):
        # Kept open for writing too, so that it does not end between two writers.
        self.descriptor = os.open(pipe.path, os.O_RDWR)

    async def wait(self, count):
        with trio.fail_after(240):
            seen = b""
            while seen.count(b"here\n") < count:
                seen += await trio.to_thread.run_sync(
                    os.read, self.descriptor, 65536, abandon_on_cancel=True
                )

    def close(self):
        os.close(self.descriptor)


@pytest.fixture
def gate(pipe):
    gate = Gate(pipe)
    yield gate
    gate.close()


async def test_sigterm_while_twenty_trials_run(server_file, pipe, gate, tmp_path):
    before = mounts()
    async with server_process(server_file(pipe), tmp_path) as (server, rollouts):
        handles = [await rollouts.start(f"r-{number}") for number in range(20)]
        await gate.wait(20)
        processes = descendants(server.process.pid)
        assert len(processes) > 40
        server.process.send_signal(signal.SIGTERM)
        results = [await handle for handle in handles]
        with trio.fail_after(120):
            assert await server.process.wait() == 0, server.log
    assert [each.status for each in results] == [RolloutStatus.CANCELLED] * 20
    assert {each.err_message for each in results} == {"cancelled while its agent ran"}
    await all_end(processes)
    assert mounts() == before
    assert list((tmp_path / "trials").iterdir()) == []
    assert list((tmp_path / "tmp").iterdir()) == []
    assert len(list((tmp_path / "kept").iterdir())) == 20
    assert files_with(tmp_path, KEY) == []
    assert KEY not in server.log


async def test_sigkill_takes_the_sandboxes_along(server_file, pipe, gate, tmp_path):
    async with server_process(server_file(pipe), tmp_path) as (server, rollouts):
        handles = [await rollouts.start(f"r-{number}") for number in range(3)]
        await gate.wait(3)
        for handle in handles:
            handle.cancel()
        processes = descendants(server.process.pid)
        assert len(processes) > 6
        server.process.kill()
        await all_end(processes)
        await server.process.wait()
    assert files_with(tmp_path, KEY) == []
    # Nobody was there to remove them.
    for name in ("tmp", "trials"):
        shutil.rmtree(tmp_path / name)
        (tmp_path / name).mkdir()
