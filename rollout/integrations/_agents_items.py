"""Chat messages as the OpenAI Agents SDK takes them: items of Responses, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.integrations._responses_items import items_as_messages

__all__ = ["as_chat", "as_items"]


def as_items(prompt: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Turn a prompt into items; items and plain messages pass as they are."""
    if isinstance(prompt, str):
        return prompt
    items: list[dict[str, Any]] = []
    for message in prompt:
        role = message.get("role")
        if role == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message.get("tool_call_id"),
                    "output": _output(message.get("content")),
                }
            )
        elif role == "assistant" and ("tool_calls" in message or "type" not in message):
            items += _reply(message)
        elif role is not None and "type" not in message:
            items.append({"role": role, "content": _content(message.get("content"))})
        else:
            items.append(dict(message))
    return items


def _reply(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    content = message.get("content")
    if content:
        text = content if isinstance(content, str) else _output(content)
        items.append({"role": "assistant", "content": text})
    elif message.get("refusal"):
        refusal = {"type": "refusal", "refusal": message["refusal"]}
        items.append({"type": "message", "role": "assistant", "content": [refusal]})
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        items.append(
            {
                "type": "function_call",
                "call_id": call.get("id"),
                "name": function.get("name"),
                "arguments": function.get("arguments"),
            }
        )
    return items


def _content(content: Any) -> Any:
    return [_part(part) for part in content] if isinstance(content, list) else content


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return {"type": "input_text", "text": part.get("text", "")}
    if kind == "image_url":
        image = part.get("image_url")
        image = image if isinstance(image, dict) else {"url": image}
        return {
            "type": "input_image",
            "image_url": image.get("url"),
            "detail": image.get("detail") or "auto",
        }
    if kind == "file" and isinstance(part.get("file"), dict):
        return {"type": "input_file", **part["file"]}
    return part


def _output(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return json.dumps(content)


def as_chat(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn items into chat messages; what chat does not know stays as it is."""
    return items_as_messages([dict(item) for item in items])
