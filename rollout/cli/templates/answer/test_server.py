"""The server in one process, in simulated time, with a model that the test scripts."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest
import server
import trio

from rollout.client import RolloutClient
from rollout.types import RolloutStatus


def script(monkeypatch, text, after_sec=0.0):
    """Let the model give this answer to everything, after so many seconds."""

    async def chat(messages, **options):
        await trio.sleep(after_sec)
        return SimpleNamespace(message={"role": "assistant", "content": text}, text=text)

    monkeypatch.setattr(server, "chat", chat)


async def run(**fields):
    app = server.create_app()
    async with (
        app.serving(),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http,
        RolloutClient(url="http://server", http_client=http, feed=False) as client,
    ):
        prompt = [{"role": "user", "content": "What is 6 * 7?"}]
        return await client.run_rollout(prompt, "http://model/v1", "r", label="42", **fields)


@pytest.mark.parametrize(("answer", "reward"), [("6 * 7 = 42", 1.0), ("41", 0.0), ("", 0.0)])
async def test_the_last_number_counts(monkeypatch, autojump_clock, answer, reward):
    script(monkeypatch, answer)
    result = await run()
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample.reward == reward


async def test_a_slow_model_costs_its_rollout(monkeypatch, autojump_clock):
    script(monkeypatch, "42", after_sec=3600)
    result = await run(agent_timeout_sec=60)
    assert result.err_category == "timeout"
