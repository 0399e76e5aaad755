"""The examples of the page about asyncio frameworks do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

from support import CHAT_URL, fresh_id, prompt, served

from rollout import RolloutContext
from rollout.client import RolloutClient
from rollout.integrations.asyncio_bridge import open_asyncio_bridge

PAGE = Path(__file__).parents[3] / "docs" / "asyncio-bridge.md"


def example(marker):
    blocks = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    (code,) = [block for block in blocks if marker in block]
    namespace = {"__name__": "documented"}
    exec(code, namespace)
    return namespace


async def test_the_workflow_that_calls_a_framework():
    rollout_id = fresh_id()
    async with (
        served(example("class Ask")["app"]) as url,
        RolloutClient(url=url) as client,
    ):
        result = await client.run_rollout(
            initial_messages=prompt(),
            chat_completions_url=CHAT_URL,
            rollout_id=rollout_id,
            grade=False,
        )
    assert result.sample.messages[-1]["content"] == f"{rollout_id} asked: What is 6 * 7?"


async def test_the_stream():
    async with open_asyncio_bridge() as bridge:
        assert await example("async def tokens")["first_token"](bridge) == "one"


async def test_the_way_back():
    class Progress:
        started = 0

        def report_agent_started(self, at=None):
            self.started += 1

    progress = Progress()
    async with open_asyncio_bridge() as bridge:
        with RolloutContext(rollout_id="r", progress=progress):
            agent = example("async def agent")["agent"]
            assert await bridge.run(agent, bridge, "word") == "WORD"
    assert progress.started == 1
