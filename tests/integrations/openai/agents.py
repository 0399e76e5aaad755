"""What the tests of the OpenAI SDK share: a workflow with tools, and how samples are checked."""

from __future__ import annotations

import json
from typing import Any

from rollout import AgentWorkflow
from rollout.integrations.openai import rollout_client
from rollout.trajectory import build_trajectory, trajectory_problems

KEY = "secret-of-this-rollout"
QUESTION = {"role": "user", "content": "What is 6 + 7?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}},
                "required": ["left", "right"],
            },
        },
    }
]


class Adder(AgentWorkflow[Any]):
    """The usual loop: ask, run the tools that the model calls, ask again."""

    async def run(self, ctx: Any) -> None:
        client = rollout_client()
        history: list[Any] = list(ctx.prompt)
        while True:
            reply = await client.chat.completions.create(
                model="policy", messages=history, tools=TOOLS
            )
            message = reply.choices[0].message
            history.append(message)
            if not message.tool_calls:
                return
            for each in message.tool_calls:
                numbers = json.loads(each.function.arguments)
                content = str(numbers["left"] + numbers["right"])
                history.append({"role": "tool", "tool_call_id": each.id, "content": content})


def trajectory(sample: Any, *, key: str = KEY) -> dict[str, Any]:
    """The document that is kept of a sample, checked."""
    document = build_trajectory(
        sample.trajectory_messages, rollout_id="r", sample=sample, secrets=[key]
    )
    assert trajectory_problems(document) == []
    return document
