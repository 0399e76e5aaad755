"""The handle: awaiting it, its milestones, its end."""

from __future__ import annotations

import gc
import traceback

import httpx
import pytest
import trio
import trio.testing
from client.fakes import (
    URL,
    FakeServer,
    admitted,
    after,
    client_of,
    refused,
    result,
    silence,
    start,
)

from rollout.client import RolloutHandle, RolloutHandleCancelled, RolloutProtocolError
from rollout.types import RolloutResultResponse, RolloutStatus

PHASES = [
    after(10, result("running")),
    after(10, result("grading")),
    after(10, result("success", sample={"messages": [], "reward": 1.0})),
]


async def test_the_members_before_during_and_after(autojump_clock):
    async with client_of(FakeServer(polls=[*PHASES])) as client:
        handle = await start(client)
        assert isinstance(handle, RolloutHandle)
        assert handle.rollout_id == "r"
        assert (handle.status, handle.latest_result, handle.done()) == ("queued", None, False)
        assert await handle.wait_for_running() is RolloutStatus.RUNNING
        assert trio.current_time() == 10
        assert handle.latest_result.status is RolloutStatus.RUNNING
        assert await handle.wait_for_grading() is RolloutStatus.GRADING
        assert trio.current_time() == 20
        assert not handle.done()
        terminal = await handle.wait_for_completion()
        assert trio.current_time() == 30
        assert handle.done()
        assert handle.status is RolloutStatus.SUCCESS
        assert handle.latest_result is terminal
        assert terminal.sample.reward == 1.0
        assert await handle is terminal


async def test_the_repr_shows_the_state(autojump_clock):
    async with client_of(FakeServer(polls=[*PHASES])) as client:
        handle = await start(client)
        assert repr(handle) == "<RolloutHandle 'r' queued, polling>"
        await handle.wait_for_running()
        assert repr(handle) == "<RolloutHandle 'r' running, polling>"
        await handle
        assert repr(handle) == "<RolloutHandle 'r' success, done>"
    async with client_of(FakeServer(polls=[result("running"), refused(500)])) as client:
        handle = await start(client)
        with pytest.raises(RolloutProtocolError):
            await handle
        assert repr(handle) == "<RolloutHandle 'r' running, failed: RolloutProtocolError>"
    async with client_of(FakeServer(polls=[silence])) as client:
        handle = await start(client)
        handle.cancel()
        assert repr(handle) == "<RolloutHandle 'r' queued, cancelled>"


async def test_many_tasks_await_it_before_and_after_the_end(autojump_clock):
    results = []

    async def wait(handle, delay):
        await trio.sleep(delay)
        results.append(await handle)
        results.append(await handle)

    async with client_of(FakeServer(polls=[*PHASES])) as client:
        handle = await start(client)
        async with trio.open_nursery() as nursery:
            for delay in range(0, 50, 5):
                nursery.start_soon(wait, handle, delay)
    assert len(results) == 20
    assert all(item is results[0] for item in results)
    assert await handle is results[0]  # also when the client is closed


async def test_cancelling_one_awaiter_leaves_the_others_and_the_polling(autojump_clock):
    async with client_of(FakeServer(polls=[*PHASES])) as client:
        handle = await start(client)
        with trio.move_on_after(5) as scope:
            await handle
        assert scope.cancelled_caught
        with trio.move_on_after(1) as scope:
            await handle.wait_for_grading()
        assert scope.cancelled_caught
        assert not handle.done()
        assert (await handle).status is RolloutStatus.SUCCESS


async def test_awaiting_is_a_checkpoint_also_after_the_end(autojump_clock):
    async with client_of(FakeServer()) as client:
        handle = await start(client)
        await handle
        for wait in (
            handle.wait_for_completion,
            handle.wait_for_running,
            handle.wait_for_grading,
        ):
            with trio.testing.assert_checkpoints():
                await wait()
            with trio.CancelScope() as scope:
                scope.cancel()
                await wait()
            assert scope.cancelled_caught


# --- milestones -----------------------------------------------------------------------------


async def test_milestones_that_were_passed_return_the_latest_status(autojump_clock):
    async with client_of(FakeServer(polls=[result("grading"), after(9, result("success"))])) as c:
        handle = await start(c)
        assert await handle.wait_for_running() is RolloutStatus.GRADING
        assert await handle.wait_for_running() is RolloutStatus.GRADING
        await handle
        assert await handle.wait_for_running() is RolloutStatus.SUCCESS
        assert await handle.wait_for_grading() is RolloutStatus.SUCCESS


@pytest.mark.parametrize("status", ["success", "failure", "cancelled"])
async def test_a_rollout_that_ends_reaches_every_milestone(autojump_clock, status):
    async with client_of(FakeServer(polls=[after(3, result(status))])) as client:
        handle = await start(client)
        assert await handle.wait_for_running() == status
        assert await handle.wait_for_grading() == status


async def test_a_milestone_that_was_reached_does_not_raise_a_later_failure(autojump_clock):
    async with client_of(FakeServer(polls=[result("running"), refused(500)])) as client:
        handle = await start(client)
        with pytest.raises(RolloutProtocolError):
            await handle
        assert await handle.wait_for_running() is RolloutStatus.RUNNING
        with pytest.raises(RolloutProtocolError):
            await handle.wait_for_grading()


# --- failures -------------------------------------------------------------------------------


async def test_a_failure_is_delivered_to_every_awaiter(autojump_clock):
    caught = []

    async def wait(method):
        try:
            await method()
        except RolloutProtocolError as error:
            caught.append(error)

    async with client_of(FakeServer(polls=[after(5, refused(500, "it broke"))])) as client:
        handle = await start(client)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait, handle.wait_for_completion)
                nursery.start_soon(wait, handle.wait_for_running)
                nursery.start_soon(wait, handle.wait_for_grading)
        await wait(handle.wait_for_completion)
        await wait(handle.wait_for_running)
    assert len(caught) == 11
    assert {(str(error), error.status_code) for error in caught} == {
        (
            "GET /rollout/r/result answered 500, not 200: it broke",
            500,
        )
    }
    assert len({id(error) for error in caught}) == 11
    assert handle.done()
    assert handle.status is RolloutStatus.QUEUED


async def test_awaiters_share_no_traceback_no_context_and_no_notes(autojump_clock):
    async def first(handle):
        await handle

    async def second(handle):
        try:
            raise KeyError("unrelated")
        except KeyError:
            await handle

    async with client_of(FakeServer(polls=[refused(500)])) as client:
        handle = await start(client)
        with pytest.raises(RolloutProtocolError) as one:
            await second(handle)
        one.value.add_note("seen by second")
        with pytest.raises(RolloutProtocolError) as two:
            await first(handle)
        with pytest.raises(RolloutProtocolError) as three:
            await first(handle)

    def frames(caught):
        return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]

    assert "second" not in frames(two)
    assert frames(two).count("first") == 1
    assert frames(two) == frames(three)
    assert "_attempt" in frames(two)  # where the polling failed
    assert not isinstance(two.value.__context__, KeyError)
    assert not hasattr(two.value, "__notes__")


async def test_a_transport_error_keeps_its_type_request_and_cause(autojump_clock):
    cause = OSError("reset by peer")
    error = httpx.ConnectTimeout("slow")
    error.__cause__ = cause
    async with client_of(FakeServer(polls=[error])) as client:
        handle = await start(client)
        with pytest.raises(httpx.ConnectTimeout, match="slow") as caught:
            await handle
    assert caught.value.__cause__ is cause
    assert caught.value.request.url == f"{URL}/rollout/r/result"


class Uncopyable(httpx.ConnectTimeout):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


async def test_an_error_that_cannot_be_copied_is_delivered_as_it_is(autojump_clock):
    error = Uncopyable("no", "copy")
    async with client_of(FakeServer(polls=[error])) as client:
        handle = await start(client)
        for _ in range(2):
            with pytest.raises(Uncopyable, match="no copy") as caught:
                await handle
            names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
            assert names.count("wait_for_completion") == 1


async def test_an_error_of_any_kind_is_delivered(autojump_clock):
    async with client_of(
        FakeServer(polls=[ZeroDivisionError("a transport of the user's own")])
    ) as c:
        handle = await start(c)
        with pytest.raises(ZeroDivisionError):
            await handle


# --- cancel ---------------------------------------------------------------------------------


async def test_cancel_stops_polling_and_says_nothing_to_the_server(autojump_clock):
    server = FakeServer(polls=[result("running"), silence])
    async with client_of(server) as client:
        handle = await start(client)
        await handle.wait_for_running()
        calls = len(server.calls)
        assert handle.cancel() is True
        assert handle.cancel() is False
        assert handle.done()
        for _ in range(2):
            with pytest.raises(RolloutHandleCancelled, match="r was cancelled"):
                await handle
        with pytest.raises(RolloutHandleCancelled):
            await handle.wait_for_grading()
        await trio.sleep(1000)
        assert handle.status is RolloutStatus.RUNNING
    assert len(server.calls) - calls <= 1  # the poll that was about to start
    assert not any("cancel" in call.path for call in server.calls)


async def test_cancel_wakes_those_who_wait(autojump_clock):
    woken = []

    async def wait(handle):
        with pytest.raises(RolloutHandleCancelled):
            await handle
        woken.append(trio.current_time())

    async with client_of(FakeServer(polls=[silence])) as client:
        handle = await start(client)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait, handle)
            await trio.sleep(7)
            handle.cancel()
    assert woken == [7, 7, 7]


async def test_cancel_before_the_first_poll(autojump_clock):
    server = FakeServer()
    async with client_of(server) as client:
        handle = await start(client)
        assert handle.cancel() is True
        with pytest.raises(RolloutHandleCancelled):
            await handle
    assert server.poll_calls == []


async def test_cancel_after_the_end_changes_nothing(autojump_clock):
    async with client_of(FakeServer()) as client:
        handle = await start(client)
        terminal = await handle
        assert handle.cancel() is False
        assert await handle is terminal


async def test_cancel_while_a_retry_is_waited_for(autojump_clock):
    server = FakeServer(polls=[refused(503)])
    async with client_of(server) as client:
        handle = await start(client)
        await trio.sleep(4)
        handle.cancel()
        calls = len(server.calls)
        await trio.sleep(100)
    assert len(server.calls) == calls


async def test_one_cancelled_handle_leaves_the_others(autojump_clock):
    server = FakeServer(
        admissions=[admitted("a"), admitted("b")],
        polls=[after(5, result("success", "b")), after(5, result("success", "b"))],
    )
    async with client_of(server) as client:
        a = await start(client, "a")
        a.cancel()
        b = await start(client, "b")
        assert (await b).status is RolloutStatus.SUCCESS
        with pytest.raises(RolloutHandleCancelled):
            await a


async def test_nothing_is_left_behind_by_handles_that_nobody_awaits(autojump_clock):
    server = FakeServer(admissions=[admitted("a"), admitted("b")], polls=[silence])
    async with client_of(server) as client:
        first = await start(client, "a")
        second = await start(client, "b")
        second.statuses()
        first.cancel()
        second.cancel()
    del first, second
    gc.collect()
    assert client._handles == set()
    assert client._failed == []


async def test_a_result_after_a_cancel_changes_nothing(autojump_clock):
    async with client_of(FakeServer(polls=[result("running"), silence])) as client:
        handle = await start(client)
        await handle.wait_for_running()
        known = handle.latest_result
        handle.cancel()
        handle._observe(RolloutResultResponse(rollout_id="r", status=RolloutStatus.SUCCESS))
        assert (handle.status, handle.latest_result) == (RolloutStatus.RUNNING, known)
