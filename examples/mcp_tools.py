"""An agent whose tools come from an MCP server over stdio, natively on trio.

It needs ``pip install "trio-rollout[mcp]"``. Start it with::

    rollout serve examples/mcp_tools.py:app

Each rollout starts an MCP server of its own, and ends it, however the rollout ends.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.types import TextContent

from rollout import AgentWorkflow, AgentWorkflowConfig, AgentWorkflowContext, LocalBackend
from rollout.integrations.chat import chat, share_connections
from rollout.server import create_rollout_server


class McpConfig(AgentWorkflowConfig):
    """What can be set about the agent."""

    model: str = "policy"
    server: str = str(Path(__file__).with_name("mcp_server.py"))
    max_turns: int = 8


class UseMcpTools(AgentWorkflow[McpConfig]):
    """Offers the server's tools to the model, and calls what it wants called."""

    async def run(self, ctx: AgentWorkflowContext[McpConfig]) -> None:
        """Return nothing: the sample is the conversation that `chat` has recorded."""
        config = ctx.config
        assert config is not None
        messages = list(ctx.prompt)
        # A cancellation anywhere in this block, in the middle of a call too, ends the server.
        async with Client(
            StdioServerParameters(command=sys.executable, args=[config.server])
        ) as server:
            tools = await describe_tools(server)
            for _ in range(config.max_turns):
                reply = await chat(messages, model=config.model, tools=tools)
                messages.append(reply.message)
                calls = reply.message.get("tool_calls") or []
                if not calls:
                    return
                messages += [await call_tool(server, call) for call in calls]
        raise RuntimeError(f"no answer after {config.max_turns} turns")


async def describe_tools(server: Client) -> list[dict[str, Any]]:
    """Return the server's tools in the form in which a model learns of them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }
        for tool in (await server.list_tools()).tools
    ]


async def call_tool(server: Client, call: dict[str, Any]) -> dict[str, Any]:
    """Call a tool; what it says, an error too, is for the model to read."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        result = await server.call_tool(function["name"], arguments)
        text = "\n".join(part.text for part in result.content if isinstance(part, TextContent))
    else:
        text = "error: the arguments are no JSON object"
    return {"role": "tool", "tool_call_id": call.get("id"), "content": text}


app = create_rollout_server(
    backend=LocalBackend(
        workflow=UseMcpTools,
        workflow_config=McpConfig(
            name="mcp-tools", model=os.environ.get("ROLLOUT_MODEL", "policy")
        ),
    ),
    lifespan=share_connections,
)
