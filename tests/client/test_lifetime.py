"""The life of a client: entering, leaving, closing, and what becomes of its handles."""

from __future__ import annotations

import asyncio
import gc
import json

import httpx
import pytest
import trio
import trio.testing
from client.fakes import (
    URL,
    FakeServer,
    admitted,
    after,
    bare_client,
    client_of,
    refused,
    result,
    run,
    silence,
    start,
)

from rollout.client import (
    NotOnTrioError,
    RolloutClient,
    RolloutClientClosedError,
    RolloutClientEnteredError,
    RolloutClientNotEnteredError,
    RolloutHandleCancelled,
    RolloutProtocolError,
)
from rollout.types import RolloutStatus


def both(*polls, **options):
    """A server that admits rollouts of any id."""

    async def admit(request):
        await trio.lowlevel.checkpoint()
        return admitted(json.loads(request.content)["rollout_id"])

    return FakeServer(admissions=[admit], polls=list(polls), **options)


def client_of_plain(server):
    return RolloutClient(url=URL, http_client=httpx.AsyncClient(transport=server))


# --- a client that is not entered -----------------------------------------------------------


async def test_without_entering_everything_but_handles_works(autojump_clock):
    client = bare_client(FakeServer())
    assert (await run(client)).status is RolloutStatus.SUCCESS
    assert (await client.health())["status"] == "ok"
    assert (await client.wait_idle())["process_id"] == "p1"
    assert (await client.cancel_rollout("r")).dispositions == {}
    await client.aclose()


async def test_a_handle_needs_an_entered_client_and_the_error_says_how(autojump_clock):
    server = FakeServer()
    with pytest.raises(RolloutClientNotEnteredError, match="async with RolloutClient"):
        await start(bare_client(server))
    assert server.calls == []


async def test_run_rollout_cancelled_says_nothing_to_the_server(autojump_clock):
    server = FakeServer(polls=[silence])
    client = bare_client(server)
    with trio.move_on_after(5) as scope:
        await run(client)
    assert scope.cancelled_caught
    assert [call.method for call in server.calls] == ["POST", "GET"]


# --- leaving the block ----------------------------------------------------------------------


async def test_leaving_waits_for_handles_that_poll(autojump_clock):
    async with client_of(
        both(after(20, result("running", "a")), after(20, result("success", "a")))
    ) as c:
        handle = await start(c, "a")
    assert trio.current_time() == 40
    assert (await handle).status is RolloutStatus.SUCCESS


async def test_an_exception_in_the_block_comes_out_plain_and_cancels_handles(autojump_clock):
    handles = []

    async def block():
        async with client_of(both(silence)) as client:
            handles.extend([await start(client, "a"), await start(client, "b")])
            await trio.sleep(3)
            raise KeyError("from the block")

    with pytest.raises(KeyError, match="from the block") as caught:
        await block()
    assert not hasattr(caught.value, "__notes__")
    assert trio.current_time() == 3
    for handle in handles:
        assert handle.done()
        with pytest.raises(RolloutHandleCancelled, match=r"client of . was closed"):
            await handle


async def test_a_failed_await_in_the_block_comes_out_plain(autojump_clock):
    async def block():
        async with client_of(both(refused(500))) as client:
            await (await start(client, "a"))

    with pytest.raises(RolloutProtocolError):
        await block()


async def test_a_cancellation_from_outside_ends_it(autojump_clock):
    server = both(silence)
    with trio.move_on_after(3) as scope:
        async with client_of(server) as client:
            in_block = await start(client, "a")
            await trio.sleep_forever()
    assert scope.cancelled_caught
    with trio.move_on_after(3) as scope:
        async with client_of(server) as client:
            on_leaving = await start(client, "b")
    assert scope.cancelled_caught
    assert trio.current_time() == 6
    for handle in (in_block, on_leaving):
        assert repr(handle).endswith("cancelled>")
        with pytest.raises(RolloutHandleCancelled):
            await handle


async def test_a_cancellation_from_outside_is_plain(autojump_clock):
    # A handler for plain cancellations, as user code may have it, is not passed by.
    passed = []

    async def body():
        try:
            async with client_of(both(silence)) as client:
                await start(client, "a")
                await start(client, "b")
        except trio.Cancelled:
            passed.append("plain")
            raise

    with trio.move_on_after(1):
        await body()
    assert passed == ["plain"]


async def test_an_exception_of_the_block_is_not_lost_to_a_cancellation_from_outside(
    autojump_clock,
):
    with pytest.raises(ValueError, match="from the block") as caught:
        with trio.CancelScope() as scope:
            async with client_of_plain(both(silence)) as client:
                await start(client, "a")
                scope.cancel()
                raise ValueError("from the block")
    assert not hasattr(caught.value, "__notes__")


async def test_failures_that_nobody_awaited_are_raised_at_the_end_grouped(autojump_clock):
    with pytest.raises(ExceptionGroup, match=r"2 rollout\(s\) that nobody awaited") as caught:
        async with RolloutClient(
            url=URL, http_client=httpx.AsyncClient(transport=both(refused(500)))
        ) as client:
            await start(client, "a")
            await start(client, "b")
            awaited = await start(client, "c")
            with pytest.raises(RolloutProtocolError):
                await awaited
    assert sorted(str(error)[:16] for error in caught.value.exceptions) == [
        "GET /rollout/a/r",
        "GET /rollout/b/r",
    ]
    assert client._failed == []


@pytest.mark.parametrize("how", ["await", "statuses", "milestone"])
async def test_failures_that_an_awaiter_has_raised_are_not_repeated(autojump_clock, how):
    async with client_of(both(refused(500))) as client:
        handle = await start(client, "a")
        await trio.sleep(1)
        with pytest.raises(RolloutProtocolError):
            if how == "await":
                await handle
            elif how == "statuses":
                [status async for status in handle.statuses()]
            else:
                await handle.wait_for_running()
    assert handle.done()


async def test_waiting_for_a_milestone_that_was_reached_raises_no_failure(autojump_clock):
    with pytest.raises(ExceptionGroup, match="nobody awaited"):
        async with client_of_plain(both(result("running", "a"), refused(500))) as client:
            handle = await start(client, "a")
            await handle.wait_for_running()


async def test_where_the_block_raised_they_are_notes(autojump_clock):
    with pytest.raises(ValueError, match="from the block") as caught:
        async with client_of_plain(both(refused(500, "lost a"))) as client:
            await start(client, "a")
            await trio.sleep(1)
            raise ValueError("from the block")
    (note,) = caught.value.__notes__
    assert "nobody awaited" in note
    assert "lost a" in note


@pytest.mark.parametrize("when", ["in the block", "on leaving"])
async def test_where_the_block_was_cancelled_they_come_out_all_the_same(autojump_clock, when):
    polls = [refused(500, "lost a"), silence]
    with pytest.raises(ExceptionGroup, match="nobody awaited") as caught:
        with trio.move_on_after(5):
            async with client_of_plain(both(*polls)) as client:
                await start(client, "a")
                await trio.sleep(1)
                await start(client, "b")
                if when == "in the block":
                    await trio.sleep_forever()
    (failure,) = caught.value.exceptions
    assert isinstance(failure, RolloutProtocolError)
    assert trio.current_time() == 5


async def test_an_interrupt_in_a_poll_comes_out_and_cancels_the_rest(autojump_clock):
    async def interrupt(_):
        await trio.sleep(1)
        raise KeyboardInterrupt

    for raising in (False, True):
        with pytest.raises(KeyboardInterrupt):
            async with client_of_plain(both(interrupt, silence)) as client:
                await start(client, "a")
                await start(client, "b")
                if raising:
                    await trio.sleep(0)


async def test_failures_that_were_raised_are_not_kept(autojump_clock):
    async with client_of(both(refused(500))) as client:
        for n in range(20):
            handle = await start(client, f"r{n}")
            with pytest.raises(RolloutProtocolError):
                await handle
        assert len(client._failed) <= 1
        assert client._handles == set()


# --- aclose ---------------------------------------------------------------------------------


async def test_aclose_inside_the_block_cancels_what_polls(autojump_clock):
    async with client_of(both(silence)) as client:
        handle = await start(client, "a")
        await client.aclose()
        await client.aclose()
        assert repr(client) == f"<RolloutClient {URL} closed>"
        with pytest.raises(RolloutHandleCancelled):
            await handle
        with pytest.raises(RolloutClientClosedError):
            await start(client, "b")
    assert trio.current_time() == 0


async def test_calls_after_closing_are_refused(autojump_clock):
    entered = bare_client(FakeServer())
    async with entered:
        pass
    closed = bare_client(FakeServer())
    await closed.aclose()
    await closed.aclose()
    for client in (entered, closed):
        for call in (
            lambda c: run(c),
            lambda c: start(c),
            lambda c: c.health(),
            lambda c: c.wait_idle(),
            lambda c: c.cancel_rollout("r"),
            lambda c: c.cancel_rollouts(all=True),
            lambda c: c.__aenter__(),
        ):
            with pytest.raises(RolloutClientClosedError, match="closed"):
                await call(client)


async def test_aclose_is_a_checkpoint():
    client = bare_client(FakeServer())
    with trio.testing.assert_checkpoints():
        await client.aclose()
    with trio.testing.assert_checkpoints():
        await client.aclose()


async def test_aclose_under_cancellation_closes_all_the_same(autojump_clock):
    client = RolloutClient(url=URL)
    with trio.CancelScope() as scope:
        scope.cancel()
        await client.aclose()
    assert scope.cancelled_caught
    assert client.http_client.is_closed


async def test_the_own_http_client_is_closed_and_that_of_the_user_is_not(autojump_clock):
    async with RolloutClient(url=URL) as own:
        assert not own.http_client.is_closed
    assert own.http_client.is_closed
    server = FakeServer()
    async with httpx.AsyncClient(transport=server) as http:
        async with RolloutClient(url=URL, http_client=http) as client:
            await run(client)
        client = RolloutClient(url=URL, http_client=http)
        await client.aclose()
        assert not http.is_closed
        assert not server.closed
        assert client.http_client is http


@pytest.mark.parametrize("ending", ["exception", "cancellation"])
async def test_the_own_http_client_is_closed_however_the_block_ends(autojump_clock, ending):
    client = RolloutClient(url=URL)
    with trio.CancelScope() as scope:
        try:
            async with client:
                if ending == "exception":
                    raise KeyError
                scope.cancel()
                await trio.sleep_forever()
        except KeyError:
            assert ending == "exception"
    assert client.http_client.is_closed


def test_the_error_on_asyncio_says_what_to_change():
    async def entered():
        async with RolloutClient(url="http://127.0.0.1:9"):
            raise AssertionError("it cannot be entered")

    async def alone():
        await RolloutClient(url="http://127.0.0.1:9").health()

    for program in (entered, alone):
        with pytest.raises(NotOnTrioError, match=r"start the program with trio\.run"):
            asyncio.run(program())


async def test_entering_twice_is_refused(autojump_clock):
    async with client_of(FakeServer()) as client:
        with pytest.raises(RolloutClientEnteredError, match="already"):
            await client.__aenter__()
        assert (await (await start(client))).status is RolloutStatus.SUCCESS


async def test_an_http_client_that_was_closed_too_early_is_named(autojump_clock):
    server = both(result("running", "a"), httpx.ReadError("closed"))
    http = httpx.AsyncClient(transport=server)
    async with RolloutClient(url=URL, http_client=http) as client:
        handle = await start(client, "a")
        await handle.wait_for_running()
        await http.aclose()
        with pytest.raises(RolloutClientClosedError, match="HTTP client"):
            await handle
        with pytest.raises(RolloutClientClosedError, match="HTTP client"):
            await client.wait_idle()


async def test_an_http_client_that_is_closed_during_a_request_is_named(autojump_clock):
    http = httpx.AsyncClient()

    async def closed(_):
        await http.aclose()
        raise httpx.ReadError("closed")

    http = httpx.AsyncClient(transport=both(closed))
    async with RolloutClient(url=URL, http_client=http) as client:
        handle = await start(client, "a")
        with pytest.raises(
            RolloutClientClosedError, match="while a request was under way"
        ) as caught:
            await handle
    assert isinstance(caught.value.__cause__, httpx.ReadError)


async def test_an_admission_that_outlives_the_block_gives_no_handle(autojump_clock):
    async def outlive(client):
        with pytest.raises(RolloutClientClosedError):
            await start(client, "late")

    server = FakeServer(admissions=[after(5, admitted("late"))])
    async with trio.open_nursery() as nursery, client_of_plain(server) as client:
        nursery.start_soon(outlive, client)
        await trio.testing.wait_all_tasks_blocked()
    assert server.poll_calls == []


async def test_an_admission_that_ends_with_the_last_handle_gives_no_handle(autojump_clock):
    async with trio.open_nursery() as ended:
        pass
    client = bare_client(FakeServer())
    client._nursery = ended  # the moment between the end of the nursery and that of the block
    with pytest.raises(RolloutClientClosedError, match="during the admission"):
        await start(client)
    assert client._handles == set()


async def test_the_repr_shows_the_state(autojump_clock):
    client = bare_client(both(silence))
    assert repr(client) == f"<RolloutClient {URL} open>"
    async with client:
        assert repr(client) == f"<RolloutClient {URL} entered>"
        handle = await start(client, "a")
        assert repr(client) == f"<RolloutClient {URL} entered, polling 1>"
        handle.cancel()
    assert repr(client) == f"<RolloutClient {URL} closed>"


async def test_no_task_is_left(autojump_clock):
    root = trio.lowlevel.current_root_task()
    before = trio.lowlevel.current_statistics().tasks_living
    async with client_of(both(silence)) as client:
        for n in range(5):
            (await start(client, f"r{n}")).cancel()
    gc.collect()
    assert root is not None
    assert trio.lowlevel.current_statistics().tasks_living == before
