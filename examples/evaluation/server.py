"""The agent and the grader of the evaluation in this folder.

`rollout eval run` starts it on a free port; ``ROLLOUT_MODEL`` is the model of the config.
"""

from __future__ import annotations

import os
import re
from typing import Any

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowContext,
    ConcurrencyConfig,
    Grader,
    GraderContext,
    LocalBackend,
    get_rollout_context,
)
from rollout.integrations.chat import chat, share_connections
from rollout.server import create_rollout_server


class Solve(AgentWorkflow[Any]):
    """Asks the model once; the recorded conversation is the sample."""

    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        """Ask with the attempt's number for a seed."""
        rollout = get_rollout_context()
        assert rollout is not None, "a server runs each workflow inside a rollout"
        await chat(
            ctx.prompt,
            model=os.environ.get("ROLLOUT_MODEL", "policy"),
            seed=attempt_number(rollout.rollout_id),
        )


class LastNumberIsRight(Grader):
    """Rewards an answer whose last number is the row's ground truth."""

    async def grade(self, ctx: GraderContext) -> None:
        """Set the reward to 1 or 0."""
        assert ctx.sample is not None
        numbers = re.findall(r"-?\d+", str(ctx.sample.messages[-1]["content"]))
        ctx.set_reward(1.0 if numbers and numbers[-1] == ctx.label else 0.0)


def attempt_number(rollout_id: str) -> int:
    """Read the attempt out of an id such as ``RUN-ROW-ATTEMPT-TOKEN``, for a model with seeds.

    The same attempt gets the same seed whenever it runs, so the run can be repeated.
    """
    return int(rollout_id.split("-")[-2])


app = create_rollout_server(
    backend=LocalBackend(
        workflow=Solve,
        workflow_config=AgentWorkflowConfig(
            name="arithmetic", concurrency=ConcurrencyConfig(max_concurrent=16)
        ),
        grader=LastNumberIsRight,
        artifact_root=False,  # the evaluation keeps every conversation in its own folder
    ),
    lifespan=share_connections,
)
