"""Checks of clients: statuses that callers see, retries, cancelled handles, and bulk calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from attrs import define, field

from rollout.simulation.callers import key_of
from rollout.simulation.history import EPSILON_SEC, Call, Checked, Finding, rank
from rollout.simulation.trace import Event
from rollout.simulation.workload import Caller

__all__ = [
    "check_bulk",
    "check_cancels_not_replayed",
    "check_local_cancel",
    "check_retries",
    "check_seen_statuses",
]


_TRANSPORT_DELAYS_SEC = (0.1, 0.5)
_GATEWAY_DELAYS_SEC = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_LONGEST_DELAY_SEC = 8.0
_RETRYABLE = {"ReadError", "WriteError", "ConnectError", "RemoteProtocolError", "ReadTimeout"}
_GATEWAY = {502, 503, 504}
_READ_GRACE_SEC = 10.0
_SHARED = {"batch", "feed", "renew"}
"""The routes of requests that are about many rollouts."""

_UNDER_WAY = {"poll", "batch", "feed", "renew"}
"""Where a request may be sent in the very moment in which its handle is cancelled."""

_ADMISSIONS = {"admit", "batch"}
_GOOD = {200, 202}
_GARBLED = {"foreign", "truncated"}


def check_seen_statuses(checked: Checked) -> Iterator[Finding]:
    """Check that the statuses which a caller sees only move forward, and the start time stays."""
    for call in checked.history.calls:
        at, started = -1, None
        for event in call.of("saw-status", "result"):
            state = event.detail["state"]
            if rank(state) < at:
                yield Finding(call.rollout_id, f"its caller saw it go back to {state}", event.time)
            at = max(at, rank(state))
            if started is not None and event.detail["started"] != started:
                yield Finding(call.rollout_id, "its caller saw the start time change", event.time)
            started = started or event.detail["started"]


@define
class _Polling:
    """The state of a client that polls, as the protocol has it.

    Attributes:
        request_sec: What has to fit before the end of the lease for a retry.
        durable_sec: Where its server has a state, how long retries go on after a failure; else 0.
        deadline: The last confirmed end of the lease.
        waits_until: Until when a server with a state is waited for.
        transport: Failures of the connection in the current GET.
        gateway: Gateway errors in the current GET.
        failed_at: When the last attempt of the current GET failed.
        delay: The backoff that has to follow.
        over: Whether the last attempt allows no further one.
        feed_failed: Whether a feed that was to report it has failed since the last confirmation.
    """

    request_sec: float
    durable_sec: float = 0.0
    deadline: float = -math.inf
    waits_until: float = -math.inf
    transport: int = 0
    gateway: int = 0
    failed_at: float = -math.inf
    delay: float = 0.0
    over: bool = False
    feed_failed: bool = False

    @property
    def retrying(self) -> bool:
        return self.transport + self.gateway > 0

    @property
    def until(self) -> float:
        """Until when retries may go on."""
        return max(self.deadline, self.waits_until)

    def may_go_on(self, now: float) -> bool:
        """Whether a poll that has just failed may be tried again."""
        if self.over or not self.retrying or now > self.failed_at + EPSILON_SEC:
            return False
        return now + self.delay + self.request_sec < self.until - EPSILON_SEC

    def confirmed(self, deadline: float) -> None:
        self.deadline, self.waits_until = deadline, -math.inf
        self.transport = self.gateway = 0
        self.feed_failed = False

    def waits(self, now: float) -> None:
        """Note that a first request has failed, which a server with a state is waited for after."""
        if self.durable_sec:
            self.waits_until = now + self.durable_sec

    def failed(self, event: Event) -> None:
        self.failed_at = event.time
        if not self.retrying:
            self.waits(event.time)
        if event.what == "failed" and event.detail["error"] in _RETRYABLE:
            self._count("transport", _TRANSPORT_DELAYS_SEC)
        elif event.detail.get("status") in _GATEWAY:
            self._count("gateway", _GATEWAY_DELAYS_SEC)
        else:
            self.over = True

    def lost_feed(self, now: float) -> None:
        if not self.feed_failed:
            self.waits(now)
        self.feed_failed = True

    def _count(self, kind: str, delays: tuple[float, ...]) -> None:
        spent = getattr(self, kind)
        setattr(self, kind, spent + 1)
        if spent < len(delays):
            self.delay = delays[spent]
        elif self.durable_sec:
            more = spent - len(delays) + 1
            self.delay = min(delays[-1] * 2.0**more, _LONGEST_DELAY_SEC)
        else:
            self.over = True


def check_retries(checked: Checked) -> Iterator[Finding]:
    """Check that a poll is retried after its backoff, and only within the lease."""
    options, lease = checked.options, checked.options.polling_lease_timeout_sec
    request_sec = options.result_wait_timeout_sec + _READ_GRACE_SEC
    for call in checked.history.calls:
        state = _Polling(request_sec)
        if options.durable:
            state = _Polling(0.0, durable_sec=lease)  # there a full request need not fit
        sent: dict[int, Event] = {}
        for event in call.events:
            if event.what == "takes-over":
                state.deadline = event.detail.get("deadline", -math.inf)
            elif event.what == "sent":
                sent[event.detail["request"]] = event
                yield from _check_attempt(checked, call, state, event)
            elif event.what in {"answered", "failed", "gave-up"}:
                began = sent.get(event.detail["request"])
                if began is None:  # a feed that was opened for an earlier call
                    continue
                yield from _take_end(checked, call, state, began, event, lease)
            elif event.what == "call-failed" and state.may_go_on(event.time):
                yield Finding(call.rollout_id, "its poll was given up too early", event.time)


def _check_attempt(
    checked: Checked, call: Call, state: _Polling, event: Event
) -> Iterator[Finding]:
    if event.detail["route"] == "feed":
        yield from _check_feed_attempt(checked, call, state, event)
    if event.detail["route"] != "poll":
        return
    if state.over:
        yield Finding(call.rollout_id, "polled again after a final failure", event.time)
    if not state.retrying:
        return
    if event.time - state.failed_at < state.delay - EPSILON_SEC:
        waited = event.time - state.failed_at
        yield Finding(
            call.rollout_id, f"waited {waited:.3f} s of a backoff of {state.delay} s", event.time
        )
    if event.time + state.request_sec >= state.until + EPSILON_SEC:
        yield Finding(
            call.rollout_id,
            f"tried again at {event.time:.3f}, with a request of {state.request_sec:g} s "
            f"and a lease until {state.until:.3f}",
            event.time,
        )


def _check_feed_attempt(
    checked: Checked, call: Call, state: _Polling, event: Event
) -> Iterator[Finding]:
    """Check that a failed feed is not opened again for rollouts whose lease may have ended."""
    slack = checked.history.paused_sec(state.until, event.time) + EPSILON_SEC
    if state.feed_failed and event.time > state.until + slack:
        message = f"a feed was tried again for it, with a lease until {state.until:.3f}"
        yield Finding(call.rollout_id, message, event.time)


def _take_end(
    checked: Checked, call: Call, state: _Polling, began: Event, event: Event, lease: float
) -> Iterator[Finding]:
    route = began.detail["route"]
    status = event.detail.get("status")
    if route in _ADMISSIONS and event.what == "answered" and status == 202:  # noqa: PLR2004
        state.confirmed(began.time + lease)
    if route in {"feed", "renew"}:
        # The first line of a feed, which confirms it, is never cut.
        garbled = _GARBLED if route == "renew" else {"foreign"}
        readable = began.detail["fault"] not in garbled
        if event.what == "answered" and status == 200 and readable:  # noqa: PLR2004
            if not event.detail.get("refused"):
                state.confirmed(max(state.deadline, began.time + lease))
        elif event.detail.get("error") != "closed":
            state.lost_feed(event.time)
    if route != "poll":
        return
    slack = checked.history.paused_sec(began.time, event.time) + EPSILON_SEC
    if state.retrying and event.time > state.until + slack:
        yield Finding(call.rollout_id, "a retry outlived the lease", event.time)
    about_it = event.detail.get("about") == call.rollout_id
    if event.what == "answered" and status == 200 and about_it:  # noqa: PLR2004
        state.confirmed(began.time + lease)
    elif event.what != "gave-up":
        state.failed(event)


def check_cancels_not_replayed(checked: Checked) -> Iterator[Finding]:
    """Check that a cancel request is never sent again."""
    for call in checked.history.calls:
        asked = len(call.of("cancels"))
        sent = call.of("sent", route="cancel")
        plan = checked.plans.get(call.rollout_id)
        if plan is not None and plan.caller is not Caller.BULK and len(sent) > asked:
            yield Finding(call.rollout_id, "a cancel request was sent again", sent[-1].time)


def check_local_cancel(checked: Checked) -> Iterator[Finding]:
    """Check that cancelling a handle sends nothing, and cancelling a rollout leaves it polling."""
    for call in checked.history.calls:
        yield from _check_silence(call)
        yield from _check_polls_on(call)
        if call.of("cancels"):
            for event in call.of("handle-was-cancelled"):
                yield Finding(call.rollout_id, "cancel_rollout() cancelled its handle", event.time)


def _check_polls_on(call: Call) -> Iterator[Finding]:
    """Check that after cancel_rollout() only an answer of the server ends a handle."""
    was_done = under_way = answered = asked = False
    for event in call.events:
        if event.what == "cancels":
            asked, was_done = True, event.detail["done"]
        elif event.detail.get("route") == "poll":
            under_way = event.what == "sent"
            answered = answered or (event.what == "answered" and "digest" in event.detail)
        elif event.what == "told":
            answered = answered or "digest" in event.detail
        elif event.what == "keeps-polling":
            if not (event.detail["polling"] or was_done) and under_way:
                message = "cancel_rollout() ended its handle's polling"
                yield Finding(call.rollout_id, message, event.time)
        elif event.what == "result" and asked and not answered:
            message = "cancel_rollout() gave its handle a result that no server had sent"
            yield Finding(call.rollout_id, message, event.time)


def _check_silence(call: Call) -> Iterator[Finding]:
    """Check that nothing is sent after a handle's cancel(), or after the caller's own end."""
    cancelled: Event | None = None
    open_polls: dict[int, Event] = {}
    for event in call.events:
        if event.what in {"handle-cancelled", "vanished"}:
            cancelled = event
        elif event.what == "sent":
            if event.detail["route"] not in _SHARED:
                open_polls[event.detail["request"]] = event
            if cancelled is not None and (
                event.time > cancelled.time + EPSILON_SEC or event.detail["route"] not in _UNDER_WAY
            ):
                message = "a request followed its handle's cancel()"
                yield Finding(call.rollout_id, message, event.time)
        elif event.what in {"answered", "failed", "gave-up"}:
            if event.detail["route"] in _SHARED:
                continue
            open_polls.pop(event.detail["request"], None)
            if cancelled is not None and event.time > cancelled.time + EPSILON_SEC:
                message = "a request outlived its handle's cancel()"
                yield Finding(call.rollout_id, message, event.time)
    if cancelled is not None and open_polls:
        message = "a request outlived its handle's cancel()"
        yield Finding(call.rollout_id, message, cancelled.time)


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
        asked: The admission key that each was asked for with.
        under_way: Until when the latest request for its admission was under way.
        over: When its caller had its outcome.
        keys_at: Since when its client knows that the server has admission keys.
        succeeded: What has ended as a success, and when.
        ended: What it need not wait for any longer.
        early: How rollouts ended, by a feed, whose admissions are not answered yet.
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
    asked: dict[str, int | None] = field(factory=dict)
    under_way: dict[str, float] = field(factory=dict)
    over: dict[str, float] = field(factory=dict)
    keys_at: float = math.inf
    succeeded: dict[str, float] = field(factory=dict)
    ended: set[str] = field(factory=set)
    early: dict[str, str | None] = field(factory=dict)
    chosen: list[str] = field(factory=list)
    left_at: float = math.inf

    @classmethod
    def of(cls, event: Event) -> _Bulk:
        """Parse the event with which one begins."""
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
        """Process the next event of the client or a caller."""
        if event.detail.get("route") == "cancel":
            if event.what == "sent":
                yield from self._cancels(event)
        elif event.rollout_id in self.ids:
            if event.what in {"answered", "failed"} and event.detail["route"] in _ADMISSIONS:
                self.under_way.pop(event.rollout_id, None)
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
                self._asks(rollout_id, event)
        elif event.what in {"result", "call-failed"}:
            self.over[rollout_id] = event.time
            self._ended(rollout_id, event.detail.get("state"), event.time)
        elif event.what == "chosen":
            self.chosen.append(rollout_id)
        elif _failed(event):
            self.troubled[rollout_id] = event.time
            if route in _ADMISSIONS and event.what != "answered":
                self._asked_in_vain(rollout_id, event.time)
        elif event.what in {"answered", "told"}:
            self._answered(rollout_id, event)

    def _asks(self, rollout_id: str, event: Event) -> None:
        if event.time <= self.over.get(rollout_id, -math.inf) + EPSILON_SEC:
            return  # with others, in the moment in which it was given up
        self.in_flight[rollout_id] = None
        self.asked[rollout_id] = event.detail.get("key")
        self.under_way[rollout_id] = math.inf
        self.ended.discard(rollout_id)  # if it was asked for before, that was refused
        self.early[rollout_id] = None
        if event.detail["fault"] in _GARBLED:
            self.ended.add(rollout_id)  # nobody can tell whether it was admitted

    def _asked_in_vain(self, rollout_id: str, now: float) -> None:
        self.ended.add(rollout_id)  # whatever a feed says of it
        self.early.pop(rollout_id, None)
        if rollout_id in self.under_way:
            self.under_way[rollout_id] = now

    def _answered(self, rollout_id: str, event: Event) -> None:
        self.troubled.pop(rollout_id, None)
        if event.detail["route"] in _ADMISSIONS:
            state = self.early.pop(rollout_id, None)
            if state is not None:
                self._ended(rollout_id, state, event.time)
            elif rollout_id not in self.ended and event.time <= self.left_at + EPSILON_SEC:
                self.admitted[rollout_id] = None
        elif "digest" in event.detail and rollout_id in self.early:
            self.early[rollout_id] = event.detail["state"]
        elif "digest" in event.detail:
            self._ended(rollout_id, event.detail["state"], event.time)

    def _cancels(self, event: Event) -> Iterator[Finding]:
        keys = event.detail.get("keys", {})
        for rollout_id in event.rollout_id.split(","):
            if rollout_id not in self.ids:
                continue
            self.left_at = min(self.left_at, event.time)
            mine = rollout_id in self.admitted
            if rollout_id in keys:  # by which the server knows whether it is this one
                asked = rollout_id in self.in_flight
                mine = asked and keys[rollout_id] == self.asked[rollout_id]
            if not mine:
                message = "a block cancelled what it had not asked for, or what had ended"
                yield Finding(rollout_id, message, event.time)
            self.admitted.pop(rollout_id, None)
            self.under_way.pop(rollout_id, None)
            self.ended.add(rollout_id)

    def _ends(self, now: float, *, paused: bool) -> Iterator[Finding]:
        for rollout_id in self.admitted:
            if self.troubled.get(rollout_id, math.inf) > self.left_at - EPSILON_SEC and not paused:
                yield Finding(rollout_id, "a block ended and left it on the server", now)
        for rollout_id, until in self.under_way.items():
            if until > self.left_at - EPSILON_SEC > self.keys_at and not paused:
                yield Finding(rollout_id, "a block ended and left its admission under way", now)
        if self.how == "first" and not self._chose_the_first():
            yield Finding(self.chosen[0], "is not among the first successes", now)
        if self.how == "all":
            for rollout_id in self.in_flight:
                yield Finding(rollout_id, "a block ended without its outcome", now)
        self.admitted.clear()
        self.in_flight.clear()

    def _chose_the_first(self) -> bool:
        """Whether the chosen ones came first, in order; those of one moment in any."""
        times = [self.succeeded.get(rollout_id, math.inf) for rollout_id in self.chosen]
        firsts = sorted(self.succeeded.values())[: len(times)]
        return len(firsts) == len(times) and all(
            abs(time - first) <= EPSILON_SEC for time, first in zip(times, firsts, strict=True)
        )

    def _ended(self, rollout_id: str, state: str | None, now: float) -> None:
        if state == "success" and rollout_id not in self.ended:
            self.succeeded.setdefault(rollout_id, now)
        self.ended.add(rollout_id)
        self.admitted.pop(rollout_id, None)
        self.in_flight.pop(rollout_id, None)


@define
class _Knowledge:
    """What a client knows of its server.

    Attributes:
        keys_at: Since when it knows that the server has admission keys.
        faults: The fault that each request meets.
    """

    keys_at: float = math.inf
    faults: dict[int, str] = field(factory=dict)

    def take(self, event: Event) -> None:
        """Process the next event of the client."""
        if event.what == "sent":
            self.faults[event.detail["request"]] = event.detail["fault"]
        elif event.what == "answered":
            readable = self.faults.get(event.detail["request"]) not in _GARBLED
            route, status = event.detail["route"], event.detail["status"]
            if route in _ADMISSIONS and status == 202 and readable:  # noqa: PLR2004
                self.keys_at = min(self.keys_at, event.time)
            elif route == "health" and status == 200:  # noqa: PLR2004
                self.keys_at = min(self.keys_at, event.time) if readable else math.inf


def check_bulk(checked: Checked) -> Iterator[Finding]:
    """Check that a block keeps its bounds, and at its end cancels what it left unfinished."""
    bulk: _Bulk | None = None
    since = -math.inf
    knowledge = _Knowledge()
    for event in checked.history.trace:
        if event.who not in {"caller", "client"} or event.detail.get("client", 1) != 1:
            continue
        knowledge.take(event)
        if event.what == "bulk-begins":
            bulk = _Bulk.of(event)
        elif bulk is not None:
            if event.time > since + EPSILON_SEC:
                since = event.time
                yield from bulk.over_its_bounds(since)
            bulk.keys_at = knowledge.keys_at
            yield from bulk.take(checked, event)


def _failed(event: Event) -> bool:
    """Whether a request failed, or its answer is not about its rollout."""
    if event.what in {"failed", "gave-up"}:
        return True
    about = event.detail.get("about", event.rollout_id)
    bad = event.detail.get("status") not in _GOOD or event.detail.get("unreadable")
    return event.what == "answered" and bool(bad or about != event.rollout_id)
