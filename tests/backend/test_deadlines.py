"""Phase deadlines: what counts against them, and what is reported once one has passed."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from backend.helpers import (
    Progress,
    assert_nothing_is_left,
    backend,
    echo,
    execute,
    full_marks,
)

from rollout import RolloutStatus
from rollout.types import RolloutErrorCategory

GRADED = {"grade": True, "label": "42"}


def assert_timeout(outcome, *words):
    assert outcome.result.status is RolloutStatus.FAILURE
    assert outcome.result.err_category is RolloutErrorCategory.TIMEOUT
    for word in words:
        assert word in outcome.result.err_message


@pytest.mark.parametrize("limit", [0, -1, -0.5, -1e308, -(10**300)])
async def test_a_deadline_that_has_passed_never_starts_the_agent(autojump_clock, limit):
    ran = []

    async def run(ctx):
        ran.append(ctx)

    local, progress = backend(run), Progress()
    outcome = await execute(local, progress=progress, agent_timeout_sec=limit)
    assert_timeout(outcome, "workflow exceeded its deadline")
    assert ran == []
    assert progress.names == []
    assert trio.current_time() == 0
    assert_nothing_is_left(local)


@pytest.mark.parametrize("limit", [None, 1e308, 10**300, 3601])
async def test_far_deadlines_do_not_matter(autojump_clock, limit):
    async def run(ctx):
        await trio.sleep(3600)
        return ctx.prompt

    outcome = await execute(backend(run), agent_timeout_sec=limit)
    assert outcome.result.status is RolloutStatus.SUCCESS


async def test_a_deadline_interrupts_a_running_workflow(autojump_clock):
    stopped_at = []

    async def run(ctx):
        try:
            await trio.sleep_forever()
        finally:
            stopped_at.append(trio.current_time())

    local, progress = backend(run), Progress()
    outcome = await execute(local, progress=progress, agent_timeout_sec=5)
    assert_timeout(outcome, "workflow exceeded its deadline of 5 s")
    assert "queue" not in outcome.result.err_message
    assert stopped_at == [5]
    assert progress.names == ["started"]
    assert outcome.grader is None
    assert_nothing_is_left(local)


async def test_queue_time_counts_and_is_mentioned(autojump_clock):
    async def run(ctx):
        await trio.sleep(ctx.metadata["sec"])
        return ctx.prompt

    local = backend(run, slots=1)
    outcomes = {}

    async def go(name, sec, **fields):
        outcomes[name] = await execute(local, name, metadata={"sec": sec}, **fields)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go, "first", 6)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(lambda: go("second", 6, agent_timeout_sec=10))
    assert outcomes["first"].result.status is RolloutStatus.SUCCESS
    assert_timeout(outcomes["second"], "deadline of 10 s", "6.0 s of it in the queue")
    assert trio.current_time() == pytest.approx(10)


async def test_a_deadline_may_pass_in_the_queue(autojump_clock):
    ran = []

    async def run(ctx):
        ran.append(ctx.metadata)
        await trio.sleep(60)
        return ctx.prompt

    local, progress = backend(run, slots=1), Progress()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: execute(local, "first"))
        await trio.testing.wait_all_tasks_blocked()
        outcome = await execute(local, "second", progress=progress, agent_timeout_sec=5)
        assert trio.current_time() == 5
        assert local.rollout_status("first") == {"status": "running"}
    assert_timeout(outcome, "deadline of 5 s", "5.0 s of it in the queue")
    assert ran == [None]
    assert progress.names == []
    assert_nothing_is_left(local)


async def test_the_clock_runs_from_the_admission_on(autojump_clock):
    local, progress = backend(), Progress()
    assert local.reserve("r")
    await trio.sleep(7)
    outcome = await execute(local, "r", progress=progress, agent_timeout_sec=5)
    assert_timeout(outcome, "7.0 s of it in the queue")
    assert progress.names == []


@pytest.mark.parametrize("late_by", [0, 20])
async def test_a_late_return_is_a_timeout(autojump_clock, late_by):
    async def run(ctx):
        with trio.CancelScope(shield=True):
            await trio.sleep(5 + late_by)
        return ctx.prompt

    local = backend(run)
    assert_timeout(await execute(local, agent_timeout_sec=5), "deadline of 5 s")
    assert trio.current_time() == 5 + late_by
    assert_nothing_is_left(local)


async def test_a_swallowed_cancellation_is_a_timeout(autojump_clock):
    async def run(ctx):
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            return ctx.prompt

    assert_timeout(await execute(backend(run), agent_timeout_sec=5))


async def test_an_error_after_the_deadline_is_a_timeout(autojump_clock):
    async def run(ctx):
        try:
            await trio.sleep_forever()
        finally:
            raise KeyError("cleanup failed")

    assert_timeout(await execute(backend(run), agent_timeout_sec=5), "deadline of 5 s")


async def test_blocking_the_loop_past_the_deadline_is_a_timeout(mock_clock):
    async def run(ctx):
        mock_clock.jump(6)  # what time.sleep(6) does to a real clock
        return ctx.prompt

    assert_timeout(await execute(backend(run), agent_timeout_sec=5), "deadline of 5 s")


async def test_an_error_before_the_deadline_is_that_error(autojump_clock):
    async def run(ctx):
        await trio.sleep(4.9)
        raise KeyError("early")

    outcome = await execute(backend(run), agent_timeout_sec=5)
    assert outcome.result.err_category is RolloutErrorCategory.AGENT_ERROR


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TimeoutError("the tool was too slow"), "the tool was too slow"),
        (TimeoutError(), "TimeoutError"),
        (trio.TooSlowError(), "TooSlowError"),
    ],
)
async def test_a_users_own_timeout_keeps_its_message(autojump_clock, error, message):
    async def run(ctx):
        raise error

    outcome = await execute(backend(run), agent_timeout_sec=5)
    assert_timeout(outcome)
    assert outcome.result.err_message == message
    assert trio.current_time() == 0


async def test_a_users_own_fail_after_is_a_timeout_too(autojump_clock):
    async def run(ctx):
        with trio.fail_after(1):
            await trio.sleep_forever()

    outcome = await execute(backend(run))
    assert_timeout(outcome)
    assert outcome.result.err_message == "TooSlowError"
    assert trio.current_time() == 1


# --- the grader's window ----------------------------------------------------------------------


async def test_the_grader_has_its_own_full_window(autojump_clock):
    async def run(ctx):
        await trio.sleep(9)
        return ctx.prompt

    async def grade(ctx):
        await trio.sleep(9)
        ctx.set_reward(0.5)

    outcome = await execute(
        backend(run, grade), agent_timeout_sec=10, grader_timeout_sec=10, **GRADED
    )
    assert outcome.result.status is RolloutStatus.SUCCESS
    assert outcome.result.sample.reward == 0.5
    assert trio.current_time() == 18


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_grader_without_time_is_never_called(autojump_clock, limit):
    called = []

    async def grade(ctx):
        called.append(ctx)

    progress = Progress()
    outcome = await execute(
        backend(echo, grade), progress=progress, grader_timeout_sec=limit, **GRADED
    )
    assert_timeout(outcome, "grader exceeded its deadline")
    assert outcome.workflow.status is RolloutStatus.SUCCESS
    assert progress.names == ["started", "grading"]
    assert called == []


async def test_a_grader_past_its_deadline_is_a_timeout_and_the_sample_stays(autojump_clock):
    async def grade(ctx):
        ctx.set_reward(1.0)
        await trio.sleep_forever()

    local = backend(echo, grade)
    outcome = await execute(local, grader_timeout_sec=3, **GRADED)
    assert_timeout(outcome, "grader exceeded its deadline of 3 s")
    assert outcome.result.sample is outcome.workflow.sample
    assert outcome.result.sample.messages[0]["content"] == "What is 6 * 7?"
    assert trio.current_time() == 3
    assert_nothing_is_left(local)


async def test_a_grader_that_swallows_its_deadline_is_a_timeout(autojump_clock):
    async def grade(ctx):
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            ctx.set_reward(1.0)

    assert_timeout(await execute(backend(echo, grade), grader_timeout_sec=3, **GRADED))


async def test_a_graders_own_timeout_error_keeps_its_message():
    async def grade(ctx):
        raise TimeoutError("the judge was too slow")

    outcome = await execute(backend(echo, grade), **GRADED)
    assert_timeout(outcome)
    assert outcome.result.err_message == "the judge was too slow"


async def test_the_agents_limit_does_not_touch_the_grader(autojump_clock):
    async def grade(ctx):
        await trio.sleep(100)
        ctx.set_reward(1)

    outcome = await execute(backend(echo, grade), agent_timeout_sec=5, **GRADED)
    assert outcome.result.status is RolloutStatus.SUCCESS


async def test_full_marks_in_no_time(autojump_clock):
    outcome = await execute(
        backend(echo, full_marks), agent_timeout_sec=1, grader_timeout_sec=1, **GRADED
    )
    assert outcome.result.sample.reward == 1.0
    assert trio.current_time() == 0
