"""Calls from trio into asyncio: values, errors, context variables, concurrency."""

from __future__ import annotations

import asyncio
import functools
import threading
import traceback
from contextvars import ContextVar

import pytest
import sniffio
import trio
import trio.testing

from rollout import RolloutContext, get_rollout_context
from rollout.integrations.asyncio_bridge import (
    BridgeCancelledError,
    BridgeError,
    get_bridge,
    open_asyncio_bridge,
    run_in_trio,
)

color: ContextVar[str] = ContextVar("color", default="none")


@pytest.fixture
async def bridge():
    async with open_asyncio_bridge() as bridge:
        yield bridge


async def add(a, b, *, plus=0):
    await asyncio.sleep(0)
    return a + b + plus


async def fail_with(error):
    await asyncio.sleep(0)
    raise error


async def test_a_call_returns_what_the_function_returns(bridge):
    assert await bridge.run(add, 1, 2) == 3
    assert await bridge.run(functools.partial(add, plus=4), 1, 2) == 7


async def test_a_call_runs_in_the_bridges_thread_as_asyncio(bridge):
    async def where():
        asyncio.get_running_loop()
        return threading.current_thread(), sniffio.current_async_library()

    thread, library = await bridge.run(where)
    assert thread is not threading.current_thread()
    assert thread.name == bridge.name
    assert library == "asyncio"
    assert sniffio.current_async_library() == "trio"


async def test_a_function_may_return_any_awaitable(bridge):
    def later(value):
        future = asyncio.get_running_loop().create_future()
        future.set_result(value)
        return future

    assert await bridge.run(later, 5) == 5


async def test_what_cannot_be_awaited_is_refused(bridge):
    with pytest.raises(TypeError, match=r"returned int, no awaitable"):
        await bridge.run(lambda: 3)


async def test_a_coroutine_object_is_refused_and_closed(bridge):
    coroutine = add(1, 2)
    with pytest.raises(TypeError, match="apart"):
        await bridge.run(coroutine)
    assert coroutine.cr_frame is None


@pytest.mark.parametrize(
    "error",
    [
        ValueError("v"),
        TimeoutError("t"),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        StopAsyncIteration(),
        ExceptionGroup("several", [ValueError("a"), OSError("b")]),
        BaseExceptionGroup("several", [SystemExit(1), ValueError("a")]),
        BaseExceptionGroup("several", [asyncio.CancelledError(), ValueError("a")]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_arrives_as_what_it_is_and_the_loop_goes_on(bridge, error):
    caught = None
    try:
        await bridge.run(fail_with, error)
    except BaseException as arrived:
        caught = arrived
    assert caught is error
    assert "fail_with" in "".join(traceback.format_exception(caught))
    assert await bridge.run(add, 1, 1) == 2


async def test_stop_iteration_becomes_a_runtime_error(bridge):
    def stop():
        raise StopIteration(1)

    for fn, args in [(fail_with, (StopIteration(1),)), (stop, ())]:
        with pytest.raises(RuntimeError) as caught:
            await bridge.run(fn, *args)
        assert isinstance(caught.value.__cause__, StopIteration)


async def cancel_myself():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("fn", "args"), [(fail_with, (asyncio.CancelledError(),)), (cancel_myself, ())]
)
async def test_a_cancellation_of_asyncios_own_is_a_plain_error(bridge, fn, args):
    with pytest.raises(BridgeCancelledError, match=fn.__name__) as caught:
        await bridge.run(fn, *args)
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)


async def test_a_value_after_cancelling_itself_is_a_value(bridge):
    async def cancel_and_return():
        asyncio.current_task().cancel()
        return 8

    assert await bridge.run(cancel_and_return) == 8


async def test_context_variables_flow_in_and_not_out(bridge):
    async def paint():
        before = color.get()
        color.set("red")
        inner = await asyncio.create_task(read())
        return before, inner, get_rollout_context().rollout_id

    async def read():
        return color.get()

    color.set("blue")
    with RolloutContext(rollout_id="r1"):
        assert await bridge.run(paint) == ("blue", "red", "r1")
    assert color.get() == "blue"


async def test_concurrent_callers_keep_their_own_context(bridge):
    seen = {}

    async def read(name):
        await asyncio.sleep(0)
        return color.get() == name

    async def caller(name):
        color.set(name)
        seen[name] = await bridge.run(read, name)

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(caller, str(number))
    assert seen == {str(number): True for number in range(50)}


async def test_thousands_of_calls_at_once_each_get_their_own_result(bridge):
    arrived = 0
    everybody = asyncio.Event()
    results = {}

    async def wait_for_all(number):
        nonlocal arrived
        arrived += 1
        if arrived == 3000:
            everybody.set()
        await everybody.wait()
        return number

    async def caller(number):
        results[number] = await bridge.run(wait_for_all, number)

    async with trio.open_nursery() as nursery:
        for number in range(3000):
            nursery.start_soon(caller, number)
    assert results == {number: number for number in range(3000)}


async def test_calls_of_one_task_start_in_order(bridge):
    started = []

    async def note(number):
        started.append(number)

    async def caller(number):
        await bridge.run(note, number)

    async with trio.open_nursery() as nursery:
        send, receive = trio.open_memory_channel(0)

        async def in_turn():
            async for number in receive:
                nursery.start_soon(caller, number)
                await trio.testing.wait_all_tasks_blocked()

        nursery.start_soon(in_turn)
        async with send:
            for number in range(20):
                await send.send(number)
    assert started == list(range(20))


async def test_get_bridge_finds_the_innermost_one_also_behind_it():
    with pytest.raises(BridgeError, match="lifespan"):
        get_bridge()

    async def which():
        return get_bridge()

    async with open_asyncio_bridge(name="outer") as outer:
        assert get_bridge() is outer
        async with open_asyncio_bridge(name="inner") as inner:
            assert get_bridge() is inner
            assert await outer.run(which) is inner
        assert get_bridge() is outer
        assert await run_via(outer, which) is outer
    with pytest.raises(BridgeError, match="lifespan"):
        get_bridge()


async def run_via(bridge, fn):
    async def there():
        return await run_in_trio(fn)

    return await bridge.run(there)


async def test_a_bridge_of_another_run_is_refused(bridge):
    def elsewhere():
        with pytest.raises(BridgeError, match=r"another trio\.run"):
            trio.run(bridge.run, add, 1, 2)
        return True

    assert await trio.to_thread.run_sync(elsewhere)


def test_a_bridge_works_in_a_run_of_another_thread():
    results = []

    async def main():
        async with open_asyncio_bridge() as bridge:
            results.append(await bridge.run(add, 1, 2))

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    thread.join()
    assert results == [3]
