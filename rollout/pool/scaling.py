"""How many workers a pool should have, from how many rollouts it has."""

from __future__ import annotations

import math

from attrs import define, field

__all__ = ["Scaling"]


@define
class Scaling:
    """A number of workers that follows the load: up at once, down after an idle time.

    Attributes:
        least: The smallest number.
        most: The largest one.
        idle_sec: For how long fewer workers must have sufficed before there are fewer.
    """

    least: int
    most: int
    idle_sec: float
    _since: float = field(default=-math.inf, init=False)
    _peak: int = field(default=0, init=False)

    def wanted(self, now: float, *, current: int, load: int, capacity: float) -> int:
        """Return how many workers there should be from now on.

        Args:
            now: The time, in seconds, that never goes back.
            current: How many workers there are, those that start included.
            load: How many rollouts wait or are on workers.
            capacity: How many rollouts one worker takes at a time; infinite without a bound, or
                while no worker has said it.
        """
        needed = max(math.ceil(load / capacity), 1) if load else 0
        needed = max(min(needed, self.most), self.least)
        if needed >= current:
            self._since, self._peak = now, needed
            return needed
        self._peak = max(self._peak, needed)
        if now - self._since < self.idle_sec:
            return current
        wanted = min(self._peak, current)
        self._since, self._peak = now, needed
        return wanted
