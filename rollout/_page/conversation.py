"""Turn a trajectory document into what the page shows of it.

A document is taken apart by what it is, not by what it should be: a part of the wrong type is
shown as JSON, or left out where there is nothing to show.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sized
from itertools import islice
from pathlib import Path
from typing import Any

from rollout._page.text import clip, line, number, parse, pretty
from rollout.errors import TrajectoryError

__all__ = ["first_prompt", "label_of", "last_answer", "read_document", "view"]

MAX_TEXT = 100_000
"""Characters of one message, argument or observation that go into the page."""

MAX_VIEW = 1_500_000
"""Characters of one conversation that go into the page."""

MAX_STEPS = 5_000
MAX_PARTS = 200
"""Tool calls, observations, arguments and figures of one step, each."""

MAX_FILE = 128 * 1024 * 1024

_NAMES = 100
"""Characters of the names of fields that are shown as JSON."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_KNOWN = ("status", "reward", "error", "row", "attempt", "retry")
"""Fields that the record has, too."""

_SOURCES = ("system", "user", "agent")


def read_document(folder: Path, name: str) -> dict[str, Any]:
    """Read a trajectory of a run. Blocking.

    Args:
        folder: The folder of the trajectories; nothing outside of it is ever read.
        name: The name of the file, as a record has it.

    Raises:
        TrajectoryError: It cannot be read or is not such a document.
    """
    if not _NAME.fullmatch(name):
        raise TrajectoryError("The record names a file that cannot be one of this run.")
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        # Not to hang on a pipe that somebody put there, nor to read through a link.
        descriptor = os.open(folder / name, flags | getattr(os, "O_CLOEXEC", 0))
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor has no path
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise TrajectoryError("The trajectory is not a regular file.")
            if status.st_size > MAX_FILE:
                raise TrajectoryError(
                    f"The trajectory is too large for the report ({status.st_size:,} bytes)."
                )
            document = parse(file.read())
    except FileNotFoundError:
        raise TrajectoryError("The trajectory file is missing.") from None
    except OSError as error:
        raise TrajectoryError(
            f"The trajectory cannot be read: {error.strerror or type(error).__name__}."
        ) from None
    except ValueError as error:
        raise TrajectoryError(f"The trajectory is not JSON: {error}.") from None
    if not isinstance(document, dict):
        raise TrajectoryError("The trajectory is not a document of steps.")
    return document


def first_prompt(document: dict[str, Any], limit: int) -> str:
    """Return the beginning of what the user said first, on one line."""
    for step in _list(document.get("steps")):
        if isinstance(step, dict) and step.get("source") == "user":
            return line(_message(step.get("message")), limit)
    return ""


def label_of(document: dict[str, Any]) -> str:
    """Return what the grader compared with, empty if there was nothing."""
    extra = document.get("extra")
    label = extra.get("label") if isinstance(extra, dict) else None
    return "" if label is None else pretty(label)


def last_answer(document: dict[str, Any], limit: int) -> str:
    """Return the end of what the agent said last, on one line of at most *limit* characters."""
    for step in reversed(_list(document.get("steps"))):
        if isinstance(step, dict) and step.get("source") == "agent":
            text = " ".join(_message(step.get("message"))[-4 * limit :].split())
            if text:
                return text if len(text) <= limit else f"…{text[1 - limit :]}"
    return ""


def view(document: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a document that the page shows, in plain JSON types.

    Keys are short, since there are thousands of them: a step has ``s`` its source, ``t`` its
    text, ``r`` the reasoning, ``c`` the tool calls, ``o`` observations that belong to none of
    them, ``m`` figures, ``at`` its time, ``x`` everything else.
    """
    budget = _Budget(MAX_VIEW)
    steps = _list(document.get("steps"))
    shown = [_step(step, budget) for step in steps[:MAX_STEPS]]
    extra = document.get("extra")
    extra = dict(extra) if isinstance(extra, dict) else {"extra": extra} if extra else {}
    label, metadata = extra.pop("label", None), extra.pop("metadata", None)
    for name in _KNOWN:
        extra.pop(name, None)
    for part in ("notes", "final_metrics", "subagent_trajectories"):
        if document.get(part):
            extra[part] = document[part]
    if extra.get("final_metrics") == {"total_steps": len(steps)}:
        del extra["final_metrics"]
    agent = document.get("agent")
    agent = agent if isinstance(agent, dict) else {}
    found: dict[str, Any] = {
        "steps": shown,
        "left": len(steps) - len(shown),
        "label": None if label is None else budget.text(label),
        "metadata": budget.text(metadata) if metadata else None,
        "extra": budget.text(extra) if extra else None,
        "named": ", ".join(extra)[:_NAMES] if extra else None,
        "agent": budget.text(agent["name"]) if agent.get("name") else None,
        "model": budget.text(agent["model_name"]) if agent.get("model_name") else None,
        "tools": budget.text(agent["tool_definitions"]) if agent.get("tool_definitions") else None,
    }
    return {name: value for name, value in found.items() if value}


class _Budget:
    """Counts the characters of one conversation, so that none becomes endless."""

    def __init__(self, characters: int) -> None:
        self._left = characters

    def text(self, value: Any) -> str:
        """Write a value for people, cut to what is left."""
        text = clip(pretty(value), max(0, min(MAX_TEXT, self._left)))
        self._left -= len(text)
        return text


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _step(step: Any, budget: _Budget) -> dict[str, Any]:
    if not isinstance(step, dict):
        return {"s": "other", "t": budget.text(step)}
    source = step.get("source")
    found: dict[str, Any] = {"s": source if source in _SOURCES else "other"}
    if found["s"] == "other" and source is not None:
        found["from"] = budget.text(source)
    found["t"] = budget.text(_message(step.get("message")))
    if step.get("reasoning_content"):
        found["r"] = budget.text(step["reasoning_content"])
    calls, loose = _calls(step, budget)
    rest = {
        name: step[name] for name in ("model_name", "reasoning_effort", "extra") if step.get(name)
    }
    found |= {
        "c": calls,
        "o": loose,
        "m": list(_figures(step.get("metrics"))),
        "at": budget.text(step["timestamp"]) if step.get("timestamp") else None,
        "x": budget.text(rest) if rest else None,
    }
    return {name: value for name, value in found.items() if value or name == "t"}


def _message(message: Any) -> str:
    if message is None:
        return ""
    if not isinstance(message, list):
        return pretty(message)
    return "\n\n".join(_part(part) for part in message)


def _part(part: Any) -> str:
    """Return the text of a part of a message; pictures and sound are named, never fetched."""
    if not isinstance(part, dict):
        return pretty(part)
    if isinstance(part.get("text"), str):
        return str(part["text"])
    source = part.get("source")
    if isinstance(source, dict):
        return f"[{pretty(part.get('type'))}: {pretty(source.get('path'))[:500]}]"
    return pretty(part)


def _calls(
    step: dict[str, Any], budget: _Budget
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the tool calls, each with what was observed of it, and what is left over."""
    calls: list[dict[str, Any]] = []
    by_id: dict[str, dict[str, Any]] = {}
    requested = _list(step.get("tool_calls"))
    for call in requested[:MAX_PARTS]:
        fields = call if isinstance(call, dict) else {"arguments": call}
        found: dict[str, Any] = {
            "name": budget.text(fields.get("function_name") or "(no name)"),
            "args": _arguments(fields.get("arguments"), budget),
            "o": [],
        }
        if fields.get("tool_call_id"):
            found["id"] = budget.text(fields["tool_call_id"])
            by_id.setdefault(str(fields["tool_call_id"]), found)
        calls.append(found)
    if more := _more(requested):
        calls.append({"name": more, "args": [], "o": []})
    loose: list[dict[str, Any]] = []
    observation = step.get("observation")
    results = observation.get("results") if isinstance(observation, dict) else observation
    results = results if isinstance(results, list) else [results] if results else []
    for result in results[:MAX_PARTS]:
        fields = result if isinstance(result, dict) else {"content": result}
        call_id = fields.get("source_call_id")
        text = _message(fields.get("content"))
        rest = {name: fields[name] for name in fields if name not in {"content", "source_call_id"}}
        seen = {"t": budget.text(text)}
        if rest and any(rest.values()):
            seen["x"] = budget.text(rest)
        target = by_id.get(str(call_id)) if call_id is not None else None
        if target is not None:
            target["o"].append(seen)
        else:
            loose.append(seen)
    if more := _more(results):
        loose.append({"t": more})
    return calls, loose


def _more(parts: Sized) -> str:
    """Return a word on what is beyond `MAX_PARTS`, empty if there is nothing."""
    return f"… {len(parts) - MAX_PARTS:,} more" if len(parts) > MAX_PARTS else ""


def _arguments(arguments: Any, budget: _Budget) -> list[list[str]]:
    """Return pairs of name and text, so that code keeps its lines; one without a name else."""
    if not arguments:
        return []
    if not isinstance(arguments, dict):
        return [["", budget.text(arguments)]]
    shown = [
        [budget.text(name), budget.text(value)]
        for name, value in islice(arguments.items(), MAX_PARTS)
    ]
    return [*shown, *([["", more]] if (more := _more(arguments)) else [])]


def _figures(metrics: Any) -> Iterator[list[Any]]:
    """Yield name and value of what was measured of a step; token ids and logprobs as counts."""
    if not isinstance(metrics, dict):
        return
    for name, value in islice(metrics.items(), MAX_PARTS):
        label = clip(str(name), 80)
        if isinstance(value, list):
            yield [label, len(value), "count"]
        elif number(value) is not None:
            yield [label, value]
        elif value is not None and value != {}:
            yield [label, clip(pretty(value), 500)]
