"""Fit what users measured into JSON.

Workflows and graders put whatever they have into a sample: NumPy scalars, NaN, sets, objects.
That must never cost a rollout its reward. `fit` keeps everything that JSON can say, turns
foreign numbers into plain ones, and names what it had to leave out. Foreign objects may raise
whatever they like while they are looked at; then they are left out too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollout.codec import MAX_JSON_DEPTH
from rollout.types._fields import plain_number

__all__ = ["fit", "utf8"]

_DROP: Any = object()

_LONGEST_INT_BITS = 14_000
"""Python writes and reads numbers of up to 4,300 digits, which is a little more than this."""


def utf8(text: str) -> str:
    """Replace lone surrogates, for text that strict peers read."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def fit(value: Any, *, max_depth: int = MAX_JSON_DEPTH) -> tuple[Any, list[str]]:
    """Return *value* in plain JSON types, and what had to be left out.

    Args:
        value: Anything.
        max_depth: How deeply the fitted value may nest; deeper parts are left out.

    Returns:
        A pair: the fitted value (``None`` if it has no JSON form at all), and one line for
        each thing that was dropped, with the way to it and its type.
    """
    fitting = _Fitting(max_depth)
    fitted = fitting.any(value, None, 0)
    return (None if fitted is _DROP else fitted), fitting.dropped


# The way to a value, innermost step first: (the way to its parent, key or index).
_Way = tuple[Any, str | int] | None


class _Fitting:
    """One run over a value."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.dropped: list[str] = []
        self.above: set[int] = set()

    def any(self, value: Any, way: _Way, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is str or kind is bool:
            return value
        if kind is int:
            return self.whole(value, way)
        if kind is float:
            return value if math.isfinite(value) else self.drop(way, "a number that is not finite")
        try:
            if isinstance(value, (Mapping, list, tuple)):
                return self.container(value, way, depth)
            return self.scalar(value, way)
        except Exception as error:  # noqa: BLE001 - the methods of foreign objects do anything
            return self.drop(way, f"of type {kind.__name__} (it raised {type(error).__name__})")

    def container(self, value: Any, way: _Way, depth: int) -> Any:
        if depth >= self.max_depth:
            return self.drop(way, "nested too deeply")
        if id(value) in self.above:
            return self.drop(way, "a part of itself")
        self.above.add(id(value))
        try:
            if isinstance(value, Mapping):
                return self.mapping(value, way, depth + 1)
            items = (self.any(item, (way, n), depth + 1) for n, item in enumerate(value))
            return [item for item in items if item is not _DROP]
        finally:
            self.above.discard(id(value))

    def mapping(self, value: Mapping[Any, Any], way: _Way, depth: int) -> dict[str, Any]:
        fitted: dict[str, Any] = {}
        for key, item in value.items():
            name = key if type(key) is str else _key(key)
            if name is None or name in fitted:
                what = "the same key as another one" if name is not None else "a key"
                self.drop(way, f"{what} of type {type(key).__name__}")
                continue
            inner = self.any(item, (way, name), depth)
            if inner is not _DROP:
                fitted[name] = inner
        return fitted

    def scalar(self, value: Any, way: _Way) -> Any:
        if isinstance(value, str):
            return str.__str__(value)
        if type(value).__name__ in {"bool", "bool_"}:
            return bool(value)
        number = _number(value)
        if number is None:
            return self.drop(way, f"of type {type(value).__name__}")
        return self.whole(number, way) if isinstance(number, int) else number

    def whole(self, value: int, way: _Way) -> Any:
        if value.bit_length() > _LONGEST_INT_BITS:
            return self.drop(way, "a number with too many digits")
        return value

    def drop(self, way: _Way, what: str) -> Any:
        self.dropped.append(f"{_text(way)}: {what}")
        return _DROP


def _text(way: _Way) -> str:
    steps: list[str | int] = []
    while way is not None:
        way, step = way
        steps.append(step)
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps[::-1])
    return text.removeprefix(".") or "value"


def _key(key: Any) -> str | None:
    if isinstance(key, str):
        return str.__str__(key)
    try:
        number = None if isinstance(key, bool) else _number(key)
        return None if number is None else str(number)
    except Exception:  # noqa: BLE001 - the methods of foreign objects do anything
        return None


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
