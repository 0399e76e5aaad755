"""The rollout server of the demo: a workflow that asks a chat endpoint, and its grader.

A real model answers by a tool call, though its endpoint ignores ``tools``: a system message names
the tool, an example shows a call, and ``response_format`` leaves the model no other form. The
reply then becomes an ordinary assistant message with ``tool_calls``, so that whatever reads the
sample sees what a tool-calling model would have sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.backend import LocalBackend
from rollout.codec import dump_json, parse_json
from rollout.context import AgentWorkflowContext, GraderContext
from rollout.demo.arithmetic import MODEL_NAME, last_number
from rollout.errors import InvalidBodyError
from rollout.grader import Grader
from rollout.integrations.chat import chat, share_connections
from rollout.server import RolloutServer, create_rollout_server
from rollout.types import AgentWorkflowConfig, AgentWorkflowOutput, ConcurrencyConfig
from rollout.workflow import AgentWorkflow

__all__ = [
    "PREAMBLE",
    "RESPONSE_FORMAT",
    "AnswerGrader",
    "AskModel",
    "answer_of",
    "as_tool_call",
    "create_demo_server",
]

_TOOL = "answer"

PREAMBLE: tuple[Mapping[str, Any], ...] = (
    {
        "role": "system",
        "content": (
            "You have one tool, answer(number). Call it with the result, as JSON: "
            '{"tool": "answer", "number": 12}'
        ),
    },
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": '{"tool": "answer", "number": 4}'},
)
"""The messages that go before the prompt of a model that answers by a tool call."""

RESPONSE_FORMAT: Mapping[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "call",
        "schema": {
            "type": "object",
            "properties": {
                "tool": {"const": _TOOL},
                "number": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["tool", "number"],
            "additionalProperties": False,
        },
    },
}
"""The field of the request that holds a reply to a call."""


class AskModel(AgentWorkflow[AgentWorkflowConfig]):
    """Sends the prompt to the rollout's chat endpoint and returns the conversation.

    The rollout's metadata may have further fields of the request, under ``request``: the model, a
    seed and so on. Where ``response_format`` is among them, the reply becomes a tool call.
    """

    async def run(self, ctx: AgentWorkflowContext[AgentWorkflowConfig]) -> AgentWorkflowOutput:
        """Ask once.

        Raises:
            httpx.TransportError: The endpoint could not be reached.
            IntegrationError: The endpoint answered with an error.
        """
        request = {"model": MODEL_NAME, **_request(ctx.metadata)}
        by_tool = "response_format" in request
        messages = [*PREAMBLE, *ctx.prompt] if by_tool else ctx.prompt
        reply = await chat(messages, record=False, **request)
        message = as_tool_call(reply.text) if by_tool else reply.message
        return AgentWorkflowOutput(
            messages=[*messages, message],
            metrics={"completion_tokens": reply.usage["completion_tokens"]},
        )


class AnswerGrader(Grader):
    """Rewards a right answer with 1 and any other with 0.

    The answer is the last number of the conversation. Where a tool call was asked for, it is the
    number of the call; text does not count then, whatever it says.
    """

    async def grade(self, ctx: GraderContext) -> None:
        """Compare with the label, and set the reward."""
        messages: Any = ctx.sample.messages if ctx.sample is not None else []
        reply = messages[-1]
        by_tool = "response_format" in _request(ctx.metadata)
        answer = answer_of(reply) if by_tool else last_number(reply["content"])
        ctx.set_reward(1.0 if answer == ctx.label else 0.0)


def _request(metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    request: Mapping[str, Any] = (metadata or {}).get("request", {})
    return request


def as_tool_call(reply: str) -> dict[str, Any]:
    """Return a reply as an assistant message with a tool call.

    A reply that is not a call, because it was cut off for example, stays text.
    """
    number = _number(reply)
    if number is None:
        return {"role": "assistant", "content": reply}
    arguments = dump_json({"number": number}).decode()
    call = {"name": _TOOL, "arguments": arguments}
    calls = [{"id": "call-1", "type": "function", "function": call}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _number(reply: str) -> int | None:
    try:
        call = parse_json(reply.encode())
    except (InvalidBodyError, UnicodeEncodeError):
        return None
    if not isinstance(call, dict) or call.get("tool") != _TOOL:
        return None
    number = call.get("number")
    return number if type(number) is int else None


def answer_of(message: Mapping[str, Any]) -> str | None:
    """Return the number that a message calls the tool with, ``None`` without a call."""
    for call in message.get("tool_calls") or ():
        arguments = parse_json(call["function"]["arguments"].encode())
        return str(arguments["number"])
    return None


def create_demo_server(*, max_concurrent: int, api_key: str) -> RolloutServer:
    """Build the demo's rollout server.

    Args:
        max_concurrent: How many rollouts it runs at a time.
        api_key: The key that its callers must present.
    """
    config = AgentWorkflowConfig(
        name="ask-model", concurrency=ConcurrencyConfig(max_concurrent=max_concurrent)
    )
    backend = LocalBackend(
        workflow=AskModel, workflow_config=config, grader=AnswerGrader, artifact_root=False
    )
    return create_rollout_server(
        backend=backend,
        lifespan=share_connections,
        configure_logging=False,
        api_key=api_key,
        watchdog_sec=None,  # nothing here blocks, and a busy machine is not worth a warning
    )
