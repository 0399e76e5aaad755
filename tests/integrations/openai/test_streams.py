"""Streams, whole and broken off, and what is recorded of them."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("openai", reason='needs pip install "trio-rollout[openai]"')

import openai
import trio
from integrations.openai.agents import KEY, QUESTION, TOOLS, trajectory
from integrations.scripted import Step, call, others, say, scripted_endpoint, stall

from rollout import RolloutContext
from rollout.integrations.openai import get_recorder, rollout_client, share_connections
from rollout.integrations.transport.connections import current_connections


def chat_stream(client, **options):
    """The helper that puts a stream together; it has moved between versions."""
    completions = client.chat.completions
    if not hasattr(completions, "stream"):
        completions = client.beta.chat.completions
    return completions.stream(model="policy", **options)


async def test_calls_of_tools_in_a_stream():
    step = call("add", left=6, right=7)
    async with scripted_endpoint(step) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            stream = await rollout_client().chat.completions.create(
                model="policy", messages=[QUESTION], tools=TOOLS, stream=True
            )
            async with stream:
                assert [chunk async for chunk in stream]
            sample = await rollout.get_sample()
    function = {"name": "add", "arguments": '{"left": 6, "right": 7}'}
    assert sample.messages[1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call-0-0", "type": "function", "function": function}],
    }
    assert sample.metrics["tool_calls"] == 1
    step = trajectory(sample)["steps"][1]
    assert step["tool_calls"][0]["arguments"] == {"left": 6, "right": 7}
    assert step["extra"]["finish_reason"] == "tool_calls"


async def test_the_helper_of_the_sdk():
    async with scripted_endpoint(say("It is 13.")) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            async with chat_stream(rollout_client(), messages=[QUESTION]) as stream:
                events = [event.type async for event in stream]
                final = await stream.get_final_completion()
            sample = await rollout.get_sample()
    assert "content.done" in events
    assert final.choices[0].message.content == "It is 13."
    assert sample.messages[1]["content"] == "It is 13."
    assert sample.metrics["completion_tokens"] == 3
    trajectory(sample)


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_caller_that_decides_about_usage_gets_what_it_wants(wanted):
    async with scripted_endpoint(say("13")) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            stream = await rollout_client().chat.completions.create(
                model="policy",
                messages=[QUESTION],
                stream=True,
                stream_options={"include_usage": wanted},
            )
            async with stream:
                chunks = [chunk async for chunk in stream]
            sample = await rollout.get_sample()
    assert [bool(chunk.usage) for chunk in chunks] == [False, False, *[True] * wanted]
    assert ("completion_tokens" in sample.metrics) is wanted


async def test_an_endpoint_that_is_not_to_be_asked_for_usage():
    async with scripted_endpoint(say("13")) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY):
            client = rollout_client(stream_usage=False)
            stream = await client.chat.completions.create(
                model="policy", messages=[QUESTION], stream=True
            )
            async with stream:
                assert len([chunk async for chunk in stream]) == 2
    assert "stream_options" not in endpoint.requests[0].body


async def test_a_stream_that_is_cancelled_keeps_what_was_said():
    async with scripted_endpoint(stall("one two three", after=2)) as endpoint, share_connections():
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            said = []
            heard = trio.Event()

            async def read():
                # Nobody closes this stream but the cancellation itself.
                async for chunk in await rollout_client().chat.completions.create(
                    model="policy", messages=[QUESTION], stream=True
                ):
                    said.append(chunk.choices[0].delta.content)
                    if len(said) == 2:
                        heard.set()

            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read)
                    await heard.wait()
                    scope.cancel()
            await endpoint.requests[0].gone.wait()
            assert current_connections().in_flight == [0]
            sample = await rollout.get_sample()
    assert said == ["one", " two"]
    assert sample.messages == [QUESTION, {"role": "assistant", "content": "one two"}]
    assert sample.metrics["interrupted_calls"] == 1
    assert sample.metrics["failed_calls"] == 0
    assert trajectory(sample)["steps"][1]["extra"]["interrupted"] is True


async def test_a_call_that_is_cancelled_is_marked():
    async with scripted_endpoint(say("13"), stall()) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            create = rollout_client().chat.completions.create
            await create(model="policy", messages=[QUESTION])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    lambda: create(model="policy", messages=[{"role": "user", "content": "More"}])
                )
                await (await endpoint.received(1)).stalled.wait()
                nursery.cancel_scope.cancel()
            await endpoint.requests[1].gone.wait()
            sample = await rollout.get_sample()
            assert get_recorder().calls[1].outcome == "interrupted"
    assert sample.messages[-1]["content"] == "13"
    assert sample.metrics["interrupted_calls"] == 1
    assert sample.extra_fields["call_problems"] == [{"call": 2, "outcome": "interrupted"}]


async def test_a_connection_that_is_lost_in_mid_stream():
    async with scripted_endpoint(say("one two three", cut_after=2)) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            stream = await rollout_client().chat.completions.create(
                model="policy", messages=[QUESTION], stream=True
            )
            with pytest.raises(Exception, match=r"(?i)peer|connection|incomplete"):
                async with stream:
                    async for _ in stream:
                        pass
            sample = await rollout.get_sample()
    assert sample.metrics["failed_calls"] == 1
    assert "RemoteProtocolError" in sample.extra_fields["call_problems"][0]["error"]
    assert sample.messages[-1]["content"] == "one two"


# The SDK raises it above generators of its own, which it leaves to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_an_error_in_mid_stream():
    async with scripted_endpoint(say("one two", error="overloaded")) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            stream = await rollout_client().chat.completions.create(
                model="policy", messages=[QUESTION], stream=True
            )
            with pytest.raises(openai.APIError, match="overloaded"):
                async with stream:
                    async for _ in stream:
                        pass
            sample = await rollout.get_sample()
    assert sample.metrics["failed_calls"] == 1
    assert sample.extra_fields["call_problems"][0]["error"] == "overloaded"


async def test_a_connection_serves_one_stream_after_another():
    async with scripted_endpoint(say("13")) as endpoint:
        async with share_connections():
            with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY):
                client = rollout_client()
                for _ in range(3):
                    async with await client.chat.completions.create(
                        model="policy", messages=[QUESTION], stream=True
                    ) as stream:
                        assert len([chunk async for chunk in stream]) == 2
            assert endpoint.connections == 1
        await endpoint.all_closed()


async def test_a_stream_that_just_ends():
    """Without an error that the SDK would notice: no reason, no mark, but a whole body."""
    chunk = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"It is"}}]}\n\n'
    step = Step(raw=chunk, headers={"content-type": "text/event-stream"})
    async with scripted_endpoint(step) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            async with await rollout_client().chat.completions.create(
                model="policy", messages=[QUESTION], stream=True
            ) as stream:
                assert len([chunk async for chunk in stream]) == 1
            sample = await rollout.get_sample()
    assert sample.messages[-1]["content"] == "It is"
    assert (sample.metrics["failed_calls"], sample.metrics["interrupted_calls"]) == (1, 0)
    (problem,) = sample.extra_fields["call_problems"]
    assert problem["error"] == "the stream ended before its answer was whole"


async def test_functions_of_the_old_kind():
    pieces = ({"name": "add", "arguments": ""}, {"arguments": '{"left": 6'}, {"arguments": "}"})
    rows = [{"choices": [{"index": 0, "delta": {"function_call": each}}]} for each in pieces]
    rows.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "function_call"}]})
    raw = b"".join(f"data: {json.dumps(row)}\n\n".encode() for row in rows)
    step = Step(raw=raw, headers={"content-type": "text/event-stream"})
    old = [each["function"] for each in TOOLS]
    async with scripted_endpoint(step, say("13")) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            create = rollout_client().chat.completions.create
            stream = await create(model="m", messages=[QUESTION], functions=old, stream=True)
            async with stream:
                assert len([chunk async for chunk in stream]) == 4
            said = {"name": "add", "arguments": '{"left": 6}'}
            history = [
                QUESTION,
                {"role": "assistant", "content": None, "function_call": said},
                {"role": "function", "name": "add", "content": "13"},
            ]
            await create(model="m", messages=history, functions=old)
            sample = await rollout.get_sample()
    assert sample.messages == [*history, {"role": "assistant", "content": "13"}]
    assert sample.metrics["tool_calls"] == 1
    assert others(sample) == {"tools": TOOLS}
    (called,) = trajectory(sample)["steps"][1]["tool_calls"]
    assert (called["function_name"], called["arguments"]) == ("add", {"left": 6})
