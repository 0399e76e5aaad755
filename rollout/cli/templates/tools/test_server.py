"""The server in one process, in simulated time, with a model that the test scripts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import httpx
import server
import trio

from rollout.client import RolloutClient
from rollout.types import RolloutStatus


def script(monkeypatch, *replies):
    """Let the model give these messages, one a second."""
    left = list(replies)

    async def chat(messages, **options):
        await trio.sleep(1)
        return SimpleNamespace(message={"role": "assistant", **left.pop(0)})

    monkeypatch.setattr(server, "chat", chat)


def asks(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


async def run(**fields):
    app = server.create_app()
    async with (
        app.serving(),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http,
        RolloutClient(url="http://server", http_client=http, feed=False) as client,
    ):
        prompt = [{"role": "user", "content": "What is 6 * 7?"}]
        return await client.run_rollout(prompt, "http://model/v1", "r", label="42", **fields)


async def test_a_tool_is_called_and_its_result_is_read(monkeypatch, autojump_clock):
    script(monkeypatch, asks("multiply", left=6, right=7), {"content": "It is 42."})
    result = await run()
    assert result.sample.reward == 1.0
    assert [message["role"] for message in result.sample.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert result.sample.messages[2]["content"] == "42"


async def test_a_wrong_call_is_an_error_for_the_model(monkeypatch, autojump_clock):
    script(monkeypatch, asks("divide", left=6), asks("add", left="x"), {"content": "no idea"})
    result = await run()
    assert result.sample.reward == 0.0
    assert "error: KeyError('divide')" in result.sample.messages[2]["content"]
    assert "error: TypeError" in result.sample.messages[4]["content"]


async def test_an_agent_that_never_answers_fails(monkeypatch, autojump_clock):
    script(monkeypatch, *[asks("add", left=1, right=1)] * 8)
    result = await run()
    assert result.status is RolloutStatus.FAILURE
    assert result.err_message == "no answer after 8 turns"
