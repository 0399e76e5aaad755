"""Checks of `run_rollouts` and `first_successes`: bounds, and what is cancelled at the end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from attrs import define, field

from rollout.simulation.bulk_callers import key_of
from rollout.simulation.findings import EPSILON_SEC, Checked, Finding
from rollout.simulation.trace import Event

__all__ = ["check_bulk"]

_GOOD = {200, 202}
_ADMISSIONS = {"admit", "batch"}
_GARBLED = {"foreign", "truncated"}


@define
class _Bulk:
    """One call with many rollouts, of the first client.

    Attributes:
        ids: Its rollouts.
        how: Whether it waits for all, leaves after a while, or wants the first successes.
        most: How many may be in flight.
        per_key: How many of one key may be.
        in_flight: What was asked for, and has no outcome.
        admitted: What is on the server for it, as far as it knows.
        troubled: Whose latest request failed, and when.
        succeeded: What has ended as a success, in order.
        ended: What it need not wait for any longer.
        chosen: What it returned.
        left_at: When it let go of the rest.
    """

    ids: set[str]
    how: str
    most: float
    per_key: float
    in_flight: dict[str, None] = field(factory=dict)
    admitted: dict[str, None] = field(factory=dict)
    troubled: dict[str, float] = field(factory=dict)
    succeeded: list[str] = field(factory=list)
    ended: set[str] = field(factory=set)
    chosen: list[str] = field(factory=list)
    left_at: float = math.inf

    @classmethod
    def of(cls, event: Event) -> _Bulk:
        """Read how one begins."""
        detail = event.detail
        most, per_key = detail.get("most") or math.inf, detail.get("per_key") or math.inf
        return cls(set(detail["ids"]), detail["how"], most, per_key)

    def over_its_bounds(self, now: float) -> Iterator[Finding]:
        """Check how many are in flight, once everything of an earlier moment has happened."""
        keys = Counter(map(key_of, self.in_flight))
        if len(self.in_flight) > self.most or max(keys.values(), default=0) > self.per_key:
            message = f"{len(self.in_flight)} are in flight, more than there may be"
            yield Finding(next(iter(self.in_flight)), message, now)

    def take(self, checked: Checked, event: Event) -> Iterator[Finding]:
        """Take the next event of the client or a caller."""
        if event.detail.get("route") == "cancel":
            if event.what == "sent":
                yield from self._cancels(event)
        elif event.rollout_id in self.ids:
            yield from self._about(event)
        elif event.what == "bulk-leaves":
            self.left_at = min(self.left_at, event.time)
        elif event.what == "bulk-ends":
            paused = checked.history.paused_sec(self.left_at, min(self.left_at, event.time)) > 0
            yield from self._ends(event.time, paused=paused)

    def _about(self, event: Event) -> Iterator[Finding]:
        rollout_id, route = event.rollout_id, event.detail.get("route")
        if event.what == "sent":
            if event.time > self.left_at + EPSILON_SEC:
                yield Finding(rollout_id, "a request followed the end of its block", event.time)
            if route in _ADMISSIONS:
                self.in_flight[rollout_id] = None
                if event.detail["fault"] in _GARBLED:
                    self.ended.add(rollout_id)  # nobody can tell whether it was admitted
        elif event.what in {"result", "call-failed"}:
            self._ended(rollout_id, event.detail.get("state"))
        elif event.what == "chosen":
            self.chosen.append(rollout_id)
        elif _failed(event):
            self.troubled[rollout_id] = event.time
        elif event.what in {"answered", "told"}:
            self._answered(rollout_id, event)

    def _answered(self, rollout_id: str, event: Event) -> None:
        self.troubled.pop(rollout_id, None)
        if "digest" in event.detail:
            self._ended(rollout_id, event.detail["state"])
        elif event.detail["route"] in _ADMISSIONS and rollout_id not in self.ended:
            self.admitted[rollout_id] = None

    def _cancels(self, event: Event) -> Iterator[Finding]:
        for rollout_id in event.rollout_id.split(","):
            if rollout_id in self.ids:
                self.left_at = min(self.left_at, event.time)
                if self.admitted.pop(rollout_id, rollout_id) is not None:
                    message = "a block cancelled what it had not admitted, or what had ended"
                    yield Finding(rollout_id, message, event.time)

    def _ends(self, now: float, *, paused: bool) -> Iterator[Finding]:
        for rollout_id in self.admitted:
            if self.troubled.get(rollout_id, math.inf) > self.left_at - EPSILON_SEC and not paused:
                yield Finding(rollout_id, "a block ended and left it on the server", now)
        if self.chosen != self.succeeded[: len(self.chosen)] and self.how == "first":
            yield Finding(self.chosen[0], "is not among the first successes", now)
        if self.how == "all":
            for rollout_id in self.in_flight:
                yield Finding(rollout_id, "a block ended without its outcome", now)
        self.admitted.clear()
        self.in_flight.clear()

    def _ended(self, rollout_id: str, state: str | None) -> None:
        if state == "success" and rollout_id not in self.succeeded:
            self.succeeded.append(rollout_id)
        self.ended.add(rollout_id)
        self.admitted.pop(rollout_id, None)
        self.in_flight.pop(rollout_id, None)


def check_bulk(checked: Checked) -> Iterator[Finding]:
    """A block keeps its bounds; its end cancels what it has admitted and has not ended."""
    bulk: _Bulk | None = None
    since = -math.inf
    for event in checked.history.trace:
        if event.who not in {"caller", "client"} or event.detail.get("client", 1) != 1:
            continue
        if event.what == "bulk-begins":
            bulk = _Bulk.of(event)
        elif bulk is not None:
            if event.time > since + EPSILON_SEC:
                since = event.time
                yield from bulk.over_its_bounds(since)
            yield from bulk.take(checked, event)


def _failed(event: Event) -> bool:
    """Whether a request brought nothing that is about its rollout."""
    if event.what in {"failed", "gave-up"}:
        return True
    about = event.detail.get("about", event.rollout_id)
    bad = event.detail.get("status") not in _GOOD or event.detail.get("unreadable")
    return event.what == "answered" and bool(bad or about != event.rollout_id)
