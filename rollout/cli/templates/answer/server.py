"""A rollout server: an agent that asks the model once, and a grader that compares the answer."""

from __future__ import annotations

import os
import re
from typing import Any

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowContext,
    Grader,
    GraderContext,
    LocalBackend,
)
from rollout.integrations.chat import chat, share_connections
from rollout.server import RolloutServer, create_rollout_server


class AnswerConfig(AgentWorkflowConfig):
    """What can be set about the agent."""

    model: str = "policy"


class Answer(AgentWorkflow[AnswerConfig]):
    """Asks the model once."""

    async def run(self, ctx: AgentWorkflowContext[AnswerConfig]) -> list[dict[str, Any]]:
        """Return the conversation."""
        assert ctx.config is not None
        reply = await chat(ctx.prompt, model=ctx.config.model)
        return [*ctx.prompt, reply.message]


class LastNumber(Grader):
    """Rewards an answer whose last number is the label."""

    def grade(self, ctx: GraderContext) -> None:
        """Set the reward to 1 or 0."""
        assert ctx.sample is not None
        numbers = re.findall(r"-?\d+", str(ctx.sample.messages[-1]["content"]))
        ctx.set_reward(1.0 if numbers and numbers[-1] == ctx.label else 0.0)


def create_app() -> RolloutServer:
    """Make the application; a test makes its own."""
    return create_rollout_server(
        backend=LocalBackend(
            workflow=Answer,
            workflow_config=AnswerConfig(
                name="answer", model=os.environ.get("ROLLOUT_MODEL", "policy")
            ),
            grader=LastNumber,
        ),
        lifespan=share_connections,
    )


app = create_app()
