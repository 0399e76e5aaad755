"""Downloads behind the bridge: trio waits and cancels, asyncio works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
import trio.testing

from rollout.backend.harbor.tasks import fetch as task_fetch
from rollout.backend.harbor.tasks.fetch import fetch_task
from rollout.backend.harbor.tasks.source import TaskSource
from rollout.integrations.asyncio_bridge import open_asyncio_bridge
from rollout.types import ExecutionRequest

pytestmark = pytest.mark.harbor


@pytest.fixture
def resolved(repository):
    value = {"git_url": f"file://{repository}", "path": "tasks/add"}
    request = ExecutionRequest(
        id="r1", prompt=[{"role": "user", "content": "x"}], metadata={"harbor_task": value}
    )
    return TaskSource(allow_local_git=True).resolve(request, Path("/nowhere"))


async def test_rollouts_that_are_cancelled_leave_the_others_alone(resolved, tmp_path, monkeypatch):
    begun, go = trio.Event(), tmp_path / "go"
    os.mkfifo(go)
    run = task_fetch._git
    clones = []

    async with open_asyncio_bridge() as bridge:

        async def slow(args, cwd, given=None):
            import asyncio

            if args[1] == "clone":
                clones.append(args)
                bridge.call_trio_soon(begun.set)
                await asyncio.to_thread(go.read_text)
            return await run(args, cwd, given)

        monkeypatch.setattr(task_fetch, "_git", slow)
        done = []

        async def one(number):
            place = tmp_path / str(number)
            place.mkdir()
            done.append(await bridge.run(fetch_task, resolved, place))

        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as first:
                first.start_soon(one, 0)
                await begun.wait()
                for number in range(1, 6):
                    nursery.start_soon(one, number)
                await trio.testing.wait_all_tasks_blocked()
                first.cancel_scope.cancel()
            await trio.to_thread.run_sync(go.write_text, "go")
        assert {task.instruction for task in done} == {"First."}
        assert len(done) == 5
        assert len(clones) == 1
    assert list((tmp_path / "tmp").iterdir()) == []
