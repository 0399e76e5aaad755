"""A rollout server: an agent that calls tools over several turns, and a grader for its answer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
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


def multiply(left: float, right: float) -> float:
    """Return the product of two numbers."""
    return float(left) * float(right)


def add(left: float, right: float) -> float:
    """Return the sum of two numbers."""
    return float(left) + float(right)


TOOLS: dict[str, Callable[..., float]] = {"multiply": multiply, "add": add}
NUMBERS = {
    "type": "object",
    "properties": {"left": {"type": "number"}, "right": {"type": "number"}},
    "required": ["left", "right"],
}
DESCRIPTIONS = [
    {
        "type": "function",
        "function": {"name": name, "description": tool.__doc__, "parameters": NUMBERS},
    }
    for name, tool in TOOLS.items()
]


class ToolConfig(AgentWorkflowConfig):
    """What can be set about the agent."""

    model: str = "policy"
    max_turns: int = 8


class UseTools(AgentWorkflow[ToolConfig]):
    """Asks the model, calls what it wants called, and so on until it answers."""

    async def run(self, ctx: AgentWorkflowContext[ToolConfig]) -> list[dict[str, Any]]:
        """Return the conversation."""
        assert ctx.config is not None
        messages = list(ctx.prompt)
        for _ in range(ctx.config.max_turns):
            reply = await chat(messages, model=ctx.config.model, tools=DESCRIPTIONS)
            messages.append(reply.message)
            calls = reply.message.get("tool_calls")
            if not calls:
                return messages
            messages += [answer(call) for call in calls]
        raise RuntimeError(f"no answer after {ctx.config.max_turns} turns")


def answer(call: dict[str, Any]) -> dict[str, Any]:
    """Run one call; an error is for the model to read, which may do better next time."""
    try:
        function = call["function"]
        content = f"{TOOLS[function['name']](**json.loads(function['arguments'])):.15g}"
    except (KeyError, TypeError, ValueError) as error:
        content = f"error: {error!r}"
    return {"role": "tool", "tool_call_id": call.get("id"), "content": content}


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
            workflow=UseTools,
            workflow_config=ToolConfig(
                name="tools", model=os.environ.get("ROLLOUT_MODEL", "policy")
            ),
            grader=LastNumber,
        ),
        lifespan=share_connections,
    )


app = create_app()
