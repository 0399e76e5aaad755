"""A rollout server for arithmetic questions: one file, one `app`.

Start it with::

    rollout serve examples/arithmetic_server.py:app

``ROLLOUT_MODEL`` in the environment names the model to ask for. With
``ROLLOUT_SERVER_API_KEY``, callers have to present that key.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar

import httpx

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowContext,
    AgentWorkflowOutput,
    ConcurrencyConfig,
    Grader,
    GraderContext,
    LocalBackend,
    get_rollout_context,
)
from rollout.server import RolloutServer, create_rollout_server

http_client: ContextVar[httpx.AsyncClient] = ContextVar("http_client")


class SolverConfig(AgentWorkflowConfig):
    """What can be set about the agent."""

    model: str
    max_tokens: int = 256


class Solve(AgentWorkflow[SolverConfig]):
    """Asks the policy once, at the endpoint that the rollout came with."""

    async def run(self, ctx: AgentWorkflowContext[SolverConfig]) -> AgentWorkflowOutput:
        """Return the conversation with the answer at its end."""
        rollout = get_rollout_context()
        assert rollout is not None, "a server runs each workflow inside a rollout"
        assert ctx.config is not None
        seed = (ctx.metadata or {}).get("seed")  # samples of one prompt differ by their seeds
        response = await http_client.get().post(
            f"{rollout.chat_completions_url.rstrip('/')}/chat/completions",
            headers={"Authorization": f"Bearer {rollout.api_key}"} if rollout.api_key else {},
            json={
                "model": ctx.config.model,
                "max_tokens": ctx.config.max_tokens,
                "messages": ctx.prompt,
                **({} if seed is None else {"seed": seed}),
            },
        )
        if response.is_error:
            raise RuntimeError(f"the model answered {response.status_code}: {response.text}")
        answer = response.json()["choices"][0]["message"]
        return AgentWorkflowOutput(messages=[*ctx.prompt, answer], metrics={"turns": 1})


class LastNumberIsRight(Grader):
    """Rewards an answer whose last number is the label."""

    def grade(self, ctx: GraderContext) -> None:
        """Set the reward to 1 or 0."""
        assert ctx.sample is not None
        numbers = re.findall(r"-?\d+", str(ctx.sample.messages[-1]["content"]))
        ctx.set_reward(1.0 if numbers and numbers[-1] == ctx.label else 0.0)


@asynccontextmanager
async def lifespan(_: RolloutServer) -> AsyncGenerator[None, None]:
    """Open one HTTP client for all rollouts; what is set here is set in every one of them."""
    async with httpx.AsyncClient(timeout=60) as http:
        http_client.set(http)
        yield


app = create_rollout_server(
    backend=LocalBackend(
        workflow=Solve,
        workflow_config=SolverConfig(
            name="arithmetic",
            model=os.environ.get("ROLLOUT_MODEL", "policy"),
            concurrency=ConcurrencyConfig(max_concurrent=16),
        ),
        grader=LastNumberIsRight,
        max_queue_depth=1000,
    ),
    lifespan=lifespan,
    api_key=os.environ.get("ROLLOUT_SERVER_API_KEY"),
)
