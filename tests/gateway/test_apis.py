"""All APIs through the gateway, with the clients of those who made them."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from gateway.sdks import needs_openai
from gateway.served import KEY, QUESTION, calling, rig
from integrations.scripted import call, say, stall

from rollout.gateway import ModelGateway
from rollout.trajectory import build_trajectory, trajectory_problems
from rollout.types import MODEL_ENDPOINT, RolloutStatus

TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}


def anthropic_sdk(context, **options):
    anthropic = pytest.importorskip("anthropic", reason="needs pip install anthropic")
    base = context.chat_completions_url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=base, api_key=context.api_key, **options)


def openai_sdk(context, **options):
    openai = pytest.importorskip("openai", reason='needs pip install "trio-rollout[openai]"')
    return openai.OpenAI(base_url=context.chat_completions_url, api_key=context.api_key, **options)


def claude(context, *, stream):
    """An agent with tools, with Anthropic's own client."""
    messages = [QUESTION]
    with anthropic_sdk(context) as client:
        while True:
            asked = {
                "model": "claude-x",
                "max_tokens": 100,
                "system": [
                    {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
                ],
                "messages": messages,
                "tools": [TOOL],
            }
            if stream:
                with client.messages.stream(**asked) as events:
                    reply = events.get_final_message()
            else:
                reply = client.messages.create(**asked)
            content = [block.model_dump(exclude_none=True) for block in reply.content]
            messages.append({"role": "assistant", "content": content})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": [
                        {"type": "text", "text": str(block.input["left"] + block.input["right"])}
                    ],
                }
                for block in reply.content
                if block.type == "tool_use"
            ]
            if not results:
                return
            messages.append({"role": "user", "content": results})


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_with_the_sdk_of_anthropic_is_recorded_as_a_chat(stream):
    steps = (
        evolve(call("add", left=6, right=7), texts=[["Let", " me add."]], reasoning="Six."),
        say("13"),
    )
    async with rig(lambda context: claude(context, stream=stream), *steps) as it:
        result = await it.run(label="13")
    assert (result.status, result.sample.reward) == (RolloutStatus.SUCCESS, 1.0)
    system, question, asked, added, reply = result.sample.messages
    assert system == {"role": "system", "content": "Be brief."}
    assert question == QUESTION
    assert (asked["content"], asked["reasoning_content"]) == ("Let me add.", "Six.")
    (made,) = asked["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"left": 6, "right": 7}
    assert added == {"role": "tool", "tool_call_id": made["id"], "content": "13"}
    assert reply["content"] == "13"
    assert "branches" not in result.sample.extra_fields
    metrics = result.sample.metrics
    assert (metrics["calls"], metrics["completion_tokens"]) == (2, 4)
    assert metrics["cached_tokens"] == 4
    tool = result.sample.extra_fields["tools"][0]["function"]
    assert tool == {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    sent = it.endpoint.requests[0]
    assert sent.path == "/v1/messages"
    # The SDK presents its key in either header, by its version, and the gateway does as it does.
    assert KEY in {sent.key, sent.headers.get("x-api-key")}
    assert sent.headers["anthropic-version"]
    document = build_trajectory(result.sample.messages, rollout_id="r", sample=result.sample)
    assert trajectory_problems(document) == []


async def test_errors_of_anthropic_s_form():
    got = []

    def agent(context):
        anthropic = pytest.importorskip("anthropic")
        with anthropic_sdk(context, max_retries=0) as client:
            ask = {"model": "m", "max_tokens": 1, "messages": [QUESTION]}
            with pytest.raises(anthropic.APIStatusError) as caught:
                client.messages.create(**ask)
            got.append(caught.value)
            with pytest.raises(anthropic.APIError) as caught:
                with client.messages.stream(**ask) as events:
                    events.get_final_message()
            got.append(caught.value)
            with pytest.raises(anthropic.NotFoundError) as caught:
                client.post("/v1/files", body={}, cast_to=object)
            got.append(caught.value)
        with anthropic_sdk(evolve(context, api_key="another"), max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                client.messages.create(**ask)
            got.append(caught.value)

    steps = (stall(), evolve(say("one two"), hold_after=2))
    async with rig(agent, *steps, gateway=ModelGateway(silence_sec=0.2)) as it:
        result = await it.run()
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert got[0].status_code == 504
    assert got[0].body["error"]["type"] == "api_error"
    assert "silent" in str(got[1])
    assert result.sample.metrics["failed_calls"] == 2


async def test_tokens_are_counted_and_not_recorded():
    got = []

    def agent(context):
        with anthropic_sdk(context) as client:
            got.append(client.messages.count_tokens(model="m", messages=[QUESTION]).input_tokens)
        return []

    async with rig(agent, evolve(say(""), raw=b'{"input_tokens": 7}')) as it:
        await it.run()
    assert got == [7]
    assert it.endpoint.requests[0].path == "/v1/messages/count_tokens"


@needs_openai
@pytest.mark.parametrize("stream", [False, True])
async def test_responses_are_recorded(stream):
    def agent(context):
        with openai_sdk(context) as client:
            if stream:
                with client.responses.stream(model="m", input="6 + 7?") as events:
                    assert events.get_final_response().output_text == "13 it is"
            else:
                assert client.responses.create(model="m", input="6 + 7?").output_text == "13 it is"

    async with rig(agent, say("13 it is")) as it:
        result = await it.run()
    assert [each["content"] for each in result.sample.messages] == ["6 + 7?", "13 it is"]
    assert result.sample.metrics["completion_tokens"] == 3


@needs_openai
@pytest.mark.parametrize("stream", [False, True])
async def test_completions_are_recorded(stream):
    def agent(context):
        with openai_sdk(context) as client:
            made = client.completions.create(model="m", prompt="6 + 7 =", stream=stream)
            text = (
                "".join(each.choices[0].text for each in made) if stream else made.choices[0].text
            )
            assert text == "13 it is"

    async with rig(agent, say("13 it is")) as it:
        result = await it.run()
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert [each["content"] for each in result.sample.messages] == ["6 + 7 =", "13 it is"]
    assert result.sample.metrics["completion_tokens"] == 3
    assert "unrecorded_calls" not in result.sample.extra_fields


@pytest.mark.parametrize(
    ("models", "sent", "got"),
    [
        ({"*": "policy"}, "gpt-4o", "policy"),
        ({"*": "policy"}, None, "policy"),
        ({"*": "policy", "judge": "other"}, "judge", "other"),
        ({"gpt-4o": "policy"}, "gpt-4o", "policy"),
        ({"gpt-4o": "policy"}, "gpt-5", "gpt-5"),
        ({"gpt-4o": "policy"}, None, None),
    ],
)
async def test_model_names(models, sent, got):
    async def agent(context):
        body = {"messages": [QUESTION], "odd": 1.5} | ({} if sent is None else {"model": sent})
        async with calling(context) as http:
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200

    async with rig(agent, say("13"), gateway=ModelGateway(models=models)) as it:
        result = await it.run()
    assert result.status is RolloutStatus.SUCCESS
    body = it.endpoint.requests[0].body
    assert body.pop("model", None) == got
    assert body == {"messages": [QUESTION], "odd": 1.5}


async def test_a_refusal_in_a_stream_of_anthropic_is_a_failure_of_the_endpoint():
    def agent(context):
        with anthropic_sdk(context, max_retries=0) as client:
            with client.messages.stream(model="m", max_tokens=1, messages=[QUESTION]) as events:
                events.get_final_message()

    async with rig(agent, evolve(say("one"), error="overloaded now")) as it:
        result = await it.run()
    assert "overloaded now" in result.err_message
    assert result.err_source == MODEL_ENDPOINT


async def test_an_error_in_a_stream_that_goes_on_is_noted_before_its_agent_ends():
    def agent(context):
        with anthropic_sdk(context, max_retries=0) as client:
            with client.messages.stream(model="m", max_tokens=1, messages=[QUESTION]) as events:
                events.get_final_message()

    async with rig(agent, evolve(say("one"), error="overloaded now", hold_after=5)) as it:
        result = await it.run()
        assert it.endpoint.requests[0].stalled.is_set()
    assert "overloaded now" in result.err_message
    assert result.err_source == MODEL_ENDPOINT


async def test_the_key_goes_in_the_header_in_which_the_token_came():
    async def agent(context):
        async with calling(context) as http:
            del http.headers["authorization"]
            http.headers["x-api-key"] = context.api_key
            body = {"model": "m", "max_tokens": 1, "messages": [QUESTION]}
            assert (await http.post("/v1/messages", json=body)).status_code == 200

    async with rig(agent, say("13")) as it:
        result = await it.run()
    assert result.status is RolloutStatus.SUCCESS
    assert it.endpoint.requests[0].headers["x-api-key"] == KEY
    assert it.endpoint.requests[0].key is None
