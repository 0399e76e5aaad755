"""Our client and our server with feed and batches, in process and over real sockets."""

from __future__ import annotations

import httpx
import pytest
import trio
from feed.scripted import assert_empty
from feed.streaming import in_process
from support import CHAT_URL, fresh_id, local_backend, make_app, prompt, served

from rollout.client import RolloutClient, RolloutProtocolError
from rollout.types import RolloutErrorCategory, RolloutStatus

TIMES = {"result_wait_timeout_sec": 10, "polling_lease_timeout_sec": 100}


async def run(client, rollout_id=None, label="42", **script):
    return await client.run_rollout(
        prompt(**script), CHAT_URL, rollout_id or fresh_id(), label=label
    )


async def start(client, rollout_id=None, label="42", **script):
    return await client.run_rollout_async(
        prompt(**script), CHAT_URL, rollout_id or fresh_id(), label=label
    )


async def test_five_hundred_rollouts_take_a_handful_of_requests():
    app = make_app(local_backend(max_concurrent=None))
    async with served(app) as url, RolloutClient(url=url) as client:
        results = []

        async def one(n):
            results.append(await run(client, sleep=0.001 * (n % 10)))

        async with trio.open_nursery() as nursery:
            for n in range(500):
                nursery.start_soon(one, n)
        assert {(r.status, r.sample.reward) for r in results} == {("success", 1.0)}
        assert len({r.rollout_id for r in results}) == 500
        assert client._extensions._feed.token is not None
        assert_empty(client._extensions)


async def test_no_single_poll_where_a_feed_works(autojump_clock):
    app = make_app(local_backend(max_concurrent=None), **TIMES)
    async with in_process(app) as (client, transport), trio.open_nursery() as nursery:
        for n in range(50):
            nursery.start_soon(run, client, None, "42")
            await trio.sleep(n % 3)
        nursery.start_soon(lambda: run(client, sleep=500))  # five leases long
    assert trio.current_time() >= 500
    assert transport.count("POST /rollout") == 1
    assert not any(request.startswith("GET") for request in transport.requests)


async def test_a_lease_that_nobody_follows_ends_while_the_others_are_renewed(autojump_clock):
    app = make_app(local_backend(max_concurrent=None), **TIMES)
    async with in_process(app) as (client, transport):
        left = await start(client, "left", sleep=1000)
        kept = await start(client, "kept", sleep=400)
        await left.wait_for_running()
        await trio.sleep(45)
        left.cancel()
        at = trio.current_time()
        before = list(transport.requests)
        await trio.lowlevel.checkpoint()
        assert transport.requests == before
        while (await client.health())["lifecycle"]["active_rollouts"] == 2:
            await trio.sleep(1)
        assert at + 80 <= trio.current_time() <= at + 101  # its own lease, from its last renewal
        assert (await kept).status is RolloutStatus.SUCCESS


async def test_an_admission_whose_caller_left_is_not_renewed(autojump_clock):
    app = make_app(local_backend(max_concurrent=None), **TIMES)
    async with in_process(app) as (client, transport):
        kept = await start(client, "kept", sleep=400)
        await kept.wait_for_running()
        transport.hold = trio.Event()
        with trio.move_on_after(5):
            await start(client, "left", sleep=1000)
        transport.hold.set()
        while (await client.health())["lifecycle"]["active_rollouts"] == 2:
            await trio.sleep(1)
        assert trio.current_time() <= 120
        assert (await kept).status is RolloutStatus.SUCCESS


async def test_feeds_that_break_all_the_time_lose_nothing(autojump_clock):
    app = make_app(local_backend(max_concurrent=None), **TIMES)
    async with in_process(app) as (client, transport), trio.open_nursery() as nursery:
        results = []

        async def one(n):
            await trio.sleep(n % 17)
            handle = await start(client, sleep=n % 29)
            statuses = [status async for status in handle.statuses()]
            assert statuses == sorted(
                statuses, key=["queued", "running", "grading", "success"].index
            )
            results.append(await handle)

        async def breaker():
            while True:
                await trio.sleep(0.7)
                transport.break_streams()

        async with trio.open_nursery() as work:
            nursery.start_soon(breaker)
            for n in range(200):
                work.start_soon(one, n)
        assert {(r.status, r.sample.reward) for r in results} == {("success", 1.0)}
        assert len(results) == 200
        assert transport.count("POST /rollouts/feed") > 20
        assert_empty(client._extensions)
        nursery.cancel_scope.cancel()


async def test_a_server_that_stays_away_ends_in_errors_and_its_side_in_expiry(autojump_clock):
    app = make_app(local_backend(max_concurrent=None), **TIMES)
    async with in_process(app) as (client, transport):
        handle = await start(client, "r", sleep=1000)
        await handle.wait_for_running()
        transport.down = httpx.ConnectError("down")
        transport.break_streams()
        with pytest.raises(httpx.ConnectError):
            await handle
        transport.down = None
        await trio.sleep(101)
        (entry,) = app.registry._entries.values()
        assert entry.record.result.err_category is RolloutErrorCategory.LEASE_EXPIRED


async def test_a_server_that_starts_anew_is_told_by_a_404(autojump_clock):
    first, second = (make_app(local_backend(max_concurrent=None), **TIMES) for _ in range(2))
    async with in_process(first) as (client, transport), second.serving():
        handles = [await start(client, sleep=1000) for _ in range(3)]
        transport.app = second.asgi_app
        transport.break_streams()
        for handle in handles:
            with pytest.raises(RolloutProtocolError, match=handle.rollout_id) as caught:
                await handle
            assert caught.value.status_code == 404
        assert (await run(client)).status is RolloutStatus.SUCCESS


async def test_single_rollouts_wait_for_nothing(autojump_clock):
    app = make_app(**TIMES)
    async with in_process(app) as (client, _):
        for pause in (0, 0, 5, 29, 31, 100):
            await trio.sleep(pause)
            at = trio.current_time()
            assert (await run(client)).status is RolloutStatus.SUCCESS
            assert trio.current_time() == at


@pytest.mark.parametrize("feed", [True, False])
async def test_every_kind_of_end_looks_the_same_with_and_without_a_feed(feed, autojump_clock):
    app = make_app(local_backend(max_concurrent=None), **TIMES)
    async with in_process(app, feed=feed) as (client, transport):
        await run(client)  # says what is offered
        ok = await start(client, sleep=1)
        wrong = await start(client, label="43")
        bad = await start(client, **{"raise": "boom"})
        ungraded = await client.run_rollout_async(prompt(), CHAT_URL, fresh_id(), grade=False)
        slow = await start(client, sleep=1000)
        assert await ok.wait_for_running() is RolloutStatus.RUNNING
        assert ok.latest_result.agent_started_at is not None
        ends = [await handle for handle in (ok, wrong, bad, ungraded)]
        assert [end.status for end in ends] == ["success", "success", "failure", "success"]
        assert [end.sample and end.sample.reward for end in ends] == [1.0, 0.0, None, None]
        assert ends[2].err_category is RolloutErrorCategory.AGENT_ERROR
        await client.cancel_rollout(slow.rollout_id)
        assert (await slow).status is RolloutStatus.CANCELLED
        assert slow.latest_result is await slow
        with pytest.raises(RolloutProtocolError) as caught:
            await start(client, slow.rollout_id)
        assert caught.value.status_code == 409
    assert any(request.endswith("/feed") for request in transport.requests) is feed


async def test_a_shutdown_hands_over_every_result_through_the_feed():
    app = make_app(local_backend(max_concurrent=None))
    async with served(app) as url, RolloutClient(url=url) as client:
        handles = [await start(client, sleep=60) for _ in range(20)]
        for handle in handles:
            await handle.wait_for_running()
        app.shutdown_stages.skip_drain()
        app.request_shutdown()
        assert {(await handle).status for handle in handles} == {"cancelled"}
