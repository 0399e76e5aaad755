"""Tool calls for an endpoint that ignores ``tools``: JSON that a schema holds the model to.

A system message names the tool, an example shows a call, and ``response_format`` leaves the
model no other form. The reply then becomes an ordinary assistant message with ``tool_calls``, so
that whatever reads the sample sees what a tool-calling model would have sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.codec import dump_json, parse_json
from rollout.errors import InvalidBodyError

__all__ = ["PREAMBLE", "RESPONSE_FORMAT", "answer_of", "as_tool_call"]

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
"""The messages that go before the prompt."""

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


def as_tool_call(reply: str) -> dict[str, Any]:
    """Return the assistant message that *reply* amounts to.

    A reply that is no call, because it was cut off for example, stays text.
    """
    number = _number(reply)
    if number is None:
        return {"role": "assistant", "content": reply}
    arguments = dump_json({"number": number}).decode()
    call = {"name": _TOOL, "arguments": arguments}
    calls = [{"id": "call-1", "type": "function", "function": call}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answer_of(message: Mapping[str, Any]) -> str | None:
    """Return the number that *message* calls the tool with, ``None`` if it calls none."""
    for call in message.get("tool_calls") or ():
        arguments = parse_json(call["function"]["arguments"].encode())
        return str(arguments["number"])
    return None


def _number(reply: str) -> int | None:
    try:
        call = parse_json(reply.encode())
    except (InvalidBodyError, UnicodeEncodeError):
        return None
    if not isinstance(call, dict) or call.get("tool") != _TOOL:
        return None
    number = call.get("number")
    return number if isinstance(number, int) and not isinstance(number, bool) else None
