"""Errors, cancellation and deadlines in rollouts of a framework; each of them passes these tests.

A test module of a framework imports all names from here and provides the fixture ``kit``.
"""

from __future__ import annotations

import json
import socket

import pytest
import trio
from integrations.frameworks import (
    KEY,
    run,
    serving,
    start,
    words,
)
from integrations.scripted import Step, call, refuse, say, scripted_endpoint, stall
from support import fresh_id

from rollout import (
    AgentWorkflow,
    RolloutContext,
    get_rollout_context,
)
from rollout.errors import BridgeError, IntegrationError, SampleSourceError
from rollout.integrations.openai import rollout_client
from rollout.types import RolloutErrorCategory, RolloutStatus


async def test_a_refusal_that_stays(kit, workflow):
    async with scripted_endpoint(refuse(400, f"bad request with {KEY}")) as endpoint:
        async with serving(workflow()) as client:
            result = await run(client, endpoint)
    assert result.status is RolloutStatus.FAILURE
    assert result.err_category is RolloutErrorCategory.AGENT_ERROR
    assert "bad request" in result.err_message
    assert KEY not in result.err_message
    assert result.err_source is None  # it is the request that is wrong
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("status", [401, 404, 500, None])
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_endpoint_that_is_of_no_use(kit, workflow, status, streamed):
    step = refuse(status or 500, "no such thing", retry_after="0.01")
    async with scripted_endpoint(step) as endpoint:
        async with serving(workflow(streamed=streamed)) as client:
            if status is None:
                endpoint.url = "http://127.0.0.1:9/v1"
            result = await run(client, endpoint)
    assert (result.status, result.err_category, result.err_source) == (
        RolloutStatus.FAILURE,
        RolloutErrorCategory.AGENT_ERROR,
        "model_key" if status == 401 else "model_endpoint",
    )


async def test_a_stream_that_breaks_off(kit, workflow):
    steps = (Step(cut_after=2, texts=[["one", " two"]]), say("It is 13"))
    async with scripted_endpoint(*steps) as endpoint, serving(workflow(streamed=True)) as client:
        result = await run(client, endpoint)
        await endpoint.all_closed()
    assert len(endpoint.requests) == 1
    assert (result.status, result.err_category, result.err_source) == (
        RolloutStatus.FAILURE,
        RolloutErrorCategory.AGENT_ERROR,
        "model_endpoint",
    )


@pytest.mark.parametrize(
    ("raised", "category"),
    [
        (ValueError("odd"), RolloutErrorCategory.VALIDATION_ERROR),
        (TimeoutError("late"), RolloutErrorCategory.TIMEOUT),
        (KeyError("gone"), RolloutErrorCategory.AGENT_ERROR),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_errors_of_tools(kit, workflow, raised, category, streamed):
    @kit.adapter.trio_tool
    async def fail() -> str:
        """Fail."""
        await trio.lowlevel.checkpoint()
        raise raised

    async with scripted_endpoint(call("fail"), say("sorry")) as endpoint:
        async with serving(workflow(fail, streamed=streamed)) as client:
            result = await run(client, endpoint)
    if kit.tool_errors_end_runs:
        assert (result.status, result.err_category) == (RolloutStatus.FAILURE, category), (
            result.err_message
        )
        assert str(raised.args[0]) in result.err_message
    else:
        assert result.status is RolloutStatus.SUCCESS, result.err_message
        assert str(raised.args[0]) in json.dumps(endpoint.requests[1].body["messages"])


async def test_without_a_bridge(kit, workflow):
    async with scripted_endpoint(say("13")) as endpoint:
        async with serving(workflow(), lifespan=None) as client:
            result = await run(client, endpoint)
    assert result.status is RolloutStatus.FAILURE
    assert "open_asyncio_bridge" in result.err_message
    assert endpoint.requests == []


async def test_outside_of_a_rollout(kit):
    with pytest.raises(IntegrationError, match="no rollout is running here"):
        kit.adapter.rollout_model("policy")
    with RolloutContext() as context:
        with pytest.raises(IntegrationError, match="no chat_completions_url"):
            kit.adapter.rollout_model("policy")
    assert context.sample_source is None


async def test_one_sample_has_one_source(kit):
    with RolloutContext(chat_completions_url="http://127.0.0.1:9/v1", api_key=KEY) as context:
        rollout_client()
        with pytest.raises(SampleSourceError, match="record=False"):
            kit.adapter.rollout_model("policy")
        model = kit.adapter.rollout_model("policy", record=False)
        with pytest.raises(SampleSourceError, match="record=False"):
            await kit.adapter.run_agent(kit.agent(model, ()), "Hello?")
        with pytest.raises(BridgeError, match="no asyncio bridge is open"):
            await kit.adapter.run_agent(kit.agent(model, ()), "Hello?", record=False)
    assert type(context.sample_source).__name__ == "ConversationRecorder"


# --- cancellation, deadlines, many at once --------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("after", [0, 2])
async def test_cancelling_a_rollout_in_mid_call(kit, workflow, streamed, after):
    steps = (stall("one two three", after=after), say("It is 13"))
    async with scripted_endpoint(*steps) as endpoint:
        async with serving(workflow(streamed=streamed), max_concurrent=1) as client:
            handle = await start(client, endpoint, name := fresh_id())
            await (await endpoint.received()).stalled.wait()
            await client.cancel_rollout(name)
            assert (await handle).status is RolloutStatus.CANCELLED
            with trio.fail_after(20):
                await endpoint.requests[0].gone.wait()
            # The only slot is free again, and so is the loop.
            result = await run(client, endpoint)
            assert result.status is RolloutStatus.SUCCESS, result.err_message
        await endpoint.all_closed()


async def test_cancelling_a_rollout_in_the_middle_of_a_tool(kit, workflow):
    running, ended = trio.Event(), trio.Event()

    @kit.adapter.trio_tool
    async def wait() -> str:
        """Wait."""
        try:
            running.set()
            await trio.sleep_forever()
        finally:
            ended.set()

    async with scripted_endpoint(call("wait")) as endpoint, serving(workflow(wait)) as client:
        handle = await start(client, endpoint, name := fresh_id())
        await running.wait()
        await client.cancel_rollout(name)
        assert (await handle).status is RolloutStatus.CANCELLED
        assert ended.is_set()
    assert len(endpoint.requests) == 1


async def test_a_deadline_in_mid_call(kit):
    class Hurried(AgentWorkflow):
        async def run(self, ctx):
            agent = kit.agent(kit.adapter.rollout_model("policy"), ())
            with trio.fail_after(3600) as scope:
                deadlines.append(scope)
                await kit.adapter.run_agent(agent, ctx.prompt)

    deadlines = []
    async with scripted_endpoint(stall(), say("It is 13")) as endpoint:
        async with serving(Hurried, max_concurrent=1) as client:
            handle = await start(client, endpoint, fresh_id())
            await (await endpoint.received()).stalled.wait()
            deadlines[0].deadline = trio.current_time()
            result = await handle
            assert (result.status, result.err_category) == (
                RolloutStatus.FAILURE,
                RolloutErrorCategory.TIMEOUT,
            )
            with trio.fail_after(20):
                await endpoint.requests[0].gone.wait()
            result = await run(client, endpoint)
            assert result.status is RolloutStatus.SUCCESS, result.err_message


async def test_the_time_of_the_agent_is_up(kit, workflow):
    async with scripted_endpoint(stall()) as endpoint:
        async with serving(workflow()) as client:
            result = await run(client, endpoint, agent_timeout_sec=0.5)
        await endpoint.all_closed()
    assert result.status is RolloutStatus.FAILURE
    assert result.err_category is RolloutErrorCategory.TIMEOUT
    assert result.err_source == "model_endpoint"


async def test_the_server_ends_in_mid_call(kit, workflow):
    async with scripted_endpoint(stall("one two", after=1)) as endpoint:
        async with serving(workflow(streamed=True)) as client:
            handle = await start(client, endpoint, fresh_id())
            await (await endpoint.received()).stalled.wait()
            handle.cancel()  # its client would wait for it
        with trio.fail_after(20):
            await endpoint.requests[0].gone.wait()
        await endpoint.all_closed()
    assert len(endpoint.requests) == 1


async def test_an_endpoint_that_is_too_slow(kit):
    class Patient(AgentWorkflow):
        async def run(self, ctx):
            options = {"max_retries": 1, "timeout_sec": 0.3}
            agent = kit.agent(kit.adapter.rollout_model("policy", **options), ())
            await kit.adapter.run_agent(agent, ctx.prompt)

    async with scripted_endpoint(stall(), stall(), say("It is 13")) as endpoint:
        async with serving(Patient) as client:
            result = await run(client, endpoint)
            assert (result.status, result.err_category, result.err_source) == (
                RolloutStatus.FAILURE,
                RolloutErrorCategory.AGENT_ERROR,
                "model_endpoint",
            )
            assert len(endpoint.requests) == 2
        await endpoint.all_closed()


async def test_many_rollouts_with_keys_of_their_own(kit, workflow):
    @kit.adapter.trio_tool
    async def whoami() -> str:
        """Say which rollout this is."""
        await trio.lowlevel.checkpoint()
        return get_rollout_context().rollout_id

    def script(request):
        last = request.body["messages"][-1]
        if last["role"] == "tool":
            return say(words(last["content"]))
        return call("whoami")

    results = {}

    async def one(client, endpoint, number):
        results[number] = await run(
            client,
            endpoint,
            prompt=[{"role": "user", "content": f"I am rollout-{number}."}],
            key=f"key-{number}",
            rollout_id=f"many-{number}",
        )

    async with scripted_endpoint(script) as endpoint:
        async with serving(workflow(whoami), max_concurrent=20) as client:
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(one, client, endpoint, number)
            assert endpoint.connections <= 20
        await endpoint.all_closed()
    for number, result in results.items():
        assert result.status is RolloutStatus.SUCCESS, result.err_message
        assert kit.text(result.sample.messages[-1]) == f"many-{number}"
        assert result.sample.metrics["calls"] == 2
    said = {
        request.key: words(request.body["messages"][0]["content"]) for request in endpoint.requests
    }
    assert said == {f"key-{number}": f"I am rollout-{number}." for number in range(20)}
    assert len(endpoint.requests) == 40


async def test_nothing_else_is_called(kit, workflow, monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "of-somebody-else")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/elsewhere")
    hosts = set()
    connect = socket.socket.connect

    def noted(self, address):
        if isinstance(address, tuple):
            hosts.add(address[0])
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", noted)
    async with scripted_endpoint(say("It is 13")) as endpoint, serving(workflow()) as client:
        result = await run(client, endpoint, key=None)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert hosts == {"127.0.0.1"}
    headers = endpoint.requests[0].headers
    assert "of-somebody-else" not in json.dumps(headers)
    assert "authorization" not in headers
