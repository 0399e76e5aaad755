"""What happened in a simulated run, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import trio
from attrs import define, field

__all__ = ["Event", "Trace"]


@define
class Event:
    """One thing that happened.

    Attributes:
        time: When, in simulated seconds since the start of the run.
        who: ``caller``, ``client``, ``network``, ``server``, ``workflow``, ``grader``, ``world``.
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
    """

    events: list[Event] = field(factory=list)
    started: float = 0.0

    def __repr__(self) -> str:
        until = f" until {self.events[-1].time:.3f} s" if self.events else ""
        return f"<Trace of {len(self.events)} events{until}>"

    def add(self, who: str, what: str, rollout_id: str = "", **detail: Any) -> Event:
        """Record that something happens now."""
        event = Event(trio.current_time() - self.started, who, what, rollout_id, detail)
        self.events.append(event)
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
        """Return what a person has to know about one rollout: its events, and the world's."""
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
