"""`UserCall`: whatever the code does, one outcome comes out, and no exception but Cancelled."""

from __future__ import annotations

import math
import signal
from functools import partial

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from rollout.backend.usercode import UserCall


def call(deadline=math.inf):
    return UserCall("r", "workflow", deadline)


async def forever():
    await trio.sleep_forever()


async def test_a_value():
    async def body():
        await trio.sleep(0)
        return 42

    outcome = await call().run(body)
    assert (outcome.value, outcome.error, outcome.interrupted) == (42, None, False)
    assert outcome.ended <= trio.current_time()


async def test_a_cancel_before_the_start_means_that_nothing_starts():
    ran = []

    async def body():
        ran.append(True)

    user_call = call()
    user_call.cancel()
    outcome = await user_call.run(body)
    assert outcome.interrupted
    assert outcome.value is None
    assert outcome.error is None
    assert ran == []


async def test_a_cancel_during_the_call_interrupts_it():
    user_call = call()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def cancel():
            await trio.testing.wait_all_tasks_blocked()
            user_call.cancel()
            user_call.cancel()

        outcome = await user_call.run(forever)
    assert outcome.interrupted
    assert outcome.error is None


async def test_a_cancel_after_the_call_changes_nothing():
    async def body():
        return 42

    user_call = call()
    outcome = await user_call.run(body)
    user_call.cancel()
    await trio.lowlevel.checkpoint()
    assert outcome.value == 42
    assert not outcome.interrupted


async def test_a_cancel_that_meets_no_checkpoint_interrupts_nothing():
    async def body():
        user_call.cancel()
        return 42

    user_call = call()
    outcome = await user_call.run(body)
    assert outcome.value == 42
    assert not outcome.interrupted


async def test_a_deadline_interrupts(autojump_clock):
    outcome = await call(7).run(forever)
    assert outcome.interrupted
    assert outcome.ended == trio.current_time() == 7


async def test_a_deadline_in_the_past_starts_nothing(autojump_clock):
    ran = []

    async def body():
        ran.append(True)

    await trio.sleep(3)
    for deadline in (3, 2, -math.inf):
        assert (await call(deadline).run(body)).interrupted
    assert ran == []


async def test_cancellation_from_outside_passes_through():
    after = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await call().run(forever)
        after.append("run returned")
    assert scope.cancelled_caught
    assert after == []


async def test_cancellation_from_outside_passes_through_a_group():
    async def body():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep_forever()

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call().run, body)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught


def on_alarm(number, frame):
    raise TimeoutError("too slow")


@pytest.fixture
def alarm():
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no SIGALRM here")
@pytest.mark.parametrize("first_set_by", ["this call", "an earlier call"])
@pytest.mark.parametrize("in_child", [False, True])
async def test_what_an_alarm_raises_while_the_code_waits_ends_the_call(
    alarm, first_set_by, in_child
):
    async def set_handler():
        signal.signal(signal.SIGALRM, on_alarm)

    async def wait():
        if first_set_by == "this call":
            await set_handler()
        await trio.lowlevel.checkpoint()
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        await trio.sleep_forever()

    async def wait_in_child():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)

    if first_set_by == "an earlier call":
        await call().run(partial(call().invoke, set_handler))
    user_call = call()
    code = wait_in_child if in_child else wait
    outcome = await user_call.run(partial(user_call.invoke, code))
    assert isinstance(outcome.error, TimeoutError)
    assert not outcome.interrupted


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no SIGALRM here")
async def test_what_an_alarm_raises_while_the_code_runs_is_raised_there(alarm):
    async def busy():
        signal.signal(signal.SIGALRM, on_alarm)
        await trio.lowlevel.checkpoint()
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            while True:
                pass
        except TimeoutError:
            return "caught"

    user_call = call()
    assert (await user_call.run(partial(user_call.invoke, busy))).value == "caught"


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no SIGALRM here")
async def test_an_alarm_after_the_end_of_the_call_is_logged(alarm, caplog):
    async def leave():
        signal.signal(signal.SIGALRM, on_alarm)

    user_call = call()
    await user_call.run(partial(user_call.invoke, leave))
    signal.raise_signal(signal.SIGALRM)
    await trio.testing.wait_all_tasks_blocked()
    assert "raised after the end: TimeoutError" in caplog.text


async def test_code_that_cancels_the_scope_around_its_task_has_failed():
    async def body():
        trio.lowlevel.current_task().parent_nursery.cancel_scope.cancel()
        await trio.sleep_forever()

    outcome = await call().run_in_task(body)
    assert not outcome.interrupted
    assert "cancelled a scope that is not its own" in str(outcome.error)


async def cancelled_exception():
    """A `trio.Cancelled` that belongs to a scope that has ended."""
    kept = []
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as error:
            kept.append(error)
    return kept[0]


async def test_a_stray_cancelled_is_an_error_of_the_code():
    stray = await cancelled_exception()

    async def body():
        raise stray

    outcome = await call().run(body)
    assert not outcome.interrupted
    assert "trio.Cancelled was raised outside of its scope" in str(outcome.error)


async def test_a_group_of_stray_cancelleds_is_an_error_of_the_code():
    stray = await cancelled_exception()

    async def body():
        raise BaseExceptionGroup("strays", [stray])

    outcome = await call().run(body)
    assert not outcome.interrupted
    assert isinstance(outcome.error, BaseExceptionGroup)


async def test_cancellations_in_a_group_are_left_out():
    async def body():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise ValueError("bad")

    async def mixed():
        raise BaseExceptionGroup("mixed", [await cancelled_exception(), ValueError("bad")])

    for each in (body, mixed):
        outcome = await call().run(each)
        assert not outcome.interrupted
        assert isinstance(outcome.error, ExceptionGroup)
        assert [str(error) for error in outcome.error.exceptions] == ["bad"]


async def test_an_error_during_an_interruption_is_kept(autojump_clock):
    async def body():
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("cleanup")

    outcome = await call(1).run(body)
    assert str(outcome.error) == "cleanup"
    assert not outcome.interrupted
    assert outcome.ended == 1


class Odd(BaseException):
    pass


class Unsplittable(BaseExceptionGroup):
    def derive(self, excs):
        raise ValueError("no")


def deep_group(depth, *leaves):
    group = BaseExceptionGroup("deep", [*leaves])
    for _ in range(depth):
        group = BaseExceptionGroup("deep", [group])
    return group


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        SystemExit(1),
        KeyboardInterrupt(),
        GeneratorExit(),
        Odd("x"),
        BaseExceptionGroup("g", [SystemExit(1)]),
        ExceptionGroup("g", [ValueError("a"), ExceptionGroup("h", [KeyError("b")])]),
    ],
    ids=repr,
)
async def test_every_exception_is_an_outcome(error):
    async def body():
        raise error

    outcome = await call().run(body)
    assert not outcome.interrupted
    assert repr(outcome.error) == repr(error)


@pytest.mark.parametrize("depth", [10, 5000])
async def test_a_deep_group_is_an_outcome(depth):
    async def body():
        raise deep_group(depth, ValueError("x"))

    outcome = await call().run(body)
    assert isinstance(outcome.error, BaseExceptionGroup)


async def test_a_group_that_cannot_be_split_is_an_outcome():
    group = Unsplittable("g", [await cancelled_exception(), ValueError("x")])

    async def body():
        raise group

    assert (await call().run(body)).error is group


async def test_a_cancel_scope_that_is_left_open_is_an_error_of_the_code():
    async def body():
        trio.CancelScope().__enter__()
        return 42

    outcome = await call().run(body)
    assert isinstance(outcome.error, RuntimeError)
    assert "ancel scope stack corrupted" in str(outcome.error)
    await trio.sleep(0)
    with trio.CancelScope() as scope:
        scope.cancel()
        await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_awaiting_what_trio_does_not_know_is_an_error_of_the_code():
    class Foreign:
        def __await__(self):
            yield "not for trio"

    async def body():
        await Foreign()

    outcome = await call().run(body)
    assert isinstance(outcome.error, TypeError)


@given(
    deadline=st.sampled_from([0, 1, 2, 3, math.inf]),
    cancel_at=st.sampled_from([0, 1, 2, 3, math.inf]),
    steps=st.lists(st.sampled_from([0, 1, 2]), max_size=3),
    swallow=st.booleans(),
    shielded=st.booleans(),
)
def test_it_returns_for_every_timing(deadline, cancel_at, steps, swallow, shielded):
    async def body():
        for step in steps:
            try:
                with trio.CancelScope(shield=shielded):
                    await trio.sleep(step)
            except trio.Cancelled:
                if not swallow:
                    raise
        return "done"

    async def main():
        user_call = call(deadline)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def cancel():
                if cancel_at == math.inf:
                    return
                await trio.sleep(cancel_at)
                user_call.cancel()

            outcome = await user_call.run(body)
            nursery.cancel_scope.cancel()
        assert outcome.error is None
        assert outcome.interrupted == (outcome.value is None)
        assert outcome.ended == trio.current_time() <= sum(steps)
        if min(deadline, cancel_at) > sum(steps):
            assert outcome.value == "done"
        if outcome.interrupted:
            assert min(deadline, cancel_at) <= outcome.ended

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
