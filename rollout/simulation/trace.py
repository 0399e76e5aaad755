"""The events of a simulated run, in order, and those that explain one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import trio
from attrs import define, evolve, field

__all__ = ["Event", "Trace", "story_of"]

_MILESTONES = {
    "admitted",
    "execution-started",
    "workflow-started",
    "stop-requested",
    "finished",
    "workflow-ended",
    "grader-ended",
    "execution-ended",
}
_LEAST_COLLAPSED = 2
"""Collapse runs of at least this many uneventful polls, except the last."""


@define
class Event:
    """One thing that happened.

    Attributes:
        time: When, in simulated seconds since the start of the run.
        who: ``caller``, ``client``, ``network``, ``server``, ``pool``, ``workflow``, ``grader``,
            ``world``.
        what: What happened, as a few words joined by hyphens.
        rollout_id: Which rollout it is about; empty if none.
        detail: What else there is to know, JSON types only.
    """

    time: float
    who: str
    what: str
    rollout_id: str = ""
    detail: dict[str, Any] = field(factory=dict)

    def __str__(self) -> str:
        about = f" {self.rollout_id}" if self.rollout_id else ""
        detail = "".join(f" {name}={value}" for name, value in self.detail.items())
        return f"{self.time:12.3f}  {self.who:<8} {self.what}{about}{detail}"


@define(repr=False)
class Trace:
    """The events of one run.

    Attributes:
        events: All of them, in the order in which they happened.
        started: The trio time that counts as zero.
        whole: A trace that has these events too, among others; ``None`` without one.
        worker: Of which worker of a pool these events are, for that trace.
    """

    events: list[Event] = field(factory=list)
    started: float = 0.0
    whole: Trace | None = None
    worker: str = ""

    def __repr__(self) -> str:
        until = f" until {self.events[-1].time:.3f} s" if self.events else ""
        return f"<Trace of {len(self.events)} events{until}>"

    def add(self, who: str, what: str, rollout_id: str = "", **detail: Any) -> Event:
        """Record that something happens now."""
        event = Event(trio.current_time() - self.started, who, what, rollout_id, detail)
        self.events.append(event)
        if self.whole is not None:
            if self.worker:
                event = evolve(event, detail={"worker": self.worker, **detail})
            self.whole.events.append(event)
        return event

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def select(self, *whats: str, rollout_id: str | None = None) -> list[Event]:
        """Return the events of these kinds, of one rollout or of all."""
        return [
            event
            for event in self.events
            if event.what in whats and rollout_id in {None, event.rollout_id}
        ]

    def story(self, rollout_id: str) -> list[Event]:
        """Return the events of one rollout and of the world."""
        return [
            event
            for event in self.events
            if event.rollout_id == rollout_id or (event.who == "world" and not event.rollout_id)
        ]

    def count(self, what: str, by: str) -> Counter[str]:
        """Count events of one kind by one of their details."""
        return Counter(str(event.detail.get(by)) for event in self.events if event.what == what)

    def render(self, events: Iterable[Event] | None = None) -> str:
        """Write events as text, one a line; all of them by default."""
        return "\n".join(str(event) for event in (self.events if events is None else events))


def story_of(trace: Trace, rollout_id: str, at: float) -> list[Event]:
    """Return the events that explain what showed at some time.

    Args:
        trace: What happened.
        rollout_id: About which rollout; empty for the server as a whole, whose story is that of
            the rollouts that had not ended by then.
        at: When it showed. What came later is left out.
    """
    events = [event for event in trace if event.time <= at]
    if rollout_id:
        return list(_without_idle_polls(_about(events, rollout_id)))
    over = {
        event.rollout_id for event in events if event.what == "execution-ended" and event.time < at
    }
    return [
        event
        for event in events
        if event.who == "world" or (event.what in _MILESTONES and event.rollout_id not in over)
    ]


def _about(events: Sequence[Event], rollout_id: str) -> list[Event]:
    """Return the events of a rollout, and those of the world since its beginning."""
    told: list[Event] = []
    process: list[Event] = []
    for event in events:
        if rollout_id in event.rollout_id.split(","):  # a cancel request has many
            told = told or process
            told.append(event)
        elif event.who == "world" and not event.rollout_id:
            if told:
                told.append(event)
            elif event.what == "server-up":
                process = [event]
    return told


def _without_idle_polls(events: Sequence[Event]) -> Iterator[Event]:
    """Collapse runs of polls that went well and brought no news."""
    idle = _idle_polls(events)
    held: dict[int, list[Event]] = {}
    latest = 0
    for event in events:
        request = event.detail.get("request")
        if request in idle:
            latest = request
            held.setdefault(request, []).append(event)
        elif event.what == "lease-renewed" and held:
            held[latest].append(event)
        else:
            yield from _collapsed(list(held.values()))
            held = {}
            yield event
    yield from _collapsed(list(held.values()))


def _collapsed(polls: list[list[Event]]) -> Iterator[Event]:
    if len(polls) > _LEAST_COLLAPSED:
        first, until = polls[0][0], polls[-2][-1].time
        detail = {"times": len(polls) - 1, "until": round(until, 3)}
        yield Event(first.time, "client", "polled-without-news", first.rollout_id, detail)
        del polls[:-1]
    for events in polls:
        yield from events


def _idle_polls(events: Sequence[Event]) -> set[int]:
    """Return the requests that are polls which went well, and told their client nothing new."""
    known: dict[int, tuple[object, object]] = {}
    smooth: set[int] = set()
    idle: set[int] = set()
    for event in events:
        if event.detail.get("route") != "poll":
            continue
        request = event.detail["request"]
        if event.what == "sent" and event.detail["fault"] == "none":
            smooth.add(request)
        elif event.what == "answered":
            client = event.detail.get("client", 1)
            news = (event.detail.get("state"), event.detail.get("started"))
            if request in smooth and news[0] is not None and known.get(client) == news:
                idle.add(request)
            known[client] = news
    return idle
