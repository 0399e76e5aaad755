"""Deadlines of rollouts: the ends of their leases and of their retention times.

One task watches all of them in a heap. A lease that is renewed is not moved in the heap: its
old deadline comes due, and whoever handles it adds the new one. So a poll costs the same,
whatever the number of rollouts, and a wake-up costs only as much as there is to do. The heap keeps
no item alive: what nobody else holds has no deadlines any more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Generic, TypeVar
from weakref import ref

import trio

from rollout.rules import ServingClock

__all__ = ["Deadlines"]

T = TypeVar("T")


class Deadlines(Generic[T]):
    """A heap of items by deadline, and the task that handles those that are due.

    Args:
        tick_sec: The longest time between two ticks of the clock while there are deadlines.
        handle: Called with each item that is due, and the trio time; may add it again.

    Attributes:
        clock: The clock of serving time, which ticks here.
    """

    def __init__(self, tick_sec: float, handle: Callable[[T, float], None]) -> None:
        self.clock = ServingClock(tick_sec)
        self._handle = handle
        self._heap: list[tuple[float, int, ref[T]]] = []
        self._sequence = itertools.count()
        self._wake = trio.Event()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, item: T) -> None:
        """Schedule an item for a deadline (serving time)."""
        heappush(self._heap, (deadline, next(self._sequence), ref(item)))
        if self.clock.due is None:
            # At once: what blocks the loop before the watch gets to run must not count.
            self.clock.tick(trio.current_time(), at_most=deadline)
            self._wake.set()
        elif self.clock.at(deadline) < self.clock.due:
            self._wake.set()

    async def watch(self) -> None:
        """Handle items as they come due, and tick the clock, until cancelled."""
        while True:
            self._wake = trio.Event()
            now = trio.current_time()
            next_deadline = self._handle_due(now)
            if next_deadline == math.inf:
                self.clock.stop(now)
                wake_at = math.inf
            else:
                wake_at = self.clock.tick(now, at_most=next_deadline)
            with trio.move_on_at(wake_at):
                await self._wake.wait()

    def _handle_due(self, now: float) -> float:
        """Handle what is due; return the next deadline."""
        serving = self.clock.time(now)
        while self._heap and self._heap[0][0] <= serving:
            item = heappop(self._heap)[2]()
            if item is not None:
                self._handle(item, now)
        return self._heap[0][0] if self._heap else math.inf
