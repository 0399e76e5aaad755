"""Fit what users measured into JSON.

Workflows and graders put whatever they have into a sample: NumPy scalars, NaN, sets, objects.
That must never cost a rollout its reward. `fit` keeps everything that JSON can say, turns
foreign numbers into plain ones, and names what it had to leave out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollout.codec import MAX_JSON_DEPTH
from rollout.types._fields import plain_number

__all__ = ["fit", "utf8"]

_DROP: Any = object()


def utf8(text: str) -> str:
    """Replace lone surrogates, for text that strict peers read."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def fit(value: Any) -> tuple[Any, list[str]]:
    """Return *value* in plain JSON types, and what had to be left out.

    Returns:
        A pair: the fitted value (``None`` if it has no JSON form at all), and one line for
        each thing that was dropped, with the way to it and its type.
    """
    dropped: list[str] = []
    fitted = _fit(value, "", dropped, 0)
    return (None if fitted is _DROP else fitted), dropped


def _fit(value: Any, where: str, dropped: list[str], depth: int) -> Any:
    if value is None or type(value) in {bool, str, int}:
        return value
    if type(value) is float:
        if math.isfinite(value):
            return value
        return _drop(where, "a number that is not finite", dropped)
    if depth > MAX_JSON_DEPTH:
        return _drop(where, "nested too deeply", dropped)
    if isinstance(value, Mapping):
        return _fit_mapping(value, where, dropped, depth)
    if isinstance(value, (list, tuple)):
        fitted = (
            _fit(item, f"{where}[{index}]", dropped, depth + 1) for index, item in enumerate(value)
        )
        return [item for item in fitted if item is not _DROP]
    if isinstance(value, str):
        return str.__str__(value)
    return _fit_number(value, where, dropped)


def _fit_mapping(value: Mapping[Any, Any], where: str, dropped: list[str], depth: int) -> Any:
    fitted: dict[str, Any] = {}
    for key, item in value.items():
        name = key if type(key) is str else _key(key)
        if name is None:
            dropped.append(f"{where or 'value'}: a key of type {type(key).__name__}")
            continue
        inner = _fit(item, f"{where}.{name}" if where else name, dropped, depth + 1)
        if inner is not _DROP:
            fitted[name] = inner
    return fitted


def _key(key: Any) -> str | None:
    if isinstance(key, str):
        return str.__str__(key)
    number = None if isinstance(key, bool) else _number(key)
    return None if number is None else str(number)


def _number(value: Any) -> int | float | None:
    if isinstance(value, int):
        return int(value)
    number = plain_number(value)
    if number is None:
        return None
    try:
        whole = value.__index__()
    except (AttributeError, TypeError):
        return number
    return int(whole)


def _fit_number(value: Any, where: str, dropped: list[str]) -> Any:
    if type(value).__name__ == "bool" or type(value).__name__ == "bool_":
        return bool(value)
    number = _number(value)
    if number is None:
        return _drop(where, f"of type {type(value).__name__}", dropped)
    return number


def _drop(where: str, what: str, dropped: list[str]) -> Any:
    dropped.append(f"{where or 'value'}: {what}")
    return _DROP
