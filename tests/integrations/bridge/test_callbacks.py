"""The way back: trio functions and hooks that asyncio code calls."""

from __future__ import annotations

import asyncio
import threading
import traceback
from contextlib import suppress
from contextvars import ContextVar

import pytest
import sniffio
import trio

from rollout import RolloutContext, get_rollout_context
from rollout.integrations.asyncio_bridge import BridgeError, open_asyncio_bridge, run_in_trio

color: ContextVar[str] = ContextVar("color", default="none")


@pytest.fixture
async def bridge(mock_clock):
    async with open_asyncio_bridge() as bridge:
        yield bridge


async def double(number):
    await trio.lowlevel.checkpoint()
    return number * 2


async def test_a_trio_function_runs_on_the_trio_side_and_returns_its_value(bridge):
    async def where():
        await trio.lowlevel.checkpoint()
        return threading.current_thread(), sniffio.current_async_library()

    async def tool():
        return await run_in_trio(double, 4), await run_in_trio(where)

    value, (thread, library) = await bridge.run(tool)
    assert value == 8
    assert thread is threading.current_thread()
    assert library == "trio"


async def test_there_and_back_again(bridge):
    async def descend(depth):
        if depth == 0:
            return 0
        return 1 + await run_in_trio(bridge.run, descend, depth - 1)

    assert await bridge.run(descend, 10) == 10


async def test_a_callback_sees_the_context_of_its_caller_and_keeps_its_own(bridge):
    async def look():
        before = color.get()
        color.set("inner")
        await trio.lowlevel.checkpoint()
        return before, get_rollout_context().rollout_id

    async def tool():
        color.set("asyncio")
        seen = await asyncio.create_task(run_in_trio(look))
        return seen, color.get()

    with RolloutContext(rollout_id="r7"):
        assert await bridge.run(tool) == (("asyncio", "r7"), "asyncio")
    assert color.get() == "none"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("v"),
        ExceptionGroup("g", [OSError("a"), ValueError("b")]),
        SystemExit(4),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_arrives_intact_on_the_asyncio_side(bridge, error):
    async def fail():
        await trio.lowlevel.checkpoint()
        raise error

    async def tool():
        try:
            await run_in_trio(fail)
        except BaseException as arrived:
            return arrived

    arrived = await bridge.run(tool)
    assert arrived is error
    assert "in fail" in "".join(traceback.format_exception(arrived))


async def test_a_cancelled_asyncio_caller_cancels_the_trio_function_and_waits_for_it(bridge):
    events = []
    started = trio.Event()

    async def wait_and_clean_up():
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
            events.append("trio function ended")

    async def tool():
        try:
            await run_in_trio(wait_and_clean_up)
        except asyncio.CancelledError:
            events.append("asyncio caller cancelled")
            raise

    async def framework():
        task = asyncio.create_task(tool())
        await run_in_trio(started.wait)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert await bridge.run(framework) is True
    assert events == ["trio function ended", "asyncio caller cancelled"]


async def test_a_trio_cancellation_goes_over_to_asyncio_and_back_to_trio(bridge):
    events = []
    started = trio.Event()

    async def wait():
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            events.append("trio function")

    async def tool():
        try:
            await run_in_trio(wait)
        except BaseException as error:
            events.append(type(error))
            raise

    scope = trio.CancelScope()

    async def caller():
        with scope:
            await bridge.run(tool)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller)
        await started.wait()
        scope.cancel()
    assert scope.cancelled_caught
    assert events == ["trio function", asyncio.CancelledError]


async def test_a_timeout_of_asyncio_ends_a_callback(bridge):
    ended = []

    async def wait():
        try:
            await trio.sleep_forever()
        finally:
            ended.append(True)

    async def tool():
        async with asyncio.timeout(0):
            await run_in_trio(wait)

    with pytest.raises(TimeoutError):
        await bridge.run(tool)
    assert ended == [True]


async def test_an_error_of_a_cancelled_callback_is_not_lost(bridge):
    started = trio.Event()

    async def wait():
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            raise OSError("cleanup failed")

    async def tool():
        task = asyncio.create_task(run_in_trio(wait))
        await run_in_trio(started.wait)
        task.cancel()
        await task

    with pytest.raises(OSError, match="cleanup failed"):
        await bridge.run(tool)


async def test_a_deadline_inside_a_callback_stays_on_the_trio_side(bridge):
    async def slow():
        with trio.fail_after(0):
            await trio.sleep_forever()

    async def tool():
        await run_in_trio(slow)

    with pytest.raises(trio.TooSlowError):
        await bridge.run(tool)


async def test_many_callbacks_at_once(bridge):
    async def tool():
        return await asyncio.gather(*(run_in_trio(double, number) for number in range(500)))

    assert await bridge.run(tool) == [2 * number for number in range(500)]


@pytest.mark.parametrize("cancelled", [True, False])
async def test_cleanup_of_asyncio_code_may_use_trio_while_the_bridge_closes(cancelled):
    cleaned = []
    started = trio.Event()

    async def clean_up():
        await trio.lowlevel.checkpoint()
        cleaned.append(True)

    async def tool(bridge):
        try:
            bridge.call_trio_soon(started.set)
            await asyncio.Event().wait()
        finally:
            await run_in_trio(clean_up)

    async def caller(bridge):
        with suppress(BridgeError):
            await bridge.run(tool, bridge)

    async with trio.open_nursery() as nursery:
        async with open_asyncio_bridge() as bridge:
            nursery.start_soon(caller, bridge)
            await started.wait()
            if cancelled:
                nursery.cancel_scope.cancel()
    assert cleaned == [True]


async def test_the_end_of_the_bridge_ends_a_callback(bridge):
    events = []
    started = trio.Event()

    async def wait():
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            events.append("trio function")

    async def background():
        try:
            await run_in_trio(wait)
        finally:
            events.append("asyncio task")

    async def spawn():
        tasks.append(asyncio.create_task(background()))

    tasks = []
    async with open_asyncio_bridge() as own:
        await own.run(spawn)
        await started.wait()
    assert events == ["trio function", "asyncio task"]
    assert tasks[0].cancelled()


async def test_a_callback_outside_of_a_bridge_explains_itself():
    with pytest.raises(BridgeError, match="in trio, await the function"):
        await run_in_trio(double, 1)

    def elsewhere():
        with pytest.raises(BridgeError, match="no bridge"):
            asyncio.run(run_in_trio(double, 1))
        return True

    assert await trio.to_thread.run_sync(elsewhere)


async def test_a_coroutine_is_refused_by_callbacks(bridge):
    async def tool():
        await run_in_trio(double(1))

    with pytest.raises(TypeError, match="apart"):
        await bridge.run(tool)


# --- hooks ----------------------------------------------------------------------------------


async def test_hooks_run_in_the_trio_thread_in_order_and_before_their_call_ends(bridge):
    seen = []

    def hook(number):
        seen.append((number, threading.current_thread(), color.get()))

    async def framework():
        color.set("hook")
        for number in range(100):
            bridge.call_trio_soon(hook, number)

    await bridge.run(framework)
    assert seen == [(number, threading.current_thread(), "hook") for number in range(100)]


async def test_a_hook_of_another_thread(bridge):
    done = trio.Event()
    await trio.to_thread.run_sync(bridge.call_trio_soon, done.set)
    await done.wait()
    assert done.is_set()


@pytest.mark.parametrize("error", [ValueError("v"), SystemExit(1)])
async def test_a_failing_hook_is_logged_and_harms_nobody(bridge, caplog, error):
    def hook():
        raise error

    async def framework():
        bridge.call_trio_soon(hook)
        return 1

    assert await bridge.run(framework) == 1
    [record] = caplog.records
    assert "hook" in record.message
    assert record.exc_info[1] is error


async def test_a_function_that_returns_in_spite_of_its_cancellation(bridge):
    """Its caller is cancelled all the same, and hears of it."""
    started = trio.Event()
    heard = []

    async def stubborn():
        started.set()
        with suppress(trio.Cancelled):
            await trio.sleep_forever()
        return "value"

    async def tool():
        try:
            heard.append(await run_in_trio(stubborn))
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    async with trio.open_nursery() as nursery:
        nursery.start_soon(bridge.run, tool)
        await started.wait()
        nursery.cancel_scope.cancel()
    assert heard == ["cancelled"]


async def test_nothing_is_kept_of_a_function_that_has_ended(bridge):
    async def fail():
        await trio.lowlevel.checkpoint()
        raise ValueError

    async def tool():
        for _ in range(3):
            await run_in_trio(double, 1)
            with suppress(ValueError):
                await run_in_trio(fail)

    await bridge.run(tool)
    assert bridge._running_callbacks == set()
