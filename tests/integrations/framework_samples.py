"""What is said in rollouts of a framework; each of them passes these tests.

A test module of a framework imports all names from here and provides the fixture ``kit``.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from pathlib import Path

import pytest
import trio
from integrations.frameworks import (
    KEY,
    QUESTION,
    SYSTEM,
    run,
    serving,
    words,
)
from integrations.scripted import call, refuse, say, scripted_endpoint, stall
from support import fresh_id, served

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    Grader,
    LocalBackend,
    get_rollout_context,
)
from rollout.client import RolloutClient
from rollout.integrations.asyncio_bridge import get_bridge
from rollout.integrations.asyncio_client import rollout_client as rollout_asyncio_client
from rollout.integrations.chat import chat
from rollout.trajectory import trajectory_problems
from rollout.types import RolloutStatus

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


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
    (known,) = result.sample.extra_fields["reply_details"]
    assert (known["model"], known["usage"]["completion_tokens"]) == ("scripted-1", 3)
    sent = endpoint.requests[0]
    assert (sent.key, sent.body["model"]) == (KEY, "policy")
    assert [(each["role"], words(each["content"])) for each in sent.body["messages"]] == [
        ("system", "You are brief."),
        ("user", "What is 6 + 7?"),
    ]


async def test_a_model_that_only_streams(kit):
    def add(left: int, right: int) -> str:
        """Add."""
        return str(left + right)

    outputs = []

    class Solve(AgentWorkflow):
        async def run(self, ctx):
            agent = kit.agent(kit.adapter.rollout_model("policy"), (add,))
            outputs.append(await kit.adapter.run_agent(agent, ctx.prompt))

    def script(request):
        if not request.body.get("stream"):
            return refuse(400, "this endpoint only streams")
        return [call("add", left=6, right=7), say("It is 13")][request.number]

    async with scripted_endpoint(script) as endpoint, serving(Solve) as client:
        result = await run(client, endpoint)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert kit.output(outputs[0]) == kit.text(result.sample.messages[-1]) == "It is 13"
    known = [each["usage"] for each in result.sample.extra_fields["reply_details"]]
    assert [each["completion_tokens"] for each in known] == [1, 3]
    assert kit.tokens(outputs[0]) == (sum(each["prompt_tokens"] for each in known), 4)


async def test_a_model_that_does_not_stream(kit):
    if "streamed" not in inspect.signature(kit.adapter.rollout_model).parameters:
        pytest.skip("this framework always asks for streams")

    class Solve(AgentWorkflow):
        async def run(self, ctx):
            model = kit.adapter.rollout_model("policy", streamed=False)
            await kit.adapter.run_agent(kit.agent(model, ()), ctx.prompt)

    async with scripted_endpoint(say("It is 13")) as endpoint, serving(Solve) as client:
        result = await run(client, endpoint)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert not endpoint.requests[0].body.get("stream")
    assert kit.text(result.sample.messages[-1]) == "It is 13"


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
    problems = result.sample.extra_fields["call_problems"]
    assert [each["status_code"] for each in problems] == [429, 500]
    assert all(each["error"].startswith(f"HTTP {each['status_code']}: ") for each in problems)
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
