"""Checks of servers whose state outlives their processes: across kills and cuts of the power."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime

from attrs import define, field

from rollout.simulation.history import EPSILON_SEC, Checked, Finding, rank
from rollout.simulation.trace import Event

__all__ = ["check_durability"]

_ACCEPTED = 202
_OK = 200
_FINAL = rank("success")
_POLLS = {"poll", "feed"}


@define
class _Life:
    """One admission of an id, across server processes.

    Attributes:
        rollout_id: The id.
        process: The process that admitted it.
        keys: The admission keys that it may have.
        token: The number of its lease token, once that was answered.
        started: When its agent started, as its server recorded.
        ran: Whether its workflow began.
        ended_at: When its end was published, or its server came back and had to know it.
        kept_until: Until when it is kept at least, if it was cancelled before it arrived.
        result: The first answer with its terminal result.
        lost: Whether a cut of the power took back what was kept of it.
    """

    rollout_id: str
    process: int
    keys: frozenset[int | None]
    token: int | None = None
    started: datetime | None = None
    ran: bool = False
    ended_at: float = math.inf
    kept_until: float = math.inf
    result: Event | None = None
    lost: bool = False


@define
class _Lives:
    """The admissions of a run, and requests that are under way."""

    checked: Checked
    lives: dict[str, _Life] = field(factory=dict)
    executed: dict[tuple[str, int], int] = field(factory=dict)
    arrivals: dict[tuple[int, str], Event] = field(factory=dict)
    process: int = 0
    up_at: float = 0.0

    def take(self, event: Event) -> Iterator[Finding]:
        """Process the next event."""
        if event.who == "world":
            self._world(event)
            return
        life: _Life | None = self.lives.get(event.rollout_id)
        detail = event.detail
        here = detail.get("process") == self.process
        if event.what == "arrived":
            self.arrivals[detail["request"], event.rollout_id] = event
        elif event.what == "server-answered":
            arrival = self.arrivals.pop((detail["request"], event.rollout_id), None)
            streams = detail["route"] == "feed"
            if arrival is not None and streams:
                self.arrivals[detail["request"], event.rollout_id] = arrival
            if arrival is None or not here:
                return
            if "token" in detail:
                life = self._with_token(life, arrival, detail["token"])
            if life is not None and not life.lost:
                yield from self._answered(life, arrival, event)
        elif life is not None and life.process == detail.get("process"):
            self._about(life, event)

    def admitted(self, life: _Life) -> Iterator[Finding]:
        """Begin the life of an admission."""
        self.lives[life.rollout_id] = life
        if len(life.keys) != 1:
            return
        (key,) = life.keys
        if key is None:
            return
        before = self.executed.setdefault((life.rollout_id, key), life.process)
        if before != life.process:
            message = f"was executed again for one admission key, after process {before}"
            yield Finding(life.rollout_id, message, self.up_at)

    def _world(self, event: Event) -> None:
        if event.what == "server-up":
            self.process, self.up_at = event.detail["process"], event.time
            for each in self.lives.values():
                each.ended_at = min(each.ended_at, event.time)
        elif event.what == "commit-lost":
            life = self.lives.get(event.rollout_id)
            if life is not None:
                life.lost = True
            self.executed = {
                known: process
                for known, process in self.executed.items()
                if known[0] != event.rollout_id
            }

    def _with_token(self, life: _Life | None, arrival: Event, token: int) -> _Life:
        """Return the life that a token belongs to; one of its own if no process began it.

        That is one whose admission was kept as its process died, or that was cancelled before.
        """
        if life is None or life.token not in {None, token}:
            key = arrival.detail.get("key")
            life = _Life(arrival.rollout_id, 0, frozenset({key}), ended_at=self.up_at)
            life.kept_until = self._cancelled_until(arrival.rollout_id, key)
            self.lives[life.rollout_id] = life
        life.token = token
        return life

    def _cancelled_until(self, rollout_id: str, key: int | None) -> float:
        lease = self.checked.options.polling_lease_timeout_sec
        asked = (
            request.time + lease
            for _, request in self.checked.history.cancels
            if key is not None and request.detail.get("keys", {}).get(rollout_id) == key
        )
        return next(asked, math.inf)

    def _about(self, life: _Life, event: Event) -> None:
        if event.what == "agent-started":
            life.started = datetime.fromisoformat(event.detail["at"])
        elif event.what == "workflow-started":
            life.ran = True
        elif event.what == "finished":
            life.ended_at = min(life.ended_at, event.time)

    def _answered(self, life: _Life, arrival: Event, event: Event) -> Iterator[Finding]:
        detail = event.detail
        if detail["route"] not in _POLLS or arrival.detail["lease"] != "own":
            return
        if "digest" in detail:
            yield from self._told(life, event)
        options = self.checked.options
        retained_sec = options.result_retention_sec
        if not life.keys <= {None}:
            retained_sec = max(retained_sec, options.polling_lease_timeout_sec)
        until = min(life.ended_at + retained_sec, life.kept_until)
        restarted = life.process != self.process
        if not restarted or not life.ended_at <= arrival.time < until - EPSILON_SEC:
            return
        if detail.get("refused") or detail["status"] != _OK:
            message = f"is gone after a restart: a {detail['route']} was answered {detail}"
            yield Finding(life.rollout_id, message, event.time)
        elif "state" in detail and rank(detail["state"]) != _FINAL:
            message = f"is {detail['state']} after a restart, which nothing will end"
            yield Finding(life.rollout_id, message, event.time)

    def _told(self, life: _Life, event: Event) -> Iterator[Finding]:
        first = life.result
        if first is None:
            life.result = event
        elif first.detail["digest"] != event.detail["digest"]:
            message = f"its result of {first.time:.3f} changed with a restart"
            yield Finding(life.rollout_id, message, event.time)
        told = event.detail["started"]
        if told is None and life.ran:
            yield Finding(life.rollout_id, "its agent ran, and its end does not say so", event.time)
        elif told is not None and life.started not in {None, datetime.fromisoformat(told)}:
            message = f"its agent started at {life.started}, and its end says {told}"
            yield Finding(life.rollout_id, message, event.time)


def check_durability(checked: Checked) -> Iterator[Finding]:
    """Check that what a server with a state has answered outlives the death of its process."""
    if not checked.options.durable:
        return
    lives = _Lives(checked)
    admissions = iter(checked.history.rollouts)
    for event in checked.history.trace:
        if event.what == "admitted":
            rollout = next(admissions)
            life = _Life(rollout.rollout_id, rollout.process, rollout.keys)
            yield from lives.admitted(life)
        else:
            yield from lives.take(event)
