"""A gateway whose upstream is LiteLLM, with providers that are played on loopback."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest
import trio
from gateway.served import KEY, QUESTION, calling, post, rig
from integrations.scripted import Step, refuse, say, scripted_endpoint, stall

from rollout.errors import InvalidFieldError, RolloutServerError
from rollout.gateway import LiteLLMUpstream, ModelGateway
from rollout.types import MODEL_ENDPOINT, MODEL_KEY, RolloutStatus

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("litellm") is None,
        reason='needs pip install "trio-rollout[litellm]"',
    ),
    pytest.mark.filterwarnings("ignore:::(litellm|pydantic|openai)"),
]
NOT_ASKED = refuse(500, "nobody asks the endpoint of requests")


def gateway_to(provider, model="openai/gpt-x", **options):
    upstream = LiteLLMUpstream(model, KEY, provider.url)
    return ModelGateway(upstreams=[upstream], retries=0, **options)


def events_of(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_provider_with_the_api_of_openai(stream):
    got = []

    async def agent(context):
        assert KEY not in str(os.environ) + repr(context.api_key)
        got.append(await post(context, stream=stream, temperature=0.5))

    async with scripted_endpoint(say("It is 13")) as provider:
        async with rig(agent, NOT_ASKED, gateway=gateway_to(provider)) as it:
            result = await it.run(chat_completions_url="http://127.0.0.1:9/v1")
    (asked,) = provider.requests
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert (asked.body["model"], asked.body["temperature"]) == ("gpt-x", 0.5)
    (response,) = got
    assert response.status_code == 200, response.text
    if stream:
        assert response.text.endswith("data: [DONE]\n\n")
        pieces = [each["choices"][0]["delta"].get("content") for each in events_of(response.text)]
        assert "".join(filter(None, pieces)) == "It is 13"
    else:
        assert response.json()["choices"][0]["message"]["content"] == "It is 13"
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample.messages[-1] == {"role": "assistant", "content": "It is 13"}
    assert result.sample.metrics["prompt_tokens"] > 0
    assert result.sample.metrics["completion_tokens"] > 0


async def test_a_provider_with_an_api_of_its_own():
    """A tool's call comes and goes in the form of OpenAI, and the model is Anthropic's."""
    got = []
    asks = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"left": 6, "right": 7}}
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x"}
    used = {"input_tokens": 11, "output_tokens": 5}
    tool = head | {"content": [asks], "stop_reason": "tool_use", "usage": used}
    text = {"type": "text", "text": "It is 13"}
    final = head | {"content": [text], "stop_reason": "end_turn", "usage": used}

    async def agent(context):
        tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
        first = (await post(context, tools=tools)).json()["choices"][0]["message"]
        assert first["content"] is None
        (asked,) = first["tool_calls"]
        answer = {"role": "tool", "tool_call_id": asked["id"], "content": "13"}
        got.append(asked["function"])
        await post(context, tools=tools, messages=[QUESTION, first, answer])

    steps = [Step(raw=json.dumps(each).encode()) for each in (tool, final)]
    async with scripted_endpoint(*steps) as provider:
        upstream = LiteLLMUpstream("anthropic/claude-x", KEY, provider.url.removesuffix("/v1"))
        async with rig(agent, NOT_ASKED, gateway=ModelGateway(upstreams=[upstream])) as it:
            result = await it.run()
    first, second = provider.requests
    assert (first.path, first.headers["x-api-key"]) == ("/v1/messages", KEY)
    assert second.body["messages"][-1]["content"][0]["type"] == "tool_result"
    assert [json.loads(each["arguments"]) for each in got] == [{"left": 6, "right": 7}]
    assert [each["role"] for each in result.sample.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert result.sample.metrics["prompt_tokens"] == 22
    assert result.sample.metrics["completion_tokens"] == 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "source"), [(401, MODEL_KEY), (400, None), (529, MODEL_ENDPOINT)]
)
async def test_what_a_provider_refuses(stream, status, source):
    got = []

    async def agent(context):
        got.append(await post(context, stream=stream))
        raise RuntimeError("the tool exited with 1")

    async with scripted_endpoint(refuse(status, f"not with {KEY}")) as provider:
        async with rig(agent, NOT_ASKED, gateway=gateway_to(provider)) as it:
            result = await it.run()
    assert got[0].status_code == status, got[0].text
    assert "not with" in got[0].json()["error"]["message"]
    assert KEY not in got[0].text
    assert result.err_source == source


async def test_an_agent_cannot_set_where_the_key_goes():
    got = []

    async def agent(context):
        got.append(await post(context, api_base="http://127.0.0.1:9/v1", temperature=1))
        got.append(await post(context, "/v1/messages"))

    async with scripted_endpoint(say("")) as provider:
        async with rig(agent, NOT_ASKED, gateway=gateway_to(provider)) as it:
            await it.run()
    assert provider.requests == []
    assert (got[0].status_code, got[1].status_code) == (400, 404)
    assert "does not pass through LiteLLM: 'api_base'" in got[0].json()["error"]["message"]
    assert "only chat completions" in got[1].text


@pytest.mark.parametrize("after", [None, 1])
async def test_an_agent_that_hangs_up_ends_the_call_at_the_provider(after):
    async def agent(context):
        async with calling(context) as http:
            with trio.move_on_after(60) as scope:
                body = {"model": "m", "messages": [QUESTION], "stream": after is not None}
                async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        scope.cancel()
        return [QUESTION, {"role": "assistant", "content": "13"}]

    async with scripted_endpoint(stall("one two three", after=after or 0)) as provider:
        async with rig(agent, NOT_ASKED, gateway=gateway_to(provider)) as it:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(it.run)
                asked = await provider.received()
                await asked.stalled.wait()
                if after is None:
                    nursery.cancel_scope.cancel()
                    await it.client.cancel_rollouts(prefix="gateway")
                with trio.fail_after(30), trio.CancelScope(shield=True):
                    await asked.gone.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("claude",), "model must be PROVIDER/MODEL"),
        (("openai/gpt", "a\nb"), "api_key"),
        (("openai/gpt", None, "nowhere"), "api_base must be"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(InvalidFieldError, match=message):
        LiteLLMUpstream(*arguments)


async def test_a_provider_that_nobody_knows():
    gateway = ModelGateway(
        upstreams=[LiteLLMUpstream("nobody/knows")], advertise_url="http://127.0.0.1:1"
    )
    with pytest.raises(RolloutServerError, match="knows no provider of 'nobody/knows'"):
        async with gateway.running():
            pass


@pytest.mark.parametrize(
    "step", [Step(texts=[["It", " is", " 13"]], cut_after=2), say("It is 13", error=f"no {KEY}")]
)
async def test_a_stream_that_breaks_off(step):
    got = []

    async def agent(context):
        async with calling(context) as http:
            body = {"model": "m", "messages": [QUESTION], "stream": True}
            got.append(await http.post("/v1/chat/completions", json=body))
        raise RuntimeError("the tool exited with 1")

    async with scripted_endpoint(step) as provider:
        async with rig(agent, NOT_ASKED, gateway=gateway_to(provider)) as it:
            result = await it.run()
    assert "[DONE]" not in got[0].text
    assert KEY not in got[0].text
    assert result.err_source == MODEL_ENDPOINT
