"""A server in a process of its own, and what is left when it ends, however it does."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from server_process import server_process
from trial_support import KEY, TESTS, files_with, mounts

from rollout._files.claims import Claim
from rollout.types import RolloutStatus

pytestmark = pytest.mark.harbor

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
        for child in children_of(unseen.pop()):
            with suppress(ProcessLookupError):
                found.append(os.pidfd_open(child))
                unseen.append(child)
    return found


def children_of(pid):
    """The children of all threads; those, and short commands, may end at any time."""
    found, tasks = [], []
    with suppress(FileNotFoundError):
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    for task in tasks:
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (task / "children").read_text().split())
    return found


async def all_end(processes):
    with trio.fail_after(120):
        for process in processes:
            await trio.lowlevel.wait_readable(process)
            os.close(process)


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
    async with server_process(server_file(pipe), tmp_path, "--drain-sec", "0.1") as (
        server,
        rollouts,
    ):
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
    assert mounts(tmp_path) == []
    assert list((tmp_path / "trials").iterdir()) == []
    assert list((tmp_path / "tmp").iterdir()) == []
    assert len(list((tmp_path / "kept").iterdir())) == 20
    assert files_with(tmp_path, KEY) == []
    assert KEY not in server.log


async def test_sigkill_takes_the_sandboxes_along(server_file, pipe, gate, tmp_path):
    file = server_file(pipe)
    async with server_process(file, tmp_path, "--drain-sec", "0.1") as (
        server,
        rollouts,
    ):
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
    left = [tmp_path / name for name in ("tmp", "trials")]
    assert [len(list(folder.iterdir())) for folder in left] == [3, 3]
    packaged = left[0] / "rollout-agent-left"
    packaged.mkdir()
    Claim(packaged).release()
    # Nobody was there to remove them; the next server does, before it serves.
    async with server_process(file, tmp_path) as (server, _):
        assert [list(folder.iterdir()) for folder in left] == [[], []]
        assert "a process that was killed" in server.log
        server.process.terminate()
        await server.process.wait()
