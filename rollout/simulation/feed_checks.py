"""Checks of the result feed: who is attached to one is told at once, and by no other one."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attrs import define, field

from rollout.simulation.findings import EPSILON_SEC, Checked, Finding, rank
from rollout.simulation.lives import History, Life
from rollout.simulation.poll_checks import State, state_of
from rollout.simulation.trace import Event

__all__ = ["check_feeds"]

_ACCEPTED = 202
_WRITES = 2
"""Something is told once the write that is under way is over."""


@define
class _Attachment:
    """A feed that reports a rollout.

    Attributes:
        request: The request that opened it.
        write_sec: How long each of its writes takes, in seconds.
        seen: What it has told, or need not tell.
        due: Since when there is something to tell.
    """

    request: int
    write_sec: float
    seen: State
    due: float = math.inf


@define
class _Reported:
    """One life, and the feed that reports it.

    Attributes:
        state: What there is to be told.
        current: The feed, if there is one.
        lost: Feeds that it was taken from, and have not said so: by when they are to.
        closed: Feeds whose connection is gone.
        over: Feeds that have told its end.
        released: Feeds that have said that it was taken from them.
        early: What a feed told before the answer to the batch that attached it.
        seen: What its client said to have seen, by the request for a feed.
    """

    history: History
    life: Life
    writes: dict[int, float]
    state: State = field(factory=State)
    current: _Attachment | None = None
    lost: dict[int, float] = field(factory=dict)
    closed: set[int] = field(factory=set)
    over: set[int] = field(factory=set)
    released: set[int] = field(factory=set)
    early: dict[int, State] = field(factory=dict)
    seen: dict[int, str | None] = field(factory=dict)

    def take(self, event: Event) -> str | None:
        """Take the next event; what is wrong with it, if anything."""
        if event.who == "server":
            if self.state.take(event):
                self._look(event.time)
            return None
        route = event.detail.get("route")
        if route == "feed":
            return self._take_feed(event)
        if route == "batch" and event.what == "server-answered":
            feed = event.detail.get("feed", 0)
            if feed and feed not in self.closed | self.over and _accepted(event):
                self._attach(feed, self.early.get(feed, State()), self.life.time_of("admitted"))
        return None

    def _take_feed(self, event: Event) -> str | None:
        number, now = event.detail["request"], event.time
        if number in self.closed:
            return None  # its server has not noticed yet
        if event.what == "arrived":
            self.seen[number] = event.detail.get("seen")
        elif event.what == "disconnected":
            self.closed.add(number)
            return self.leave(number, now)
        elif event.detail.get("refused") is False:
            return self._opened(number, now)
        elif event.detail.get("taken_over"):
            self.lost.pop(number, None)
            self.released.add(number)
        elif "state" in event.detail:
            return self._told(number, event)
        return None

    def _opened(self, number: int, now: float) -> str | None:
        before, message = self.current, None
        if before is not None:
            message = self.leave(before.request, now)
            until = now + _WRITES * before.write_sec + EPSILON_SEC
            if before.request not in self.released:
                self.lost[before.request] = self.history.delayed(now, until)
        self._attach(number, state_of(self.seen.get(number)), now)
        return message

    def _attach(self, number: int, seen: State, now: float) -> None:
        if self.current is None or self.current.request != number:
            self.current = _Attachment(number, self.writes.get(number, 0.0), seen)
            self._look(now)

    def _look(self, now: float) -> None:
        if self.current is not None and self.state.is_news_for(self.current.seen):
            self.current.due = min(self.current.due, now)

    def _late(self, now: float) -> str | None:
        current = self.current
        if current is None or current.due == math.inf:
            return None
        allowed = _WRITES * current.write_sec + EPSILON_SEC
        if now > self.history.delayed(current.due, current.due + allowed):
            return f"a feed that reports it has not told its news of {current.due:.3f}"
        return None

    def leave(self, number: int, now: float) -> str | None:
        late = self.lost.pop(number, math.inf) < now
        if self.current is not None and self.current.request == number:
            message = self._late(now)
            self.current = None
            return message
        return "a feed did not say that it was taken over" if late else None

    def _told(self, number: int, event: Event) -> str | None:
        news = State(rank(event.detail["state"]), event.detail["started"] is not None)
        if "digest" in event.detail:
            self.over.add(number)
        if self.current is None or self.current.request != number:
            if number in self.lost or number in self.released:
                return "a feed that reports it no longer told its news"
            self.early[number] = news
            return None
        message = self._late(event.time)
        if not news.is_news_for(self.current.seen):
            message = message or "a feed told what it had told before"
        self.current.seen, self.current.due = news, math.inf
        self._look(event.time)
        if "digest" in event.detail:
            self.current = None
        return message


def _accepted(event: Event) -> bool:
    return bool(event.detail["status"] == _ACCEPTED)


def check_feeds(checked: Checked) -> Iterator[Finding]:
    """A feed tells at once the news of every rollout that it reports, and of no other one."""
    history = checked.history
    writes = history.write_secs
    if not writes:
        return
    for life in history.lives:
        reported = _Reported(history, life, writes)
        for event in life.events:
            message = reported.take(event)
            if message is not None:
                yield Finding(life.rollout_id, message, event.time)
        end = min(life.closed_at, life.lost_at, history.ends_at)
        number = reported.current.request if reported.current is not None else 0
        for each in (number, *reported.lost):
            message = reported.leave(each, end)
            if message is not None:
                yield Finding(life.rollout_id, message, end)
