"""How many calls each upstream of a policy gets at a time, and which call is sent next. Pure.

Theory of operation: an upstream has a `Window`, the number of calls that may be in flight to it.
It follows the rule of TCP's congestion control (RFC 5681; additive increase and multiplicative
decrease, Chiu and Jain 1989), which Netflix's concurrency-limits applies to requests. A refusal for
overload cuts it below the number of calls that were in flight; while it is in use, each window of
answers lets it grow by one, or double until it is back near its size before the cut. It starts at
the maximum. Latency counts as in that library's Gradient2: where the recent average is much above
the long one, the window is cut. As answers differ in length, it is the latency for each token.

Calls without a place wait. Those of rollouts that have called before go first, since their slots
and caches are taken already; among equals, rollouts take turns (start-time fair queueing). A
rollout stays with its upstream, which has its prefixes cached, and moves when that fails, or has no
room while another one is half empty.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from typing import Generic, TypeVar

from attrs import define, field

from rollout.gateway.retries import Outcome

__all__ = ["Bounds", "Caller", "Flow", "Ticket", "UpstreamState", "Window"]

E = TypeVar("E")

_CUT = 0.9
_TOO_SLOW = 2.0
_RECENT_CALLS = 16
_MANY_CALLS = 256
_LONGEST_REST_SEC = 60.0
_LONG_HOLD_SEC = 5.0


@define(kw_only=True)
class Bounds:
    """The bounds of the calls in flight to each upstream, which may change at any time.

    Attributes:
        minimum: The least that a window is cut to; the maximum, if that is less.
        maximum: ``None`` for no bound.
    """

    minimum: int = 1
    maximum: int | None = None


@define
class _Pace:
    """The time for a token, averaged over about so many of the latest answers."""

    _over: int
    _seconds: float = 0.0
    _tokens: float = 0.0
    answers: int = 0

    def add(self, seconds: float, tokens: int) -> None:
        self.answers += 1
        share = 1 / min(self.answers, self._over)
        self._seconds += share * (seconds - self._seconds)
        self._tokens += share * (tokens - self._tokens)

    @property
    def sec(self) -> float:
        return self._seconds / self._tokens


@define
class Window:
    """The calls that may be in flight to an upstream.

    Attributes:
        bounds: Its bounds.
        in_flight: How many are.
    """

    bounds: Bounds
    in_flight: int = 0
    _size: float = math.inf
    _threshold: float = math.inf
    _cut_at: float = -math.inf
    _grew: bool = False
    _recent: _Pace = field(factory=lambda: _Pace(_RECENT_CALLS))
    _long: _Pace = field(factory=lambda: _Pace(_MANY_CALLS))

    @property
    def limit(self) -> float:
        """How many calls may be in flight."""
        most = math.inf if self.bounds.maximum is None else self.bounds.maximum
        return max(min(self._size, most), min(self.bounds.minimum, most))

    @property
    def has_room(self) -> bool:
        """Whether one more call may be sent."""
        return self.in_flight + 1 <= self.limit

    @property
    def half_empty(self) -> bool:
        """Whether at most half of it is in use."""
        return self.in_flight * 2 <= self.limit

    def answered(self, outcome: Outcome, sent_at: float, now: float) -> None:
        """Note an answer to a call that is still counted as in flight."""
        self._grew = True
        if outcome.tokens:
            self._recent.add(outcome.latency_sec, outcome.tokens)
            self._long.add(outcome.latency_sec, outcome.tokens)
            slow = self._recent.sec > _TOO_SLOW * self._long.sec
            if slow and self._long.answers > _RECENT_CALLS and sent_at > self._cut_at:
                self._cut(self.in_flight, now)
                return
        limit = self.limit
        if self._size < math.inf and self.in_flight * 2 >= limit:
            self._size = limit + (1.0 if limit < self._threshold else 1 / limit)

    def refused(self, now: float) -> None:
        """Note a refusal for overload of a call that is still counted as in flight."""
        if self.in_flight - 1 < self.limit:
            self._cut(self.in_flight - 1, now)

    def _cut(self, in_flight: int, now: float) -> None:
        if self._grew:
            self._threshold = _CUT * self.limit
        self._grew = False
        self._cut_at = now
        self._size = min(self.limit, max(_CUT * in_flight, 1.0))


@define(eq=False)
class UpstreamState(Generic[E]):
    """One upstream.

    Attributes:
        endpoint: Where it is.
        window: The calls in flight to it.
        rollouts: How many rollouts stay with it.
        held_until: Nothing is sent before that time, as it asked.
        failures: How often it has failed since its last answer.
    """

    endpoint: E
    window: Window
    rollouts: int = 0
    held_until: float = -math.inf
    failures: int = 0
    _failed_at: float = -math.inf
    _avoided_until: float = -math.inf

    def takes(self, now: float) -> bool:
        """Whether a call may be sent to it."""
        return now >= self.held_until and self.window.has_room

    def avoided(self, now: float) -> bool:
        """Whether calls had better go elsewhere; one at a time finds out whether it is back."""
        return now < self._avoided_until or (self.failures > 0 and self.window.in_flight > 0)

    @property
    def load(self) -> float:
        """How much it has to do; a rollout between its calls counts as well."""
        window = self.window
        share = 1.0 if window.bounds.maximum is None else window.limit
        return (self.rollouts + window.in_flight) / share

    def ended(self, outcome: Outcome | None, sent_at: float, now: float) -> None:
        """Note the end of a call; ``None``: its agent has left it."""
        if outcome is not None:
            self._learn(outcome, sent_at, now)
        self.window.in_flight -= 1

    def _learn(self, outcome: Outcome, sent_at: float, now: float) -> None:
        if outcome.overloaded:
            self.window.refused(now)
            if outcome.retry_after_sec is not None:
                self.held_until = max(self.held_until, now + outcome.retry_after_sec)
                if outcome.retry_after_sec > _LONG_HOLD_SEC:
                    self._avoided_until = self.held_until
        if outcome.broken:
            # Calls that were in flight at the same time fail together, and count as one.
            if sent_at >= self._failed_at:
                rest = min(2.0 ** min(self.failures, 6), _LONGEST_REST_SEC)
                self._avoided_until = max(self._avoided_until, now + rest)
                self.failures += 1
                self._failed_at = now
        elif not outcome.overloaded:
            self.failures = 0
        if outcome.answered:
            self.window.answered(outcome, sent_at, now)


@define(eq=False)
class Caller(Generic[E]):
    """A rollout, as far as its calls are concerned.

    Attributes:
        upstream: Where its calls go; ``None`` before the first one.
        broken_at: Where its last call failed, which others are to try first.
        tag: The virtual time at which its next call that has to wait is due.
    """

    upstream: UpstreamState[E] | None = None
    broken_at: UpstreamState[E] | None = None
    tag: float = 0.0

    def avoids(self, upstream: UpstreamState[E], now: float) -> bool:
        """Whether its next call had better go elsewhere."""
        broke = upstream is self.broken_at and upstream.failures > 0
        return broke or upstream.avoided(now)


@define(eq=False)
class Ticket(Generic[E]):
    """One attempt to send a call.

    Attributes:
        caller: Whose call it is.
        upstream: Where it is sent to; ``None`` while it waits.
        asked_at: Since when it waits.
        sent_at: Since when it may be sent.
        rank: What goes first, the lowest one.
    """

    caller: Caller[E]
    upstream: UpstreamState[E] | None = field(default=None, init=False)
    asked_at: float = field(default=math.inf, init=False)
    sent_at: float = field(default=math.inf, init=False)
    rank: tuple[bool, float] = field(default=(False, 0.0), init=False)

    def placed(self) -> None:
        """Notify whoever waits for the place; does nothing here."""

    def waited_sec(self, now: float) -> float:
        """Return how long it has waited for its place."""
        return max(min(self.sent_at, now) - self.asked_at, 0.0)


class Flow(Generic[E]):
    """The upstreams of a policy, and the calls that wait for them.

    Args:
        endpoints: The upstreams.
        bounds: The bounds of the calls in flight to each.
    """

    def __init__(self, endpoints: Iterable[E], bounds: Bounds) -> None:
        self.upstreams = [UpstreamState(each, Window(bounds)) for each in endpoints]
        self._waiting: list[Ticket[E]] = []
        self._virtual = 0.0

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return len(self._waiting)

    def ask(self, ticket: Ticket[E], now: float) -> None:
        """Give a call its place, at once or later."""
        caller, ticket.asked_at = ticket.caller, now
        if not self._waiting and self._place(ticket, now):
            return
        due = max(caller.tag, self._virtual)
        caller.tag = due + 1
        ticket.rank = (caller.upstream is None, due)
        insort(self._waiting, ticket, key=_rank)
        self.advance(now)

    def end(self, ticket: Ticket[E], outcome: Outcome | None, now: float) -> None:
        """Note how a call ended, or that its agent has left it, whether it was sent or not."""
        if ticket.upstream is None:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            return
        ticket.upstream.ended(outcome, ticket.sent_at, now)
        if outcome is not None:
            ticket.caller.broken_at = ticket.upstream if outcome.broken else None
        self.advance(now)

    def leave(self, caller: Caller[E]) -> None:
        """Note that a rollout is over; those of its calls that wait get no place any more."""
        self._waiting = [each for each in self._waiting if each.caller is not caller]
        self._bind(caller, None)

    def advance(self, now: float) -> None:
        """Give places to calls that wait."""
        at = 0
        while at < len(self._waiting) and any(each.takes(now) for each in self.upstreams):
            ticket = self._waiting[at]
            is_new = ticket.caller.upstream is None
            if not self._place(ticket, now):
                at += 1
                continue
            del self._waiting[at]
            self._virtual = max(self._virtual, ticket.rank[1])
            if is_new:
                for other in self._waiting:
                    if other.caller is ticket.caller:
                        other.rank = (False, other.rank[1])
                self._waiting.sort(key=_rank)
                at = 0

    def opens_at(self, now: float) -> float:
        """Return when to `advance` though nothing has happened: an upstream may be asked again."""
        later = (each.held_until for each in self.upstreams if each.held_until > now)
        return min(later, default=math.inf)

    def of_other_requests(self, caller: Caller[E], now: float) -> E:
        """Return where requests go that take no place, such as for the list of models."""
        own = [caller.upstream] if caller.upstream is not None else []
        known = [*own, *self.upstreams]
        return next((each for each in known if not each.avoided(now)), known[0]).endpoint

    def moves(self, caller: Caller[E], now: float) -> bool:
        """Whether the next call of a rollout goes to another upstream than the last one."""
        own = caller.upstream
        return (
            own is not None
            and caller.avoids(own, now)
            and any(not caller.avoids(each, now) for each in self.upstreams)
        )

    def choose(self, caller: Caller[E], now: float) -> UpstreamState[E] | None:
        """Return the upstream for a rollout's next call; ``None``: it has to wait."""
        own = caller.upstream
        usable = [each for each in self.upstreams if not caller.avoids(each, now)]
        usable = usable or self.upstreams
        free = [each for each in usable if each.takes(now)]
        if own is not None and not self.moves(caller, now):
            if own.window.has_room:
                return own if own.takes(now) else None
            # Reading a prefix again takes less than waiting for somebody's answer.
            free = [each for each in free if each.window.half_empty]
        return min(free, key=lambda each: each.load, default=None)

    def _bind(self, caller: Caller[E], upstream: UpstreamState[E] | None) -> None:
        if caller.upstream is not None:
            caller.upstream.rollouts -= 1
        if upstream is not None:
            upstream.rollouts += 1
        caller.upstream = upstream

    def _place(self, ticket: Ticket[E], now: float) -> bool:
        caller = ticket.caller
        upstream = self.choose(caller, now)
        if upstream is None:
            return False
        self._bind(caller, upstream)
        upstream.window.in_flight += 1
        ticket.upstream, ticket.sent_at = upstream, now
        ticket.placed()
        return True


def _rank(ticket: Ticket[E]) -> tuple[bool, float]:
    return ticket.rank
