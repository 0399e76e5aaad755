"""The Responses API: its items become one history in chat form."""

from __future__ import annotations

import pytest

pytest.importorskip("openai", reason='needs pip install "trio-rollout[openai]"')

from integrations.openai.agents import KEY, trajectory
from integrations.scripted import call, say, scripted_endpoint

from rollout import RolloutContext
from rollout.integrations.openai import rollout_client

HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 6 + 7?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Let me add.",
        "tool_calls": [
            {
                "id": "call-0-0",
                "type": "function",
                "function": {"name": "add", "arguments": '{"left": 6, "right": 7}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call-0-0", "content": "13"},
    {"role": "assistant", "content": "It is 13."},
]


def check(sample):
    assert sample.messages == HISTORY
    assert sample.metrics["calls"] == 2
    assert sample.metrics["tool_calls"] == 1
    document = trajectory(sample)
    assert [step["source"] for step in document["steps"]] == ["system", "user", "agent", "agent"]
    totals = document["final_metrics"]
    assert totals["total_prompt_tokens"] == sample.metrics["prompt_tokens"] > 0
    assert totals["total_completion_tokens"] == sample.metrics["completion_tokens"] == 1 + 3
    assert totals["total_cached_tokens"] == sample.metrics["cached_tokens"] == 2


def script():
    first = call("add", left=6, right=7)
    return type(first)(calls=first.calls, reasoning="Let me add."), say("It is 13.")


RESULT = {"type": "function_call_output", "call_id": "call-0-0", "output": "13"}


async def test_items_that_are_sent_back():
    async with scripted_endpoint(*script()) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            create = rollout_client().responses.create
            items = [{"role": "user", "content": "What is 6 + 7?"}]
            reply = await create(model="policy", instructions="Be brief.", input=items)
            items += [*(item.to_dict() for item in reply.output), RESULT]
            reply = await create(model="policy", instructions="Be brief.", input=items)
            assert reply.output_text == "It is 13."
            check(await rollout.get_sample())


async def test_a_response_that_is_named_as_the_one_before():
    async with scripted_endpoint(*script()) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            create = rollout_client().responses.create
            reply = await create(model="policy", instructions="Be brief.", input="What is 6 + 7?")
            await create(model="policy", input=[RESULT], previous_response_id=reply.id)
            check(await rollout.get_sample())


async def test_streams_of_responses():
    async with scripted_endpoint(*script()) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            create = rollout_client().responses.create
            stream = await create(
                model="policy", instructions="Be brief.", input="What is 6 + 7?", stream=True
            )
            async with stream:
                events = [event async for event in stream]
            stream = await create(
                model="policy",
                input=[RESULT],
                previous_response_id=events[-1].response.id,
                stream=True,
            )
            async with stream:
                assert [e.type async for e in stream][-1] == "response.completed"
            check(await rollout.get_sample())


async def test_completions_without_messages_are_counted_and_said(caplog):
    body = b'{"id":"c","object":"text_completion","created":1,"model":"m","choices":[]}'
    async with scripted_endpoint(type(say("x"))(raw=body)) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            for _ in range(2):
                await rollout_client().completions.create(model="policy", prompt="6 + 7 =")
            sample = await rollout.get_sample()
    assert sample.extra_fields["unrecorded_calls"] == {"/v1/completions": 2}
    assert caplog.text.count("was not recorded") == 1
