"""Plain ``def run`` and ``def grade``: worker threads, which nobody can stop."""

from __future__ import annotations

import functools
import inspect
import signal
import threading

import pytest
import trio
import trio.testing
from backend.helpers import (
    SECRET,
    Progress,
    assert_nothing_is_left,
    backend,
    counts,
    execute,
)

from rollout import AgentWorkflow, RolloutContext, RolloutStatus, get_rollout_context
from rollout.backend.usercode import _ThreadCall
from rollout.types import RolloutErrorCategory


class Blocker:
    """A plain workflow that blocks its thread until it is let go."""

    def __init__(self):
        self.started = threading.Event()
        self.go_on = threading.Event()
        self.ended = threading.Event()

    def __call__(self, ctx):
        self.started.set()
        try:
            assert self.go_on.wait(60)
        finally:
            self.ended.set()
        return ctx.prompt

    async def wait_started(self):
        assert await trio.to_thread.run_sync(self.started.wait, 60)

    async def wait_ended(self):
        assert await trio.to_thread.run_sync(self.ended.wait, 60)


async def start(nursery, local, outcomes, **fields):
    async def run():
        outcomes.append(await execute(local, **fields))

    nursery.start_soon(run)
    await trio.testing.wait_all_tasks_blocked()


async def test_run_and_grade_run_in_a_worker_thread():
    threads = []

    def run(ctx):
        threads.append(threading.current_thread())
        return [*ctx.prompt, {"role": "assistant", "content": "42"}]

    def grade(ctx):
        threads.append(threading.current_thread())
        ctx.set_reward(ctx.sample.messages[-1]["content"] == ctx.label)

    outcome = await execute(backend(run, grade), grade=True, label="42")
    assert outcome.result.status is RolloutStatus.SUCCESS
    assert outcome.result.sample.reward == 1.0
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_an_async_function_runs_on_the_loop():
    threads = []

    async def run(ctx):
        threads.append(threading.current_thread())
        return ctx.prompt

    await execute(backend(run))
    assert threads == [threading.current_thread()]


async def test_the_context_is_visible_in_the_thread():
    seen = []

    def run(ctx):
        seen.append(get_rollout_context())
        return ctx.prompt

    def grade(ctx):
        seen.append(get_rollout_context())
        ctx.set_reward(1)

    await execute(backend(run, grade), "mine", grade=True, label="x")
    first, second = seen
    assert first is second
    assert isinstance(first, RolloutContext)
    assert first.rollout_id == "mine"
    assert first.api_key == SECRET
    assert get_rollout_context() is None


async def test_a_thread_can_call_back_into_trio(autojump_clock):
    def run(ctx):
        trio.from_thread.run(trio.sleep, 3)
        now = trio.from_thread.run_sync(trio.current_time)
        return [{"role": "assistant", "content": str(now)}]

    outcome = await execute(backend(run))
    assert outcome.result.sample.messages == [{"role": "assistant", "content": "3.0"}]


def wrapped(function):
    """What many decorators make: a plain function that returns a coroutine."""

    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call


class Awaitable:
    def __init__(self, value):
        self.value = value

    def __await__(self):
        yield from trio.lowlevel.checkpoint().__await__()
        return self.value


async def answer(ctx):
    await trio.sleep(2)
    assert get_rollout_context() is not None
    return ctx.prompt


@pytest.mark.parametrize(
    "run", [wrapped(answer), lambda ctx: answer(ctx), lambda ctx: Awaitable(ctx.prompt)]
)
async def test_an_awaitable_from_a_plain_function_is_awaited(autojump_clock, run):
    outcome = await execute(backend(run))
    assert outcome.result.err_message is None
    assert outcome.result.status is RolloutStatus.SUCCESS


async def test_an_awaitable_from_a_plain_grader_is_awaited():
    async def judge(ctx):
        await trio.lowlevel.checkpoint()
        ctx.set_reward(0.5)

    outcome = await execute(backend(grade=wrapped(judge)), grade=True, label="x")
    assert outcome.result.sample.reward == 0.5


async def test_an_awaitable_from_a_plain_function_has_the_deadline_too(autojump_clock):
    outcome = await execute(backend(wrapped(answer)), agent_timeout_sec=1)
    assert outcome.result.err_category is RolloutErrorCategory.TIMEOUT
    assert trio.current_time() == 1


@pytest.mark.parametrize(
    ("error", "category", "message"),
    [
        (ValueError("bad"), "validation_error", "bad"),
        (SystemExit(3), "agent_error", "SystemExit: 3"),
        (KeyboardInterrupt(), "agent_error", "KeyboardInterrupt"),
        (TimeoutError("slow"), "timeout", "slow"),
    ],
)
async def test_whatever_a_thread_raises_ends_the_rollout_alone(error, category, message):
    def run(ctx):
        raise error

    local = backend(run)
    outcome = await execute(local)
    assert outcome.result.err_category == category
    assert outcome.result.err_message == message
    assert_nothing_is_left(local)


async def test_signals_in_a_thread_are_refused_with_a_hint():
    def grade(ctx):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    outcome = await execute(backend(grade=grade), grade=True, label="x")
    assert "turn off timeouts that use signals" in outcome.result.err_message


async def test_stop_iteration_from_a_thread_is_a_failure():
    def run(ctx):
        return next(iter([]))

    outcome = await execute(backend(run))
    assert outcome.result.err_category is RolloutErrorCategory.AGENT_ERROR
    assert "StopIteration" in outcome.result.err_message


async def test_a_cancelled_thread_keeps_its_slot_until_it_ends():
    blocker, outcomes = Blocker(), []
    local = backend(blocker, slots=1)
    async with trio.open_nursery() as nursery:
        await start(nursery, local, outcomes)
        await blocker.wait_started()
        assert local.cancel_rollouts(ids=["r"]) == {"r": "cancelled_running"}
        await trio.testing.wait_all_tasks_blocked()
        assert outcomes == []
        assert counts(local) == (0, 1)
        blocker.go_on.set()
    assert outcomes[0].result.status is RolloutStatus.CANCELLED
    assert blocker.ended.is_set()
    assert_nothing_is_left(local)


async def test_check_cancelled_raises_after_a_cancel_request():
    asked, outcomes, raised = threading.Event(), [], []

    def run(ctx):
        trio.from_thread.check_cancelled()
        started.set()
        assert asked.wait(60)
        try:
            trio.from_thread.check_cancelled()
        except trio.Cancelled:
            raised.append(True)
            raise

    started = threading.Event()
    local = backend(run)
    async with trio.open_nursery() as nursery:
        await start(nursery, local, outcomes)
        assert await trio.to_thread.run_sync(started.wait, 60)
        local.cancel_rollouts(all=True)
        await trio.testing.wait_all_tasks_blocked()
        asked.set()
    assert raised == [True]
    assert outcomes[0].result.status is RolloutStatus.CANCELLED
    assert_nothing_is_left(local)


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("phase", ["workflow", "grader"])
async def test_a_thread_past_its_deadline_keeps_its_slot_and_nothing_else(
    mock_clock, phase, cancelled
):
    blocker, outcomes = Blocker(), []
    local = backend(blocker) if phase == "workflow" else backend(grade=blocker, grader_slots=1)
    times = {"agent_timeout_sec" if phase == "workflow" else "grader_timeout_sec": 5}
    graded = {"grade": phase == "grader", "label": "x"}
    async with trio.open_nursery() as nursery:
        await start(nursery, local, outcomes, **graded, **times)
        await blocker.wait_started()
        if cancelled:
            local.cancel_rollouts(ids=["r"])
        await trio.testing.wait_all_tasks_blocked()
        assert outcomes == []
        mock_clock.jump(5)
        await trio.testing.wait_all_tasks_blocked()
        result = outcomes[0].result
        if cancelled:
            assert result.status is RolloutStatus.CANCELLED
        else:
            assert result.err_category is RolloutErrorCategory.TIMEOUT
            assert f"{phase} exceeded its deadline of 5 s" in result.err_message
        assert counts(local) == (0, 1)
        assert not local.reserve("r")
        blocker.go_on.set()
        await blocker.wait_ended()
    while counts(local) != (0, 0):
        await trio.lowlevel.checkpoint()
    assert_nothing_is_left(local)


async def test_others_get_through_while_a_thread_does_not_return(mock_clock):
    blocker, outcomes = Blocker(), []
    local = backend(grade=lambda ctx: blocker(ctx) if ctx.label == "x" else ctx.set_reward(1))
    async with trio.open_nursery() as nursery:
        await start(nursery, local, outcomes, grade=True, label="x", grader_timeout_sec=2)
        await blocker.wait_started()
        mock_clock.jump(2)
    for number in range(4):
        outcome = await execute(local, str(number), grade=True, label="y", grader_timeout_sec=2)
        assert outcome.result.sample.reward == 1
    assert counts(local) == (0, 1)
    blocker.go_on.set()
    await blocker.wait_ended()


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("phase", ["workflow", "grader"])
async def test_a_queue_behind_threads_that_do_not_return_has_an_end(mock_clock, phase, returns):
    blocker, first, second = Blocker(), [], []

    def grade(ctx):
        if ctx.label == "x":
            blocker(ctx)
        ctx.set_reward(1)

    local = backend(grade=grade, slots=2, grader_slots=1)
    if phase == "workflow":
        local = backend(grade=grade, slots=1)
    async with trio.open_nursery() as nursery:
        await start(nursery, local, first, grade=True, label="x", grader_timeout_sec=2)
        await blocker.wait_started()
        await start(nursery, local, second, rollout_id="s", grade=True, label="y")
        mock_clock.jump(2)
        await trio.testing.wait_all_tasks_blocked()
        assert len(first) == 1
        mock_clock.jump(59)
        await trio.testing.wait_all_tasks_blocked()
        assert second == []
        if returns:
            blocker.go_on.set()
        else:
            mock_clock.jump(1)
    if returns:
        assert second[0].result.sample.reward == 1
    else:
        assert second[0].result.err_category is RolloutErrorCategory.INTERNAL_ERROR
        assert second[0].result.err_message == (
            f"no slot for the {phase}: plain functions that went on past their deadlines hold "
            "all of them; restart the server"
        )
        third = await execute(local, "t", grade=True, label="y")
        assert third.result.err_category is RolloutErrorCategory.INTERNAL_ERROR
    blocker.go_on.set()
    await blocker.wait_ended()


async def test_a_deadline_in_the_queue_starts_no_thread(autojump_clock):
    ran = []
    progress = Progress()
    outcome = await execute(backend(ran.append), progress=progress, agent_timeout_sec=0)
    assert outcome.result.err_category is RolloutErrorCategory.TIMEOUT
    assert ran == []
    assert progress.names == []


async def test_cancelling_execute_abandons_the_thread():
    blocker, outcomes = Blocker(), []
    local = backend(blocker)
    async with trio.open_nursery() as nursery:
        await start(nursery, local, outcomes)
        await blocker.wait_started()
        nursery.cancel_scope.cancel()
    assert outcomes == []
    assert not blocker.ended.is_set()
    assert_nothing_is_left(local)
    blocker.go_on.set()
    await blocker.wait_ended()


async def test_cancelling_execute_abandons_a_thread_that_ignored_a_cancel_request():
    blocker, outcomes = Blocker(), []
    local = backend(blocker)
    async with trio.open_nursery() as nursery:
        await start(nursery, local, outcomes)
        await blocker.wait_started()
        local.cancel_rollouts(all=True)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert outcomes == []
    assert_nothing_is_left(local)
    blocker.go_on.set()
    await blocker.wait_ended()


class CoroutineBlocker(Blocker):
    """Blocks like any other, and then returns a coroutine that nobody awaits any more."""

    def __call__(self, ctx):
        super().__call__(ctx)
        self.coroutine = answer(ctx)
        return self.coroutine


@pytest.mark.parametrize("how", ["by id", "from outside"])
async def test_a_coroutine_that_comes_too_late_is_closed(how):
    blocker = CoroutineBlocker()
    local = backend(blocker)
    async with trio.open_nursery() as nursery:
        await start(nursery, local, [])
        await blocker.wait_started()
        if how == "by id":
            local.cancel_rollouts(all=True)
            await trio.testing.wait_all_tasks_blocked()
            blocker.go_on.set()
        else:
            nursery.cancel_scope.cancel()
    blocker.go_on.set()
    await blocker.wait_ended()
    with trio.fail_after(60):
        while inspect.getcoroutinestate(blocker.coroutine) != inspect.CORO_CLOSED:
            await trio.lowlevel.checkpoint()


def test_a_coroutine_that_comes_after_the_loop_is_closed():
    coroutine = answer(None)

    async def main():
        return _ThreadCall(lambda: coroutine)

    trio.run(main).run()
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_an_abandoned_thread_may_outlive_the_loop(caplog):
    blocker = Blocker()

    async def main():
        local = backend(blocker)
        async with trio.open_nursery() as nursery:
            await start(nursery, local, [])
            await blocker.wait_started()
            nursery.cancel_scope.cancel()

    trio.run(main)
    blocker.go_on.set()
    assert blocker.ended.wait(60)
    assert caplog.records == []


async def test_without_threads_the_rollout_fails_and_does_not_hang(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("trio._threads.start_thread_soon", refuse)
    local = backend(lambda ctx: ctx.prompt)
    with trio.fail_after(60):
        outcome = await execute(local)
    assert outcome.result.err_message == "can't start new thread"
    assert_nothing_is_left(local)


async def test_more_threads_than_trio_allows_by_default():
    limit = trio.to_thread.current_default_thread_limiter()
    barrier = threading.Barrier(int(limit.total_tokens) + 5, timeout=20)

    def run(ctx):
        barrier.wait()
        return ctx.prompt

    local, outcomes = backend(run, slots=None), []

    async def go(index):
        outcomes.append(await execute(local, f"r{index}"))

    async with trio.open_nursery() as nursery:
        for index in range(barrier.parties):
            nursery.start_soon(go, index)
    assert {outcome.result.status for outcome in outcomes} == {RolloutStatus.SUCCESS}


async def test_a_static_or_class_method_is_called_like_any_other():
    class Static(AgentWorkflow):
        @staticmethod
        def run(ctx):
            return ctx.prompt

    class OfClass(AgentWorkflow):
        @classmethod
        async def run(cls, ctx):
            return ctx.prompt

    for kind in (Static, OfClass):
        assert (await execute(backend(kind))).result.status is RolloutStatus.SUCCESS
