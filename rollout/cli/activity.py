"""What a server is asked to do, for whoever watches it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import trio

from rollout._logs import printable
from rollout.server.entry import Entry
from rollout.server.registry import RolloutRegistry

__all__ = ["Activity"]

_MOST_LINES = 6


class Activity:
    """Says which rollouts come and how they end: one by one if they are few, else in numbers.

    Args:
        registry: The server's rollouts.
        say: What gets the lines.
        every_sec: How long events are collected before they are said.
        one_by_one: Whether a few rollouts get a line each.
    """

    def __init__(
        self,
        registry: RolloutRegistry,
        say: Callable[[str], object],
        *,
        every_sec: float,
        one_by_one: bool,
    ) -> None:
        self._registry = registry
        self._say = say
        self._every_sec = every_sec
        self._one_by_one = one_by_one
        self._lines: list[str] = []
        self._admitted = 0
        self._ended: Counter[str] = Counter()
        self._since: dict[str, float] = {}
        self._next = registry.hooks.observer
        registry.hooks.observer = self._observe

    async def run(self) -> None:
        """Say what happens until this is cancelled, and then the rest."""
        try:
            while True:
                await trio.sleep(self._every_sec)
                self._flush()
        finally:
            self._flush()

    def _observe(self, what: str, entry: Entry) -> None:
        if self._next is not None:
            self._next(what, entry)
        if what == "admitted":
            self._admitted += 1
            self._since[entry.rollout_id] = trio.current_time()
            self._note(entry, "admitted")
        elif what == "finished" and entry.record.result is not None:
            result = entry.record.result
            now = trio.current_time()
            seconds = now - self._since.pop(entry.rollout_id, now)
            self._ended[result.status] += 1
            why = f"{result.err_category}, " if result.err_category else ""
            self._note(entry, f"{result.status} ({why}{seconds:.1f} s)")

    def _note(self, entry: Entry, what: str) -> None:
        if len(self._lines) <= _MOST_LINES:
            self._lines.append(f"rollout {printable(entry.rollout_id)}: {what}")

    def _flush(self) -> None:
        if self._one_by_one and len(self._lines) <= _MOST_LINES:
            for line in self._lines:
                self._say(line)
        elif self._lines:
            ended = ", ".join(f"{count} {status}" for status, count in self._ended.items())
            self._say(
                f"rollouts: {self._admitted} admitted, {self._ended.total()} ended"
                f"{f' ({ended})' if ended else ''}; {len(self._since)} in flight"
            )
        self._lines, self._admitted = [], 0
        self._ended.clear()
