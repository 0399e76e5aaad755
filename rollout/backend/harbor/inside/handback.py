"""What comes back out of a sandbox: a sample, or the error of a workflow, as JSON.

The sandbox is not trusted. What is read here has a bounded size and depth, is strict JSON, and
goes through the same checks as what travels over the wire.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import frozen

from rollout._json.fit import fit
from rollout._json.text import utf8
from rollout.codec import MAX_JSON_DEPTH, dump_json, parse_json, structure
from rollout.errors import InvalidBodyError, InvalidFieldError
from rollout.types import MODEL_ENDPOINT, RolloutErrorCategory, RolloutSample

__all__ = ["MOST_BYTES", "Handback", "WorkflowFailure", "dump_handback", "read_handback"]

MOST_BYTES = 64 * 1024 * 1024
"""The largest result that is taken out of a sandbox."""

_LONGEST_TEXT = 100_000
_ABOVE = 2
"""How many levels of the document are above a sample's own values."""

_USERS = {
    RolloutErrorCategory.TIMEOUT,
    RolloutErrorCategory.VALIDATION_ERROR,
    RolloutErrorCategory.HTTP_ERROR,
    RolloutErrorCategory.AGENT_ERROR,
}


@frozen(kw_only=True)
class WorkflowFailure:
    """How a workflow failed.

    Attributes:
        message: What went wrong, for people.
        category: What went wrong, for programs.
        source: Whose failure it was, where that is known.
        traceback: Where, for the server's log.
    """

    message: str
    category: RolloutErrorCategory = RolloutErrorCategory.AGENT_ERROR
    source: str | None = None
    traceback: str = ""


@frozen(kw_only=True)
class Handback:
    """What a workflow handed back.

    Attributes:
        sample: Its sample, if it made one.
        failure: How it failed, if it did.
        dropped: What of the sample had no JSON form, one line each.
    """

    sample: RolloutSample | None = None
    failure: WorkflowFailure | None = None
    dropped: tuple[str, ...] = ()


def dump_handback(handback: Handback) -> bytes:
    """Write a result; what has no JSON form is left out and named."""
    if handback.failure is not None:
        failure = handback.failure
        return dump_json(
            {
                "failure": {
                    "message": failure.message[:_LONGEST_TEXT],
                    "category": failure.category,
                    "source": failure.source or "",
                    "traceback": failure.traceback[-_LONGEST_TEXT:],
                }
            }
        )
    if handback.sample is None:
        return dump_json({"sample": None})
    sample, dropped = _fitted(handback.sample)
    return dump_json({"sample": sample, "dropped": dropped})


def _fitted(sample: RolloutSample) -> tuple[dict[str, Any], list[str]]:
    document: dict[str, Any] = {
        "label": sample.label,
        "reward": sample.reward,
        "remove_sample": sample.remove_sample,
    }
    dropped: list[str] = []
    trajectory = sample.trajectory_messages
    same = trajectory is not None and list(trajectory) == list(sample.messages)
    parts = {
        "messages": list(sample.messages),
        "metrics": sample.metrics,
        "extra_fields": sample.extra_fields,
        "trajectory_messages": None if trajectory is None or same else list(trajectory),
    }
    for name, value in parts.items():
        document[name], lost = fit(value, max_depth=MAX_JSON_DEPTH - _ABOVE)
        dropped += [f"{name}: {line}" for line in lost]
    if same:
        document["trajectory_messages"] = True
    return document, dropped


def read_handback(path: Path) -> Handback:
    """Read a result. Blocking.

    Raises:
        FileNotFoundError: There is none.
        InvalidFieldError: It is no result: too large, no strict JSON, too deep, or of another
            form.
    """
    if path.is_symlink() or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise InvalidFieldError("result", f"is larger than {MOST_BYTES // 1024**2} MiB")
    try:
        document = parse_json(data)
        if not isinstance(document, dict):
            raise InvalidFieldError("result", "must be an object")  # noqa: TRY301
        if "failure" in document:
            return Handback(failure=_failure(document["failure"]))
        return Handback(sample=_sample(document["sample"]), dropped=_lines(document))
    except KeyError as error:
        raise InvalidFieldError("result", f"lacks {error}") from None
    except (InvalidBodyError, InvalidFieldError) as error:
        raise InvalidFieldError("result", f"cannot be read: {error}") from None


def _sample(value: Any) -> RolloutSample | None:
    if value is None:
        return None
    sample = structure(value, RolloutSample)
    trajectory = value.get("trajectory_messages")
    if trajectory is True:
        trajectory = [dict(message) for message in sample.messages]
    sample.trajectory_messages = trajectory
    return sample


def _failure(value: Any) -> WorkflowFailure:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise InvalidFieldError("failure", "must be an object of strings")
    try:
        category = RolloutErrorCategory(value.get("category", ""))
    except ValueError:
        category = RolloutErrorCategory.AGENT_ERROR
    return WorkflowFailure(
        message=utf8(value["message"])[:_LONGEST_TEXT],
        category=category if category in _USERS else RolloutErrorCategory.AGENT_ERROR,
        source=MODEL_ENDPOINT if value.get("source") == MODEL_ENDPOINT else None,
        traceback=utf8(value.get("traceback", ""))[:_LONGEST_TEXT],
    )


def _lines(document: dict[str, Any]) -> tuple[str, ...]:
    dropped = document.get("dropped", [])
    if not isinstance(dropped, list) or not all(isinstance(line, str) for line in dropped):
        raise InvalidFieldError("dropped", "must be a list of strings")
    return tuple(utf8(line)[:1000] for line in dropped[:100])
