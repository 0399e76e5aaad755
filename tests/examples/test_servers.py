"""The examples that are rollout servers, each against a scripted endpoint, over real HTTP."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import asynccontextmanager

import pytest
import trio
from examples.loading import example
from integrations.scripted import Step, call, refuse, say, scripted_endpoint, stall
from support import fresh_id, make_app, served

from rollout.client import RolloutClient
from rollout.integrations.chat import share_connections
from rollout.types import RolloutErrorCategory, RolloutStatus

KEY = "key-of-the-policy"


@asynccontextmanager
async def client_of(module, *, backend=None):
    """Serve the backend of an example's app; yields a client of it."""
    app = make_app(backend or module.app.backend, lifespan=share_connections)
    async with served(app) as url, RolloutClient(url=url) as client:
        yield client


def ask(chat_url, question="What is 6 * 7?", label="42", **more):
    return {
        "initial_messages": [{"role": "user", "content": question}],
        "chat_completions_url": chat_url,
        "rollout_id": fresh_id(),
        "llm_api_key": KEY,
        "label": label,
        **more,
    }


# --- several turns with tools ---------------------------------------------------------------


async def test_tool_agent():
    module = example("tool_agent")
    two = Step(calls=[("price", {"item": "apple"}), ("price", {"item": "cheese"})])
    steps = (two, call("multiply", left=11, right=4), say("It costs 44."))
    async with scripted_endpoint(*steps) as endpoint, client_of(module) as client:
        result = await client.run_rollout(**ask(endpoint.url, "4 cheeses?", "44"))
    assert (result.status, result.sample.reward) == (RolloutStatus.SUCCESS, 1.0)
    roles = [message["role"] for message in result.sample.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    answers = [m["content"] for m in result.sample.messages if m["role"] == "tool"]
    assert answers == ["3", "11", "44"]
    offered = endpoint.requests[0].body["tools"]
    assert [tool["function"]["name"] for tool in offered] == ["price", "multiply"]
    assert endpoint.requests[0].key == KEY


def called(arguments=None, *, calls=None):
    """A reply with calls as some models make them."""
    call = {"id": "c1", "function": {"name": "price", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": calls or [call]}
    return Step(raw=json.dumps({"choices": [{"index": 0, "message": message}]}).encode())


@pytest.mark.parametrize(
    "wrong",
    [
        call("price", item="gold"),
        call("price", thing="apple"),
        call("steal", item="apple"),
        call("multiply", left="a", right="b"),
        call("multiply", left="a", right=10_000_000_000),
        call("price", item=["apple"]),
        called(None),
        called("["),
        called("[" * 100_000),
    ],
)
async def test_tool_agent_tells_the_model_what_went_wrong(wrong):
    steps = (wrong, say("I cannot say."))
    async with scripted_endpoint(*steps) as endpoint, client_of(example("tool_agent")) as client:
        result = await client.run_rollout(**ask(endpoint.url))
    assert (result.status, result.sample.reward) == (RolloutStatus.SUCCESS, 0.0)
    assert result.sample.messages[2]["content"].startswith("error: ")


async def test_tool_agent_does_without_ids():
    calls = [
        {"function": {"name": "price", "arguments": json.dumps({"item": item})}}
        for item in ("apple", "bread")
    ]
    async with (
        scripted_endpoint(called(calls=calls), say("7")) as endpoint,
        client_of(example("tool_agent")) as client,
    ):
        result = await client.run_rollout(**ask(endpoint.url))
    answers = [m["content"] for m in result.sample.messages if m["role"] == "tool"]
    assert answers == ["3", "4"]


async def test_tool_agent_ends_after_its_turns(caplog):
    steps = (call("price", item="apple"),)
    async with scripted_endpoint(*steps) as endpoint, client_of(example("tool_agent")) as client:
        with caplog.at_level(logging.CRITICAL):
            result = await client.run_rollout(**ask(endpoint.url))
    assert (result.status, result.err_message) == (
        RolloutStatus.FAILURE,
        "no answer after 8 turns",
    )
    assert len(endpoint.requests) == 8


# --- a judge --------------------------------------------------------------------------------


def judge_backend(module, url):
    config = module.JudgeConfig(name="judge", url=url)
    backend = type(module.app.backend)
    return backend(workflow=module.Ask, grader=module.Judge, grader_config=config)


@pytest.mark.parametrize(("verdict", "reward"), [("correct", 1.0), ("incorrect", 0.0)])
async def test_llm_judge(monkeypatch, verdict, reward):
    monkeypatch.setenv("JUDGE_API_KEY", "key-of-the-judge")
    module = example("llm_judge")
    said = say(json.dumps({"verdict": verdict, "reason": "It says so."}))
    async with (
        scripted_endpoint(say("42, I think")) as policy,
        scripted_endpoint(said) as judge,
        client_of(module, backend=judge_backend(module, judge.url)) as client,
    ):
        result = await client.run_rollout(**ask(policy.url))
    assert (result.status, result.sample.reward) == (RolloutStatus.SUCCESS, reward)
    assert result.sample.extra_fields["judge_reason"] == "It says so."
    assert [message["content"] for message in result.sample.messages] == [
        "What is 6 * 7?",
        "42, I think",
    ]
    asked = judge.requests[0]
    assert asked.key == "key-of-the-judge"
    assert json.loads(asked.body["messages"][1]["content"]) == {
        "reference": "42",
        "answer": "42, I think",
    }
    assert policy.requests[0].key == KEY


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("Correct!", "is no JSON"),
        ('"correct"', "is no verdict"),
        ('{"verdict": "maybe", "reason": "x"}', "is no verdict"),
        ('{"verdict": ["correct"], "reason": "x"}', "is no verdict"),
        ('{"verdict": "correct"}', "is no verdict"),
    ],
)
async def test_llm_judge_takes_no_other_reply(said, message, caplog):
    module = example("llm_judge")
    async with (
        scripted_endpoint(say("42")) as policy,
        scripted_endpoint(say(said)) as judge,
        client_of(module, backend=judge_backend(module, judge.url)) as client,
    ):
        with caplog.at_level(logging.CRITICAL):
            result = await client.run_rollout(**ask(policy.url))
    assert result.status is RolloutStatus.FAILURE
    assert result.err_category is RolloutErrorCategory.VALIDATION_ERROR
    assert message in result.err_message


async def test_llm_judge_that_is_away(caplog):
    module = example("llm_judge")
    async with (
        scripted_endpoint(say("42")) as policy,
        scripted_endpoint(refuse(500, "overloaded")) as judge,
        client_of(module, backend=judge_backend(module, judge.url)) as client,
    ):
        with caplog.at_level(logging.CRITICAL):
            result = await client.run_rollout(**ask(policy.url))
    assert result.status is RolloutStatus.FAILURE
    assert "500: overloaded" in result.err_message


# --- a sample source ------------------------------------------------------------------------


async def test_custom_sample_source():
    module = example("custom_sample_source")
    steps = (say("54"), say("No, 42."))
    async with scripted_endpoint(*steps) as endpoint, client_of(module) as client:
        result = await client.run_rollout(**ask(endpoint.url, grade=False))
    assert result.status is RolloutStatus.SUCCESS
    assert [(m["role"], m["content"]) for m in result.sample.messages] == [
        ("user", "What is 6 * 7?"),
        ("assistant", "54"),
        ("user", "Look again: are you sure?"),
        ("assistant", "No, 42."),
    ]
    assert result.sample.metrics == {"turns": 2}
    times = result.sample.extra_fields["said_after_sec"]
    assert len(times) == 4
    assert times == sorted(times)
    assert endpoint.requests[1].body["messages"] == result.sample.messages[:3]


# --- a backend ------------------------------------------------------------------------------

WAITS = """
import json, socket, sys
task = json.load(sys.stdin)
with socket.create_connection(("127.0.0.1", int(task["label"]))) as connection:
    connection.sendall(b"here")
    connection.recv(1)
"""


async def test_custom_backend():
    async with client_of(example("custom_backend")) as client:
        right = await client.run_rollout(**ask("http://127.0.0.1:9/v1"))
        wrong = await client.run_rollout(**ask("http://127.0.0.1:9/v1", label="43"))
        alone = await client.run_rollout(**ask("http://127.0.0.1:9/v1", grade=False))
    assert [r.status for r in (right, wrong, alone)] == [RolloutStatus.SUCCESS] * 3
    assert [r.sample.reward for r in (right, wrong, alone)] == [1.0, 0.0, None]
    assert right.sample.messages[-1] == {"role": "assistant", "content": "42"}
    assert right.agent_started_at is not None


async def test_custom_backend_tells_of_a_process_that_fails():
    module = example("custom_backend")
    backend = module.ProcessBackend(
        command=[sys.executable, "-c", "raise SystemExit(7)"], max_concurrent=1, max_queued=1
    )
    async with client_of(module, backend=backend) as client:
        result = await client.run_rollout(**ask("http://127.0.0.1:9/v1"))
    assert (result.status, result.err_message) == (RolloutStatus.FAILURE, "exit code 7")
    assert result.err_category is RolloutErrorCategory.AGENT_ERROR


async def test_custom_backend_cancels_what_runs_and_what_waits():
    module = example("custom_backend")
    backend = module.ProcessBackend(
        command=[sys.executable, "-c", WAITS], max_concurrent=1, max_queued=1
    )
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = str(listener.socket.getsockname()[1])
    chat_url = "http://127.0.0.1:9/v1"
    async with listener, client_of(module, backend=backend) as client:
        runs = await client.run_rollout_async(**ask(chat_url, label=port))
        async with await listener.accept() as process:
            assert await process.receive_some() == b"here"
            waits = await client.run_rollout_async(**ask(chat_url, label=port))
            assert not backend.has_capacity()
            health = await client.health()
            assert (health["running"], health["queued"]) == (1, 1)
            both = await client.cancel_rollouts(ids=[runs.rollout_id, waits.rollout_id])
            assert both.dispositions == {
                runs.rollout_id: "cancelled_running",
                waits.rollout_id: "cancelled_queued",
            }
            assert await process.receive_some() == b"", "the process has ended"
        ended, never = await runs, await waits
    assert ended.status is never.status is RolloutStatus.CANCELLED
    assert ended.agent_started_at is not None
    assert never.agent_started_at is None
    assert backend.executions == {}


async def test_custom_backend_keeps_the_deadline_of_the_agent():
    module = example("custom_backend")
    backend = module.ProcessBackend(
        command=[sys.executable, "-c", WAITS], max_concurrent=1, max_queued=1
    )
    async with client_of(module, backend=backend) as client:
        result = await client.run_rollout(**ask("http://127.0.0.1:9/v1", agent_timeout_sec=0))
    assert (result.status, result.err_category) == (
        RolloutStatus.FAILURE,
        RolloutErrorCategory.TIMEOUT,
    )


# --- all of them ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tool_agent", "llm_judge", "custom_sample_source"])
async def test_a_cancelled_rollout_hangs_up_on_the_model(name):
    async with scripted_endpoint(stall()) as endpoint, client_of(example(name)) as client:
        # Not graded, as one of them has no grader.
        handle = await client.run_rollout_async(**ask(endpoint.url, grade=False))
        request = await endpoint.received()
        await request.stalled.wait()
        await client.cancel_rollout(handle.rollout_id)
        result = await handle
        await request.gone.wait()
        await endpoint.all_closed()
    assert result.status is RolloutStatus.CANCELLED
