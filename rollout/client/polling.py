"""Admission and polling: thin loops around the rules of `rollout.rules`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

import httpx
import trio
from attrs import define, evolve, field

from rollout.client.wire import Wire
from rollout.codec import dump_request
from rollout.errors import (
    RolloutAdmissionTimeoutError,
    RolloutPollTimeoutError,
    RolloutProtocolError,
)
from rollout.rules import SeenState, is_terminal, may_follow
from rollout.rules.retry import (
    GATEWAY_STATUS_CODES,
    RESULT_READ_GRACE_SEC,
    FailureKind,
    ResultRetrySchedule,
    retry_after_sec,
)
from rollout.types import (
    RolloutInitRequest,
    RolloutInitResponse,
    RolloutResultResponse,
    RolloutStatus,
)

__all__ = ["Admission", "Poller", "admit"]

logger = logging.getLogger(__name__)

_RETRYABLE = (httpx.RemoteProtocolError, httpx.NetworkError, httpx.ReadTimeout)
_LONGEST_PAUSE_SEC = 0.5
_SHORTEST_PAUSE_SEC = 0.01
_TOO_MANY_REQUESTS = 429


@define
class Admission:
    """An admitted rollout: the server's answer, and when its lease ends unless renewed."""

    response: RolloutInitResponse
    lease_deadline: float


async def admit(wire: Wire, request: RolloutInitRequest, *, timeout_sec: float | None) -> Admission:
    """Ask for admission until the server has room, or the time is up.

    Only 429 is tried again, after its ``Retry-After``. A transport error is raised as it is:
    the request may have arrived, and admitting twice is not ours to risk.

    Raises:
        RolloutAdmissionTimeoutError: The time was up first.
        RolloutProtocolError: The server answered with something else than 202 or 429.
        InvalidFieldError: The request holds something that has no JSON form.
        httpx.TransportError: A request failed.

    Cancelling this may leave an admitted rollout behind, which ends with its lease.
    """
    body = dump_request(request)
    underway = False
    with trio.CancelScope() as scope:
        if timeout_sec is not None:
            scope.deadline = trio.current_time() + timeout_sec
        while True:
            await trio.lowlevel.checkpoint()  # where the time is up already, nothing is sent
            underway = True
            sent_at = trio.current_time()
            response = await wire.admit(body)
            underway = False
            if response.status_code != _TOO_MANY_REQUESTS:
                admission = wire.read_admission(response, request)
                return Admission(admission, sent_at + admission.polling_lease_timeout_sec)
            delay = retry_after_sec(response.headers.get("Retry-After"), datetime.now(UTC))
            logger.debug("rollout %s: no capacity, again in %.2f s", request.rollout_id, delay)
            await trio.sleep(delay)
    message = f"rollout {request.rollout_id} was not admitted within {timeout_sec:g} s"
    if underway:
        message += (
            "; the admission may have succeeded: a request was under way. The server stops a "
            "rollout that nobody polls once its polling lease has ended"
        )
    raise RolloutAdmissionTimeoutError(message)


@define(eq=False)
class Poller:
    """Polls one rollout to its end.

    Attributes:
        wire: The server.
        admission: The admission, with the last confirmed end of the lease.
        on_result: Called with every valid answer, after it was merged into what is known.
        status: The furthest status seen.
        agent_started_at: The first start time seen.
    """

    wire: Wire
    admission: Admission
    on_result: Callable[[RolloutResultResponse], None] = field(repr=False)
    status: RolloutStatus = RolloutStatus.QUEUED
    agent_started_at: datetime | None = None

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self.admission.response.rollout_id

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
            result, news = self._take(await self._poll())
            self.on_result(result)
            if is_terminal(result.status):
                return result
            await self._pause(started, news)

    def _take(self, result: RolloutResultResponse) -> tuple[RolloutResultResponse, bool]:
        """Merge an answer into what is known. Nothing known is ever taken back."""
        news = False
        if may_follow(result.status, self.status):
            self.status = result.status
            news = True
        if self.agent_started_at is None and result.agent_started_at is not None:
            self.agent_started_at = result.agent_started_at
            news = True
        merged = evolve(result, status=self.status, agent_started_at=self.agent_started_at)
        return merged, news

    async def _pause(self, started: float, news: bool) -> None:
        """Hold back a little when a server answers polls at once though nothing is new."""
        wait = self.admission.response.result_wait_timeout_sec
        if not news and trio.current_time() - started < max(wait / 2, _SHORTEST_PAUSE_SEC):
            await trio.sleep(min(_LONGEST_PAUSE_SEC, max(wait / 4, _SHORTEST_PAUSE_SEC)))

    async def _poll(self) -> RolloutResultResponse:
        """Send one poll, and its retries."""
        response = self.admission.response
        schedule = ResultRetrySchedule(
            response.result_wait_timeout_sec + RESULT_READ_GRACE_SEC, self.admission.lease_deadline
        )
        failure: Exception | None = None
        while True:
            sent_at = trio.current_time()
            cutoff = schedule.lease_deadline
            if failure is None:
                # No retry, so nothing has to fit: it may take as long as the lease that it
                # renews, or as one full request where that is longer.
                cutoff = sent_at + max(response.polling_lease_timeout_sec, schedule.request_sec)
            try:
                result = await self._attempt(schedule.request_sec, cutoff, failure)
            except _RETRYABLE as error:
                failure, kind = error, FailureKind.TRANSPORT
            except RolloutProtocolError as error:
                if error.status_code not in GATEWAY_STATUS_CODES:
                    raise
                failure, kind = error, FailureKind.GATEWAY
            else:
                # The server renewed the lease when the request reached it, which was not
                # before it was sent. A failed request confirms nothing.
                self.admission.lease_deadline = sent_at + response.polling_lease_timeout_sec
                return result
            delay = schedule.delay_after(kind, trio.current_time())
            if delay is None:
                raise failure
            logger.warning(
                "rollout %s: polling again in %.2f s after %s (failed attempt %d)",
                self.rollout_id,
                delay,
                type(failure).__name__
                if kind is FailureKind.TRANSPORT
                else f"HTTP {getattr(failure, 'status_code', '')}",
                schedule.attempts,
            )
            await trio.sleep(delay)
            if not schedule.may_start(trio.current_time()):
                raise failure

    async def _attempt(
        self, request_sec: float, cutoff: float, failure: Exception | None
    ) -> RolloutResultResponse:
        seen = SeenState(self.status, self.agent_started_at is not None)
        with trio.CancelScope(deadline=cutoff):
            response = await self.wire.result(
                self.admission.response, seen=seen, timeout_sec=request_sec
            )
            return self.wire.read_result(response, self.admission.response)
        raise failure or RolloutPollTimeoutError(
            f"the result of rollout {self.rollout_id} was still coming in when its lease ended"
        )
