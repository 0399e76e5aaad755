"""Chat messages: their text, and items of OpenAI's Responses API in their form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["input_as_messages", "items_as_messages", "text_of"]

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def text_of(content: Any) -> str | None:
    """Return the text of a message's content, ``None`` if it is not text alone."""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else None


def input_as_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a request sends, its instructions first, as chat messages."""
    messages: list[dict[str, Any]] = []
    if isinstance(body.get("instructions"), str):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        messages += items_as_messages([item for item in given if isinstance(item, dict)])
    return messages


def items_as_messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn items into messages: what the assistant says in one go becomes one message.

    An item of a kind that chat messages do not know is kept as it is, without a role.
    """
    messages: list[dict[str, Any]] = []
    open_reply: dict[str, Any] | None = None
    for item in items:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message" and item.get("role") != "assistant":
            open_reply = None
            messages.append(_message(item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            open_reply = None
            output = item.get("output")
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": output if isinstance(output, str) else _content(output),
                }
            )
        elif kind in ("message", "reasoning", "function_call", "custom_tool_call"):
            if open_reply is None or (kind == "reasoning" and "tool_calls" in open_reply):
                open_reply = {"role": "assistant", "content": None}
                messages.append(open_reply)
            _add_to_reply(open_reply, kind, item)
        else:
            open_reply = None
            messages.append(item)
    return messages


def _add_to_reply(reply: dict[str, Any], kind: str, item: dict[str, Any]) -> None:
    if kind == "message":
        content = _content(item.get("content"))
        before = reply["content"]
        if isinstance(before, str) and isinstance(content, str):
            content = before + content
        elif before is not None:
            content = [*_parts(before), *_parts(content)]
        reply["content"] = content
    elif kind == "reasoning":
        thought = "\n\n".join(
            part["text"]
            for key in ("summary", "content")
            for part in _parts(item.get(key))
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
        if thought:
            before = reply.get("reasoning_content")
            reply["reasoning_content"] = f"{before}\n\n{thought}" if before else thought
    else:
        given = item.get("arguments", item.get("input"))
        call = {
            "id": item.get("call_id") or item.get("id"),
            "type": "function",
            "function": {
                "name": item.get("name"),
                "arguments": given if isinstance(given, str) else json.dumps(given),
            },
        }
        reply.setdefault("tool_calls", []).append(call)


def _message(item: dict[str, Any]) -> dict[str, Any]:
    return {"role": item.get("role"), "content": _content(item.get("content"))}


def _content(value: Any) -> Any:
    """Return the text of parts if there is nothing but text, else parts as chat has them."""
    if not isinstance(value, list):
        return value
    if all(isinstance(part, dict) and part.get("type") in _TEXTS for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    return [_part(part) for part in value]


def _part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") in _TEXTS:
        return {"type": "text", "text": part.get("text", "")}
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "refusal", "refusal": part.get("refusal")}
    if isinstance(part, dict) and part.get("type") == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return part


def _parts(content: Any) -> list[Any]:
    if content is None:
        return []
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
