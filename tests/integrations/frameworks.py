"""What the tests of all frameworks behind the bridge share: how one is used, servers, rollouts.

A rollout goes the whole way: our client, a rollout server with `LocalBackend`, a workflow, the
framework on the bridge, a scripted endpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from attrs import frozen
from support import fresh_id, local_backend, make_app, served

from rollout import (
    AgentWorkflow,
)
from rollout.client import RolloutClient
from rollout.integrations.asyncio_bridge import open_asyncio_bridge
from rollout.trajectory import build_trajectory, trajectory_problems

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
        tokens: The tokens of prompts and replies that a result counts.
        piece: The piece of text that an event brings, ``None`` if it brings none.
        tool_errors_end_runs: Whether an error of a tool ends the run.
    """

    adapter: Any
    agent: Callable[..., Any]
    output: Callable[[Any], str]
    text: Callable[[dict[str, Any]], str]
    tokens: Callable[[Any], tuple[int, int]]
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


def words(content):
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


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
