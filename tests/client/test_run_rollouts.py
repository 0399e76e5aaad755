"""Many rollouts with a bound, and groups of which some are enough."""

from __future__ import annotations

import json

import httpx
import pytest
import trio
import trio.testing
from client.fakes import FakeServer, admitted, client_of, refused, silence
from support import CHAT_URL, Script, in_process, local_backend, make_app, prompt

from rollout.client import RolloutClient, RolloutProtocolError
from rollout.types import RolloutInitRequest, RolloutStatus


def request(rollout_id, **script):
    return RolloutInitRequest(
        rollout_id=rollout_id,
        initial_messages=prompt(**script),
        chat_completions_url=CHAT_URL,
        label="42",
    )


def unbounded(**options):
    return make_app(local_backend(max_concurrent=None, **options))


async def test_outcomes_come_in_order_of_completion(autojump_clock):
    requests = [request(f"r{seconds}", sleep=seconds) for seconds in (5, 1, 3)]
    async with in_process(unbounded()) as client:
        async with client.run_rollouts(requests, max_in_flight=3) as finished:
            got = [rollout async for rollout in finished]
    assert [rollout.request.rollout_id for rollout in got] == ["r1", "r3", "r5"]
    assert all(rollout.result.status is RolloutStatus.SUCCESS for rollout in got)


async def test_the_next_request_is_pulled_only_when_a_place_is_free(autojump_clock):
    pulled = []

    async def endless():
        number = 0
        while True:
            pulled.append(number)
            yield request(f"r{number}", sleep=10)
            number += 1

    async with in_process(unbounded()) as client:
        async with client.run_rollouts(endless(), max_in_flight=4) as finished:
            await trio.sleep(5)
            assert len(pulled) == 4
            for _ in range(4):
                await finished.receive()
            await trio.sleep(5)
            assert len(pulled) == 8


async def test_one_failure_does_not_end_the_others(autojump_clock):
    requests = [request("a"), request("b", **{"raise": "boom"}), request("a"), request("c")]
    async with in_process(unbounded()) as client:
        async with client.run_rollouts(requests, max_in_flight=1) as finished:
            got = [rollout async for rollout in finished]
    assert [rollout.succeeded for rollout in got] == [True, False, False, True]
    assert got[1].result.err_message == "boom"
    assert isinstance(got[2].outcome, RolloutProtocolError)
    with pytest.raises(RolloutProtocolError, match="409"):
        _ = got[2].result


async def test_leaving_cancels_what_is_left_on_the_server_too(autojump_clock):
    app = unbounded()
    requests = [request("quick", sleep=1), *(request(f"r{n}", sleep=3600) for n in range(5))]
    async with in_process(app) as client:
        async with client.run_rollouts(requests, max_in_flight=10) as finished:
            first = await finished.receive()
            assert app.registry.lifecycle.active_rollouts == 5
        assert first.request.rollout_id == "quick"
        health = await client.wait_idle(timeout_sec=5, poll_interval_sec=0.1)
        assert health["lifecycle"]["active_rollouts"] == 0


@pytest.mark.parametrize(
    ("admissions", "cancelled"),
    [
        ([silence], []),
        ([refused(429, Retry_After="60")], []),
        ([refused(409)], []),
        ([admitted("a"), refused(409)], ["a"]),
    ],
    ids=["on its way", "put off", "refused", "the first of two"],
)
async def test_leaving_cancels_only_what_was_admitted_here(autojump_clock, admissions, cancelled):
    server = FakeServer(admissions=admissions, polls=[silence])
    async with client_of(server, feed=False) as client:
        async with client.run_rollouts([request("a")] * 2, max_in_flight=2):
            await trio.sleep(5)
    cancels = [json.loads(call.body) for call in server.calls if call.path == "/rollout/cancel"]
    assert [name for body in cancels for name in body["ids"]] == cancelled


async def test_what_was_on_its_way_when_the_block_was_left_does_not_start(autojump_clock):
    app, on_their_way = unbounded(), []

    class Slow(httpx.ASGITransport):
        async def handle_async_request(self, request):
            if request.url.path == "/rollout" and b'"slow"' in request.content:
                on_their_way.append(request.content)
                await trio.sleep_forever()
            return await super().handle_async_request(request)

    async with app.serving(), httpx.AsyncClient(transport=Slow(app=app)) as http:
        async with RolloutClient(url="http://test", http_client=http, feed=False) as client:
            requests = [request("quick", sleep=1), request("slow", sleep=3600)]
            async with client.run_rollouts(requests, max_in_flight=2) as finished:
                assert (await finished.receive()).result.status is RolloutStatus.SUCCESS
        (body,) = on_their_way
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as later:
            arrived = await later.post("http://test/rollout", content=body)
        assert arrived.status_code == 202
        assert app.registry.lifecycle.active_rollouts == 0


@pytest.mark.parametrize(
    ("extensions", "keys"), [(["admission-keys"], True), ([], False)], ids=["keys", "no keys"]
)
async def test_keys_go_only_to_servers_that_know_them(autojump_clock, extensions, keys):
    server = FakeServer(admissions=[admitted("a", extensions=extensions), silence], polls=[silence])
    async with client_of(server, feed=False) as client:
        async with client.run_rollouts([request("a"), request("b")], max_in_flight=2):
            await trio.sleep(5)
    (cancel,) = [json.loads(call.body) for call in server.calls if call.path == "/rollout/cancel"]
    assert sorted(cancel["ids"]) == (["a", "b"] if keys else ["a"])
    assert list(cancel.get("admission_keys", {})) == (["b"] if keys else [])


async def test_what_was_admitted_is_cancelled_whoever_else_asks_for_its_id(autojump_clock):
    server = FakeServer(
        admissions=[admitted("a", extensions=["admission-keys"]), silence], polls=[silence]
    )
    async with client_of(server, feed=False) as client:
        async with client.run_rollouts([request("a")] * 2, max_in_flight=2):
            await trio.sleep(5)
    (cancel,) = [json.loads(call.body) for call in server.calls if call.path == "/rollout/cancel"]
    assert cancel["ids"] == ["a"]
    assert "admission_keys" not in cancel


@pytest.mark.parametrize("close", [False, True], ids=["left", "closed"])
async def test_leaving_while_outcomes_wait_to_be_received_raises_nothing(autojump_clock, close):
    app = unbounded()
    requests = [request(f"r{n}", sleep=1) for n in range(100)]
    async with in_process(app) as client:
        async with client.run_rollouts(requests, max_in_flight=2) as finished:
            async for _ in finished:
                await trio.sleep(100)
                break
            if close:
                finished.close()
                await trio.sleep(100)
                assert app.registry.lifecycle.active_rollouts == 0
        health = await client.wait_idle(timeout_sec=5, poll_interval_sec=0.1)
        assert health["lifecycle"]["active_rollouts"] == 0


async def test_an_exception_in_the_block_comes_out_plain_and_cancels(autojump_clock):
    app = unbounded()
    async with in_process(app) as client:
        with pytest.raises(KeyError, match="mine"):
            async with client.run_rollouts([request("a", sleep=3600)], max_in_flight=1):
                await trio.sleep(1)
                raise KeyError("mine")
        await client.wait_idle(timeout_sec=5, poll_interval_sec=0.1)


async def test_an_exception_in_the_block_keeps_its_cause(autojump_clock):
    cause = KeyError("why")
    async with in_process(unbounded()) as client:
        with pytest.raises(LookupError) as caught:
            async with client.run_rollouts([request("a", sleep=100)], max_in_flight=1):
                raise LookupError("no") from cause
    assert caught.value.__cause__ is cause


async def test_an_exception_of_the_requests_is_not_lost_when_the_block_is_left(autojump_clock):
    left = trio.Event()

    async def requests():
        yield request("a")
        await left.wait()
        raise LookupError("no more requests")

    async with in_process(unbounded()) as client:
        with pytest.raises(LookupError):
            async with client.run_rollouts(requests(), max_in_flight=2) as finished:
                await finished.receive()
                left.set()
                await trio.testing.wait_all_tasks_blocked()


async def test_an_exception_of_the_requests_comes_out_plain(autojump_clock):
    def requests():
        yield request("a", sleep=3600)
        raise LookupError("no more prompts")

    async with in_process(unbounded()) as client:
        with pytest.raises(LookupError, match="no more prompts"):
            async with client.run_rollouts(requests(), max_in_flight=2) as finished:
                await finished.receive()


async def test_a_surrounding_cancel_scope_is_obeyed(autojump_clock):
    app = unbounded()
    async with in_process(app) as client:
        with trio.move_on_after(5) as scope:
            async with client.run_rollouts([request("a", sleep=3600)], max_in_flight=1) as finished:
                await finished.receive()
        assert scope.cancelled_caught
        await client.wait_idle(timeout_sec=5, poll_interval_sec=0.1)


async def test_limits_for_each_key(autojump_clock):
    most: dict[str, int] = {}
    now: dict[str, int] = {}

    class Counting(Script):
        async def run(self, ctx):
            key = ctx.prompt[0]["key"]
            now[key] = now.get(key, 0) + 1
            most[key] = max(most.get(key, 0), now[key])
            try:
                return await super().run(ctx)
            finally:
                now[key] -= 1

    requests = [request(f"{k}{n}", key=k, sleep=1 + n) for n in range(4) for k in "xy"]
    async with (
        in_process(unbounded(workflow=Counting)) as client,
        client.run_rollouts(
            requests,
            max_in_flight=8,
            key=lambda item: item.initial_messages[0]["key"],
            max_in_flight_per_key=2,
        ) as finished,
    ):
        got = [rollout async for rollout in finished]
    assert len(got) == 8
    assert most == {"x": 2, "y": 2}


@pytest.mark.parametrize("endless", [False, True])
async def test_no_group_waits_while_there_is_room_for_it(autojump_clock, endless):
    async def requests():
        for rollout in group:
            yield rollout
        await trio.sleep_forever()

    group = [request(f"x{n}", sleep=100) for n in range(20)] + [request("y", sleep=1)]
    async with (
        in_process(unbounded()) as client,
        client.run_rollouts(
            requests() if endless else group,
            max_in_flight=2,
            key=lambda item: item.rollout_id[0],
            max_in_flight_per_key=1,
        ) as finished,
    ):
        ended = [(await finished.receive()).request.rollout_id for _ in range(3)]
        assert trio.current_time() == 200
    assert ended == ["y", "x0", "x1"]


async def test_the_first_successes_of_a_group_end_the_rest(autojump_clock):
    app = unbounded()
    group = [
        request("slow", sleep=3600),
        request("bad", **{"raise": "no"}),
        *(request(f"r{seconds}", sleep=seconds) for seconds in (3, 1, 2)),
    ]
    async with in_process(app) as client:
        found = await client.first_successes(group, 2)
        assert [rollout.request.rollout_id for rollout in found] == ["r1", "r2"]
        await client.wait_idle(timeout_sec=5, poll_interval_sec=0.1)


async def test_a_group_with_too_few_successes_gives_what_there_is(autojump_clock):
    group = [request("a"), request("b", **{"raise": "no"})]
    async with in_process(unbounded()) as client:
        assert len(await client.first_successes(group, 2)) == 1
        assert await client.first_successes([], 1) == []


async def test_no_requests_are_no_rollouts(autojump_clock):
    async with in_process(unbounded()) as client:
        async with client.run_rollouts([], max_in_flight=1) as finished:
            assert [rollout async for rollout in finished] == []


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
async def test_limits_are_whole_numbers_from_one_up(autojump_clock, value):
    async with in_process(unbounded()) as client:
        with pytest.raises(ValueError, match="max_in_flight"):
            async with client.run_rollouts([], max_in_flight=value):
                pass
        with pytest.raises(ValueError, match="k must be"):
            await client.first_successes([], value)


async def test_a_limit_for_each_key_needs_a_key(autojump_clock):
    async with in_process(unbounded()) as client:
        with pytest.raises(ValueError, match="key"):
            async with client.run_rollouts([], max_in_flight=1, max_in_flight_per_key=1):
                pass


async def test_a_request_that_was_spoiled_in_place_is_an_outcome_of_its_own(autojump_clock):
    spoiled = request("a")
    spoiled.initial_messages.append("no object")
    async with in_process(unbounded()) as client:
        async with client.run_rollouts([spoiled, request("b")], max_in_flight=1) as finished:
            got = [rollout async for rollout in finished]
    assert isinstance(got[0].outcome, ValueError)
    assert "initial_messages" in str(got[0].outcome)
    assert got[1].succeeded
