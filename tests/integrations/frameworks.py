"""Tests that every framework behind the bridge passes, over HTTP against a scripted endpoint.

A test module of a framework imports all names from here and provides the fixture ``kit``. Each
rollout goes the whole way: our client, a rollout server with `LocalBackend`, a workflow, the
framework on the bridge, the endpoint.
"""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import frozen
from integrations.scripted import Step, call, refuse, say, scripted_endpoint, stall
from support import fresh_id, local_backend, make_app, served

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    Grader,
    LocalBackend,
    RolloutContext,
    get_rollout_context,
)
from rollout.client import RolloutClient
from rollout.errors import BridgeError, IntegrationError, SampleSourceError
from rollout.integrations.asyncio_bridge import get_bridge, open_asyncio_bridge
from rollout.integrations.asyncio_client import rollout_client as rollout_asyncio_client
from rollout.integrations.chat import chat
from rollout.integrations.openai import rollout_client
from rollout.trajectory import build_trajectory, trajectory_problems
from rollout.types import RolloutErrorCategory, RolloutStatus

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
KEY = "secret-of-this-rollout"
SYSTEM = {"role": "system", "content": "You are brief."}
QUESTION = {"role": "user", "content": "What is 6 + 7?"}


@frozen
class Kit:
    """A framework, as these tests use it.

    Attributes:
        adapter: The module under test.
        agent: Makes an agent out of a model and plain functions as tools.
        output: The text that a result ends with.
        text: The text that the last message of a sample says, in the framework's form.
        piece: The piece of text that an event brings, ``None`` if it brings none.
        tool_errors_end_runs: Whether an error of a tool ends the run.
    """

    adapter: Any
    agent: Callable[..., Any]
    output: Callable[[Any], str]
    text: Callable[[dict[str, Any]], str]
    piece: Callable[[Any], str | None]
    tool_errors_end_runs: bool


@asynccontextmanager
async def bridged(app: Any):
    async with open_asyncio_bridge():
        yield


@asynccontextmanager
async def serving(workflow, *, backend=None, lifespan=bridged, **options):
    backend = backend or local_backend(workflow, None, **options)
    async with (
        served(make_app(backend, lifespan=lifespan)) as url,
        RolloutClient(url=url) as client,
    ):
        yield client


async def run(client, endpoint, *, prompt=(QUESTION,), key=KEY, rollout_id=None, **options):
    return await client.run_rollout(
        initial_messages=list(prompt),
        chat_completions_url=endpoint.url,
        rollout_id=rollout_id or fresh_id(),
        llm_api_key=key,
        **{"grade": False, **options},
    )


async def start(client, endpoint, rollout_id, **options):
    return await client.run_rollout_async(
        initial_messages=[QUESTION],
        chat_completions_url=endpoint.url,
        rollout_id=rollout_id,
        llm_api_key=KEY,
        grade=False,
        **options,
    )


def trajectory(sample):
    """The document that is kept of a sample, checked."""
    document = build_trajectory(
        sample.trajectory_messages, rollout_id="r", sample=sample, secrets=[KEY]
    )
    assert trajectory_problems(document) == []
    return document


@pytest.fixture
def workflow(kit):
    """Makes workflows that run one agent."""

    def make(*tools, streamed=False, **options):
        class Solve(AgentWorkflow):
            async def run(self, ctx):
                agent = kit.agent(kit.adapter.rollout_model("policy"), tools)
                if not streamed:
                    await kit.adapter.run_agent(agent, ctx.prompt, **options)
                    return
                async with kit.adapter.stream_agent(agent, ctx.prompt, **options) as events:
                    async for _ in events:
                        pass

        return Solve

    return make


# --- what is said ---------------------------------------------------------------------------------


async def test_an_agent_from_admission_to_reward(kit, workflow):
    class Compare(Grader):
        async def grade(self, ctx):
            ctx.set_reward(float(kit.text(ctx.sample.messages[-1]) == ctx.label))

    backend = LocalBackend(
        workflow=workflow(),
        workflow_config=AgentWorkflowConfig(name="solve"),
        grader=Compare,
    )
    async with scripted_endpoint(say("It is 13")) as endpoint:
        async with serving(None, backend=backend) as client:
            result = await run(
                client, endpoint, prompt=[SYSTEM, QUESTION], label="It is 13", grade=True
            )
            assert (endpoint.connections, endpoint.open_connections) == (1, 1)
        await endpoint.all_closed()  # with the bridge
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert result.sample.reward == 1.0
    assert result.sample.metrics["calls"] == 1
    assert result.sample.metrics["prompt_tokens"] > 0
    assert result.sample.metrics["completion_tokens"] == 3
    sent = endpoint.requests[0]
    assert (sent.key, sent.body["model"]) == (KEY, "policy")
    assert [(each["role"], words(each["content"])) for each in sent.body["messages"]] == [
        ("system", "You are brief."),
        ("user", "What is 6 + 7?"),
    ]


def words(content):
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@pytest.mark.parametrize("streamed", [False, True])
async def test_tools_of_all_three_kinds(kit, workflow, streamed):
    seen = []

    def note():
        context = get_rollout_context()
        seen.append(context and context.rollout_id)

    async def aio_add(left: int, right: int) -> str:
        """Add on asyncio."""
        import asyncio

        await asyncio.sleep(0)
        note()
        return str(left + right)

    def sync_add(left: int, right: int) -> str:
        """Add at once."""
        note()
        return str(left + right)

    @kit.adapter.trio_tool
    async def trio_add(left: int, right: int) -> str:
        """Add on trio."""
        with trio.fail_after(5):
            await trio.lowlevel.checkpoint()
        note()
        return str(left + right)

    steps = (
        call("aio_add", left=1, right=2),
        call("sync_add", left=3, right=3),
        call("trio_add", left=6, right=7),
        say("It is 13"),
    )
    solve = workflow(aio_add, sync_add, trio_add, streamed=streamed)
    async with scripted_endpoint(*steps) as endpoint, serving(solve) as client:
        result = await run(client, endpoint, rollout_id=(name := fresh_id()))
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert seen == [name] * 3
    assert kit.text(result.sample.messages[-1]) == "It is 13"
    last = endpoint.requests[-1].body["messages"]
    assert [words(each["content"]) for each in last if each["role"] == "tool"] == ["3", "6", "13"]
    offered = endpoint.requests[0].body["tools"]
    assert [each["function"]["name"] for each in offered] == ["aio_add", "sync_add", "trio_add"]
    assert set(offered[2]["function"]["parameters"]["properties"]) == {"left", "right"}
    assert result.sample.metrics["tool_calls"] == 3
    assert len(result.sample.extra_fields["tools"]) == 3


async def test_the_trajectory_on_disk(kit, workflow, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)

    def add(left: int, right: int) -> str:
        """Add."""
        return str(left + right)

    backend = LocalBackend(
        workflow=workflow(add),
        workflow_config=AgentWorkflowConfig(
            name="solve", concurrency=ConcurrencyConfig(max_concurrent=1)
        ),
        artifact_root=tmp_path,
    )
    steps = (
        call("add", left=6, right=7),
        refuse(429, f"slow down, {KEY}", retry_after="0.01"),
        refuse(500, f"no {KEY}", retry_after="0.01"),
        say("It is 13", reasoning="Six and seven."),
    )
    async with scripted_endpoint(*steps) as endpoint:
        async with serving(None, backend=backend) as client:
            result = await run(client, endpoint, prompt=[SYSTEM, QUESTION], rollout_id="kept")
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert result.sample.metrics["retries"] == 2
    assert [each["status_code"] for each in result.sample.extra_fields["call_problems"]] == [
        429,
        500,
    ]
    text = (tmp_path / "kept" / "trajectory.json").read_text("utf-8")
    assert KEY not in text
    document = json.loads(text)
    assert trajectory_problems(document) == []
    assert [step["source"] for step in document["steps"]] == ["system", "user", "agent", "agent"]
    first, last = document["steps"][2:]
    assert first["tool_calls"][0]["arguments"] == {"left": 6, "right": 7}
    assert first["observation"]["results"][0]["content"] == "13"
    assert (last["message"], last["reasoning_content"]) == ("It is 13", "Six and seven.")
    assert all("timestamp" in step for step in document["steps"])
    assert {first["model_name"], last["model_name"]} == {"scripted-1"}
    totals, metrics = document["final_metrics"], result.sample.metrics
    assert totals["total_prompt_tokens"] == metrics["prompt_tokens"] > 0
    assert totals["total_completion_tokens"] == metrics["completion_tokens"] > 0
    assert totals["total_cached_tokens"] == metrics["cached_tokens"] == 2
    # Neither in what travels, nor in any log.
    assert KEY not in json.dumps([result.sample.messages, result.sample.extra_fields])
    assert KEY not in caplog.text


async def test_events_as_they_come(kit):
    pieces, results = [], []

    class Stream(AgentWorkflow):
        async def run(self, ctx):
            agent = kit.agent(kit.adapter.rollout_model("policy"), ())
            async with kit.adapter.stream_agent(agent, ctx.prompt) as events:
                pieces.extend([kit.piece(event) async for event in events])
            results.append(events.result)

    async with scripted_endpoint(say("one two three")) as endpoint, serving(Stream) as client:
        result = await run(client, endpoint)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert "".join(piece or "" for piece in pieces) == "one two three"
    assert len([piece for piece in pieces if piece]) > 1
    assert kit.output(results[0]) == "one two three"
    assert endpoint.requests[0].body["stream"] is True
    assert result.sample.metrics["completion_tokens"] == 3
    assert kit.text(result.sample.messages[-1]) == "one two three"


async def test_leaving_a_stream_ends_its_call(kit):
    class Impatient(AgentWorkflow):
        async def run(self, ctx):
            agent = kit.agent(kit.adapter.rollout_model("policy"), ())
            async with kit.adapter.stream_agent(agent, ctx.prompt) as events:
                async for event in events:
                    if kit.piece(event):
                        break
            assert events.result is None

    async with scripted_endpoint(stall("one two three", after=3)) as endpoint:
        async with serving(Impatient) as client:
            result = await run(client, endpoint)
            with trio.fail_after(20):
                await endpoint.requests[0].gone.wait()
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert result.sample.metrics["interrupted_calls"] == 1
    assert "6 + 7" in json.dumps(result.sample.messages)


async def test_what_is_not_of_the_sample(kit):
    class Judged(AgentWorkflow):
        async def run(self, ctx):
            adapter = kit.adapter
            agent = kit.agent(adapter.rollout_model("policy"), ())
            await adapter.run_agent(agent, ctx.prompt)
            judge = kit.agent(adapter.rollout_model("judge", record=False), ())
            await adapter.run_agent(judge, "Was that right?", record=False)

    async with scripted_endpoint(say("It is 13"), say("yes")) as endpoint:
        async with serving(Judged) as client:
            result = await run(client, endpoint)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert [each.body["model"] for each in endpoint.requests] == ["policy", "judge"]
    assert result.sample.metrics["calls"] == 1
    assert kit.text(result.sample.messages[-1]) == "It is 13"
    assert "right?" not in json.dumps(result.sample.messages)


async def test_a_call_on_the_trio_side_is_recorded_too(kit, workflow):
    @kit.adapter.trio_tool
    async def ask() -> str:
        """Ask another model."""
        reply = await chat([{"role": "user", "content": "Well?"}], model="helper")
        return reply.text

    steps = (call("ask"), say("helpful"), say("It is 13"))
    async with scripted_endpoint(*steps) as endpoint, serving(workflow(ask)) as client:
        result = await run(client, endpoint)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert [each.body["model"] for each in endpoint.requests] == ["policy", "helper", "policy"]
    assert result.sample.metrics["calls"] == 3
    (aside,) = result.sample.extra_fields["other_calls"]
    assert aside["replies"][0]["content"] == "helpful"
    assert kit.text(result.sample.messages[-1]) == "It is 13"


@pytest.mark.parametrize("route", ["chat", "responses"])
async def test_a_bare_client_behind_the_bridge(kit, route):
    async def ask(prompt):
        client = rollout_asyncio_client()
        if route == "chat":
            await client.chat.completions.create(model="policy", messages=prompt)
        else:
            await client.responses.create(model="policy", input=prompt)

    class Ask(AgentWorkflow):
        async def run(self, ctx):
            await get_bridge().run(ask, ctx.prompt)

    async with scripted_endpoint(say("It is 13")) as endpoint, serving(Ask) as client:
        result = await run(client, endpoint)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert endpoint.requests[0].key == KEY
    assert result.sample.messages == [QUESTION, {"role": "assistant", "content": "It is 13"}]
    assert result.sample.metrics["completion_tokens"] == 3


async def test_the_example_of_the_page(kit, monkeypatch):
    """Each page's example is a whole server; it is served and asked."""
    name = kit.adapter.__name__
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if f"from {name} import" in block]
    namespace = {"__name__": "documented"}
    exec(code, namespace)
    steps = (call("multiply", left=6, right=7), say("It is 42"))
    async with (
        scripted_endpoint(*steps) as endpoint,
        served(namespace["app"]) as url,
        RolloutClient(url=url) as client,
    ):
        result = await run(client, endpoint)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    last = endpoint.requests[1].body["messages"][-1]
    assert (last["role"], words(last["content"])) == ("tool", "42")
    assert kit.text(result.sample.messages[-1]) == "It is 42"


async def test_runs_beside_each_other_are_all_kept(kit):
    class Twice(AgentWorkflow):
        async def run(self, ctx):
            for question in ("first?", "second?"):
                agent = kit.agent(kit.adapter.rollout_model("policy"), ())
                await kit.adapter.run_agent(agent, question)

    async with scripted_endpoint(say("one"), say("two")) as endpoint, serving(Twice) as client:
        result = await run(client, endpoint)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert "second?" in json.dumps(result.sample.messages)
    (other,) = result.sample.extra_fields["other_runs"]
    assert "first?" in json.dumps(other)
    (aside,) = result.sample.extra_fields["other_calls"]
    assert aside["replies"][0]["content"] == "one"
    assert result.sample.metrics["calls"] == 2


async def test_a_whole_chat_history_as_prompt(kit, workflow):
    history = [
        QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"left": 6, "right": 7}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "13"},
        {"role": "assistant", "content": "It is 13."},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ]
    async with scripted_endpoint(say("Yes.")) as endpoint, serving(workflow()) as client:
        result = await run(client, endpoint, prompt=history)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    sent = endpoint.requests[0].body["messages"]
    assert [each["role"] for each in sent] == ["user", "assistant", "tool", "assistant", "user"]
    function = sent[1]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == (
        "add",
        {"left": 6, "right": 7},
    )
    assert [words(each["content"]) for each in sent[2:]] == ["13", "It is 13.", "Sure?"]


# --- retries, errors, the way out -----------------------------------------------------------------


async def test_a_refusal_that_stays(kit, workflow):
    async with scripted_endpoint(refuse(400, f"bad request with {KEY}")) as endpoint:
        async with serving(workflow()) as client:
            result = await run(client, endpoint)
    assert result.status is RolloutStatus.FAILURE
    assert result.err_category is RolloutErrorCategory.AGENT_ERROR
    assert "bad request" in result.err_message
    assert KEY not in result.err_message
    assert len(endpoint.requests) == 1


async def test_a_stream_that_breaks_off(kit, workflow):
    steps = (Step(cut_after=2, texts=[["one", " two"]]), say("It is 13"))
    async with scripted_endpoint(*steps) as endpoint, serving(workflow(streamed=True)) as client:
        result = await run(client, endpoint)
        await endpoint.all_closed()
    assert len(endpoint.requests) == 1
    assert (result.status, result.err_category) == (
        RolloutStatus.FAILURE,
        RolloutErrorCategory.AGENT_ERROR,
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
