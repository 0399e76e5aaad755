"""An agent that calls tools over several turns: one file, one `app`.

Start it with::

    rollout serve examples/tool_agent.py:app

``ROLLOUT_MODEL`` in the environment names the model to ask for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowContext,
    ConcurrencyConfig,
    Grader,
    GraderContext,
    LocalBackend,
)
from rollout.integrations.chat import chat, share_connections
from rollout.server import create_rollout_server

PRICES = {"apple": 3, "bread": 4, "cheese": 11}


async def price(item: str) -> int:
    """Return the price of one item."""
    await trio.lowlevel.checkpoint()  # a real tool would ask a database here
    return PRICES[item]


async def multiply(left: float, right: float) -> float:
    """Return the product of two numbers."""
    await trio.lowlevel.checkpoint()
    # Arguments are the model's: "spam" * 1_000_000_000 is no product, but fills the memory.
    return float(left) * float(right)


TOOLS: dict[str, Callable[..., Awaitable[float]]] = {"price": price, "multiply": multiply}


def describe(name: str, **types: str) -> dict[str, Any]:
    """Return the form in which a model learns of a tool."""
    parameters = {
        "type": "object",
        "properties": {parameter: {"type": kind} for parameter, kind in types.items()},
        "required": list(types),
    }
    function = {"name": name, "description": TOOLS[name].__doc__, "parameters": parameters}
    return {"type": "function", "function": function}


DESCRIPTIONS = [
    describe("price", item="string"),
    describe("multiply", left="number", right="number"),
]


class ToolConfig(AgentWorkflowConfig):
    """What can be set about the agent."""

    model: str = "policy"
    max_turns: int = 8


class UseTools(AgentWorkflow[ToolConfig]):
    """Asks the model, calls what it wants called, and so on until it answers."""

    async def run(self, ctx: AgentWorkflowContext[ToolConfig]) -> None:
        """Return nothing: the sample is the conversation that `chat` has recorded."""
        assert ctx.config is not None
        messages = list(ctx.prompt)
        for _ in range(ctx.config.max_turns):
            reply = await chat(messages, model=ctx.config.model, tools=DESCRIPTIONS)
            calls = reply.message.get("tool_calls")
            if not calls:
                return
            messages += [reply.message, *await call_all(calls)]
        raise RuntimeError(f"no answer after {ctx.config.max_turns} turns")


async def call_all(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the calls of one turn side by side; their results come in the order of the calls."""
    results = [{"role": "tool", "tool_call_id": call.get("id"), "content": ""} for call in calls]

    async def call_one(function: dict[str, Any], result: dict[str, Any]) -> None:
        try:
            arguments = json.loads(function["arguments"])
            result["content"] = f"{await TOOLS[function['name']](**arguments):.15g}"
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            # For the model to read: it may do better next time.
            result["content"] = f"error: {error!r}"

    async with trio.open_nursery() as nursery:
        for call, result in zip(calls, results, strict=True):
            nursery.start_soon(call_one, call["function"], result)
    return results


class LastNumberIsRight(Grader):
    """Rewards an answer whose last number is the label."""

    def grade(self, ctx: GraderContext) -> None:
        """Set the reward to 1 or 0."""
        assert ctx.sample is not None
        numbers = re.findall(r"-?\d+", str(ctx.sample.messages[-1]["content"]))
        ctx.set_reward(1.0 if numbers and numbers[-1] == ctx.label else 0.0)


app = create_rollout_server(
    backend=LocalBackend(
        workflow=UseTools,
        workflow_config=ToolConfig(
            name="tool-agent",
            model=os.environ.get("ROLLOUT_MODEL", "policy"),
            concurrency=ConcurrencyConfig(max_concurrent=16),
        ),
        grader=LastNumberIsRight,
    ),
    lifespan=share_connections,
)
