"""Polling: a thin loop around the rules of `rollout.rules`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TypeVar

import httpx
import trio
from attrs import Factory, define, evolve, field

from rollout._logs import get_logger
from rollout.client.answers import Admitted
from rollout.client.wire import Wire
from rollout.errors import RolloutPollTimeoutError, RolloutProtocolError
from rollout.rules import SeenState, is_terminal, may_follow
from rollout.rules.retry import (
    GATEWAY_STATUS_CODES,
    RESULT_READ_GRACE_SEC,
    FailureKind,
    ResultRetrySchedule,
)
from rollout.types import DURABLE_RESULTS, RolloutInitResponse, RolloutResultResponse, RolloutStatus

__all__ = ["RETRYABLE", "Poller", "durable_sec", "retried"]

T = TypeVar("T")

logger = get_logger(__name__)

RETRYABLE = (httpx.RemoteProtocolError, httpx.NetworkError, httpx.ReadTimeout)
_LONGEST_PAUSE_SEC = 0.5
_SHORTEST_PAUSE_SEC = 0.01


@define(eq=False)
class Poller:
    """Polls one rollout to its end.

    Attributes:
        wire: The server.
        admitted: The admission.
        on_result: Called with every valid answer, after it was merged into what is known.
        lease_deadline: The last confirmed end of the lease.
        status: The furthest status seen.
        agent_started_at: The first start time seen.
        body: The terminal result as the feed's line had it, if it came so.
    """

    wire: Wire
    admitted: Admitted
    on_result: Callable[[RolloutResultResponse], None] = field(repr=False)
    lease_deadline: float = field(
        default=Factory(lambda self: self.admitted.lease_deadline, takes_self=True), init=False
    )
    status: RolloutStatus = field(default=RolloutStatus.QUEUED, init=False)
    agent_started_at: datetime | None = field(default=None, init=False)
    body: bytes | None = field(default=None, init=False, repr=False)

    @property
    def admission(self) -> RolloutInitResponse:
        """The server's answer that admitted the rollout."""
        return self.admitted.response

    @property
    def durable_sec(self) -> float:
        """How long to wait for a server that keeps lease and result when its process ends."""
        return durable_sec(self.admission)

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self.admission.rollout_id

    async def run(self) -> RolloutResultResponse:
        """Poll until the rollout has ended; return its terminal result.

        Raises:
            RolloutProtocolError: An answer is not what the protocol allows, or a gateway
                answered for the server until the retries were used up.
            RolloutPollTimeoutError: An answer trickled in past the end of the lease.
            httpx.TransportError: A poll failed, and the retries with it.

        Cancelling this sends nothing: the rollout runs on until its lease ends.
        """
        while True:
            started = trio.current_time()
            before = self.seen
            result = self.take(await self._poll())
            if is_terminal(result.status):
                return result
            if self.seen == before:
                await self._pause(started)

    @property
    def seen(self) -> SeenState:
        """The state seen so far, as a request sends it."""
        return SeenState(self.status, self.agent_started_at is not None)

    def take(self, result: RolloutResultResponse) -> RolloutResultResponse:
        """Merge an answer into what is known, and report it; nothing known is ever taken back."""
        if may_follow(result.status, self.status):
            self.status = result.status
        if self.agent_started_at is None:
            self.agent_started_at = result.agent_started_at
        known = self.status, self.agent_started_at
        if (result.status, result.agent_started_at) != known:
            result = evolve(result, status=self.status, agent_started_at=self.agent_started_at)
        self.on_result(result)
        return result

    async def _pause(self, started: float) -> None:
        """Wait a little when a server answers polls at once though nothing is new."""
        wait = self.admission.result_wait_timeout_sec
        if trio.current_time() - started < max(wait / 2, _SHORTEST_PAUSE_SEC):
            await trio.sleep(min(_LONGEST_PAUSE_SEC, max(wait / 4, _SHORTEST_PAUSE_SEC)))

    async def _poll(self) -> RolloutResultResponse:
        """Send one poll, and its retries."""
        admission = self.admission
        schedule = ResultRetrySchedule(
            admission.result_wait_timeout_sec + RESULT_READ_GRACE_SEC,
            self.lease_deadline,
            self.durable_sec,
        )

        async def attempt(failure: Exception | None) -> RolloutResultResponse:
            sent_at = trio.current_time()
            cutoff = schedule.lease_deadline
            if failure is None:
                # No retry, so nothing has to fit: it may take as long as the lease that it
                # renews, or as one full request where that is longer.
                cutoff = sent_at + max(admission.polling_lease_timeout_sec, schedule.request_sec)
            result = await self._attempt(schedule.request_sec, cutoff, failure)
            # The server renewed the lease when the request reached it, which was not
            # before it was sent. A failed request confirms nothing.
            self.lease_deadline = sent_at + admission.polling_lease_timeout_sec
            return result

        return await retried(attempt, schedule, f"rollout {self.rollout_id}: polling")

    async def _attempt(
        self, request_sec: float, cutoff: float, failure: Exception | None
    ) -> RolloutResultResponse:
        with trio.CancelScope(deadline=cutoff):
            return await self.wire.result(self.admission, seen=self.seen, timeout_sec=request_sec)
        raise failure or RolloutPollTimeoutError(
            f"the result of rollout {self.rollout_id} was still coming in when its lease ended"
        )


def durable_sec(admission: RolloutInitResponse) -> float:
    """Return how long to wait for the server of a rollout when its process ends."""
    durable = DURABLE_RESULTS in admission.extensions
    return admission.polling_lease_timeout_sec if durable else 0.0


async def retried(
    attempt: Callable[[Exception | None], Awaitable[T]], schedule: ResultRetrySchedule, what: str
) -> T:
    """Send a request about a rollout, again after faults of the network, as a schedule allows.

    Args:
        attempt: Sends it once, given the failure of the attempt before.
        schedule: When it may be sent again.
        what: What is sent, for the log.

    Raises what the last attempt raised.
    """
    failure: Exception | None = None
    while True:
        try:
            return await attempt(failure)
        except RETRYABLE as error:
            failure, kind, cause = error, FailureKind.TRANSPORT, type(error).__name__
        except RolloutProtocolError as error:
            if error.status_code not in GATEWAY_STATUS_CODES:
                raise
            failure, kind, cause = error, FailureKind.GATEWAY, f"HTTP {error.status_code}"
        delay = schedule.delay_after(kind, trio.current_time())
        if delay is None:
            raise failure
        logger.warning(
            "%s again in %.2f s after %s (failed attempt %d)",
            what,
            delay,
            cause,
            schedule.attempts,
        )
        await trio.sleep(delay)
        if not schedule.may_start(trio.current_time()):
            raise failure
