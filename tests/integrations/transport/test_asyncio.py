"""The transport of the asyncio side, by plain httpx on a bridge, and what becomes of its calls."""

from __future__ import annotations

import asyncio
import gzip
import json

import httpx
import pytest
import trio
from integrations.scripted import Step, call, others, refuse, say, scripted_endpoint, stall

from rollout import RolloutContext
from rollout.integrations.asyncio_bridge import open_asyncio_bridge
from rollout.integrations.frameworks.source import FrameworkSource
from rollout.integrations.recording.recorder import recorder_of
from rollout.integrations.transport import connections
from rollout.integrations.transport.recording import NO_KEY, AsyncioTransport, Endpoint, ReadAlong
from rollout.trajectory import build_trajectory, trajectory_problems

KEY = "secret-of-this-rollout"
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "What is 6 + 7?"}
BODY = {"model": "policy", "messages": [SYSTEM, QUESTION]}


class Side:
    """An endpoint, a bridge and the source of a rollout."""

    def __init__(self, endpoint, bridge, context):
        self.endpoint = endpoint
        self.bridge = bridge
        self.source = recorder_of(context, FrameworkSource)
        self.context = context

    def client(self, *, record=True):
        endpoint = Endpoint.of(self.context.chat_completions_url, self.context.api_key)
        transport = AsyncioTransport(endpoint, self.source if record else None, conversation="main")
        return httpx.AsyncClient(transport=transport, trust_env=False)

    async def post(self, body=BODY, *, path="/chat/completions", key=KEY, url=None, record=True):
        async def send():
            async with self.client(record=record) as client:
                headers = {"Authorization": f"Bearer {key}"}
                return await client.post(
                    (url or self.endpoint.url) + path, json=body, headers=headers
                )

        return await self.bridge.run(send)


@pytest.fixture
def sides():
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def make(*steps):
        async with scripted_endpoint(*steps) as endpoint:
            async with open_asyncio_bridge() as bridge:
                context = RolloutContext(chat_completions_url=endpoint.url, api_key=KEY)
                yield Side(endpoint, bridge, context)
            await endpoint.all_closed()

    return make


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_is_recorded_and_its_bytes_pass(sides, streamed):
    async with sides(say("It is 13", reasoning="Hm.")) as side:
        response = await side.post({**BODY, "stream": streamed})
        sample = await side.source.get_sample()
    assert ("[DONE]" in response.text) is streamed
    assert "13" in response.text
    assert sample.messages[:2] == [SYSTEM, QUESTION]
    assert sample.messages[2]["content"] == "It is 13"
    assert sample.metrics["completion_tokens"] == 3
    (recorded,) = side.source.calls
    assert (recorded.outcome, recorded.status_code) == ("complete", 200)
    assert recorded.streamed is streamed
    if streamed:
        assert side.endpoint.requests[0].body["stream_options"] == {"include_usage": True}


async def test_connections_are_shared_kept_and_closed_with_the_bridge(sides):
    async with sides(say("one")) as side:
        for _ in range(3):
            await side.post()
        assert (side.endpoint.connections, side.endpoint.open_connections) == (1, 1)
        assert len(connections._of_loops) == 1
    assert side.endpoint.open_connections == 0
    assert connections._of_loops == {}


async def test_many_calls_at_once(sides):
    async with sides(say("one")) as side:
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(side.post)
        assert len(side.endpoint.requests) == 50
    assert side.source.metrics()["calls"] == 50
    assert sorted(each.number for each in side.source.calls) == list(range(1, 51))


async def test_a_compressed_answer_is_read_and_passed_on_as_it_is(sides):
    answer = {"choices": [{"message": {"role": "assistant", "content": "13"}}]}
    packed = gzip.compress(json.dumps(answer).encode())
    step = say("", raw=packed, headers={"content-encoding": "gzip"})
    async with sides(step) as side:
        response = await side.post()
    assert response.json() == answer
    assert side.source.calls[0].outcome == "complete"
    assert side.source.messages[-1]["content"] == "13"


async def test_a_stream_that_is_left_at_its_mark_keeps_its_connection(sides):
    async with sides(say("one two")) as side:

        async def send():
            async with side.client() as client:
                url = f"{side.endpoint.url}/chat/completions"
                async with client.stream("POST", url, json={**BODY, "stream": True}) as response:
                    async for line in response.aiter_lines():
                        if line == "data: [DONE]":
                            break

        for _ in range(3):
            await side.bridge.run(send)
        assert side.endpoint.connections == 1
    assert [each.outcome for each in side.source.calls] == ["complete"] * 3


async def test_the_key_goes_to_its_endpoint_alone(sides):
    async with sides(say("one")) as side, scripted_endpoint(say("two")) as other:
        await side.post(url=other.url)
        await side.post(key=NO_KEY)
        await side.post(key="of-the-user", url=other.url)

    assert [each.key for each in other.requests] == [None, "of-the-user"]
    assert [each.key for each in side.endpoint.requests] == [None]
    assert len(side.source.calls) == 1


async def test_what_is_not_recorded(sides, caplog):
    async with sides(say("one")) as side:
        await side.post(record=False)
        await side.post({**BODY, "prompt": "?"}, path="/completions")
        await side.post(path="/embeddings")
        sample = await side.source.get_sample()
    assert side.source.calls == []
    assert sample.extra_fields["unrecorded_calls"] == {"/v1/completions": 1, "/v1/embeddings": 1}
    assert "/v1/completions was not recorded" in caplog.text
    assert "embeddings" not in caplog.text  # nobody takes them for part of a conversation


async def test_calls_that_were_not_recorded_are_told_beside_a_history(sides):
    async with sides(say("one")) as side:
        await side.post(path="/embeddings")
        side.source.take_history([{"a": 1}], [{"role": "user", "content": "a"}])
        sample = await side.source.get_sample()
    assert sample.messages == [{"a": 1}]
    assert others(sample) == {"unrecorded_calls": {"/v1/embeddings": 1}}


async def test_refusals_and_lost_endpoints(sides):
    async with sides(refuse(429, f"slow down, {KEY}"), say("It is 13")) as side:
        assert (await side.post()).status_code == 429
        await side.post()
        with pytest.raises(httpx.ConnectError):
            side.context.chat_completions_url = "http://127.0.0.1:9/v1"
            await side.post(url="http://127.0.0.1:9/v1")
        sample = await side.source.get_sample()
    first, last = sample.extra_fields["call_problems"]
    assert first["status_code"] == 429
    assert "slow down" in first["error"]
    assert KEY not in first["error"]
    assert last["error"].startswith("ConnectError")
    assert sample.metrics["failed_calls"] == 2


async def test_a_refusal_that_nobody_reads_is_recorded_and_its_connection_kept(sides, monkeypatch):
    monkeypatch.setattr(ReadAlong, "rest_sec", 20.0)
    async with sides(refuse(429, f"slow down, {KEY}")) as side:

        async def send():
            async with side.client() as client:
                url = f"{side.endpoint.url}/chat/completions"
                async with client.stream("POST", url, json=BODY) as response:
                    assert response.status_code == 429

        for _ in range(3):
            await side.bridge.run(send)
        assert side.endpoint.connections == 1
    assert [each.error for each in side.source.calls] == ["HTTP 429: slow down, [redacted]"] * 3


async def test_a_refusal_that_never_ends_is_left_soon(sides, monkeypatch):
    monkeypatch.setattr(ReadAlong, "rest_sec", 0.01)

    class Silent(httpx.AsyncByteStream):
        closed = False

        def __aiter__(self):
            return self

        async def __anext__(self):
            await asyncio.Event().wait()

        async def aclose(self):
            self.closed = True

    body = Silent()

    async def answer(transport, request):
        return httpx.Response(429, stream=body, request=request)

    monkeypatch.setattr(AsyncioTransport, "send", answer)
    async with sides(say("never asked")) as side:

        async def send():
            async with side.client() as client:
                url = f"{side.endpoint.url}/chat/completions"
                async with client.stream("POST", url, json=BODY):
                    pass

        with trio.fail_after(20):
            await side.bridge.run(send)
    (recorded,) = side.source.calls
    assert (recorded.outcome, recorded.error, body.closed) == ("failed", "HTTP 429", True)


async def test_a_call_that_is_cancelled_before_its_answer(sides):
    async with sides(stall()) as side:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(side.post)
            await (await side.endpoint.received()).stalled.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(20):
            await side.endpoint.requests[0].gone.wait()
    (recorded,) = side.source.calls
    assert (recorded.outcome, recorded.choices) == ("interrupted", [])


async def test_a_call_that_is_cancelled_in_the_middle_of_its_answer(sides):
    begun = trio.Event()
    async with sides(stall("one two three", after=2)) as side:

        async def send():
            async with side.client() as client:
                url = f"{side.endpoint.url}/chat/completions"
                async with client.stream("POST", url, json={**BODY, "stream": True}) as response:
                    async for line in response.aiter_lines():
                        if "one" in line:
                            side.bridge.call_trio_soon(begun.set)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(side.bridge.run, send)
            await begun.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(20):
            await side.endpoint.requests[0].gone.wait()
    (recorded,) = side.source.calls
    assert recorded.outcome == "interrupted"
    assert recorded.choices[0].messages[0]["content"].startswith("one")


# --- histories ------------------------------------------------------------------------------------


async def test_a_history_gets_what_is_known_of_its_calls(sides):
    asked = [{"role": "user", "text": "What is 6 + 7?"}]
    async with sides(call("add", left=6, right=7), say("It is 13"), say("aside")) as side:
        reply = (await side.post()).json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "13"}
        await side.post(
            {**BODY, "messages": [SYSTEM, QUESTION, reply, result], "tools": [{"a": 1}]}
        )
        await side.post({**BODY, "messages": [QUESTION]})
        said = {"role": "assistant", "content": " It is 13"}
        chat = [
            QUESTION,
            {**reply, "content": None},
            result,
            said,
            {"role": "user", "content": "!"},
        ]
        side.source.take_history(asked, chat)
        sample = await side.source.get_sample()
    assert sample.messages == asked
    told = sample.trajectory_messages
    assert [each["role"] for each in told] == [
        *["system", "user", "assistant", "tool", "assistant", "user"],
    ]
    assert [each.get("model") for each in told if each["role"] == "assistant"] == ["scripted-1"] * 2
    assert ["timestamp" in each for each in told] == [True] * 5 + [False]
    assert told[4]["response_id"] == "chatcmpl-1"
    assert sample.extra_fields["tools"] == [{"a": 1}]
    (aside,) = sample.extra_fields["other_calls"]
    assert (aside["call"], aside["replies"][0]["content"]) == (3, "aside")
    document = build_trajectory(told, rollout_id="r", sample=sample)
    assert trajectory_problems(document) == []
    assert document["final_metrics"]["total_completion_tokens"] == 4


async def test_calls_without_ids_are_found_by_what_they_call(sides):
    """Some endpoints give them none, and frameworks make them up."""

    def reply(name, text="", **more):
        call = {"type": "function", "function": {"name": name, "arguments": "{}"}, **more}
        return {"role": "assistant", "content": text, "tool_calls": [call]}

    def answer(message, tokens):
        body = {"choices": [{"message": message}], "usage": {"completion_tokens": tokens}}
        return Step(raw=json.dumps(body).encode())

    replies = (reply("f"), reply("g"), reply("g", "Hm."), {"role": "assistant", "content": ""})
    async with sides(*(answer(each, 1 + place) for place, each in enumerate(replies))) as side:
        for _ in replies:
            await side.post()
        chat = [QUESTION, reply("g", "Hm. ", id="u1"), reply("g", id="u2"), reply("f", id="u3")]
        side.source.take_history(chat, chat)
        sample = await side.source.get_sample()
    told = [each for each in sample.trajectory_messages if each["role"] == "assistant"]
    assert [each["usage"]["completion_tokens"] for each in told] == [3, 2, 1]
    assert [each["tool_calls"][0]["id"] for each in told] == ["u1", "u2", "u3"]
    assert [each["call"] for each in sample.extra_fields["other_calls"]] == [4]


async def test_of_runs_that_said_the_same_the_last_one_is_told(sides):
    """The tokens of a reply are those of its own call."""
    steps = [say("yes", usage={"completion_tokens": number}) for number in range(1, 7)]
    again = {"role": "user", "content": "Sure?"}
    async with sides(*steps) as side:
        for _ in range(2):
            reply = (await side.post()).json()["choices"][0]["message"]
            await side.post({**BODY, "messages": [SYSTEM, QUESTION, reply, again]})
        await side.post({**BODY, "messages": [SYSTEM, again]})  # another agent
        chat = [QUESTION, reply, again, reply]
        side.source.take_history(chat, chat)
        told = (await side.source.get_sample()).trajectory_messages
    replies = [each for each in told if each["role"] == "assistant"]
    assert [each["usage"]["completion_tokens"] for each in replies] == [3, 4]


async def test_a_reply_that_a_framework_has_dropped_is_added(sides):
    def from_chat(messages):
        return [{"own form": each["content"]} for each in messages]

    async with sides(say("first"), say("second"), say("aside")) as side:
        await side.post()
        side.source.take_history([{"own form": "?"}], [QUESTION], from_chat=from_chat)
        sample = await side.source.get_sample()
        assert sample.messages == [{"own form": "?"}, {"own form": "first"}]
        assert sample.trajectory_messages[-1]["usage"]["completion_tokens"] == 1
        assert others(sample) == {}
        # Not again where it is there, and not the reply to something else.
        chat = [QUESTION, {"role": "assistant", "content": "first"}]
        for _ in range(2):
            side.source.take_history(chat, chat, from_chat=from_chat)
            assert (await side.source.get_sample()).messages == chat
            await side.post()


async def test_half_a_reply_is_not_added(sides):
    async with sides(say("one two", cut_after=1)) as side:
        with pytest.raises(httpx.RemoteProtocolError):
            await side.post({**BODY, "stream": True})
        (recorded,) = side.source.calls
        assert recorded.choices
        side.source.take_history([QUESTION], [QUESTION], from_chat=list)
        assert (await side.source.get_sample()).messages == [QUESTION]


async def test_a_run_that_a_tool_has_ended_keeps_all_calls_of_its_last_reply(sides):
    calls = [("add", {"left": 6}), ("fail", {})]
    async with sides(Step(calls=calls)) as side:
        reply = (await side.post()).json()["choices"][0]["message"]
        chat = [QUESTION, {**reply, "tool_calls": reply["tool_calls"][:1]}]
        side.source.take_history(chat, chat, from_chat=list)
        sample = await side.source.get_sample()
    assert sample.messages == chat
    assert sample.trajectory_messages[-1]["tool_calls"] == reply["tool_calls"]
    assert sample.trajectory_messages[-1]["usage"]["completion_tokens"] == 2


async def test_runs_that_go_on_take_the_place_of_those_before(sides):
    async with sides(say("one")) as side:
        first, second = {"role": "user", "content": "1"}, {"role": "user", "content": "2"}
        side.source.take_history([first], [first])
        side.source.take_history([first, second], [first, second])
        side.source.take_history([second], [second])
        side.source.take_history([second, first], [second, first])
        sample = await side.source.get_sample()
        sample.messages[0]["content"] = "changed by its user"
        again = await side.source.get_sample()
    assert again.messages == [second, first]
    assert sample.extra_fields["other_runs"] == [[first, second]]


async def test_replies_without_a_call_stay_as_they_are(sides):
    async with sides(say("one")) as side:
        await side.post()
        chat = [
            QUESTION,
            {"role": "assistant", "content": "made up", "usage": {"prompt_tokens": 3}},
        ]
        side.source.take_history(chat, chat)
        sample = await side.source.get_sample()
    assert sample.trajectory_messages == chat
