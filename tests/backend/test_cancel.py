"""Cancel requests: dispositions, and who wins against a deadline."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from backend.helpers import Progress, assert_nothing_is_left, backend, counts, echo, execute

from rollout import RolloutStatus
from rollout.types import RolloutErrorCategory

GRADED = {"grade": True, "label": "42"}


async def forever(ctx):
    await trio.sleep_forever()


async def running(nursery, local, rollout_id, outcomes, **fields):
    async def run():
        outcomes[rollout_id] = await execute(local, rollout_id, **fields)

    nursery.start_soon(run)
    await trio.testing.wait_all_tasks_blocked()


def assert_cancelled(outcome, words):
    assert outcome.result.status is RolloutStatus.CANCELLED
    assert outcome.result.err_category is None
    assert words in outcome.result.err_message


async def test_a_running_rollout_is_interrupted():
    local, outcomes = backend(forever), {}
    async with trio.open_nursery() as nursery:
        await running(nursery, local, "a", outcomes)
        assert local.cancel_rollouts(ids=["a", "b"]) == {
            "a": "cancelled_running",
            "b": "not_found",
        }
    assert_cancelled(outcomes["a"], "while its agent ran")
    assert local.cancel_rollouts(ids=["a"]) == {"a": "not_found"}
    assert_nothing_is_left(local)


async def test_a_queued_rollout_never_starts():
    local, outcomes, progress = backend(forever, slots=1), {}, Progress()
    async with trio.open_nursery() as nursery:
        await running(nursery, local, "first", outcomes)
        await running(nursery, local, "second", outcomes, progress=progress)
        assert local.cancel_rollouts(ids=["second"]) == {"second": "cancelled_queued"}
        await trio.testing.wait_all_tasks_blocked()
        assert_cancelled(outcomes["second"], "while it waited for a slot")
        assert progress.names == []
        assert counts(local) == (0, 1)
        local.cancel_rollouts(all=True)
    assert_nothing_is_left(local)


async def test_a_grading_rollout_is_interrupted_and_keeps_its_sample():
    local, outcomes = backend(echo, forever), {}
    async with trio.open_nursery() as nursery:
        await running(nursery, local, "a", outcomes, **GRADED)
        assert local.cancel_rollouts(ids=["a"]) == {"a": "cancelled_running"}
    assert_cancelled(outcomes["a"], "while its grader ran")
    assert outcomes["a"].result.sample is not None
    assert outcomes["a"].workflow.status is RolloutStatus.SUCCESS
    assert_nothing_is_left(local)


async def test_a_rollout_that_waits_for_the_grader_is_interrupted():
    graded = []

    async def grade(ctx):
        graded.append(ctx.metadata["name"])
        await trio.sleep_forever()

    local, outcomes = backend(echo, grade, grader_slots=1), {}
    async with trio.open_nursery() as nursery:
        for name in ("a", "b"):
            await running(nursery, local, name, outcomes, grade=True, metadata={"name": name})
        assert graded == ["a"]
        assert local.rollout_status("b") == {"status": "grading"}
        assert local.cancel_rollouts(ids=["b"]) == {"b": "cancelled_running"}
        await trio.testing.wait_all_tasks_blocked()
        assert_cancelled(outcomes["b"], "grader")
        assert graded == ["a"]
        local.cancel_rollouts(ids=["a"])
    assert_nothing_is_left(local)


async def test_asking_twice_changes_nothing():
    cleanups = []
    go_on = trio.Event()

    async def run(ctx):
        try:
            await trio.sleep_forever()
        finally:
            cleanups.append("began")
            with trio.CancelScope(shield=True):
                await go_on.wait()
            cleanups.append("ended")

    local, outcomes = backend(run, slots=1), {}
    async with trio.open_nursery() as nursery:
        await running(nursery, local, "a", outcomes)
        await running(nursery, local, "b", outcomes)
        for _ in range(3):
            assert local.cancel_rollouts(all=True) in (
                {"a": "cancelled_running", "b": "cancelled_queued"},
                {"a": "cancelled_running"},
            )
            await trio.testing.wait_all_tasks_blocked()
            # It keeps its slot until its cleanup is over.
            assert counts(local) == (0, 1)
        go_on.set()
    assert cleanups == ["began", "ended"]
    assert_cancelled(outcomes["a"], "while its agent ran")
    assert_cancelled(outcomes["b"], "while it waited for a slot")
    assert_nothing_is_left(local)


async def test_selectors():
    local, outcomes = backend(forever, slots=None), {}
    async with trio.open_nursery() as nursery:
        for name in ("eval-1", "eval-2", "train-1", "é-1"):
            await running(nursery, local, name, outcomes)
        assert local.cancel_rollouts() == {}
        assert local.cancel_rollouts(ids=[]) == {}
        assert local.cancel_rollouts(prefix="nothing") == {}
        assert local.cancel_rollouts(prefix="eval-") == {
            "eval-1": "cancelled_running",
            "eval-2": "cancelled_running",
        }
        await trio.testing.wait_all_tasks_blocked()
        assert set(outcomes) == {"eval-1", "eval-2"}
        assert local.cancel_rollouts(prefix="") == {
            "train-1": "cancelled_running",
            "é-1": "cancelled_running",
        }
    assert_nothing_is_left(local)


async def test_shutdown_interrupts_what_still_runs():
    local, outcomes = backend(forever, slots=1), {}
    async with trio.open_nursery() as nursery:
        for name in ("a", "b"):
            await running(nursery, local, name, outcomes)
        await local.shutdown()
    assert {outcome.result.status for outcome in outcomes.values()} == {RolloutStatus.CANCELLED}
    await local.shutdown()
    assert_nothing_is_left(local)


async def test_a_cancel_between_admission_and_execution():
    ran = []

    async def run(ctx):
        ran.append(ctx)

    local, progress = backend(run), Progress()
    assert local.reserve("a")
    assert local.cancel_rollouts(ids=["a"]) == {"a": "cancelled_queued"}
    outcome = await execute(local, "a", progress=progress)
    assert_cancelled(outcome, "while it waited for a slot")
    assert ran == []
    assert progress.names == []
    local.release("a")
    assert_nothing_is_left(local)


@pytest.mark.parametrize("how", ["returns", "raises"])
async def test_a_workflow_that_swallows_its_cancellation_is_cancelled(how):
    async def run(ctx):
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            if how == "raises":
                raise ValueError("no") from None
            return ctx.prompt

    local, outcomes = backend(run), {}
    async with trio.open_nursery() as nursery:
        await running(nursery, local, "a", outcomes)
        local.cancel_rollouts(ids=["a"])
    assert_cancelled(outcomes["a"], "while its agent ran")


async def test_a_cancelled_workflow_is_not_graded():
    graded = []

    async def run(ctx):
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            return ctx.prompt

    async def grade(ctx):
        graded.append(ctx)

    local, outcomes = backend(run, grade), {}
    async with trio.open_nursery() as nursery:
        await running(nursery, local, "a", outcomes, **GRADED)
        local.cancel_rollouts(ids=["a"])
    assert graded == []
    assert outcomes["a"].result.status is RolloutStatus.CANCELLED


async def test_a_workflow_may_cancel_its_own_rollout():
    async def run(ctx):
        local.cancel_rollouts(all=True)
        return ctx.prompt

    local = backend(run)
    assert_cancelled(await execute(local), "while its agent ran")
    assert_nothing_is_left(local)


# --- cancel against deadline: the earlier one counts ------------------------------------------


async def slow_to_stop(ctx):
    try:
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await trio.sleep(10)


async def test_a_cancel_before_the_deadline_wins_even_if_the_end_comes_after(autojump_clock):
    local, outcomes = backend(slow_to_stop), {}
    async with trio.open_nursery() as nursery:
        await running(nursery, local, "a", outcomes, agent_timeout_sec=5)
        await trio.sleep(4)
        local.cancel_rollouts(ids=["a"])
    assert trio.current_time() == 14
    assert_cancelled(outcomes["a"], "while its agent ran")


async def test_the_first_cancel_request_counts_against_the_deadline(autojump_clock):
    local, outcomes = backend(slow_to_stop), {}
    async with trio.open_nursery() as nursery:
        await running(nursery, local, "a", outcomes, agent_timeout_sec=5)
        await trio.sleep(4)
        local.cancel_rollouts(ids=["a"])
        await trio.sleep(2)
        local.cancel_rollouts(ids=["a"])
    assert_cancelled(outcomes["a"], "while its agent ran")


async def test_a_cancel_after_the_deadline_comes_too_late(autojump_clock):
    local, outcomes = backend(slow_to_stop), {}
    async with trio.open_nursery() as nursery:
        await running(nursery, local, "a", outcomes, agent_timeout_sec=5)
        await trio.sleep(6)
        assert local.cancel_rollouts(ids=["a"]) == {"a": "cancelled_running"}
    assert outcomes["a"].result.status is RolloutStatus.FAILURE
    assert outcomes["a"].result.err_category is RolloutErrorCategory.TIMEOUT


async def test_at_the_same_moment_the_deadline_wins(mock_clock):
    local, outcomes = backend(slow_to_stop), {}
    async with trio.open_nursery() as nursery:
        await running(nursery, local, "a", outcomes, agent_timeout_sec=5)
        mock_clock.jump(5)
        local.cancel_rollouts(ids=["a"])
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(10)
    assert outcomes["a"].result.err_category is RolloutErrorCategory.TIMEOUT


# --- cancellation from outside ----------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queued", "running", "grading", "waiting for the grader"])
async def test_cancelling_execute_leaves_nothing_behind(phase):
    queued, waiting = phase == "queued", phase == "waiting for the grader"
    local = backend(
        forever if phase in {"queued", "running"} else echo,
        forever,
        slots=1 if queued else 4,
        grader_slots=1 if waiting else None,
    )
    outcomes = {}
    async with trio.open_nursery() as nursery:
        if queued or waiting:
            await running(nursery, local, "first", outcomes, **GRADED)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                await running(inner, local, "a", outcomes, **GRADED)
                expected = {"waiting for the grader": "grading"}.get(phase, phase)
                assert local.rollout_status("a") == {"status": expected}
                scope.cancel()
        assert scope.cancelled_caught
        assert local.rollout_status("a") is None
        local.cancel_rollouts(all=True)
    assert "a" not in outcomes
    assert_nothing_is_left(local)
