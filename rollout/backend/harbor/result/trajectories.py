"""Adopt the trajectory document that an agent has left, and read its conversation.

Harbor's agents write an ATIF document into their log folder: one in all, or one for each step
of a task of several steps, and an agent that goes on in a second document has two. Only a
single one, which holds the whole conversation, says what the rollout was; otherwise the files
are left where they are and nothing is adopted.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from rollout._json.text import utf8
from rollout._redaction import Redactor
from rollout.backend.harbor.plan import TrialPlan
from rollout.codec import parse_json
from rollout.errors import InvalidBodyError
from rollout.trajectory import trajectory_problems
from rollout.trajectory.calls import raw_arguments

__all__ = ["Adoption", "adopt_trajectory", "messages_from"]

_NAME = "trajectory.json"
_CONTINUED = "trajectory.cont-*.json"
_LARGEST = 64 << 20
_OPEN = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@frozen(kw_only=True)
class Adoption:
    """The trajectory document of a trial, or the reason why it has none.

    Attributes:
        document: The document, checked and without the key.
        messages: Its conversation, as chat messages.
        note: For the diagnostics: what was adopted, or why nothing was.
        undecided: Whether there is something that a person may want to look at, so that the
            trial's folder stays where it is.
    """

    document: dict[str, Any] | None = field(default=None, repr=False)
    messages: list[dict[str, Any]] = field(factory=list, repr=False)
    note: str
    undecided: bool = False


def adopt_trajectory(plan: TrialPlan) -> Adoption:
    """Adopt the one trajectory document of a trial. Blocking; never raises for what is there."""
    redactor = Redactor(plan.secrets)
    candidates = _candidates(plan.trial_dir)
    if not candidates:
        return Adoption(note="the agent left no trajectory")
    if len(candidates) > 1:
        names = ", ".join(_shown(path, plan.trial_dir) for path in candidates[:10])
        return Adoption(
            note=redactor.text(f"{len(candidates)} trajectories, none is adopted: {names}"),
            undecided=True,
        )
    shown = redactor.text(_shown(candidates[0], plan.trial_dir))
    try:
        document = parse_json(_read(candidates[0]))
    except OSError as error:
        return _refused(shown, error.strerror or type(error).__name__)
    except InvalidBodyError as error:
        why = "; ".join(
            " ".join((*map(str, problem.loc), problem.msg)) for problem in error.problems
        )
        return _refused(shown, redactor.text(why.replace("the body ", "it ")))
    problems = trajectory_problems(document)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return _refused(shown, redactor.text(problems[0]) + more)
    clean: dict[str, Any] = redactor.value(document)
    return Adoption(document=clean, messages=messages_from(clean), note=f"adopted {shown}")


def _refused(shown: str, why: str) -> Adoption:
    return Adoption(note=f"{shown} is not adopted: {why}", undecided=True)


def _candidates(trial_dir: Path) -> list[Path]:
    folders = [trial_dir / "agent", *sorted((trial_dir / "steps").glob("*/agent"))]
    found: list[Path] = []
    for folder in folders:
        if not folder.resolve().is_relative_to(trial_dir.resolve()):
            continue
        paths = [folder / _NAME, *sorted(folder.glob(_CONTINUED))]
        found += [path for path in paths if os.path.lexists(path)]
    return found


def _shown(path: Path, trial_dir: Path) -> str:
    return utf8(path.relative_to(trial_dir).as_posix())


def _read(path: Path) -> bytes:
    descriptor = os.open(path, _OPEN)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor has no path
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(None, "it is not a file")
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise OSError(None, f"it is larger than {_LARGEST >> 20} MiB")
    return data


# --- the conversation -------------------------------------------------------------------------


def messages_from(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation of a valid ATIF document as chat messages of OpenAI.

    An agent's step becomes an assistant message, with ``reasoning_content`` and ``tool_calls``
    where it has some, and a message of the role ``tool`` for each result. What the agent saw
    without having called for it is a user message. Measurements stay in the document.
    """
    messages: list[dict[str, Any]] = []
    for step in document["steps"]:
        if step["source"] == "agent":
            messages.append(_assistant(step))
        else:
            messages.append({"role": step["source"], "content": _content(step["message"])})
        messages += _results(step)
    return messages


def _assistant(step: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _content(step["message"])}
    if step.get("reasoning_content") is not None:
        message["reasoning_content"] = step["reasoning_content"]
    calls = step.get("tool_calls")
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                "id": call["tool_call_id"],
                "type": "function",
                "function": {"name": call["function_name"], "arguments": _arguments(call)},
            }
            for call in calls
        ]
    return message


def _arguments(call: Mapping[str, Any]) -> str:
    raw = raw_arguments(call["arguments"])
    return json.dumps(call["arguments"], ensure_ascii=False) if raw is None else raw


def _results(step: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    results = (step.get("observation") or {}).get("results") or []
    calls = [call["tool_call_id"] for call in step.get("tool_calls") or []]
    single = calls[0] if len(calls) == 1 and len(results) == 1 else None
    for result in results:
        call_id = result.get("source_call_id") or single
        content = _content(result.get("content") or "")
        if call_id is None:
            yield {"role": "user", "content": content}
        else:
            yield {"role": "tool", "tool_call_id": call_id, "content": content}


def _content(value: Any) -> Any:
    return [_part(part) for part in value] if isinstance(value, list) else value


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    source = part["source"]
    kind = f"{part['type']}_url"
    more = {key: value for key, value in source.items() if key != "path" and value is not None}
    return {"type": kind, kind: {"url": source["path"]}, **more}
