"""Anthropic's messages in the form of chat messages, whole and as streams of events. Pure.

As tolerant as `recording.calls`: what is not understood is kept as it is, or left out.
"""

from __future__ import annotations

import json
from typing import Any

from attrs import define, field

from rollout._json.fit import fit

__all__ = ["GrowingMessage", "reply_of", "request_messages", "request_tools"]


def request_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a request sends, its system prompt first, as chat messages."""
    messages: list[dict[str, Any]] = []
    system = _content(body.get("system"))
    if system:
        messages.append({"role": "system", "content": system})
    for each in _dicts(body.get("messages")):
        content = each.get("content")
        if each.get("role") == "assistant":
            messages.append(reply_of(content))
        else:
            messages += _said(each.get("role"), content)
    return messages


def request_tools(tools: Any) -> list[Any]:
    """Return the tools that a request offers as chat has them; those of the endpoint as they are.

    The schema of a tool's input is that of a function's parameters.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": each.get("name"),
                "description": each.get("description"),
                "parameters": each["input_schema"],
            },
        }
        if "input_schema" in each
        else each
        for each in _dicts(tools)
    ]


def reply_of(content: Any) -> dict[str, Any]:
    """Return what the model says, in blocks or as a text, as one chat message."""
    reply: dict[str, Any] = {"role": "assistant", "content": None}
    said: list[Any] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _dicts(content)
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            arguments = json.dumps(block.get("input"), ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        else:
            said.append(block)
    if said:
        reply["content"] = _content(said)
    if any(thoughts):
        reply["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        reply["tool_calls"] = calls
    return reply


def _said(role: Any, content: Any) -> list[dict[str, Any]]:
    """Return a message of the user: the results of tools in it are messages of their own."""
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    messages: list[dict[str, Any]] = []
    rest: list[Any] = []
    for block in _dicts(content):
        if block.get("type") == "tool_result":
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
            messages.append({**result, "content": _content(block.get("content"))})
        else:
            rest.append(block)
    if rest:
        messages.append({"role": role, "content": _content(rest)})
    return messages


def _content(value: Any) -> Any:
    """Return the text of blocks if there is nothing but text, else the blocks.

    Where a prompt is to be cached says nothing to the model, and moves from call to call.
    """
    if not isinstance(value, list):
        return value
    blocks = [
        {name: each for name, each in block.items() if name != "cache_control"}
        for block in _dicts(value)
    ]
    if all(each.get("type") == "text" and isinstance(each.get("text"), str) for each in blocks):
        return "".join(each["text"] for each in blocks)
    return blocks


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


_PIECES = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
"""For each kind of delta, the field with its piece."""


@define
class GrowingMessage:
    """A message that comes in events.

    Attributes:
        done: Whether it has come to its end.
    """

    done: bool = False
    _head: dict[str, Any] = field(factory=dict)
    _blocks: dict[int, dict[str, Any]] = field(factory=dict)

    def add(self, event: dict[str, Any]) -> None:
        """Add an event."""
        kind, index = event.get("type"), event.get("index")
        if kind == "message_start" and isinstance(event.get("message"), dict):
            self._head = dict(event["message"])
        elif kind == "message_delta":
            self._change(event)
        elif kind == "message_stop":
            self.done = True
        elif kind == "content_block_start" and isinstance(event.get("content_block"), dict):
            place = index if type(index) is int else len(self._blocks)
            self._blocks[place] = dict(event["content_block"])
        elif kind == "content_block_delta" and type(index) is int and index in self._blocks:
            self._grow(self._blocks[index], event.get("delta"))

    def _change(self, event: dict[str, Any]) -> None:
        delta, usage = event.get("delta"), event.get("usage")
        if isinstance(delta, dict):
            self._head.update(delta)
        if isinstance(usage, dict):
            before = self._head.get("usage")
            counted = {name: value for name, value in usage.items() if value is not None}
            self._head["usage"] = {**(before if isinstance(before, dict) else {}), **counted}

    @staticmethod
    def _grow(block: dict[str, Any], delta: Any) -> None:
        name = _PIECES.get(str(delta.get("type"))) if isinstance(delta, dict) else None
        piece = delta.get(name) if name is not None else None
        if name is not None and isinstance(piece, str):
            before = block.get(name)
            block[name] = (before if isinstance(before, str) else "") + piece

    def body(self) -> dict[str, Any]:
        """Return it as it stands, in the form of a whole answer."""
        content = [_with_input(self._blocks[index]) for index in sorted(self._blocks)]
        return {**self._head, "content": content}


def _with_input(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block of a stream; the input of a tool comes as JSON text."""
    given = block.get("partial_json")
    if not isinstance(given, str):
        return block
    rest = {name: value for name, value in block.items() if name != "partial_json"}
    try:
        rest["input"] = fit(json.loads(given or "{}"))[0]
    except (ValueError, RecursionError):
        rest["input"] = given  # it was cut off
    return rest
