"""The server in one process: in simulated time with a scripted shell, and with real sandboxes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest
import server
import trio

from rollout.client import RolloutClient
from rollout.sandbox import CommandResult, NamespaceError, check_system

CHECK = 'test "$ANSWER" = $((6 * 7))'


def script(monkeypatch, *replies):
    """Let the model give these replies, one a second."""
    left = list(replies)

    async def chat(messages, **options):
        await trio.sleep(1)
        text = left.pop(0)
        return SimpleNamespace(message={"role": "assistant", "content": text}, text=text)

    monkeypatch.setattr(server, "chat", chat)


async def run():
    app = server.create_app()
    async with (
        app.serving(),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http,
        RolloutClient(url="http://server", http_client=http, feed=False) as client,
    ):
        prompt = [{"role": "user", "content": "What is 6 * 7?"}]
        return await client.run_rollout(prompt, "http://model/v1", "r", metadata={"check": CHECK})


async def test_commands_run_one_after_the_other(monkeypatch, autojump_clock):
    ran = []

    @asynccontextmanager
    async def open_shell():
        async def shell(script, **env):
            ran.append((script, env))
            await trio.sleep(5)
            return CommandResult(stdout="42\n", stderr="", return_code=0)

        yield shell

    monkeypatch.setattr(server, "open_shell", open_shell)
    script(monkeypatch, "```sh\necho $((6 * 7))\n```", "It is 42.")
    result = await run()
    assert result.sample.reward == 1.0
    assert result.sample.messages[2]["content"] == "exit code 0\n42\n"
    assert ran == [("echo $((6 * 7))\n", {}), (CHECK, {"ANSWER": "42"})]


@pytest.mark.parametrize(("last", "reward"), [("It is 42.", 1.0), ("It is 41.", 0.0)])
async def test_the_same_in_real_sandboxes(monkeypatch, last, reward):
    try:
        await trio.to_thread.run_sync(check_system)
    except NamespaceError as error:
        pytest.skip(str(error))
    script(monkeypatch, "```sh\necho $((6 * 7))\n```", last)
    result = await run()
    assert result.sample.reward == reward
    assert result.sample.messages[2]["content"] == "exit code 0\n42\n"
