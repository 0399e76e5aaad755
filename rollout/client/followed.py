"""What a client's result feed keeps of each rollout."""

from __future__ import annotations

import math

import trio
from attrs import define, field

from rollout._tasks import copy_error
from rollout.client.polling import Poller
from rollout.rules import is_terminal
from rollout.rules.retry import RESULT_READ_GRACE_SEC, FailureKind, ResultRetrySchedule
from rollout.types import RolloutResultResponse

__all__ = ["Expectation", "Followed"]


@define(eq=False, repr=False)
class Expectation:
    """An admission that is under way, and what a feed has said of its rollout already.

    Two may be under way for one id, and only one of them can succeed, so the lease token says
    which of them is followed later on.

    Attributes:
        rollout_id: The rollout.
        lease: The token of its lease, once it was admitted.
        feed: The token of the feed that it was attached to, if it was.
    """

    rollout_id: str
    lease: str | None = None
    feed: str | None = None
    _early: RolloutResultResponse | None = field(default=None, init=False)
    _early_from: str | None = field(default=None, init=False)

    def hear(self, result: RolloutResultResponse, feed: str | None) -> None:
        """Keep what the feed with that token said."""
        if self._early is None or self._early_from != feed or not is_terminal(self._early.status):
            self._early, self._early_from = result, feed

    def news(self) -> RolloutResultResponse | None:
        """Return what its feed has said of it. A line of another feed may mean another rollout."""
        return self._early if self.feed is not None and self._early_from == self.feed else None


@define(eq=False, repr=False)
class Followed:
    """A rollout that somebody waits for.

    Attributes:
        poller: Knows what has been seen, and the lease.
        attached: Whether the open feed reports it.
        asked: Whether a feed was ever asked for it, so that failures of feeds concern it.
        retry_at: When its backoff is over.
        over: Set once there is a result, an error, or nothing more to expect from the feed.
    """

    poller: Poller
    attached: bool = False
    asked: bool = False
    retry_at: float = -math.inf
    result: RolloutResultResponse | None = None
    failure: Exception | None = None
    over: trio.Event = field(factory=trio.Event)
    _schedule: ResultRetrySchedule | None = field(default=None, init=False)

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self.poller.rollout_id

    @property
    def wait_sec(self) -> float:
        """How long the server holds a poll, in seconds; the lease is renewed as often."""
        return self.poller.admission.response.result_wait_timeout_sec

    @property
    def request_sec(self) -> float:
        """How long one full request may take, in seconds."""
        return self.wait_sec + RESULT_READ_GRACE_SEC

    @property
    def lease_sec(self) -> float:
        """How long the lease is, in seconds."""
        return self.poller.admission.response.polling_lease_timeout_sec

    def claim(self) -> dict[str, str]:
        """Return what a request that opens a feed says of it."""
        return {
            "rollout_id": self.rollout_id,
            "polling_lease_token": self.poller.admission.response.polling_lease_token,
            "seen": self.poller.seen.to_header(),
        }

    def renewed(self, sent_at: float) -> None:
        """Take an answer that confirms the lease: counted from when its request was sent."""
        admission = self.poller.admission
        admission.lease_deadline = max(admission.lease_deadline, sent_at + self.lease_sec)

    def opened(self, sent_at: float) -> None:
        """Take an open feed: the lease is renewed, and failures before it are forgotten."""
        self.renewed(sent_at)
        self._schedule = None
        self.retry_at = -math.inf

    def delay_after(self, kind: FailureKind, now: float) -> float | None:
        """Count a failure; return the backoff before the next attempt, ``None`` to give up."""
        if self._schedule is None:
            deadline = self.poller.admission.lease_deadline
            self._schedule = ResultRetrySchedule(self.request_sec, deadline)
        return self._schedule.delay_after(kind, now)

    def may_try(self, now: float) -> bool:
        """Whether a full request still fits before the last confirmed end of the lease."""
        return self._schedule is None or self._schedule.may_start(now)

    def fail(self, error: Exception) -> None:
        """Keep an error of the feed; a copy, since its other rollouts raise it too."""
        self.failure = copy_error(error)
