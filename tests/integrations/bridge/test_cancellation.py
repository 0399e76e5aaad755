"""Cancellation by trio: the asyncio task ends first, whatever it takes."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
import trio
import trio.testing

from rollout.integrations.asyncio_bridge import BridgeError, open_asyncio_bridge

GRACE = 10.0


class Task:
    """Code of the asyncio side that says where it is, and goes on when told to."""

    def __init__(self, bridge):
        self.bridge = bridge
        self.started = trio.Event()
        self.cancelled = [trio.Event() for _ in range(5)]
        self.cancellations = 0
        self.over = asyncio.Event()
        self.ended = False

    def tell(self, event):
        self.bridge.call_trio_soon(event.set)

    async def release(self):
        async def release():
            self.over.set()

        await self.bridge.run(release)

    async def run(self, *, swallow=0, finish=None):
        """Swallow so many cancellations, then wait for ever, or do *finish* at once."""
        self.tell(self.started)
        try:
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancellations += 1
                    self.tell(self.cancelled[self.cancellations - 1])
                    if self.cancellations > swallow:
                        if finish is None:
                            raise
                        return finish()
        finally:
            self.ended = True

    async def clean_up_until_told(self):
        self.tell(self.started)
        try:
            await asyncio.Event().wait()
        finally:
            self.cancellations += 1
            self.tell(self.cancelled[0])
            await self.over.wait()
            self.ended = True


@pytest.fixture
async def bridge(mock_clock):
    async with open_asyncio_bridge(grace_sec=GRACE) as bridge:
        yield bridge


async def test_a_cancelled_call_waits_for_the_tasks_cleanup(bridge):
    task = Task(bridge)
    ended_before = None

    async def caller(scope):
        nonlocal ended_before
        with scope:
            await bridge.run(task.clean_up_until_told)
        ended_before = task.ended

    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()
        nursery.start_soon(caller, scope)
        await task.started.wait()
        scope.cancel()
        await task.cancelled[0].wait()
        assert not task.ended
        await task.release()
    assert ended_before is True
    assert scope.cancelled_caught
    assert task.cancellations == 1


async def test_a_deadline_cancels(bridge, mock_clock):
    task = Task(bridge)

    async def caller():
        with pytest.raises(trio.TooSlowError):
            with trio.fail_after(60):
                await bridge.run(task.run)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller)
        await task.started.wait()
        mock_clock.jump(60)
    assert task.cancellations == 1
    assert task.ended


async def test_cleanup_that_hangs_is_cancelled_again_after_each_grace_period(
    bridge, mock_clock, caplog
):
    task = Task(bridge)
    scope = trio.CancelScope()

    async def caller():
        with scope:
            await bridge.run(lambda: task.run(swallow=3))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller)
        await task.started.wait()
        scope.cancel()
        await task.cancelled[0].wait()
        for again in range(3):
            assert task.cancellations == again + 1
            mock_clock.jump(GRACE)
            await task.cancelled[again + 1].wait()
    assert scope.cancelled_caught
    assert task.cancellations == 4
    warned = [record for record in caplog.records if "cancelled again" in record.message]
    assert len(warned) == 3
    assert "lambda" in warned[0].message


@pytest.mark.parametrize("finish", [lambda: 5, lambda: None])
async def test_a_swallowed_cancellation_still_ends_the_scope_as_cancelled(bridge, finish):
    task = Task(bridge)
    scope = trio.CancelScope()
    returned = []

    async def caller():
        with scope:
            returned.append(await bridge.run(lambda: task.run(finish=finish)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller)
        await task.started.wait()
        scope.cancel()
    assert returned == []
    assert scope.cancelled_caught


async def test_a_cancellation_that_comes_after_the_end_takes_nothing_away(bridge):
    """The task has returned; trio, which cancels it, has not heard of that yet."""
    held, let_go = trio.Event(), threading.Event()
    results = []

    async def hold_up_the_loop():
        bridge.call_trio_soon(held.set)
        let_go.wait()
        return "done"

    async def caller():
        results.append(await bridge.run(hold_up_the_loop))

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller)
            await held.wait()
            scope.cancel()
            with trio.CancelScope(shield=True):
                try:
                    await trio.testing.wait_all_tasks_blocked()  # the cancellation is on its way
                finally:
                    let_go.set()
    assert results == ["done"]


def raiser(error):
    def fail():
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (OSError("cleanup failed"), OSError),
        (ExceptionGroup("g", [OSError("a")]), ExceptionGroup),
        (SystemExit(2), SystemExit),
        (BaseExceptionGroup("g", [asyncio.CancelledError(), OSError("a")]), ExceptionGroup),
    ],
)
async def test_an_error_of_the_cleanup_is_not_lost(bridge, error, arrives):
    task = Task(bridge)
    scope = trio.CancelScope()
    caught = []

    async def caller():
        with scope:
            try:
                await bridge.run(lambda: task.run(finish=raiser(error)))
            except BaseException as arrived:
                caught.append(arrived)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller)
        await task.started.wait()
        scope.cancel()
    assert [type(each) for each in caught] == [arrives]


async def test_a_group_of_nothing_but_cancellations_is_a_cancellation(bridge):
    task = Task(bridge)
    scope = trio.CancelScope()
    error = BaseExceptionGroup("g", [asyncio.CancelledError(), asyncio.CancelledError()])

    async def caller():
        with scope:
            await bridge.run(lambda: task.run(finish=raiser(error)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller)
        await task.started.wait()
        scope.cancel()
    assert scope.cancelled_caught


async def test_a_call_that_was_cancelled_before_it_starts_does_not_start(bridge):
    ran = []

    async def run():
        ran.append(1)

    with trio.CancelScope() as scope:
        scope.cancel()
        await bridge.run(run)
    assert scope.cancelled_caught
    assert ran == []


async def test_a_task_that_is_cancelled_before_its_first_step_ends_as_cancelled(bridge):
    """The loop is held up while trio starts a call and cancels it."""
    held = trio.Event()
    let_go = threading.Event()
    ran = []

    async def hold():
        bridge.call_trio_soon(held.set)
        let_go.wait()

    async def run():
        ran.append(1)

    scope = trio.CancelScope()

    async def caller():
        with scope:
            await bridge.run(run)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(bridge.run, hold)
        await held.wait()
        nursery.start_soon(caller)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        let_go.set()
    assert scope.cancelled_caught
    assert ran == []


async def test_a_result_that_was_there_before_the_cancellation_is_not_lost(bridge):
    """The task is done, trio has not heard of it yet, and the cancellation goes out."""
    scope = trio.CancelScope()
    returned = []

    async def finish():
        # Queued ahead of the message that says the task is done.
        bridge.call_trio_soon(scope.cancel)
        return "result"

    with scope:
        returned.append(await bridge.run(finish))
    assert returned == ["result"]
    assert scope.cancel_called
    assert not scope.cancelled_caught


async def test_races_of_cancellation_and_completion_end_one_way_or_the_other(bridge, caplog):
    """Hundreds of calls that end at about the moment when they are cancelled."""
    outcomes = {}

    async def turns(count):
        for _ in range(count):
            await asyncio.sleep(0)
        return count

    async def fail(count):
        await turns(count)
        raise LookupError(count)

    async def caller(number, scope):
        with scope:
            try:
                outcomes[number] = await bridge.run(fail if number % 2 else turns, number % 40)
            except LookupError as error:
                outcomes[number] = error.args[0]
        if scope.cancelled_caught:
            assert number not in outcomes
            outcomes[number] = "cancelled"

    async with trio.open_nursery() as nursery:
        for batch in range(20):
            scopes = [trio.CancelScope() for _ in range(30)]
            for place, scope in enumerate(scopes):
                nursery.start_soon(caller, 30 * batch + place, scope)
            await bridge.run(asyncio.sleep, 0)
            for scope in scopes:
                await trio.lowlevel.checkpoint()
                scope.cancel()
    assert len(outcomes) == 600
    for number, end in outcomes.items():
        assert end in {"cancelled", number % 40}
    assert caplog.records == []


async def test_abandoned_after_its_time_and_named(mock_clock, caplog):
    async with open_asyncio_bridge(grace_sec=GRACE, abandon_after_sec=25) as bridge:
        task = Task(bridge)
        scope = trio.CancelScope()
        left = trio.Event()

        async def caller():
            with scope:
                await bridge.run(lambda: task.run(swallow=3, finish=raiser(OSError("late"))))
            left.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller)
            await task.started.wait()
            scope.cancel()
            await task.cancelled[0].wait()
            mock_clock.jump(GRACE)
            await task.cancelled[1].wait()
            mock_clock.jump(GRACE)
            await task.cancelled[2].wait()
            assert not left.is_set()
            mock_clock.jump(5)
            await left.wait()
        assert scope.cancelled_caught
        assert not task.ended
        assert "is abandoned" in caplog.records[-1].message
        assert "lambda" in caplog.records[-1].message
        caplog.clear()
    # The end of the bridge cancelled it once more; what it failed with is not lost.
    assert task.ended
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert str(record.exc_info[1]) == "late"


async def test_a_blocked_loop_does_not_hold_up_an_abandoned_call(mock_clock):
    let_go = threading.Event()
    async with open_asyncio_bridge(abandon_after_sec=5) as bridge:
        held = trio.Event()

        async def hold():
            bridge.call_trio_soon(held.set)
            let_go.wait()

        scope = trio.CancelScope()

        async def caller():
            with scope:
                await bridge.run(hold)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller)
            await held.wait()
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(5)
        assert scope.cancelled_caught
        let_go.set()


async def test_a_cancelled_block_cancels_its_calls_and_ends_as_cancelled(mock_clock):
    with trio.CancelScope() as scope:
        async with open_asyncio_bridge() as bridge:
            task = Task(bridge)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bridge.run, task.run)
                await task.started.wait()
                scope.cancel()
    assert scope.cancelled_caught
    assert task.ended
    with pytest.raises(BridgeError):
        await bridge.run(asyncio.sleep, 0)
