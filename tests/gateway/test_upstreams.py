"""Calls through real gateways: several upstreams, places for calls, and retries."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx
import pytest
import trio
from attrs import evolve
from gateway.served import KEY, QUESTION, calling, post, rig
from integrations.scripted import refuse, say, scripted_endpoint, stall

from rollout.errors import InvalidFieldError
from rollout.gateway import Limits, ModelGateway, Upstream
from rollout.types import MODEL_ENDPOINT, RolloutStatus

OTHER_KEY = "sk-the-key-of-another-endpoint"
NOWHERE = "http://127.0.0.1:9/v1"


async def one_call(context):
    await post(context)


def caller_of(count, got):
    async def agent(context):
        for _ in range(count):
            got.append(await post(context))

    return agent


@asynccontextmanager
async def two(agent, first, second, **settings):
    """A rig with two upstreams besides the endpoint that requests name."""
    async with scripted_endpoint(*first) as one, scripted_endpoint(*second) as other:
        gateway = ModelGateway(
            upstreams=[one.url, Upstream(other.url, api_key=OTHER_KEY)], **settings
        )
        async with rig(agent, refuse(500, "not mine"), gateway=gateway) as it:
            yield it, one, other


async def health(it):
    async with httpx.AsyncClient(base_url=it.url, trust_env=False) as http:
        payload = (await http.get("/health")).json()
        return payload["gateway"] | {"calls_in_flight": payload["policy"]["calls_in_flight"]}


# --- several upstreams --------------------------------------------------------------------------


async def test_upstreams_take_the_place_of_the_endpoint_of_requests_each_with_its_key():
    got = []
    async with two(caller_of(2, got), [say("a")], [say("b")]) as (it, one, other):
        results = [await it.run() for _ in range(4)]
        state = await health(it)
        assert it.endpoint.requests == []
        assert [each.key for each in one.requests] == [None] * len(one.requests)
        assert [each.key for each in other.requests] == [OTHER_KEY] * len(other.requests)
        # Each rollout stays where its first call went.
        assert len(one.requests) % 2 == len(other.requests) % 2 == 0
    assert len(one.requests) + len(other.requests) == 8
    assert all(each.status is RolloutStatus.SUCCESS for each in results)
    assert results[0].sample.metrics["model_wait_sec"] == 0.0
    assert [each["url"] for each in state["upstreams"]] == [one.url, other.url]
    assert (state["calls"], state["calls_in_flight"], state["retries"]) == (8, 0, 0)
    assert {each["rollouts"] for each in state["upstreams"]} == {0}


async def test_rollouts_that_run_together_are_shared_out():
    arrived = []

    async def agent(context):
        await post(context)
        arrived.append(context)
        with trio.fail_after(20):
            while len(arrived) < 4:
                await trio.sleep(0.01)
        await post(context)

    async with two(agent, [say("a")], [say("b")]) as (it, one, other):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(it.run)
    assert (len(one.requests), len(other.requests)) == (4, 4)


@pytest.mark.parametrize("fails", [[refuse(503)], [refuse(502)], [evolve(say("a"), cut_after=0)]])
async def test_a_rollout_moves_when_its_upstream_fails(fails):
    got = []
    async with two(caller_of(3, got), fails, [say("b")]) as (it, one, other):
        result = await it.run()
        state = await health(it)
    assert [each.status_code for each in got] == [200] * 3
    assert (len(one.requests), len(other.requests)) == (1, 3)
    metrics = result.sample.metrics
    assert (metrics["calls"], metrics["retries"], metrics["failed_calls"]) == (3, 1, 0)
    assert [each["failing"] for each in state["upstreams"]] == [True, False]


async def test_an_upstream_that_cannot_be_reached_costs_no_call():
    got = []
    async with scripted_endpoint(say("13")) as reached:
        gateway = ModelGateway(upstreams=[NOWHERE, reached.url])
        async with rig(caller_of(1, got), say(""), gateway=gateway) as it:
            results = [await it.run() for _ in range(3)]
    assert all(each.status is RolloutStatus.SUCCESS for each in results)
    assert len(reached.requests) == 3


async def test_the_list_of_models_comes_from_an_upstream():
    got = []

    async def agent(context):
        async with calling(context) as http:
            got.append((await http.get("/v1/models")).json())
        return []

    models = [evolve(say(""), raw=b'{"data":[]}')]
    async with two(agent, models, models) as (it, one, other):
        await it.run()
    assert got == [{"data": []}]
    assert len(one.requests + other.requests) == 1


async def test_no_key_of_an_upstream_reaches_an_agent():
    got = []
    gone = [refuse(401, f"{KEY} and {OTHER_KEY}")]
    async with two(caller_of(1, got), gone, gone) as (it, one, _):
        await it.run()
        state = str(await health(it))
    assert got[0].status_code == 401
    assert KEY not in got[0].text
    assert OTHER_KEY not in got[0].text + state
    assert OTHER_KEY not in repr(ModelGateway(upstreams=[Upstream(one.url, OTHER_KEY)]))
    assert "pass-word" not in repr(Upstream("http://me:pass-word@host/v1"))


# --- places -------------------------------------------------------------------------------------


async def test_calls_beyond_the_maximum_wait_for_a_place():
    async def agent(context):
        if not it.endpoint.requests:
            with trio.CancelScope() as hold:
                holds.append(hold)
                await post(context)
            return
        assert (await post(context)).status_code == 200

    holds, results = [], []

    async def run():
        results.append(await it.run())

    gateway = ModelGateway(max_calls_in_flight=1)
    async with rig(agent, stall(), say("13"), gateway=gateway) as it:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await it.endpoint.received()
            nursery.start_soon(run)
            with trio.fail_after(20):
                while not (state := await health(it))["calls_waiting"]:
                    await trio.sleep(0.01)
            (upstream,) = state["upstreams"]
            assert (upstream["calls_in_flight"], upstream["limit"]) == (1, 1)
            assert len(it.endpoint.requests) == 1
            holds[0].cancel()
        assert (await health(it))["wait_sec"] > 0
    waits = sorted(each.sample.metrics["model_wait_sec"] for each in results)
    assert waits[0] == 0.0
    assert waits[1] > 0.0


async def test_an_agent_that_hangs_up_while_it_waits_leaves_its_turn_to_others():
    async def agent(context):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, context)
            await (await it.endpoint.received()).stalled.wait()
            with trio.move_on_after(0.05):
                await post(context)
            nursery.cancel_scope.cancel()
        assert (await post(context)).status_code == 200

    async with rig(agent, stall(), say("13"), gateway=ModelGateway(max_calls_in_flight=1)) as it:
        result = await it.run()
        state = await health(it)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert len(it.endpoint.requests) == 2
    assert (state["calls_waiting"], state["calls_in_flight"]) == (0, 0)


async def test_a_gateway_without_bounds_has_no_places():
    async with rig(one_call, say("13")) as it:
        result = await it.run()
        state = await health(it)
    assert state["upstreams"] == []
    assert "model_wait_sec" not in result.sample.metrics


# --- retries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_refusal_is_tried_again_and_counts_as_one_call(status):
    got = []
    gateway = ModelGateway(limits=Limits(calls=2))
    steps = [refuse(status, retry_after="0"), say("13")]
    async with rig(caller_of(2, got), *steps, gateway=gateway) as it:
        result = await it.run()
        assert (await health(it))["retries"] == 1
    assert [each.status_code for each in got] == [200, 200]
    counts = [each.headers.get("x-stainless-retry-count") for each in it.endpoint.requests]
    assert counts == [None, "1", None]
    metrics = result.sample.metrics
    assert (metrics["calls"], metrics["retries"], metrics["failed_calls"]) == (2, 1, 0)
    assert metrics["model_wait_sec"] > 0


async def test_the_last_refusal_passes_unchanged():
    got = []
    gateway = ModelGateway(retries=1)
    async with rig(
        caller_of(1, got), refuse(503, "down for today", retry_after="0"), gateway=gateway
    ) as it:
        result = await it.run()
    assert (got[0].status_code, got[0].headers["retry-after"]) == (503, "0")
    assert got[0].json()["error"]["message"] == "down for today"
    assert len(it.endpoint.requests) == 2
    metrics = result.sample.metrics
    assert (metrics["calls"], metrics["failed_calls"]) == (1, 1)


async def test_a_wait_that_does_not_fit_passes_at_once():
    got = []
    async with rig(caller_of(1, got), refuse(429, retry_after="31")) as it:
        await it.run()
    assert got[0].status_code == 429
    assert len(it.endpoint.requests) == 1


async def test_an_answer_that_breaks_off_before_the_agent_has_seen_any_is_asked_for_again():
    got = []
    steps = [evolve(say("one two three"), cut_after=1), say("13")]
    async with rig(caller_of(1, got), *steps) as it:
        await it.run()
    assert got[0].json()["choices"][0]["message"]["content"] == "13"


async def test_a_stream_that_has_begun_is_not_asked_for_again():
    async def agent(context):
        async with calling(context) as http:
            body = {"model": "m", "messages": [QUESTION], "stream": True}
            with pytest.raises(httpx.RemoteProtocolError):
                await http.post("/v1/chat/completions", json=body)
        raise RuntimeError("the tool exited with 1")

    async with rig(agent, evolve(say("one two three"), cut_after=1)) as it:
        result = await it.run()
    assert result.err_source == MODEL_ENDPOINT
    assert len(it.endpoint.requests) == 1


async def test_an_agent_that_hangs_up_ends_the_retries():
    async def agent(context):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, context)
            await it.endpoint.received()
            with trio.fail_after(20):
                while not (await health(it))["retries"]:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert (await health(it))["calls_in_flight"] == 0

    async with rig(agent, refuse(503, retry_after="20")) as it:
        result = await it.run()
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert len(it.endpoint.requests) == 1


async def test_while_the_policy_is_paused_nothing_is_tried_again():
    async def agent(context):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(update)
            assert (await post(context)).status_code == 200

    async def update():
        await it.endpoint.received()
        await it.client.pause_policy()
        await trio.sleep(0.1)
        assert len(it.endpoint.requests) == 1
        await it.client.resume_policy()

    async with rig(agent, refuse(503, retry_after="0.05"), say("13")) as it:
        result = await it.run()
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert len(it.endpoint.requests) == 2


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"upstreams": []}, "upstreams must have an item"),
        ({"upstreams": "http://one/v1"}, "upstreams must be a list"),
        ({"upstreams": ["http://one/v1", "ftp://two"]}, "upstreams item 1 must be an http://"),
        ({"upstreams": [{"url": "http://one/v1"}]}, "upstreams item 0 must be a URL"),
        ({"max_calls_in_flight": 0}, "max_calls_in_flight"),
        ({"max_calls_in_flight": 1.5}, "max_calls_in_flight"),
        ({"min_calls_in_flight": 0}, "min_calls_in_flight"),
        ({"min_calls_in_flight": 9, "max_calls_in_flight": 8}, "min_calls_in_flight"),
        ({"retries": -1}, "retries"),
        ({"retry_sec": -1}, "retry_sec"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(InvalidFieldError, match=message):
        ModelGateway(**settings)


@pytest.mark.parametrize(
    ("url", "key", "name"), [("one", None, "url"), ("http://one", "", "api_key")]
)
def test_bad_upstreams_are_named(url, key, name):
    with pytest.raises(InvalidFieldError, match=name):
        Upstream(url, api_key=key)
