"""Copy what a rollout's user code may change, soon.

`copy.deepcopy` keeps account of every object that it meets, since any of them may be met again.
What came as JSON is a tree of few kinds of values, which takes a fraction of that time.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from rollout.types import AgentWorkflowConfig, ConcurrencyConfig, GraderConfig

__all__ = ["deep_copy"]

T = TypeVar("T")

_NEVER_CHANGE = frozenset({str, int, float, bool, type(None), ConcurrencyConfig})
_CONFIGS = frozenset({AgentWorkflowConfig, GraderConfig})
_DEEPEST = 100


class _NotPlain(Exception):  # noqa: N818 - never leaves this module
    """The value holds something else than JSON does, the same container twice, or much depth."""


def deep_copy(value: T) -> T:
    """Return what `copy.deepcopy` returns."""
    if type(value) in _NEVER_CHANGE:
        return value
    try:
        copied: T = _copied(value, set(), 0)
    except _NotPlain:
        return copy.deepcopy(value)
    return copied


def _copied(value: Any, met: set[int], depth: int) -> Any:
    kind = type(value)
    if kind in _NEVER_CHANGE:
        return value
    if id(value) in met or depth == _DEEPEST:
        raise _NotPlain
    met.add(id(value))
    depth += 1
    if kind is dict:
        return _items(value, met, depth)
    if kind is list:
        return [v if type(v) in _NEVER_CHANGE else _copied(v, met, depth) for v in value]
    if kind in _CONFIGS:
        made = object.__new__(kind)
        vars(made).update(_items(vars(value), met, depth))
        return made
    raise _NotPlain


def _items(value: dict[Any, Any], met: set[int], depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, item in value.items():
        if type(name) is not str:
            raise _NotPlain
        made[name] = item if type(item) in _NEVER_CHANGE else _copied(item, met, depth)
    return made
