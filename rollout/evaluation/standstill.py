"""Detect that this process was suspended, by a signal or a machine that sleeps."""

from __future__ import annotations

import math
import time

import trio
from attrs import define, field

__all__ = ["Standstill"]

_TICK_SEC = 1.0
_LATE_SEC = 10.0
"""Shorter ones are made up for by retries."""


def _now() -> float:
    # By the wall clock, since a monotonic one may stand still while the machine sleeps.
    return time.time()


@define
class Standstill:
    """Watches for gaps in the process's own running time."""

    _tick: float = field(factory=_now)
    _ended_at: float = -math.inf

    async def watch(self) -> None:
        """Watch until cancelled."""
        while True:
            self._look()
            await trio.sleep(_TICK_SEC)

    def since(self, moment: float) -> bool:
        """Whether the process stood still for long after *moment*, on trio's clock."""
        self._look()
        return self._ended_at >= moment

    def _look(self) -> None:
        now = _now()
        if now - self._tick > _TICK_SEC + _LATE_SEC:
            self._ended_at = trio.current_time()
        self._tick = now
