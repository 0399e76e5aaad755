"""Chat messages as Strands takes them, in blocks of content, and back."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollout.codec import MAX_JSON_DEPTH
from rollout.errors import InvalidFieldError

__all__ = ["as_blocks", "as_chat", "plain"]

_DATA_URL = "data:image/"
_USAGE = {
    "inputTokens": "prompt_tokens",
    "outputTokens": "completion_tokens",
    "totalTokens": "total_tokens",
    "cacheReadInputTokens": "cached_tokens",
}


def as_blocks(
    prompt: str | Sequence[Mapping[str, Any]],
) -> tuple[str | None, str | list[dict[str, Any]]]:
    """Return what a prompt says as the system, and the rest of it in the form of Strands.

    Raises:
        InvalidFieldError: A part of a message has no counterpart there.
    """
    if isinstance(prompt, str):
        return None, prompt
    system: list[str] = []
    messages: list[dict[str, Any]] = []
    for message in prompt:
        role, content = message.get("role"), message.get("content")
        if role in {"system", "developer"}:
            system += [block["text"] for block in _blocks(content)]
        elif role == "tool":
            result = {
                "toolUseId": message.get("tool_call_id"),
                "status": "success",
                "content": _blocks(content),
            }
            _add(messages, "user", [{"toolResult": result}])
        elif role is None:  # blocks alone are a message of the user
            _add(messages, "user", [dict(message)])
        else:
            calls = [_tool_use(call) for call in message.get("tool_calls") or ()]
            _add(messages, str(role), [*_blocks(content), *calls])
    return "\n\n".join(system) or None, messages


def _add(messages: list[dict[str, Any]], role: str, blocks: list[dict[str, Any]]) -> None:
    """Add blocks; there, what one side says in a row is one message."""
    if messages and messages[-1]["role"] == role:
        messages[-1]["content"] += blocks
    else:
        messages.append({"role": role, "content": blocks})


def _blocks(content: Any) -> list[dict[str, Any]]:
    if content is None:
        return []
    parts = content if isinstance(content, list) else [content]
    return [_block(part) for part in parts]


def _block(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"text": part}
    kind = part.get("type")
    if kind is None:
        return dict(part)
    if kind == "text":
        return {"text": part["text"]}
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if kind == "image_url" and isinstance(url, str) and url.startswith(_DATA_URL):
        head, _, data = url.partition(",")
        form = head.removeprefix(_DATA_URL).partition(";")[0]
        return {"image": {"format": form, "source": {"bytes": base64.b64decode(data)}}}
    raise InvalidFieldError(
        "prompt", f"has a part of type {kind} that Strands has no block for; pass blocks instead"
    )


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    given: Any = function["arguments"] or "{}"
    with suppress(ValueError, RecursionError):  # what a model has once written may be no JSON
        given = json.loads(given)
    return {"toolUse": {"toolUseId": call["id"], "name": function["name"], "input": given}}


def plain(value: Any, *, depth: int = MAX_JSON_DEPTH) -> Any:
    """Return a copy in JSON values; bytes become base64, as sessions of Strands keep them."""
    if not depth:
        return value  # the sample cuts it off there
    if isinstance(value, (bytes, bytearray)):
        return {"__bytes_encoded__": True, "data": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return {str(key): plain(each, depth=depth - 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, depth=depth - 1) for each in value]
    return value


def as_chat(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn messages of Strands, in JSON values, into chat messages.

    A block that chat does not know is kept as a part of the content, with its name as ``type``.
    """
    chat: list[dict[str, Any]] = []
    for message in messages:
        results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
        chat += [_result(each) for each in results]
        rest = [block for block in message["content"] if "toolResult" not in block]
        if rest or not results:
            chat.append(_message(message, rest))
    return chat


def _result(result: Mapping[str, Any]) -> dict[str, Any]:
    content = _parts(result.get("content") or [])
    message = {"role": "tool", "tool_call_id": result.get("toolUseId"), "content": content}
    if result.get("status") not in (None, "success"):
        message["status"] = result["status"]
    return message


def _message(message: Mapping[str, Any], blocks: list[Any]) -> dict[str, Any]:
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    said: list[Any] = []
    for block in blocks:
        if "toolUse" in block:
            calls.append(_call(block["toolUse"]))
        elif isinstance((thought := _thought(block)), str):
            thoughts.append(thought)
        else:
            said.append(block)
    content = _parts(said)
    chat: dict[str, Any] = {"role": message["role"], "content": content}
    if calls:
        chat["content"] = content or None
        chat["tool_calls"] = calls
    if thoughts:
        chat["reasoning_content"] = "\n\n".join(thoughts)
    usage = (message.get("metadata") or {}).get("usage")
    if message["role"] == "assistant" and isinstance(usage, dict):
        chat["usage"] = {_USAGE.get(name, name): count for name, count in usage.items()}
    return chat


def _thought(block: Mapping[str, Any]) -> str | None:
    """Return the text of a block of thoughts that holds nothing else."""
    inner = block.get("reasoningContent")
    text = inner.get("reasoningText") if isinstance(inner, dict) and len(inner) == 1 else None
    said = text.get("text") if isinstance(text, dict) and len(text) == 1 else None
    return said if isinstance(said, str) else None


def _call(use: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": use.get("name"), "arguments": json.dumps(use.get("input"))}
    return {"id": use.get("toolUseId"), "type": "function", "function": function}


def _parts(blocks: Sequence[Mapping[str, Any]]) -> Any:
    """Return blocks as content: their text if they are nothing else."""
    if all(block.keys() == {"text"} for block in blocks):
        return "".join(block["text"] for block in blocks)
    return [
        {"type": "text", "text": block["text"]}
        if block.keys() == {"text"}
        else {"type": next(iter(block), "empty"), **block}
        for block in blocks
    ]
