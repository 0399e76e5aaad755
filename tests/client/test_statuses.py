"""Subscriptions to the statuses of a handle."""

from __future__ import annotations

import gc
import warnings

import pytest
import trio
import trio.testing
from client.fakes import FakeServer, after, client_of, refused, result, silence, start

from rollout.client import RolloutHandleCancelled, RolloutProtocolError


def phases():
    return [
        after(10, result("running")),
        after(10, result("grading")),
        after(10, result("success")),
    ]


EVERY = ["queued", "running", "grading", "success"]


async def test_several_subscribers_each_see_every_status(autojump_clock):
    seen = [[] for _ in range(4)]

    async def watch(handle, mine, pause):
        async for status in handle.statuses():
            mine.append(status)
            await trio.sleep(pause)

    async with client_of(FakeServer(polls=phases())) as client:
        handle = await start(client)
        async with trio.open_nursery() as nursery:
            for n, mine in enumerate(seen):
                nursery.start_soon(watch, handle, mine, n * 20)  # the slow ones lose nothing
    assert seen == [EVERY] * 4


async def test_a_slow_subscriber_does_not_slow_the_polling(autojump_clock):
    async with client_of(FakeServer(polls=phases())) as client:
        handle = await start(client)
        stream = handle.statuses()
        await handle
        assert trio.current_time() == 30
        assert [status async for status in stream] == EVERY


async def test_a_late_subscriber_starts_at_the_current_status(autojump_clock):
    async with client_of(FakeServer(polls=phases())) as client:
        handle = await start(client)
        await handle.wait_for_grading()
        assert [status async for status in handle.statuses()] == ["grading", "success"]
        assert [status async for status in handle.statuses()] == ["success"]
    assert [status async for status in handle.statuses()] == ["success"]


async def test_polls_without_a_change_repeat_no_status(autojump_clock):
    polls = [
        after(30, result("running")),
        after(30, result("running")),
        after(3, result("failure")),
    ]
    async with client_of(FakeServer(polls=polls)) as client:
        handle = await start(client)
        assert [s async for s in handle.statuses()] == ["queued", "running", "failure"]


async def test_a_subscriber_may_leave_early(autojump_clock):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with client_of(FakeServer(polls=phases())) as client:
            handle = await start(client)
            async for status in handle.statuses():
                if status == "running":
                    break
            gc.collect()
            abandoned = handle.statuses()
            del abandoned
            gc.collect()
            async with handle.statuses() as statuses:
                async for _ in statuses:
                    break
            await handle
            gc.collect()
    assert handle._subscribers == []


@pytest.mark.parametrize("how", ["close", "drop"])
async def test_those_who_left_are_forgotten_while_the_rollout_goes_on(autojump_clock, how):
    async with client_of(FakeServer(polls=[after(10, result("running")), silence])) as client:
        handle = await start(client)
        for _ in range(100):
            stream = handle.statuses()
            if how == "close":
                stream.close()
        del stream
        gc.collect()
        await handle.wait_for_running()
        assert len(handle._subscribers) <= 1
        handle.cancel()


async def test_a_closed_stream_ends(autojump_clock):
    async with client_of(FakeServer(polls=phases())) as client:
        handle = await start(client)
        stream = handle.statuses()
        stream.close()
        stream.close()
        await stream.aclose()
        assert [status async for status in stream] == []
        await handle


async def test_closing_a_stream_ends_the_loop_that_waits_on_it(autojump_clock):
    seen = []

    async def watch(stream):
        seen.extend([status async for status in stream])

    async with client_of(FakeServer(polls=[silence])) as client:
        handle = await start(client)
        stream = handle.statuses()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, stream)
            await trio.testing.wait_all_tasks_blocked()
            stream.close()
        handle.cancel()
    assert seen == ["queued"]


async def test_a_failure_comes_after_the_last_status(autojump_clock):
    async with client_of(FakeServer(polls=[result("running"), after(5, refused(500))])) as client:
        handle = await start(client)
        for _ in range(2):
            seen = []
            with pytest.raises(RolloutProtocolError) as caught:
                async for status in handle.statuses():
                    seen.append(status)  # noqa: PERF401 - the comprehension would be lost
            assert seen[-1] == "running"
            assert not isinstance(caught.value.__context__, trio.EndOfChannel)


async def test_a_stream_that_raised_is_over(autojump_clock):
    async with client_of(FakeServer(polls=[refused(500)])) as client:
        handle = await start(client)
        stream = handle.statuses()
        with pytest.raises(RolloutProtocolError):
            [status async for status in stream]
        assert [status async for status in stream] == []


async def test_a_cancelled_handle_ends_its_streams(autojump_clock):
    async with client_of(FakeServer(polls=[silence])) as client:
        handle = await start(client)
        stream = handle.statuses()
        handle.cancel()
        with pytest.raises(RolloutHandleCancelled):
            [status async for status in stream]
        with pytest.raises(RolloutHandleCancelled):
            [status async for status in handle.statuses()]


async def test_cancelling_a_subscriber_leaves_its_stream_usable(autojump_clock):
    async with client_of(FakeServer(polls=phases())) as client:
        handle = await start(client)
        stream = handle.statuses()
        assert await anext(stream) == "queued"
        with trio.move_on_after(5) as scope:
            await anext(stream)
        assert scope.cancelled_caught
        assert [status async for status in stream] == EVERY[1:]
