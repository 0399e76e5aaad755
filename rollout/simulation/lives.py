"""A trace, sorted by what checks look at: lives on the server, calls on the client."""

from __future__ import annotations

import math
from functools import cached_property

from attrs import define, field

from rollout.simulation.trace import Event, Trace

__all__ = ["Call", "History", "Life"]

_SERVER_SIDE = {"server", "network", "workflow", "grader"}


@define(eq=False)
class Life:
    """One rollout in one server process, from its admission to its being forgotten.

    Attributes:
        process: Which server process.
        rollout_id: Which rollout.
        events: Its events on the server's side, in order.
        lost_at: When its process crashed with it, if it did.
    """

    process: int
    rollout_id: str
    events: list[Event] = field(factory=list)
    lost_at: float = math.inf

    def times(self, *whats: str) -> list[float]:
        """Return when these things happened."""
        return [event.time for event in self.events if event.what in whats]

    def first(self, what: str) -> Event | None:
        """Return the first event of a kind."""
        return next((event for event in self.events if event.what == what), None)

    def time_of(self, what: str) -> float:
        """Return when something happened first; infinity if it never did."""
        event = self.first(what)
        return math.inf if event is None else event.time

    @property
    def over_at(self) -> float:
        """When its execution ended, in whatever way."""
        return min(self.time_of("execution-ended"), self.lost_at)

    def answers(self) -> list[Event]:
        """Return the polls that the server answered with a state."""
        return [
            event
            for event in self.events
            if event.what == "server-answered"
            and event.detail["route"] == "poll"
            and "state" in event.detail
        ]

    def contacts(self) -> list[float]:
        """Return when its caller showed itself: the admission, and every poll that arrived."""
        return [
            event.time
            for event in self.events
            if event.what == "admitted"
            or (event.what == "arrived" and event.detail["route"] == "poll")
        ]


@define(eq=False)
class Call:
    """One call of a caller, from its first request on.

    Attributes:
        rollout_id: Which rollout.
        events: What its caller and its client did, in order.
    """

    rollout_id: str
    events: list[Event] = field(factory=list)

    def of(self, *whats: str, route: str | None = None) -> list[Event]:
        """Return events of these kinds, to one route or to all."""
        return [
            event
            for event in self.events
            if event.what in whats and route in {None, event.detail.get("route")}
        ]


@define(eq=False, slots=False)
class History:
    """The lives and the calls of a trace.

    Attributes:
        trace: The trace.
        lives: Every life, by admission.
        calls: Every call, by its beginning.
        ends_at: The time of the last event.
    """

    trace: Trace
    lives: list[Life] = field(factory=list)
    calls: list[Call] = field(factory=list)

    @cached_property
    def pauses(self) -> list[tuple[float, float]]:
        """When everything stood still, and for how long."""
        return [(event.time, event.detail["seconds"]) for event in self.trace.select("paused")]

    @property
    def ends_at(self) -> float:
        """When the trace ends."""
        return self.trace.events[-1].time if self.trace.events else 0.0

    @classmethod
    def of(cls, trace: Trace) -> History:
        """Sort a trace."""
        history = cls(trace)
        history._sort_lives()
        history._sort_calls()
        return history

    def _sort_lives(self) -> None:
        current: dict[tuple[int, str], Life] = {}
        process = 0
        for event in self.trace:
            process = event.detail.get("process", process)
            if event.what in {"server-crashed", "server-down"}:
                for life in current.values():
                    if life.process == process:
                        life.lost_at = min(life.lost_at, event.time)
            if event.who not in _SERVER_SIDE:
                continue
            key = (process, event.rollout_id)
            if event.what == "admitted":
                current[key] = Life(*key)
                self.lives.append(current[key])
            if key in current:
                current[key].events.append(event)

    def _sort_calls(self) -> None:
        current: dict[str, Call] = {}
        for event in self.trace:
            if event.who not in {"caller", "client"} or not event.rollout_id:
                continue
            if event.what in {"called", "repeats"} or event.rollout_id not in current:
                current[event.rollout_id] = Call(event.rollout_id)
                self.calls.append(current[event.rollout_id])
            current[event.rollout_id].events.append(event)

    def paused_sec(self, since: float, until: float) -> float:
        """Return for how long everything stood still in a span of time."""
        return sum(length for moment, length in self.pauses if since - length <= moment <= until)
