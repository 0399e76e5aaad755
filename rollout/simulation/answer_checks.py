"""Checks of answers: to polls, on feeds, to wrong tokens, and to cancel requests."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attrs import define, field

from rollout.simulation.history import (
    EPSILON_SEC,
    Checked,
    Finding,
    History,
    ServedRollout,
    is_own_poll,
    rank,
)
from rollout.simulation.trace import Event

__all__ = [
    "State",
    "check_cancel_requests",
    "check_feeds",
    "check_polls",
    "check_tokens",
    "state_of",
]


_OK = 200
_FINAL = rank("success")


@define
class State:
    """The state of a rollout, or as much of it as a client has seen.

    Attributes:
        at: How far it is along the way.
        started: Whether its agent has started.
    """

    at: int = 0
    started: bool = False

    def take(self, event: Event) -> bool:
        """Update it with an event of the server; return whether that changed anything."""
        before = self.at, self.started
        if event.what in {"status", "finished"}:
            self.at = max(self.at, rank(event.detail["status"]))
        elif event.what == "agent-started":
            self.started = True
        return before != (self.at, self.started)

    def is_news_for(self, seen: State) -> bool:
        """Whether a client that has seen *seen* must be told of this state."""
        return self.at == _FINAL or self.at > seen.at or (self.started and not seen.started)


def state_of(seen: str | None) -> State:
    """Parse the state that a client says it has seen."""
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
    """The polls of one rollout that the server holds."""

    checked: Checked
    rollout: ServedRollout
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
        if event.time < due - EPSILON_SEC and event.time < self.rollout.closed_at:
            return f"a poll was answered without news, {due - event.time:.3f} s before its time"
        return None

    def unanswered(self) -> Iterator[float]:
        """Yield the times at which polls were due that were never answered."""
        rollout, history = self.rollout, self.checked.history
        for poll in self.polls.values():
            due = min(poll.due, poll.came_at + self.checked.options.result_wait_timeout_sec)
            due = history.delayed(poll.came_at, due + EPSILON_SEC)
            if due < min(rollout.closed_at, rollout.lost_at, history.ends_at):
                yield due


def check_polls(checked: Checked) -> Iterator[Finding]:
    """Check that a poll is answered at once if there is something new, else after its wait."""
    for rollout in checked.history.rollouts:
        held = _Held(checked, rollout)
        for event in rollout.events:
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
                    yield Finding(rollout.rollout_id, message, event.time)
        for due in held.unanswered():
            yield Finding(rollout.rollout_id, "a poll was never answered", due)


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
    """One rollout, and the feed that reports it.

    Attributes:
        state: What there is to be told.
        current: The feed, if there is one.
        lost: Feeds that it was taken from, and have not said so: by when they are to.
        closed: Feeds whose connection is gone.
        over: Feeds that have told its end.
        released: Feeds that have said that it was taken from them.
        early: What a feed told before the answer to the batch that attached it.
        seen: What its client said to have seen, by the request for a feed.
        replays: When admissions came that were sent again, by their requests.
    """

    history: History
    rollout: ServedRollout
    writes: dict[int, float]
    state: State = field(factory=State)
    current: _Attachment | None = None
    lost: dict[int, float] = field(factory=dict)
    closed: set[int] = field(factory=set)
    over: set[int] = field(factory=set)
    released: set[int] = field(factory=set)
    early: dict[int, State] = field(factory=dict)
    seen: dict[int, str | None] = field(factory=dict)
    replays: dict[int, float] = field(factory=dict)

    def take(self, event: Event) -> str | None:
        """Process the next event; return what is wrong with it, if anything."""
        if event.who == "server":
            if self.state.take(event):
                self._look(event.time)
            return None
        route = event.detail.get("route")
        if route == "feed":
            return self._take_feed(event)
        if route == "batch" and event.what == "server-answered":
            feed = event.detail.get("feed", 0)
            if feed and feed not in self.closed | self.over and event.detail["status"] == _ACCEPTED:
                replayed_at = self.replays.get(event.detail["request"])
                if replayed_at is not None:
                    return self._opened(feed, self.early.get(feed, State()), replayed_at)
                self._attach(feed, self.early.get(feed, State()), self.rollout.time_of("admitted"))
        elif route == "batch" and self.rollout.is_replay(event):
            self._forget_told(event)
        return None

    def _forget_told(self, replay: Event) -> None:
        """Note that an admission came again, so that the feed may repeat what it said."""
        self.replays[replay.detail["request"]] = replay.time
        self.early.clear()
        self.over.clear()
        if self.current is not None:
            self.current.seen = State()

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
            return self._opened(number, state_of(self.seen.get(number)), now)
        elif event.detail.get("taken_over"):
            self.lost.pop(number, None)
            self.released.add(number)
        elif "state" in event.detail:
            return self._told(number, event)
        return None

    def _opened(self, number: int, seen: State, now: float) -> str | None:
        before, message = self.current, None
        if before is not None and before.request == number:
            self._look(now)
        elif before is not None:
            message = self.leave(before.request, now)
            until = now + _WRITES * before.write_sec + EPSILON_SEC
            if before.request not in self.released:
                self.lost[before.request] = self.history.delayed(now, until)
        self._attach(number, seen, now)
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


def check_feeds(checked: Checked) -> Iterator[Finding]:
    """Check that a feed reports at once every change of its own rollouts, and of no other one."""
    history = checked.history
    writes = history.write_secs
    if not writes:
        return
    for rollout in history.rollouts:
        reported = _Reported(history, rollout, writes)
        for event in rollout.events:
            message = reported.take(event)
            if message is not None:
                yield Finding(rollout.rollout_id, message, event.time)
        end = min(rollout.closed_at, rollout.lost_at, history.ends_at)
        number = reported.current.request if reported.current is not None else 0
        for each in (number, *reported.lost):
            message = reported.leave(each, end)
            if message is not None:
                yield Finding(rollout.rollout_id, message, end)


_FORBIDDEN = 403


def check_tokens(checked: Checked) -> Iterator[Finding]:
    """Check that a poll or a feed with the token of another rollout is refused."""
    for rollout in checked.history.rollouts:
        others: set[int] = set()
        for event in rollout.events:
            if event.what == "arrived" and event.detail["lease"] == "other":
                others.add(event.detail["request"])
            elif event.what == "forgotten" or event.time >= rollout.dropped_at:
                break  # from here on there is no such rollout
            elif event.what == "server-answered" and event.detail["request"] in others:
                others.discard(event.detail["request"])
                route, status = event.detail["route"], event.detail["status"]
                if not (status == _FORBIDDEN if route == "poll" else event.detail.get("refused")):
                    message = f"a {route} with another token was answered {status}"
                    yield Finding(rollout.rollout_id, message, event.time)


_QUEUED, _RUNNING, _NOT_FOUND = "cancelled_queued", "cancelled_running", "not_found"


@define
class _Target:
    """One rollout as the target of cancel requests.

    Attributes:
        keys: The admission keys that it may have.
        running: Whether its agent has started.
        over: Whether it has its result.
        first: What the first request to stop it was worth.
    """

    keys: frozenset[int | None] = frozenset()
    running: bool = False
    over: bool = False
    first: str | None = None

    def take(self, event: Event) -> str | None:
        """Process an event of the server; return what is wrong with it, if anything."""
        message = None
        if event.what == "status" and event.detail["status"] != "queued":
            self.running = True
        elif event.what == "finished":
            self.over = True
        elif event.what == "stop-requested":
            message = None if self.first is None else "was asked to stop twice"
            self.first = _RUNNING if self.running else _QUEUED
        return message

    def worth(self, key: int | None) -> set[str]:
        """Return what a request to cancel it may be answered, with the key that it names."""
        if self.over or (key is not None and key not in self.keys):
            return {_NOT_FOUND}
        worth = {self.first or (_RUNNING if self.running else _QUEUED)}
        return worth if key is None or self.keys == {key} else worth | {_NOT_FOUND}


@define
class _CancelRequests:
    """The rollouts of all server processes, and cancel requests that are not answered yet.

    Attributes:
        targets: The rollouts, by process and id.
        stopped: Those that were asked to stop while their admissions were being kept.
        early: What was cancelled before it arrived, by process and id.
        asked: What each request may be answered, by its number and the id; with its key.
    """

    checked: Checked
    targets: dict[tuple[int, str], _Target] = field(factory=dict)
    stopped: set[tuple[int, str]] = field(factory=set)
    early: set[tuple[int, str]] = field(factory=set)
    asked: dict[tuple[int, str], tuple[int | None, set[str]]] = field(factory=dict)

    def admitted(self, rollout: ServedRollout) -> None:
        """Add a rollout."""
        where = (rollout.process, rollout.rollout_id)
        self.targets[where] = _Target(
            rollout.keys, first=_QUEUED if where in self.stopped else None
        )
        self.stopped.discard(where)
        self._look(rollout.rollout_id, self.targets[where])

    def changed(self, process: int, event: Event) -> Iterator[Finding]:
        """Process an event of the server."""
        where = (process, event.rollout_id)
        target = self.targets.get(where)
        if target is None or target.over:
            if event.what == "stop-requested":
                self.stopped.add(where)
            return
        message = target.take(event)
        self._look(event.rollout_id, target)
        if message is not None:
            yield Finding(event.rollout_id, message, event.time)

    def _look(self, rollout_id: str, target: _Target) -> None:
        """Note what requests may be answered now."""
        for (_, about), (key, worth) in self.asked.items():
            if about == rollout_id:
                worth.update(target.worth(key))

    def take(self, process: int, event: Event) -> Iterator[Finding]:
        """Process an event of a cancel request."""
        request, keys = event.detail["request"], event.detail.get("keys", {})
        dispositions = event.detail.get("dispositions") or {}
        for rollout_id in event.rollout_id.split(","):
            if event.what == "arrived":
                key = keys.get(rollout_id)
                worth = self._worth((process, rollout_id), key)
                self.asked[request, rollout_id] = key, worth
            elif (asked := self.asked.pop((request, rollout_id), None)) and dispositions:
                told = dispositions.get(rollout_id)
                if asked[0] is not None and told == _QUEUED:
                    self.early.add((process, rollout_id))
                if told not in asked[1]:
                    expected = " or ".join(sorted(asked[1]))
                    message = f"a cancel request was answered {told}, not {expected}"
                    yield Finding(rollout_id, message, event.time)

    def _worth(self, where: tuple[int, str], key: int | None) -> set[str]:
        target = self.targets.get(where)
        if target is not None and not target.over:
            return target.worth(key)
        if key is None:
            return {_QUEUED, _NOT_FOUND} if where in self.stopped else {_NOT_FOUND}
        process, _ = where
        known = target is not None or where in self.early
        kept = self.checked.options.durable and process > 1
        return {_QUEUED, _NOT_FOUND} if known or kept else {_QUEUED}


def check_cancel_requests(checked: Checked) -> Iterator[Finding]:
    """Check the dispositions of cancel requests, and that a rollout is asked to stop once."""
    requests = _CancelRequests(checked)
    admissions = iter(checked.history.rollouts)
    for event in checked.history.trace:
        process = event.detail.get("process", 0)
        if event.what == "admitted":
            requests.admitted(next(admissions))
        elif event.who == "server":
            yield from requests.changed(process, event)
        elif event.who == "network" and event.detail["route"] == "cancel":
            yield from requests.take(process, event)
