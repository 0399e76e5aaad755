"""Which rollout goes next, and to which worker. No I/O.

Theory of operation: rollouts wait by run, first come, first served within a run. Each run has a
tag, the virtual time at which its next rollout is due, and the lowest tag goes next; a rollout
that is taken moves its run's tag on by the inverse of the run's weight. So runs of equal weight
take turns, and others get shares in proportion. A run that comes, or comes back, starts at the
virtual time of the rollout that was taken last: it neither waits for those that were there before
nor catches up on what it did not ask for.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from attrs import define, field

__all__ = ["FairQueue", "Room", "most_room"]

T = TypeVar("T")


@define(eq=False)
class _Run:
    """A run with rollouts that wait or are out.

    Attributes:
        name: Its name; ``None`` for rollouts that name none.
        step: How far its tag moves for each rollout.
        waiting: What waits, in order.
        out: How many were taken and have not ended.
        tag: The virtual time at which its next rollout is due.
        listed: Whether it is in the heap of runs that may go next.
    """

    name: str | None
    step: float
    waiting: OrderedDict[object, None] = field(factory=OrderedDict)
    out: int = 0
    tag: float = 0.0
    listed: bool = False


class FairQueue(Generic[T]):
    """What waits, by run, taken in turns.

    Args:
        max_per_run: How many of one run may be out at a time; ``None`` for no cap.
        weights: The shares of runs by name; 1 for those that are not named. Positive numbers.
    """

    def __init__(
        self, *, max_per_run: int | None = None, weights: Mapping[str, float] | None = None
    ) -> None:
        self._max_per_run = max_per_run
        self._weights = dict(weights or {})
        self._runs: dict[str | None, _Run] = {}
        self._heap: list[tuple[float, int, _Run]] = []
        self._turns = itertools.count()
        self._now = 0.0
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    @property
    def runs(self) -> dict[str | None, tuple[int, int]]:
        """How many rollouts of each run wait, and how many are out."""
        return {run.name: (len(run.waiting), run.out) for run in self._runs.values()}

    def push(self, run_name: str | None, item: T) -> None:
        """Add an item at the end of its run."""
        run = self._runs.get(run_name)
        if run is None:
            weight = self._weights.get(run_name, 1.0) if run_name is not None else 1.0
            run = self._runs[run_name] = _Run(run_name, 1.0 / weight)
        if not run.waiting and run.tag < self._now:
            run.tag = self._now
            run.listed = False  # what is in the heap of it has the wrong tag
        run.waiting[item] = None
        self._waiting += 1
        self._list(run)

    def put_back(self, run_name: str | None, item: T) -> None:
        """Return an item that was taken, to the head of its run, as if it had not been."""
        run = self._runs[run_name]
        run.out -= 1
        run.tag -= run.step
        run.waiting[item] = None
        run.waiting.move_to_end(item, last=False)
        self._waiting += 1
        run.listed = False  # its entry in the heap, if there is one, has the wrong tag
        self._list(run)

    def pop(self) -> T | None:
        """Take the item that goes next; ``None`` if nothing waits that may go.

        It counts as out until `ended`.
        """
        while self._heap:
            tag, _, run = heapq.heappop(self._heap)
            if not run.listed or tag != run.tag:
                continue  # an entry that another one has replaced
            run.listed = False
            if not run.waiting or self._full(run):
                continue  # listed again when something comes, or one of it has ended
            item, _ = run.waiting.popitem(last=False)
            self._waiting -= 1
            self._now = max(self._now, run.tag)
            run.tag += run.step
            run.out += 1
            self._list(run)
            return item  # type: ignore[return-value] # the keys are what was pushed
        return None

    def discard(self, run_name: str | None, item: T) -> bool:
        """Drop an item that waits; ``False`` if it does not."""
        run = self._runs.get(run_name)
        if run is None or item not in run.waiting:
            return False
        del run.waiting[item]
        self._waiting -= 1
        self._forget(run)
        return True

    def ended(self, run_name: str | None) -> None:
        """Note that an item of this run, which was taken, is over."""
        run = self._runs[run_name]
        run.out -= 1
        self._list(run)
        self._forget(run)

    def _full(self, run: _Run) -> bool:
        return self._max_per_run is not None and run.out >= self._max_per_run

    def _list(self, run: _Run) -> None:
        if not run.listed and run.waiting and not self._full(run):
            run.listed = True
            heapq.heappush(self._heap, (run.tag, next(self._turns), run))

    def _forget(self, run: _Run) -> None:
        if not run.waiting and not run.out:
            run.listed = False
            del self._runs[run.name]


class Room(Protocol):
    """What the choice of a worker looks at."""

    @property
    def room(self) -> float:
        """How many more rollouts it would start at once; infinite without a bound."""
        ...

    @property
    def in_flight(self) -> int:
        """How many rollouts it has."""
        ...


W = TypeVar("W", bound=Room)


def most_room(workers: Iterable[W], avoided: Collection[object] = ()) -> W | None:
    """Return the worker with most room; among equals the one with the fewest rollouts.

    Args:
        workers: Those that may be asked.
        avoided: Workers that are chosen only where no other has room.

    Returns:
        ``None`` if none has room.
    """
    best: W | None = None
    best_key: tuple[bool, float, int] = (False, 0.0, 0)
    for worker in workers:
        if worker.room <= 0:
            continue
        key = (worker not in avoided, worker.room, -worker.in_flight)
        if best is None or key > best_key:
            best, best_key = worker, key
    return best
