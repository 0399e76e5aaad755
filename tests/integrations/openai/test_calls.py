"""Calls over the SDK, in a rollout, and what is recorded of them."""

from __future__ import annotations

import pytest

pytest.importorskip("openai", reason='needs pip install "trio-rollout[openai]"')

from integrations.openai.agents import KEY, QUESTION, trajectory
from integrations.scripted import call, others, refuse, say, scripted_endpoint

from rollout import RolloutContext
from rollout.integrations.openai import rollout_client
from rollout.integrations.transport.recording import ReadAlong


async def test_a_call_becomes_the_sample():
    async with scripted_endpoint(say("It is 13.")) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            client = rollout_client()
            reply = await client.chat.completions.create(
                model="policy", messages=[QUESTION], logprobs=True
            )
            sample = await rollout.get_sample()
    assert reply.choices[0].message.content == "It is 13."
    assert endpoint.requests[0].key == KEY
    assert sample.messages == [QUESTION, {"role": "assistant", "content": "It is 13."}]
    assert sample.metrics.pop("latency_sec") > 0
    assert sample.metrics == {
        "calls": 1,
        "failed_calls": 0,
        "interrupted_calls": 0,
        "retries": 0,
        "tool_calls": 0,
        "prompt_tokens": reply.usage.prompt_tokens,
        "completion_tokens": 3,
        "cached_tokens": 1,
    }
    document = trajectory(sample)
    step = document["steps"][1]
    assert (step["source"], step["message"]) == ("agent", "It is 13.")
    assert step["model_name"] == "scripted-1"
    assert step["metrics"]["logprobs"] == [-0.5, -0.5, -0.5]
    assert step["extra"]["finish_reason"] == "stop"
    assert step["extra"]["request_id"] == "req-0"
    assert step["timestamp"] > document["steps"][0]["timestamp"]


async def test_a_stream_is_recorded_with_the_usage_that_nobody_asked_for():
    async with scripted_endpoint(say("It is 13.")) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            client = rollout_client()
            stream = await client.chat.completions.create(
                model="policy", messages=[QUESTION], stream=True, logprobs=True
            )
            async with stream:
                chunks = [chunk async for chunk in stream]
            sample = await rollout.get_sample()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "It is 13."
    assert sample.messages == [QUESTION, {"role": "assistant", "content": "It is 13."}]
    assert sample.metrics["completion_tokens"] == 3
    step = trajectory(sample)["steps"][1]
    assert step["metrics"]["logprobs"] == [-0.5, -0.5, -0.5]


async def test_refusals_that_go_away(monkeypatch):
    monkeypatch.setattr(ReadAlong, "rest_sec", 20.0)
    script = (refuse(429, "slow", retry_after="0.01"), refuse(500, retry_after="0.01"), say("13"))
    async with scripted_endpoint(*script) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            await rollout_client().chat.completions.create(model="policy", messages=[QUESTION])
            sample = await rollout.get_sample()
    assert sample.messages[-1]["content"] == "13"
    assert (sample.metrics["calls"], sample.metrics["retries"]) == (1, 2)
    assert sample.metrics["failed_calls"] == 0
    problems = sample.extra_fields["call_problems"]
    assert [each["status_code"] for each in problems] == [429, 500]
    # The SDK closes what it tries again without reading what was said.
    assert [each["error"] for each in problems] == ["HTTP 429: slow", "HTTP 500: not now"]


async def test_tools_in_a_loop():
    script = (call("add", left=6, right=7), say("It is 13."), say("Bye."))
    async with scripted_endpoint(*script) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            client = rollout_client()
            history = [QUESTION]
            reply = await client.chat.completions.create(model="policy", messages=history)
            message = reply.choices[0].message
            history.append(message)
            history.append(
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "13"}
            )
            reply = await client.chat.completions.create(model="policy", messages=history)
            # Many agents keep no more than the text.
            history.append({"role": "assistant", "content": reply.choices[0].message.content})
            history.append({"role": "user", "content": "Thanks."})
            await client.chat.completions.create(model="policy", messages=history)
            sample = await rollout.get_sample()
    assert [message["role"] for message in sample.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert others(sample) == {}
    assert (sample.metrics["calls"], sample.metrics["tool_calls"]) == (3, 1)
    document = trajectory(sample)
    totals = document["final_metrics"]
    assert totals["total_prompt_tokens"] == sample.metrics["prompt_tokens"]
    assert totals["total_completion_tokens"] == sample.metrics["completion_tokens"] == 1 + 3 + 1
    assert document["steps"][1]["observation"]["results"][0]["content"] == "13"
