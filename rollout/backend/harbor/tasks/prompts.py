"""Turn the messages of a rollout into the instruction of a task. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollout._json.text import utf8
from rollout.errors import InvalidFieldError

__all__ = ["fill_template", "instruction_of"]

_PLACEHOLDER = re.compile(r"\{\{\s*prompt\s*\}\}")
_LEADING = frozenset({"system", "developer"})
_LABELS = {
    "system": "System",
    "developer": "System",
    "user": "User",
    "assistant": "Assistant",
}


def instruction_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as one text.

    Messages of ``system`` and ``developer`` at the beginning, and messages of ``user``, stand
    one after the other with an empty line between them. Once somebody else speaks too, or a
    ``system`` message comes later, each message after the beginning has a line with its
    speaker above it (``User:``, ``Assistant:``), so that the agent sees who said what.

    Raises:
        InvalidFieldError: A message holds something else than text, or no message has any.
    """
    texts = [
        (str(message.get("role", "user")), _text(message, f"initial_messages[{index}]"))
        for index, message in enumerate(messages)
    ]
    start = 0
    while start < len(texts) and texts[start][0] in _LEADING:
        start += 1
    labelled = any(role != "user" for role, _ in texts[start:])
    parts = [
        f"{_LABELS[role]}:\n{text}" if labelled and index >= start else text
        for index, (role, text) in enumerate(texts)
        if text
    ]
    if not parts:
        raise InvalidFieldError("initial_messages", "hold no text for the task")
    return utf8("\n\n".join(parts))


def fill_template(template: str, prompt: str) -> str:
    """Replace ``{{ prompt }}`` in a template; without it, the prompt replaces all."""
    if _PLACEHOLDER.search(template) is None:
        return prompt
    return _PLACEHOLDER.sub(lambda _: prompt, template)


def _text(message: Mapping[str, Any], name: str) -> str:
    role = message.get("role", "user")
    if role not in _LABELS:
        raise InvalidFieldError(
            f"{name}.role", "is one of system, developer, user and assistant for a Harbor task"
        )
    if message.get("tool_calls") or message.get("function_call"):
        raise InvalidFieldError(
            f"{name}.tool_calls", "cannot be said in the instruction of a Harbor task"
        )
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content.strip("\n")
    if not isinstance(content, list):
        raise InvalidFieldError(f"{name}.content", "is text or a list of text parts")
    return "\n".join(
        _part(part, f"{name}.content[{index}]") for index, part in enumerate(content)
    ).strip("\n")


def _part(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in {"text", "input_text"} or not isinstance(text, str):
        raise InvalidFieldError(
            name,
            "is not text; the instruction of a Harbor task is text alone (no images, no files)",
        )
    return text
