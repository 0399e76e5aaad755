"""Fitting of foreign values into JSON.

Workflows and graders put whatever they have into a sample: NumPy scalars, NaN, sets, objects.
That must never cost a rollout its reward. `fit` keeps everything that JSON can say, turns
foreign numbers and SDKs' objects (whatever has ``model_dump``) into plain ones, and names what it
had to leave out. Foreign objects may raise whatever they like while they are looked at; then they
are left out too.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

from rollout._json.text import LARGEST_WEIGHT, MAX_JSON_DEPTH, weight_of

__all__ = ["as_float", "dumped", "fit", "plain_number"]

_DROP: Any = object()

_SHORT_INT = 2**63
_SMALL = 256 * 1024
"""What has at most so many values and characters is certainly not too large to be written."""

_LARGEST_INT = 10**4300 - 1
"""Python reads numbers of up to 4,300 digits."""


def fit(value: Any, *, max_depth: int = MAX_JSON_DEPTH) -> tuple[Any, list[str]]:
    """Return *value* in plain JSON types, and what had to be left out.

    Args:
        value: Anything. Of what is too large to be written, the items of the outermost list or
            object are left out that are too much.
        max_depth: How deeply the fitted value may nest; deeper parts are left out.

    Returns:
        A pair: the fitted value (``None`` if it has no JSON form at all), and one line for
        each thing that was dropped, with the way to it and its type.
    """
    with suppress(_NotPlainError, RuntimeError):  # another thread may change it meanwhile
        return _Copying().whole(value, max_depth), []
    fitting = _Fitting(max_depth)
    fitted = fitting.any(value, None, 0)
    return (None if fitted is _DROP else fitted), fitting.dropped


class _NotPlainError(Exception):
    """A value is not small and in JSON's own types."""


class _Copying:
    """The state of copying one value that is small and in JSON's own types, as most values are.

    Attributes:
        left: How many more values and characters it may have.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = _SMALL

    def whole(self, value: Any, levels: int) -> Any:
        """Copy it, in one pass.

        Raises:
            _NotPlainError: It holds something else, too much, or is nested too deeply.
        """
        copied = self.copy(value, levels)
        if self.left < 0:
            raise _NotPlainError
        return copied

    def copy(self, value: Any, levels: int) -> Any:
        kind = type(value)
        if kind is str:
            self.left -= len(value)
            return value
        if kind is bool or value is None:
            return value
        if kind is dict or kind is list or kind is tuple:
            self.left -= len(value)
            if not levels or self.left < 0:
                raise _NotPlainError
            if kind is not dict:
                return [
                    # Numbers are many, and need no call.
                    item
                    if type(item) is float and math.isfinite(item)
                    else self.copy(item, levels - 1)
                    for item in value
                ]
            for key in value:
                if type(key) is not str:
                    raise _NotPlainError
                self.left -= len(key)
            return {key: self.copy(item, levels - 1) for key, item in value.items()}
        if (kind is float and math.isfinite(value)) or (kind is int and abs(value) <= _SHORT_INT):
            return value
        raise _NotPlainError


# The way to a value, innermost step first: (the way to its parent, key or index).
_Way = tuple[Any, str | int] | None


class _Fitting:
    """The state of fitting one value.

    Attributes:
        above: The ids of the lists and objects that the current value is in.
        weight: How much the values of the outermost list or object weigh so far.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.dropped: list[str] = []
        self.above: set[int] = set()
        self.weight = 0

    def any(self, value: Any, way: _Way, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is str or kind is bool:
            return value
        if kind is int:
            return self.whole(value, way)
        if kind is float:
            return value if math.isfinite(value) else self.drop(way, "a number that is not finite")
        try:
            if isinstance(value, (dict, list, tuple, Mapping)):
                return self.container(value, way, depth)
            return self.scalar(value, way, depth)
        except Exception as error:  # noqa: BLE001 - the methods of foreign objects do anything
            return self.drop(way, f"of type {kind.__name__} (it raised {type(error).__name__})")

    def weighed(self, value: Any, way: _Way, depth: int) -> Any:
        """Fit an item of the outermost list or object, or an SDK's object, unless too large."""
        try:
            weight = weight_of(value, self.max_depth - depth)
        except Exception:  # noqa: BLE001 - what is wrong with it is found once more below
            weight = 0
        if self.weight + weight > LARGEST_WEIGHT:
            return self.drop(way, "too large")
        self.weight += weight
        return self.any(value, way, depth)

    def container(self, value: Any, way: _Way, depth: int) -> Any:
        if depth >= self.max_depth:
            return self.drop(way, "nested too deeply")
        if id(value) in self.above:
            return self.drop(way, "a part of itself")
        self.above.add(id(value))
        try:
            if isinstance(value, (dict, Mapping)):
                return self.mapping(value, way, depth + 1)
            return self.sequence(value, way, depth + 1)
        finally:
            self.above.discard(id(value))

    def sequence(self, value: Iterable[Any], way: _Way, depth: int) -> list[Any]:
        fit_item = self.any if depth > 1 else self.weighed
        fitted = [
            # Numbers are many, and need no call.
            item
            if type(item) is float and math.isfinite(item)
            else fit_item(item, (way, index), depth)
            for index, item in enumerate(value)
        ]
        return [item for item in fitted if item is not _DROP]

    def mapping(self, value: Mapping[Any, Any], way: _Way, depth: int) -> dict[str, Any]:
        fit_item = self.any if depth > 1 else self.weighed
        fitted: dict[str, Any] = {}
        for key, item in value.items():
            name = key if type(key) is str else _key(key)
            if name is None or name in fitted:
                what = "the same key as another one" if name is not None else "a key"
                self.drop(way, f"{what} of type {type(key).__name__}")
                continue
            # Texts are many, and need no call either.
            plain = depth > 1 and type(item) is str
            inner = item if plain else fit_item(item, (way, name), depth)
            if inner is not _DROP:
                fitted[name] = inner
        return fitted

    def scalar(self, value: Any, way: _Way, depth: int) -> Any:
        if isinstance(value, str):
            return str.__str__(value)
        if type(value).__name__ in {"bool", "bool_"}:
            return bool(value)
        number = _number(value)
        if number is None:
            made = dumped(value)
            if made is not None:
                return self.weighed(made, way, depth)
            return self.drop(way, f"of type {type(value).__name__}")
        return self.whole(number, way) if isinstance(number, int) else number

    def whole(self, value: int, way: _Way) -> Any:
        if not -_LARGEST_INT <= value <= _LARGEST_INT:
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


def dumped(value: Any) -> dict[str, Any] | None:
    """Return the dict that an object with ``model_dump`` makes of itself, ``None`` without one.

    Fields that are ``None`` are left out, as clients of model APIs leave them out.
    """
    if not hasattr(type(value), "model_dump"):
        return None
    try:
        made = value.model_dump(mode="json", exclude_none=True)
    except Exception:  # noqa: BLE001 - a foreign method may raise anything
        return None
    return made if isinstance(made, dict) else None


def plain_number(value: Any) -> float | None:
    """Turn a foreign number scalar into a plain finite float; ``None`` for anything else.

    See `as_float` for what is taken.
    """
    number = as_float(value)
    return number if number is not None and math.isfinite(number) else None


def as_float(value: Any) -> float | None:
    """Turn a foreign number scalar into a float, NaN and infinities too; ``None`` for others.

    A whole number beyond the range of floats counts as infinite.

    Takes what `numbers.Real` covers (NumPy registers its scalars there), decimals, and
    zero-dimensional arrays or tensors that unwrap with ``item()``. A foreign class may raise
    anything at all while it is asked; then it is not a number.
    """
    try:
        if not isinstance(value, (numbers.Real, Decimal)):
            value = value.item()
            if not isinstance(value, (numbers.Real, Decimal)):
                return None
        return float(value)
    except OverflowError:
        return math.inf
    except Exception:  # noqa: BLE001 - see above
        return None
