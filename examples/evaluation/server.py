"""The agent and the grader of the evaluation in this folder.

`rollout eval run` starts it on a free port; ``ROLLOUT_MODEL`` is the model of the config.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

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


class Solve(AgentWorkflow[Any]):
    """Asks the model once."""

    async def run(self, ctx: AgentWorkflowContext[Any]) -> AgentWorkflowOutput:
        """Return the conversation with the answer at its end."""
        rollout = get_rollout_context()
        assert rollout is not None, "a server runs each workflow inside a rollout"
        response = await http_client.get().post(
            f"{rollout.chat_completions_url.rstrip('/')}/chat/completions",
            headers={"Authorization": f"Bearer {rollout.api_key}"} if rollout.api_key else {},
            json={
                "model": os.environ.get("ROLLOUT_MODEL", "policy"),
                "messages": ctx.prompt,
                "seed": attempt_number(rollout.rollout_id),
            },
        )
        if response.is_error:
            raise RuntimeError(f"the model answered {response.status_code}: {response.text}")
        body = response.json()
        # With the usage in the message, the evaluation knows how many tokens it took.
        answer = {**body["choices"][0]["message"], "usage": body["usage"]}
        return AgentWorkflowOutput(
            messages=[*ctx.prompt, answer],
            metrics={"answer_length": len(answer["content"])},
        )


class LastNumberIsRight(Grader):
    """Rewards an answer whose last number is the row's ground truth."""

    def grade(self, ctx: GraderContext) -> None:
        """Set the reward to 1 or 0."""
        assert ctx.sample is not None
        numbers = re.findall(r"-?\d+", str(ctx.sample.messages[-1]["content"]))
        ctx.set_reward(1.0 if numbers and numbers[-1] == ctx.label else 0.0)


def attempt_number(rollout_id: str) -> int:
    """Read the attempt out of an id such as ``RUN-ROW-ATTEMPT-TOKEN``, for a model with seeds.

    The same attempt gets the same seed whenever it runs, so the run can be repeated.
    """
    return int(rollout_id.split("-")[-2])


@asynccontextmanager
async def lifespan(_: RolloutServer) -> AsyncGenerator[None, None]:
    """Open one HTTP client for all rollouts; what is set here is set in every one of them."""
    async with httpx.AsyncClient(timeout=60) as http:
        http_client.set(http)
        yield


app = create_rollout_server(
    backend=LocalBackend(
        workflow=Solve,
        workflow_config=AgentWorkflowConfig(
            name="arithmetic", concurrency=ConcurrencyConfig(max_concurrent=16)
        ),
        grader=LastNumberIsRight,
        artifact_root=False,  # the evaluation keeps every conversation in its own folder
    ),
    lifespan=lifespan,
)
