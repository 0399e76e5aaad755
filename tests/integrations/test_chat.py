"""The plain helper: one call over httpx, without an SDK."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest
import trio
from integrations.scripted import Step, call, others, refuse, say, scripted_endpoint, stall
from support import fresh_id, local_backend, make_app, served

from rollout import AgentWorkflow, RolloutContext
from rollout.client import RolloutClient
from rollout.errors import IntegrationError
from rollout.integrations.chat import chat, get_recorder, share_connections
from rollout.integrations.transport.connections import current_connections
from rollout.trajectory import build_trajectory, trajectory_problems

KEY = "secret-of-this-rollout"
QUESTION = {"role": "user", "content": "What is 6 + 7?"}


def entered(endpoint, key=KEY):
    return RolloutContext(chat_completions_url=endpoint.url, api_key=key)


async def test_a_conversation_with_a_tool():
    async with scripted_endpoint(call("add", left=6, right=7), say("It is 13.")) as endpoint:
        with entered(endpoint) as rollout:
            tools = [{"type": "function", "function": {"name": "add"}}]
            first = await chat([QUESTION], model="policy", tools=tools, temperature=0.5)
            (asked,) = first.message["tool_calls"]
            result = {"role": "tool", "tool_call_id": asked["id"], "content": "13"}
            reply = await chat([QUESTION, first.message, result], model="policy", tools=tools)
            sample = await rollout.get_sample()
    assert (first.text, first.finish_reason, first.usage["completion_tokens"]) == (
        "",
        "tool_calls",
        1,
    )
    assert (reply.text, reply.model, reply.id) == ("It is 13.", "scripted-1", "chatcmpl-1")
    sent = endpoint.requests[0]
    assert (sent.key, sent.path, sent.body["temperature"]) == (KEY, "/v1/chat/completions", 0.5)
    assert sample.messages == [QUESTION, first.message, result, reply.message]
    assert sample.metrics["completion_tokens"] == 1 + 3
    assert others(sample) == {"tools": tools}
    document = build_trajectory(sample.trajectory_messages, rollout_id="r", sample=sample)
    assert trajectory_problems(document) == []
    assert document["final_metrics"]["total_completion_tokens"] == 1 + 3


async def test_in_a_rollout():
    class Ask(AgentWorkflow):
        async def run(self, ctx):
            await chat(ctx.prompt, model="policy")

    async with (
        scripted_endpoint(say("13")) as endpoint,
        served(make_app(local_backend(Ask), lifespan=share_connections)) as url,
        RolloutClient(url=url) as client,
    ):
        result = await client.run_rollout(
            initial_messages=[QUESTION],
            chat_completions_url=endpoint.url,
            rollout_id=fresh_id(),
            llm_api_key=KEY,
            label="13",
        )
    assert result.sample.reward == 1.0


async def test_a_refusal_is_not_tried_again_and_tells_no_key():
    async with scripted_endpoint(refuse(429, f"too many for {KEY}"), say("13")) as endpoint:
        with entered(endpoint) as rollout:
            with pytest.raises(IntegrationError, match="answered 429: too many for") as caught:
                await chat([QUESTION], model="policy")
            sample = await rollout.get_sample()
    assert caught.value.status_code == 429
    assert KEY not in str(caught.value)
    assert len(endpoint.requests) == 1
    assert sample.messages == [QUESTION]
    assert sample.metrics["failed_calls"] == sample.metrics["calls"] == 1
    (problem,) = sample.extra_fields["call_problems"]
    assert (problem["status_code"], problem["request_id"]) == (429, "req-0")
    assert KEY not in json.dumps(problem)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Step(raw=b"<html>"), "is not a JSON object"),
        (Step(raw=b"[1]"), "is not a JSON object"),
        (Step(raw=b"{}"), "has no choices"),
        (Step(raw=b'{"choices": [{"index": 0}]}'), "has no choices"),
        (Step(raw=b'{"error": {"message": "out of memory"}}'), "out of memory"),
        (Step(raw=b"<html>", status=502), "answered 502: Bad Gateway"),
        (Step(raw=b'{"detail": "no such model"}', status=404), "answered 404: no such model"),
        (Step(raw=b'{"error": "busy"}', status=503), "answered 503: busy"),
        (Step(raw=b"", status=307, headers={"location": "/v2"}), "answered 307"),
    ],
)
async def test_answers_that_are_none(step, said):
    async with scripted_endpoint(step) as endpoint:
        with entered(endpoint) as rollout:
            with pytest.raises(IntegrationError, match=said):
                await chat([QUESTION], model="policy")
            sample = await rollout.get_sample()
    assert sample.metrics["failed_calls"] == 1
    assert len(endpoint.requests) == 1


async def test_a_compressed_answer_is_recorded():
    body = {"choices": [{"message": {"role": "assistant", "content": "13"}}]}
    step = Step(raw=gzip.compress(json.dumps(body).encode()), headers={"content-encoding": "gzip"})
    async with scripted_endpoint(step) as endpoint:
        with entered(endpoint) as rollout:
            assert (await chat([QUESTION], model="policy")).text == "13"
            sample = await rollout.get_sample()
    assert sample.messages[-1] == {"role": "assistant", "content": "13"}
    assert "prompt_tokens" not in sample.metrics


async def test_cancelling_a_call_closes_its_connection():
    async with scripted_endpoint(stall()) as endpoint:
        with entered(endpoint):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: chat([QUESTION], model="policy"))
                await (await endpoint.received()).stalled.wait()
                nursery.cancel_scope.cancel()
            await endpoint.requests[0].gone.wait()
            await endpoint.all_closed()
            assert get_recorder().metrics()["interrupted_calls"] == 1


async def test_an_endpoint_that_is_not_there():
    async with scripted_endpoint(say("13")) as endpoint:
        pass
    with entered(endpoint) as rollout:
        with pytest.raises(httpx.ConnectError):
            await chat([QUESTION], model="policy")
        sample = await rollout.get_sample()
    assert "ConnectError" in sample.extra_fields["call_problems"][0]["error"]


async def test_no_key_is_sent_where_there_is_none():
    async with scripted_endpoint(say("13")) as endpoint:
        with entered(endpoint, key=None):
            await chat([QUESTION], model="policy")
    assert endpoint.requests[0].key is None


@pytest.mark.parametrize(
    ("suffix", "path"),
    [
        ("", "/v1/chat/completions"),
        ("/", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/chat/completions?tenant=a%20b", "/v1/chat/completions?tenant=a%20b"),
    ],
)
async def test_forms_of_the_url(suffix, path):
    async with scripted_endpoint(say("13")) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url + suffix) as rollout:
            await chat([QUESTION], model="policy")
            assert (await rollout.get_sample()).metrics["calls"] == 1
    assert endpoint.requests[0].path.replace("+", "%20") == path


async def test_a_model_that_only_streams():
    def script(request):
        if not request.body.get("stream"):
            return refuse(400, "this endpoint only streams")
        return [call("add", left=6, right=7), say("It is 13.")][request.number]

    async with scripted_endpoint(script) as endpoint:
        with entered(endpoint) as rollout:
            first = await chat([QUESTION], model="policy", stream=True)
            (asked,) = first.message["tool_calls"]
            history = [QUESTION, first.message, {"role": "tool", "tool_call_id": asked["id"]}]
            reply = await chat(history, model="policy", stream=True)
            sample = await rollout.get_sample()
    assert asked["function"] == {"name": "add", "arguments": '{"left": 6, "right": 7}'}
    assert (first.text, first.finish_reason) == ("", "tool_calls")
    assert (reply.text, reply.model, reply.id) == ("It is 13.", "scripted-1", "chatcmpl-1")
    assert reply.usage["completion_tokens"] == 3
    assert sample.messages == [*history, reply.message]
    assert sample.metrics["completion_tokens"] == 1 + 3


async def test_a_stream_with_an_error_is_no_reply():
    async with scripted_endpoint(say("It is", error="overloaded")) as endpoint:
        with entered(endpoint):
            with pytest.raises(IntegrationError, match="answered 200, but overloaded"):
                await chat([QUESTION], model="policy", stream=True)


async def test_outside_of_a_rollout():
    with pytest.raises(IntegrationError, match="no rollout is running here"):
        await chat([QUESTION], model="policy")
    with RolloutContext():
        with pytest.raises(IntegrationError, match="no chat_completions_url"):
            await chat([QUESTION], model="policy")


async def test_a_call_that_is_not_recorded():
    async with scripted_endpoint(say("yes")) as endpoint:
        with entered(endpoint) as rollout:
            assert (await chat([QUESTION], model="judge", record=False)).text == "yes"
    assert rollout.sample_source is None
    assert endpoint.requests[0].key == KEY


async def test_shared_connections_are_used_again_and_closed():
    async with scripted_endpoint(say("13")) as endpoint:
        async with share_connections():
            for _ in range(3):
                with entered(endpoint):
                    await chat([QUESTION], model="policy")
            assert (endpoint.connections, endpoint.open_connections) == (1, 1)
        await endpoint.all_closed()
        for _ in range(2):
            with entered(endpoint):
                await chat([QUESTION], model="policy")
        assert endpoint.connections == 3
        await endpoint.all_closed()


async def test_many_calls_at_once_starve_nobody():
    """More than a pool of httpx takes by default, all in flight together."""
    count = 150

    async def one():
        await chat([QUESTION], model="policy")

    async with scripted_endpoint(stall()) as endpoint:
        async with share_connections():
            with entered(endpoint):
                async with trio.open_nursery() as nursery:
                    for _ in range(count):
                        nursery.start_soon(one)
                    for number in range(count):
                        await (await endpoint.received(number)).stalled.wait()
                    assert endpoint.open_connections == count
                    nursery.cancel_scope.cancel()
        await endpoint.all_closed()
    assert len(endpoint.requests) == count


async def test_proxies_from_the_environment_do_not_capture_loopback(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with scripted_endpoint(say("13")) as endpoint:
        with entered(endpoint):
            assert (await chat([QUESTION], model="policy")).text == "13"


async def test_proxies_from_the_environment_lead_elsewhere(monkeypatch):
    async with scripted_endpoint(say("13")) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with RolloutContext(chat_completions_url="http://model.invalid/v1", api_key=KEY):
            assert (await chat([QUESTION], model="policy")).text == "13"
    assert proxy.requests[0].path == "http://model.invalid/v1/chat/completions"


async def test_shared_connections_that_close_end_the_calls_that_still_use_them():
    async with scripted_endpoint(stall()) as endpoint:
        with entered(endpoint):
            async with trio.open_nursery() as nursery:

                async def one():
                    with pytest.raises(httpx.TransportError):
                        await chat([QUESTION], model="policy")

                async with share_connections():
                    nursery.start_soon(one)
                    await (await endpoint.received()).stalled.wait()
        await endpoint.all_closed()
        assert endpoint.requests[0].gone.is_set()


async def test_requests_are_spread_over_pools_and_none_stays_counted():
    """A pool of httpx is slow with many requests in flight, so each takes a few dozen."""
    steps = [say("13"), refuse(500), *[stall()] * 70]
    async with scripted_endpoint(*steps) as endpoint:
        async with share_connections():
            pools = current_connections()
            with entered(endpoint):
                await chat([QUESTION], model="policy")
                with pytest.raises(IntegrationError):
                    await chat([QUESTION], model="policy")
                with RolloutContext(chat_completions_url="http://127.0.0.1:9/v1"):
                    with pytest.raises(httpx.ConnectError):
                        await chat([QUESTION], model="policy")
                assert pools.in_flight == [0]
                async with trio.open_nursery() as nursery:
                    for _ in range(70):
                        nursery.start_soon(lambda: chat([QUESTION], model="policy"))
                    await (await endpoint.received(71)).stalled.wait()
                    assert pools.in_flight == [32, 32, 6]
                    nursery.cancel_scope.cancel()
                assert pools.in_flight == [0, 0, 0]
        await endpoint.all_closed()
