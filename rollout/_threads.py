"""Work in threads that keeps the event loop free, under clocks of every kind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import trio

from rollout.types import RolloutSample

__all__ = ["BODIES", "RESULTS", "clock_jumps", "is_large", "run_by_size", "run_off_loop"]

T = TypeVar("T")

_LARGE = 256 * 1024
_VALUE_COST = 64
"""What a value costs, where a character of a string costs 1."""

_SCALARS = frozenset({type(None), bool, float, int})
_CONTAINERS = (dict, list, tuple, RolloutSample)

BODIES = trio.CapacityLimiter(1)
"""For bodies that are decoded."""

RESULTS = trio.CapacityLimiter(1)
"""For results that are fitted and encoded.

One at a time bounds the memory, and how long the event loop waits for the interpreter lock."""


def is_large(*values: Any) -> bool:
    """Whether it takes more than a few milliseconds to copy, fit or write samples or JSON."""
    left = _LARGE
    parts: list[Any] = [values]
    while parts and left > 0:
        part = parts.pop()
        if isinstance(part, RolloutSample):
            part = part.messages, part.metrics, part.extra_fields
        left -= _VALUE_COST * len(part)
        if left <= 0:
            break
        for item in part.values() if isinstance(part, dict) else part:
            kind = type(item)
            if kind is str:
                left -= len(item)
            elif kind in _SCALARS:
                continue
            elif isinstance(item, str):
                left -= len(item)
            elif isinstance(item, _CONTAINERS) and item:
                parts.append(item)
    return left <= 0


def clock_jumps() -> bool:
    """Whether the running clock is a `trio.testing.MockClock` that jumps while threads work."""
    # Whoever runs a MockClock has loaded this module, so it need not be loaded for the question.
    testing: Any = sys.modules.get("trio.testing")
    if testing is None:
        return False
    clock: Any = trio.lowlevel.current_clock()
    return isinstance(clock, testing.MockClock) and clock.autojump_threshold != float("inf")


async def run_by_size(function: Callable[[], T], *values: Any) -> T:
    """Call a function that copies, fits or writes these values, in a thread if they are large."""
    if is_large(*values):
        return await run_off_loop(function, RESULTS)
    return function()


async def run_off_loop(
    function: Callable[[], T], limiter: trio.CapacityLimiter, *, abandon: bool = False
) -> T:
    """Call a function in a thread, and wait for it even when cancelled, unless *abandon* is true.

    Where the clock jumps, it is called in place: waiting for a thread would let time pass.
    """
    if clock_jumps():
        await trio.lowlevel.checkpoint()
        return function()
    return await trio.to_thread.run_sync(function, limiter=limiter, abandon_on_cancel=abandon)
