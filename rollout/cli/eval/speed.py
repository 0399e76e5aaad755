"""How fast a run is, and how long it has yet to go. Pure.

Attempts may end a hundred a second or one in ten minutes, and often many at once, so the rate
is that of a window: the last ten minutes, or as long as it takes for a few dozen to end.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["Speed", "duration_text", "rate_text"]

_WINDOW_SEC = 600.0
_LEAST = 32
"""So many attempts have to end within the window, however long that takes."""
_GRAIN_SEC = 1.0
"""What ends within this time is one step, so that the window holds few of them."""
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


class Speed:
    """Follows a run.

    Args:
        now: When it starts, in seconds of any clock.
        settled: How many attempts had ended before, which say nothing of its speed.
    """

    def __init__(self, now: float, settled: int) -> None:
        self._settled = settled
        # How many had ended when; the first step is where the window begins.
        self._steps = deque([(now, settled)])

    def move(self, now: float, settled: int) -> None:
        """Note how many attempts have ended."""
        steps = self._steps
        self._settled = settled
        if len(steps) > 1 and now - steps[-1][0] < _GRAIN_SEC:
            steps[-1] = (steps[-1][0], settled)
        else:
            steps.append((now, settled))
        while (
            len(steps) > 1 and now - steps[1][0] >= _WINDOW_SEC and settled - steps[1][1] >= _LEAST
        ):
            steps.popleft()

    def rate(self, now: float) -> float | None:
        """How many attempts end in a second; ``None`` before the first one has."""
        begin, before = self._steps[0]
        ended = self._settled - before
        return ended / (now - begin) if ended and now > begin else None

    def remaining_sec(self, now: float, total: int) -> float | None:
        """How long the rest will take at this rate, in seconds; ``None`` if nobody knows."""
        rate = self.rate(now)
        return None if rate is None else max(0, total - self._settled) / rate


def rate_text(rate: float | None) -> str:
    """Write a rate in the unit in which it is a number that one can read."""
    if rate is None:
        return "-/s"
    for unit, seconds in (("s", 1), ("min", _MINUTE)):
        if rate * seconds >= 1:
            return f"{rate * seconds:.1f}/{unit}"
    return f"{rate * _HOUR:.1f}/h"


def duration_text(seconds: float | None) -> str:
    """Write how long something takes, as in 00:07, 1:02:03 or 2d 03:04."""
    if seconds is None:
        return "--:--"
    whole = math.ceil(seconds)
    minutes, rest = divmod(whole, _MINUTE)
    if whole < _HOUR:
        return f"{minutes:02}:{rest:02}"
    hours, minutes = divmod(minutes, _MINUTE)
    if whole < _DAY:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{whole // _DAY}d {hours % 24:02}:{minutes:02}"
