"""Whole rollouts over HTTP: our client, a rollout server, a workflow with the SDK, an endpoint."""

from __future__ import annotations

import json
import logging

import pytest

pytest.importorskip("openai", reason='needs pip install "trio-rollout[openai]"')

import trio
from integrations.openai.agents import KEY, QUESTION, Adder, trajectory
from integrations.scripted import call, refuse, say, scripted_endpoint, stall
from support import Compare, fresh_id, local_backend, make_app, served

from rollout import AgentWorkflow, AgentWorkflowConfig, ConcurrencyConfig, LocalBackend
from rollout.client import RolloutClient
from rollout.integrations.openai import rollout_client, share_connections
from rollout.types import RolloutStatus


async def run(client, endpoint, *, prompt=(QUESTION,), key=KEY, rollout_id=None, **options):
    return await client.run_rollout(
        initial_messages=list(prompt),
        chat_completions_url=endpoint.url,
        rollout_id=rollout_id or fresh_id(),
        llm_api_key=key,
        **options,
    )


async def test_an_agent_with_tools_from_admission_to_reward():
    async with scripted_endpoint(call("add", left=6, right=7), say("13")) as endpoint:
        async with (
            served(make_app(local_backend(Adder), lifespan=share_connections)) as url,
            RolloutClient(url=url) as client,
        ):
            result = await run(client, endpoint, label="13")
            assert (endpoint.connections, endpoint.open_connections) == (1, 1)
        await endpoint.all_closed()
    assert (result.status, result.sample.reward) == (RolloutStatus.SUCCESS, 1.0)
    assert [each["role"] for each in result.sample.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert result.sample.metrics["calls"] == 2
    assert result.sample.metrics["completion_tokens"] == 2
    assert result.sample.extra_fields["tools"][0]["function"]["name"] == "add"
    assert endpoint.requests[1].body["messages"][2]["content"] == "13"


async def test_the_trajectory_on_disk(tmp_path):
    backend = LocalBackend(
        workflow=Adder,
        workflow_config=AgentWorkflowConfig(
            name="adder", concurrency=ConcurrencyConfig(max_concurrent=1)
        ),
        grader=Compare,
        artifact_root=tmp_path,
    )
    steps = (
        call("add", left=6, right=7),
        refuse(429, f"slow down, {KEY}", retry_after="0.01"),
        refuse(500, retry_after="0.01"),
        say("13", reasoning="Six and seven."),
    )
    async with (
        scripted_endpoint(*steps) as endpoint,
        served(make_app(backend)) as url,
        RolloutClient(url=url) as client,
    ):
        result = await run(client, endpoint, rollout_id="kept", label="13")
    assert result.sample.metrics["retries"] == 2
    text = (tmp_path / "kept" / "trajectory.json").read_text("utf-8")
    assert KEY not in text
    document = json.loads(text)
    assert [step["source"] for step in document["steps"]] == ["user", "agent", "agent"]
    first, last = document["steps"][1:]
    assert first["tool_calls"][0]["arguments"] == {"left": 6, "right": 7}
    assert first["observation"]["results"][0]["content"] == "13"
    assert last["reasoning_content"] == "Six and seven."
    assert document["agent"]["model_name"] == "scripted-1"
    totals, metrics = document["final_metrics"], result.sample.metrics
    assert totals["total_prompt_tokens"] == metrics["prompt_tokens"] > 0
    assert totals["total_completion_tokens"] == metrics["completion_tokens"] == 2
    assert totals["total_cached_tokens"] == metrics["cached_tokens"] == 2
    # Neither in what travels.
    assert KEY not in json.dumps([result.sample.messages, result.sample.extra_fields])


@pytest.mark.parametrize("streamed", [False, True])
async def test_cancelling_a_rollout_in_mid_call(streamed):
    class Ask(AgentWorkflow):
        async def run(self, ctx):
            create = rollout_client().chat.completions.create
            if not streamed:
                await create(model="policy", messages=ctx.prompt)
                return
            async with await create(model="policy", messages=ctx.prompt, stream=True) as stream:
                async for _ in stream:
                    pass

    async with (
        scripted_endpoint(stall("one two", after=1 if streamed else 0), say("13")) as endpoint,
        served(make_app(local_backend(Ask, max_concurrent=1))) as url,
        RolloutClient(url=url) as client,
    ):
        handle = await client.run_rollout_async(
            initial_messages=[QUESTION],
            chat_completions_url=endpoint.url,
            rollout_id="stalled",
            llm_api_key=KEY,
            grade=False,
        )
        await (await endpoint.received()).stalled.wait()
        await client.cancel_rollout("stalled")
        assert (await handle).status is RolloutStatus.CANCELLED
        await endpoint.requests[0].gone.wait()
        # Its slot, the only one, is free.
        result = await run(client, endpoint, label="13")
        # Nobody shares connections here, so none is kept.
        await endpoint.all_closed()
    assert result.sample.reward == 1.0


async def test_a_deadline_in_mid_call():
    async with (
        scripted_endpoint(stall()) as endpoint,
        served(make_app(local_backend(Adder))) as url,
        RolloutClient(url=url) as client,
    ):
        result = await run(client, endpoint, grade=False, agent_timeout_sec=0.2)
        # Under load the deadline may have come before the call.
        if endpoint.requests:
            await endpoint.requests[0].gone.wait()
    assert (result.status, result.err_category) == (RolloutStatus.FAILURE, "timeout")


async def test_many_rollouts_with_keys_of_their_own():
    """Endpoint, key and record of one rollout never get into another."""
    keys = {f"Sum {number}": f"key-{number}-secret" for number in range(50)}

    def answer(request):
        question = request.body["messages"][0]["content"]
        assert request.key == keys[question]
        if len(request.body["messages"]) == 1:
            return call("add", left=int(question.split()[1]), right=1)
        return say(f"{question} is {request.body['messages'][-1]['content']}")

    results = {}

    async def one(client, endpoint, question):
        results[question] = await run(
            client,
            endpoint,
            prompt=[{"role": "user", "content": question}],
            key=keys[question],
            grade=False,
        )

    async with (
        scripted_endpoint(answer) as endpoint,
        served(
            make_app(local_backend(Adder, max_concurrent=None), lifespan=share_connections)
        ) as url,
        RolloutClient(url=url) as client,
        trio.open_nursery() as nursery,
    ):
        for question in keys:
            nursery.start_soon(one, client, endpoint, question)
    for question, result in results.items():
        number = int(question.split()[1])
        assert result.sample.messages[-1]["content"] == f"{question} is {number + 1}"
        assert len(result.sample.messages) == 4
        assert result.sample.metrics["calls"] == 2
    assert len(endpoint.requests) == 100


async def test_an_endpoint_that_refuses_fails_the_rollout_without_its_key(caplog):
    caplog.set_level(logging.DEBUG)
    async with (
        scripted_endpoint(refuse(401, f"wrong key: {KEY}")) as endpoint,
        served(make_app(local_backend(Adder))) as url,
        RolloutClient(url=url) as client,
    ):
        result = await run(client, endpoint, grade=False)
    assert (result.status, result.err_category) == (RolloutStatus.FAILURE, "agent_error")
    assert "401" in result.err_message
    assert KEY not in result.err_message
    assert "the workflow failed" in caplog.text
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("rollout")]
    assert not [line for line in ours if KEY in line]


async def test_a_workflow_that_asks_nothing_has_an_empty_sample():
    class Quiet(AgentWorkflow):
        async def run(self, ctx):
            rollout_client()

    async with (
        scripted_endpoint(say("13")) as endpoint,
        served(make_app(local_backend(Quiet))) as url,
        RolloutClient(url=url) as client,
    ):
        result = await run(client, endpoint, grade=False)
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample.messages == []
    assert result.sample.metrics["calls"] == 0


async def test_the_trajectory_of_a_grader_that_asks_the_model_too():
    """The sample is taken before the grader runs, so a judge does not get into it."""

    class Judge:
        def __init__(self, config=None):
            pass

        async def grade(self, ctx):
            client = rollout_client(record=False)
            verdict = await client.chat.completions.create(
                model="judge", messages=[{"role": "user", "content": "Is it right?"}]
            )
            trajectory(ctx.sample)
            ctx.set_reward(1.0 if verdict.choices[0].message.content == "yes" else 0.0)

    async with (
        scripted_endpoint(say("13"), say("yes")) as endpoint,
        served(make_app(local_backend(Adder, grader=Judge))) as url,
        RolloutClient(url=url) as client,
    ):
        result = await run(client, endpoint, label="13")
    assert result.sample.reward == 1.0
    assert result.sample.metrics["calls"] == 1
