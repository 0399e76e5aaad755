"""Metrics of model calls, read from messages, and the totals of a document."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

__all__ = [
    "TIME_KEYS",
    "final_metrics",
    "is_number",
    "is_timestamp",
    "read_usage",
    "take_metrics",
    "take_timestamp",
    "token_count",
    "token_totals",
    "whole_numbers",
]

TIME_KEYS = ("timestamp", "created_at", "created", "completed_at")
"""Where messages have their time, the best first."""

_COSTS = ("cost_usd", "cost", "response_cost")
_TOKEN_IDS = {
    "prompt_token_ids": ("prompt_token_ids",),
    "completion_token_ids": ("completion_token_ids", "response_token_ids", "token_ids"),
}
_CACHE_PARTS = ("cache_read_input_tokens", "cache_creation_input_tokens")
_CACHED = (
    ("prompt_tokens_details", "cached_tokens"),
    ("input_tokens_details", "cached_tokens"),
    ("input_token_details", "cache_read"),
    ("cached_tokens",),
    ("prompt_cache_hit_tokens",),
    ("cache_read_input_tokens",),
)
_SUMS = {
    "total_prompt_tokens": "prompt_tokens",
    "total_completion_tokens": "completion_tokens",
    "total_cached_tokens": "cached_tokens",
    "total_cost_usd": "cost_usd",
}
_TOO_MANY = 2**53
"""No endpoint has counted so many tokens; JSON numbers are exact below."""

_SECONDS = (1e8, 1e11)
"""Numbers in between are seconds since 1970; a thousand times that, milliseconds."""


def take_metrics(rest: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the metrics of a call from the rest of its message, and return them.

    Values of an unexpected form stay where they are. Fields of a usage that ATIF has no name for go
    into the metrics' ``extra``.
    """
    metrics: dict[str, Any] = {}
    for key in ("usage", "usage_metadata"):
        usage = rest.get(key)
        if isinstance(usage, dict) and usage and not metrics:
            metrics = read_usage(rest.pop(key))
    _take_first(rest, metrics, "cost_usd", _COSTS, _cost)
    for name, keys in _TOKEN_IDS.items():
        _take_first(rest, metrics, name, keys, whole_numbers)
    _take_logprobs(rest, metrics)
    return metrics or None


def _take_first(
    rest: dict[str, Any],
    metrics: dict[str, Any],
    name: str,
    keys: Sequence[str],
    read: Callable[[Any], Any],
) -> None:
    for key in keys:
        value = read(rest[key]) if key in rest else None
        if value is not None and name not in metrics:
            metrics[name] = value
            del rest[key]


def read_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics that a usage names, in any of its forms."""
    metrics: dict[str, Any] = {}
    extra = dict(usage)
    for name, keys in (
        ("prompt_tokens", ("prompt_tokens", "input_tokens")),
        ("completion_tokens", ("completion_tokens", "output_tokens")),
    ):
        _take_first(extra, metrics, name, keys, token_count)
    for way in _CACHED:
        value: Any = usage
        for key in way:
            value = value.get(key) if isinstance(value, dict) else None
        if token_count(value) is not None:
            metrics["cached_tokens"] = token_count(value)
            if len(way) == 1:
                extra.pop(way[0], None)
            break
    parts = [token_count(usage.get(key)) for key in _CACHE_PARTS]
    if "input_tokens" in usage and "prompt_tokens" in metrics and any(parts):
        # There the tokens of the cache are counted apart; here they are part of the prompt.
        metrics["prompt_tokens"] += sum(part or 0 for part in parts)
        extra = dict(usage)
    _take_first(extra, metrics, "cost_usd", _COSTS, _cost)
    if extra:
        metrics["extra"] = extra
    return metrics


def _take_logprobs(rest: dict[str, Any], metrics: dict[str, Any]) -> None:
    value = rest.get("logprobs")
    if isinstance(value, dict) and "token_logprobs" in value:  # those of a completion
        value = value["token_logprobs"]
    numbers = _numbers(value)
    if numbers is not None:
        metrics["logprobs"] = numbers
        del rest["logprobs"]
    elif isinstance(value, dict) and isinstance(value.get("content"), list):
        # The tokens themselves and their rivals have no place in ATIF, so all of it stays.
        items = [item.get("logprob") for item in value["content"] if isinstance(item, dict)]
        numbers = _numbers(items)
        if numbers is not None and len(items) == len(value["content"]):
            metrics["logprobs"] = numbers


def token_count(value: Any) -> int | None:
    """Return a number of tokens; ``None`` for what cannot be one."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < _TOO_MANY else None


def _cost(value: Any) -> float | None:
    return value if is_number(value) and value >= 0 else None


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold, and not a boolean."""
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and abs(value) < 1e300  # noqa: PLR2004 - what a float can hold


def whole_numbers(value: Any) -> list[int] | None:
    """Return a list of whole numbers that is not empty; ``None`` for anything else."""
    if not isinstance(value, list) or not value:
        return None
    # Ids are thousands, so they are counted in C.
    return value if list(map(type, value)).count(int) == len(value) else None


def _numbers(value: Any) -> list[float] | None:
    if isinstance(value, list) and value and all(map(is_number, value)):
        return value
    return None


def take_timestamp(rest: dict[str, Any]) -> str | None:
    """Remove the time of a message from the rest of it, and return it as ISO 8601."""
    for key in TIME_KEYS:
        text = _time(rest[key]) if key in rest else None
        if text is not None:
            del rest[key]
            return text
    return None


def is_timestamp(text: str) -> bool:
    """Whether *text* is a time as ISO 8601 writes it."""
    try:
        datetime.fromisoformat(text.replace("Z", "+00:00"))  # noqa: FURB162 - as Harbor reads it
    except ValueError:
        return False
    return True


def _time(value: Any) -> str | None:
    if isinstance(value, str):
        return value if is_timestamp(value) else None
    if not is_number(value):
        return None
    seconds = value / 1000 if value >= _SECONDS[1] else value
    if not _SECONDS[0] <= seconds < _SECONDS[1]:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def final_metrics(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the metrics of all steps; a total that no step has a part in is left out.

    Steps that are copied from an earlier conversation cost nothing here.
    """
    totals: dict[str, Any] = {}
    with_metrics = [step for step in steps if "metrics" in step]
    own = [step["metrics"] or {} for step in with_metrics if not step.get("is_copied_context")]
    for total, name in _SUMS.items() if own else ():
        values = [metrics[name] for metrics in own if name in metrics]
        if values and is_number(sum(values)):
            totals[total] = sum(values)
    totals["total_steps"] = len(steps)
    return totals


def token_totals(document: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the prompt and completion tokens of a document, ``None`` where they are missing."""
    found = document.get("final_metrics")
    totals = found if isinstance(found, Mapping) else {}
    return (
        token_count(totals.get("total_prompt_tokens")),
        token_count(totals.get("total_completion_tokens")),
    )
