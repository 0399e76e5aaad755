"""Code that leaves a nursery or a cancel scope open fails alone; trio ends only its own task."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from backend.helpers import assert_nothing_is_left, backend, echo, execute, full_marks
from support import CHAT_URL, in_process, make_app, prompt

from rollout import RolloutStatus
from rollout.backend.usercode import UserCall
from rollout.types import RolloutErrorCategory


class LeftOpen:
    """Ways to leave something open, and whether what ran inside was ended."""

    def __init__(self):
        self.kept = []
        self.begun = self.ended = 0

    async def child(self):
        self.begun += 1
        try:
            await trio.sleep_forever()
        finally:
            self.ended += 1

    async def scope(self):
        scope = trio.CancelScope()
        scope.__enter__()
        self.kept.append(scope)

    async def nursery(self):
        manager = trio.open_nursery()
        nursery = await manager.__aenter__()
        nursery.start_soon(self.child)
        self.kept.append(manager)
        await trio.testing.wait_all_tasks_blocked()

    async def items(self):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.child)
            await trio.testing.wait_all_tasks_blocked()
            yield 1

    async def generator(self):
        generator = self.items()
        self.kept.append(generator)
        async for _ in generator:
            break

    def leave(self, how):
        return getattr(self, how)()


ways = pytest.mark.parametrize("how", ["scope", "nursery", "generator"])


@ways
@pytest.mark.parametrize("raises", [True, False])
async def test_the_call_comes_back_with_an_error(how, raises):
    left = LeftOpen()

    async def body():
        await left.leave(how)
        if raises:
            raise KeyError("after that")
        return 42

    outcome = await UserCall("r", "workflow").run_in_task(body)
    assert isinstance(outcome.error, RuntimeError)
    assert "stack corrupted" in str(outcome.error)
    assert outcome.value is None
    await trio.testing.wait_all_tasks_blocked()
    assert left.ended == left.begun
    # The task that waited is whole: scopes and nurseries work as ever.
    with trio.move_on_after(0) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
    assert scope.cancelled_caught


async def test_nothing_left_open_is_an_ordinary_call():
    async def body():
        return 42

    user_call = UserCall("r", "workflow")
    outcome = await user_call.run_in_task(body)
    assert (outcome.value, outcome.error, outcome.interrupted) == (42, None, False)


async def test_cancellation_from_outside_passes_through():
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(UserCall("r", "workflow").run_in_task, trio.sleep_forever)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught


async def test_the_task_says_whose_it_is():
    names = []

    async def body():
        names.append(trio.lowlevel.current_task().name)

    await UserCall("r-7", "grader").run_in_task(body)
    assert names == ["grader of rollout r-7"]


@ways
@pytest.mark.parametrize("phase", ["workflow", "grader"])
async def test_the_rollout_fails_and_its_slot_is_free(how, phase):
    left = LeftOpen()

    async def leave(ctx):
        await left.leave(how)
        return [{"role": "user"}]

    local = backend(leave, full_marks) if phase == "workflow" else backend(echo, leave)
    outcome = await execute(local, grade=True, label="x")
    assert outcome.result.status is RolloutStatus.FAILURE
    assert outcome.result.err_category is RolloutErrorCategory.AGENT_ERROR
    assert "stack corrupted" in outcome.result.err_message
    assert_nothing_is_left(local)


@pytest.mark.parametrize("grade", [True, False])
async def test_a_nursery_whose_scope_alone_was_left_fails_the_rollout_too(grade):
    left = LeftOpen()

    async def leave(ctx):
        manager = trio.open_nursery()
        nursery = await manager.__aenter__()
        nursery.cancel_scope.__exit__(None, None, None)
        left.kept.append(manager)
        return [{"role": "user"}]

    local = backend(leave, full_marks)
    outcome = await execute(local, grade=grade, label="x")
    assert outcome.result.status is RolloutStatus.FAILURE
    assert outcome.result.err_category is RolloutErrorCategory.AGENT_ERROR
    assert "stack corrupted" in outcome.result.err_message
    assert_nothing_is_left(local)


@ways
async def test_a_server_lives_on_and_so_do_the_other_rollouts(autojump_clock, how):
    left = LeftOpen()

    async def run(ctx):
        if "leave" in ctx.prompt[0]:
            await left.leave(how)
        else:
            await trio.sleep(10)
        return ctx.prompt

    local = backend(run)
    async with in_process(make_app(local)) as client:
        other = await client.run_rollout_async(prompt(), CHAT_URL, "other", grade=False)
        await other.wait_for_running()
        for name in ("a", "b"):
            result = await client.run_rollout(prompt(leave=True), CHAT_URL, name, grade=False)
            assert result.err_category is RolloutErrorCategory.AGENT_ERROR
        assert (await other).status is RolloutStatus.SUCCESS
        assert (await client.health())["lifecycle"]["active_rollouts"] == 0
    assert_nothing_is_left(local)
