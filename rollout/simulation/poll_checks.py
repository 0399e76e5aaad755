"""Checks of when polls are answered: at once where there is news, else after their wait."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attrs import define, field

from rollout.simulation.findings import EPSILON_SEC, Checked, Finding, rank
from rollout.simulation.lives import Life, is_own_poll
from rollout.simulation.trace import Event

__all__ = ["State", "check_polls", "state_of"]

_OK = 200
_FINAL = rank("success")


@define
class State:
    """What there is to be told of a rollout, or what somebody was told.

    Attributes:
        at: How far it is along the way.
        started: Whether its agent has started.
    """

    at: int = 0
    started: bool = False

    def take(self, event: Event) -> bool:
        """Take an event of the server; whether it changed anything."""
        before = self.at, self.started
        if event.what in {"status", "finished"}:
            self.at = max(self.at, rank(event.detail["status"]))
        elif event.what == "agent-started":
            self.started = True
        return before != (self.at, self.started)

    def is_news_for(self, seen: State) -> bool:
        """Whether who has seen that much is to be told."""
        return self.at == _FINAL or self.at > seen.at or (self.started and not seen.started)


def state_of(seen: str | None) -> State:
    """Read what a client says to have seen."""
    status, _, flag = (seen or "queued").partition(";")
    return State(rank(status), bool(flag))


@define
class _Poll:
    """A poll that is not answered yet.

    Attributes:
        came_at: When it came.
        seen: What its client has seen.
        due: When there was something to tell it.
    """

    came_at: float
    seen: State
    due: float = math.inf


@define
class _Held:
    """The polls of one life that the server holds."""

    checked: Checked
    life: Life
    state: State = field(factory=State)
    polls: dict[int, _Poll] = field(factory=dict)

    def look(self, now: float) -> None:
        for poll in self.polls.values():
            if self.state.is_news_for(poll.seen):
                poll.due = min(poll.due, now)

    def answered(self, event: Event) -> str | None:
        poll = self.polls.pop(event.detail["request"], None)
        if poll is None or event.detail["status"] != _OK:
            return None
        over = poll.came_at + self.checked.options.result_wait_timeout_sec
        due = min(poll.due, over)
        if event.time > self.checked.history.delayed(poll.came_at, due + EPSILON_SEC):
            return f"a poll was answered {event.time - due:.3f} s late"
        if event.time < due - EPSILON_SEC and event.time < self.life.closed_at:
            return f"a poll was answered without news, {due - event.time:.3f} s before its time"
        return None

    def unanswered(self) -> Iterator[float]:
        """Return when polls were due that were never answered."""
        life, history = self.life, self.checked.history
        for poll in self.polls.values():
            due = min(poll.due, poll.came_at + self.checked.options.result_wait_timeout_sec)
            due = history.delayed(poll.came_at, due + EPSILON_SEC)
            if due < min(life.closed_at, life.lost_at, history.ends_at):
                yield due


def check_polls(checked: Checked) -> Iterator[Finding]:
    """A poll is answered at once if there is news for its client, else after its wait."""
    for life in checked.history.lives:
        held = _Held(checked, life)
        for event in life.events:
            if event.who == "server":
                if held.state.take(event):
                    held.look(event.time)
            elif is_own_poll(event) and event.detail.get("seen"):
                seen = state_of(event.detail["seen"])
                held.polls[event.detail["request"]] = _Poll(event.time, seen)
                held.look(event.time)
            elif event.what == "disconnected":
                held.polls.pop(event.detail["request"], None)
            elif event.what == "server-answered":
                message = held.answered(event)
                if message is not None:
                    yield Finding(life.rollout_id, message, event.time)
        for due in held.unanswered():
            yield Finding(life.rollout_id, "a poll was never answered", due)
