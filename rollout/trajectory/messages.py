"""Rebuild the messages of a rollout from its trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rollout._json.fit import fit
from rollout.codec import dump_json
from rollout.errors import TrajectoryError
from rollout.trajectory.calls import raw_arguments
from rollout.trajectory.checker import trajectory_problems
from rollout.trajectory.steps import COPIED, Steps

__all__ = ["messages_of", "readable_messages"]

_BESIDE = frozenset({"step_id", "timestamp", "model_name", "reasoning_effort", "metrics", COPIED})
"""Fields of a step that are about a message rather than part of it."""
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
_INEXACT = frozenset({"content_parts", "position", "message"})
"""What a step's or a result's ``extra`` has where its messages had another form."""


def messages_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a trajectory as chat messages, without times, models and usage.

    A content of a single text is a string, a call's arguments are JSON anew, and a content that
    was null is empty. Whatever else would be lost is an error.

    Args:
        document: The trajectory, parsed.

    Raises:
        TrajectoryError: It is not valid, or its steps do not say all of the messages.
    """
    problems = trajectory_problems(document)
    if problems:
        raise TrajectoryError(f"this is not a valid trajectory: {problems[0]}", problems)
    messages = [message for step in document["steps"] for message in _messages(step, _exact_extra)]
    again, steps = Steps(), document["steps"]
    for message in fit(messages)[0] or []:
        again.add(message)
    if _said(again.finish()) != _said(steps):
        raise TrajectoryError("its messages have a form that its steps do not keep")
    return messages


def readable_messages(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a trajectory as chat messages to be read, not to be sent again.

    Like `messages_of`, but the form that a message had where its step cannot express that is
    left out.

    Raises:
        TrajectoryError: It is not valid.
    """
    problems = trajectory_problems(document)
    if problems:
        raise TrajectoryError(f"this is not a valid trajectory: {problems[0]}", problems)
    return [message for step in document["steps"] for message in _messages(step, _readable_extra)]


def _said(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in step.items() if name not in _BESIDE} for step in steps]


def _messages(
    step: dict[str, Any], extra_of: Callable[[dict[str, Any]], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    extra = extra_of(step)
    results = step.get("observation", {}).get("results", [])
    message = {"role": _ROLES[step["source"]], "content": _content(step["message"]), **extra}
    if "reasoning_content" in step:
        message["reasoning_content"] = step["reasoning_content"]
    if "tool_calls" in step:
        message["tool_calls"] = [_call(call, extra_of) for call in step["tool_calls"]]
    if message != {"role": "system", "content": ""} or not results:
        yield message
    for result in results:
        answer = {"role": "tool", "content": _content(result.get("content", ""))}
        if "source_call_id" in result:
            answer["tool_call_id"] = result["source_call_id"]
        yield answer | extra_of(result)


def _exact_extra(holder: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = holder.get("extra", {})
    if not _INEXACT.isdisjoint(extra):
        raise TrajectoryError("a message has a content that its step cannot express")
    return extra


def _readable_extra(holder: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = holder.get("extra", {})
    return {name: value for name, value in extra.items() if name not in _INEXACT}


def _content(value: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    return value if isinstance(value, str) else [_part(part) for part in value]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": part["source"]["path"]}}
    return part


def _call(
    call: dict[str, Any], extra_of: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    arguments = call["arguments"]
    text = raw_arguments(arguments)
    if text is None:
        text = dump_json(arguments).decode()
    function = {"name": call["function_name"], "arguments": text}
    made = {"id": call["tool_call_id"], "type": "function", "function": function}
    return made | extra_of(call)
