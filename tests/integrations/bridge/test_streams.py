"""Iterating over asynchronous generators of the asyncio side."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest
import trio
import trio.testing

from rollout.errors import InvalidFieldError
from rollout.integrations.asyncio_bridge import (
    BridgeCancelledError,
    BridgeError,
    open_asyncio_bridge,
)

color: ContextVar[str] = ContextVar("color", default="none")


@pytest.fixture
async def bridge(mock_clock):
    async with open_asyncio_bridge() as bridge:
        yield bridge


class Source:
    """A generator of the asyncio side that notes what happens to it."""

    def __init__(self):
        self.made = 0
        self.tasks = set()
        self.closed = False

    async def items(self, count, error=None):
        try:
            for number in range(count):
                self.tasks.add(asyncio.current_task())
                self.made = number + 1
                yield number
            if error is not None:
                raise error
        finally:
            await asyncio.sleep(0)
            self.tasks.add(asyncio.current_task())
            self.closed = True


@pytest.mark.parametrize("buffer_size", [1, 3, 1000])
async def test_all_items_arrive_in_order_out_of_one_task(bridge, buffer_size):
    source = Source()
    async with bridge.iterate(source.items, 100, buffer_size=buffer_size) as stream:
        assert [item async for item in stream] == list(range(100))
        assert [item async for item in stream] == []
    assert source.closed
    assert len(source.tasks) == 1


async def test_the_generator_is_never_ahead_by_more_than_the_buffer(bridge):
    source = Source()
    taken = 0
    async with bridge.iterate(source.items, 50, buffer_size=4) as stream:
        async for _ in stream:
            taken += 1
            await bridge.run(asyncio.sleep, 0)
            assert source.made <= taken + 4
    assert taken == 50


async def test_an_error_comes_behind_the_last_item_and_once(bridge):
    source = Source()
    error = OSError("stream broke")
    async with bridge.iterate(source.items, 3, error) as stream:
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="stream broke") as caught:
            await anext(stream)
        assert [item async for item in stream] == []
    assert caught.value is error


@pytest.mark.parametrize("error", [StopIteration(), StopAsyncIteration()])
async def test_a_stop_raised_by_the_function_is_no_end(bridge, error):
    def fail():
        raise error

    async with bridge.iterate(fail) as stream:
        with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
            await anext(stream)
    assert caught.value.__cause__ is error


async def test_leaving_the_block_early_closes_the_generator_in_its_task(bridge):
    source = Source()
    async with bridge.iterate(source.items, 100, buffer_size=2) as stream:
        async for item in stream:
            if item == 5:
                break
    assert source.closed
    assert len(source.tasks) == 1
    assert source.made < 100


async def test_leaving_the_block_interrupts_a_generator_that_waits(bridge):
    events = []

    async def wait():
        yield 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("cancelled")
            raise
        finally:
            events.append("closed")

    async with bridge.iterate(wait) as stream:
        assert await anext(stream) == 1
    assert events == ["cancelled", "closed"]


async def test_a_cancellation_while_waiting_for_an_item_ends_the_iteration(bridge):
    closed = []
    started = trio.Event()

    async def wait():
        bridge.call_trio_soon(started.set)
        try:
            await asyncio.Event().wait()
            yield 1
        finally:
            closed.append(True)

    scope = trio.CancelScope()

    async def consumer():
        with scope:
            async with bridge.iterate(wait) as stream:
                async for _ in stream:
                    raise AssertionError("there is no item")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(consumer)
        await started.wait()
        scope.cancel()
    assert scope.cancelled_caught
    assert closed == [True]


async def test_an_error_of_the_body_arrives_bare(bridge):
    source = Source()
    with pytest.raises(LookupError, match="mine"):
        async with bridge.iterate(source.items, 100) as stream:
            async for _ in stream:
                raise LookupError("mine")
    assert source.closed


async def test_an_error_while_closing_is_raised_at_the_end_of_the_block(bridge):
    async def stubborn():
        try:
            yield 1
            yield 2
        finally:
            raise OSError("close failed")

    with pytest.raises(OSError, match="close failed"):
        async with bridge.iterate(stubborn, buffer_size=1) as stream:
            assert await anext(stream) == 1


async def test_an_iteration_that_cancels_itself_is_a_plain_error(bridge):
    async def cancel_itself():
        yield 1
        raise asyncio.CancelledError

    async with bridge.iterate(cancel_itself) as stream:
        with pytest.raises(BridgeCancelledError):
            assert [item async for item in stream] == []


async def test_functions_that_return_iterables_work_too(bridge):
    class Countdown:
        def __init__(self, start):
            self.left = start

        def __aiter__(self):
            return self

        async def __anext__(self):
            if self.left == 0:
                raise StopAsyncIteration
            self.left -= 1
            return self.left

    async def request(start):
        await asyncio.sleep(0)
        return Countdown(start)

    for fn in (Countdown, request):
        async with bridge.iterate(fn, 3) as stream:
            assert [item async for item in stream] == [2, 1, 0]


async def test_context_variables_flow_into_the_whole_iteration(bridge):
    async def colors():
        for _ in range(3):
            yield color.get()
            await asyncio.sleep(0)

    color.set("green")
    async with bridge.iterate(colors) as stream:
        color.set("red")
        assert [item async for item in stream] == ["green"] * 3


async def test_several_consumers_share_the_items(bridge):
    source = Source()
    taken = []

    async def consumer(stream):
        taken.extend([item async for item in stream])

    async with bridge.iterate(source.items, 60, buffer_size=2) as stream:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(consumer, stream)
    assert sorted(taken) == list(range(60))


async def test_a_buffer_for_nothing_is_refused(bridge):
    with pytest.raises(InvalidFieldError, match="buffer_size"):
        async with bridge.iterate(Source().items, 1, buffer_size=0):
            raise AssertionError("not reached")


async def test_a_stream_ends_with_its_bridge():
    source = Source()
    ended = []

    async def endless():
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            source.closed = True

    async def consumer(bridge, started):
        with pytest.raises(BridgeError, match="closed"):
            async with bridge.iterate(endless) as stream:
                async for _ in stream:
                    started.set()
        ended.append(True)

    async with trio.open_nursery() as nursery:
        async with open_asyncio_bridge() as bridge:
            started = trio.Event()
            nursery.start_soon(consumer, bridge, started)
            await started.wait()
    assert ended == [True]
    assert source.closed


async def test_a_cancellation_of_its_own_that_nobody_has_seen_comes_out_at_the_end(bridge):
    async def cancels_itself():
        raise asyncio.CancelledError
        yield

    with pytest.raises(BridgeCancelledError):
        async with bridge.iterate(cancels_itself) as stream:
            await stream._call.finished.wait()
