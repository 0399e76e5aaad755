"""Admission and polling: thin loops around the rules of `rollout.rules`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Literal, Protocol

import httpx
import trio
from attrs import define, evolve, field

from rollout._logs import get_logger
from rollout.client.wire import Wire, is_refusal
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
    lengthened,
    retry_after_sec,
)
from rollout.types import (
    RolloutInitRequest,
    RolloutInitResponse,
    RolloutResultResponse,
    RolloutStatus,
)

__all__ = [
    "RETRYABLE",
    "Admission",
    "Admitted",
    "Admitter",
    "Attempt",
    "BusyNotice",
    "Poller",
    "Progress",
    "SingleAdmitter",
    "admit",
]

logger = get_logger(__name__)

RETRYABLE = (httpx.RemoteProtocolError, httpx.NetworkError, httpx.ReadTimeout)
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_LONGEST_PAUSE_SEC = 0.5
_SHORTEST_PAUSE_SEC = 0.01
_TOO_MANY_REQUESTS = 429
_BUSY_SEC = 30.0


@define
class Admission:
    """An admitted rollout: the server's answer, and when its lease ends unless renewed."""

    response: RolloutInitResponse
    lease_deadline: float


Admitted = Literal["yes", "no", "unknown"]


@define(eq=False)
class Progress:
    """How far a rollout is known to have come, also where it ends with an error.

    Attributes:
        admitted: Whether a server has admitted it; "unknown" where a request may have arrived.
        agent_started_at: When its agent started, as far as the client has heard.
    """

    admitted: Admitted = "no"
    agent_started_at: datetime | None = None

    def hear(self, result: RolloutResultResponse) -> None:
        """Keep what a result says of the start."""
        self.agent_started_at = result.agent_started_at


@define
class Attempt:
    """One answer to a request for admission, not checked yet.

    Attributes:
        response: The answer.
        sent_at: When the request was sent.
        read: Checks the answer and returns the admission, or raises what it is instead.
    """

    response: httpx.Response
    sent_at: float
    read: Callable[[], RolloutInitResponse]


class Admitter(Protocol):
    """Sends requests for admission, in one way or another."""

    async def attempt(
        self, request: RolloutInitRequest, body: bytes, on_sent: Callable[[], None]
    ) -> Attempt:
        """Ask once.

        Args:
            request: What to ask for.
            body: The same, encoded.
            on_sent: Called when the request is on its way.

        Raises:
            RolloutProtocolError: The answer is outside of the protocol.
            httpx.TransportError: The request failed.
        """
        ...


@define(eq=False)
class BusyNotice:
    """Warns now and then, for all rollouts of a client, while a server has no room for any."""

    _next_at: float = -math.inf

    def put_off(self, rollout_id: str, waited_sec: float, now: float) -> None:
        """Log a warning if a rollout has waited for long, and none was logged lately."""
        if waited_sec >= _BUSY_SEC and now >= self._next_at:
            self._next_at = now + _BUSY_SEC
            logger.warning(
                "rollout %s has waited %.0f s for admission: the server has no capacity (HTTP 429);"
                " admission_timeout_sec bounds the wait",
                rollout_id,
                waited_sec,
            )


@define
class SingleAdmitter:
    """Asks for each rollout in a request of its own."""

    wire: Wire

    async def attempt(
        self, request: RolloutInitRequest, body: bytes, on_sent: Callable[[], None]
    ) -> Attempt:
        """Send one admission request; see `Admitter`."""
        await trio.lowlevel.checkpoint()  # where the time is up already, nothing is sent
        on_sent()
        sent_at = trio.current_time()
        response = await self.wire.admit(body)
        return Attempt(response, sent_at, partial(self.wire.read_admission, response, request))


async def admit(
    admitter: Admitter,
    request: RolloutInitRequest,
    *,
    timeout_sec: float | None,
    progress: Progress | None = None,
    notice: BusyNotice | None = None,
) -> Admission:
    """Ask for admission until the server has room, or the time is up.

    Only 429 is tried again, after its ``Retry-After``. A transport error is raised as it is:
    the request may have arrived, and admitting twice is not ours to risk.

    Args:
        admitter: Sends the requests.
        request: What to ask for.
        timeout_sec: How long to ask, in seconds; ``None`` for as long as it takes.
        progress: Takes what is known of the admission, at each moment.
        notice: Warns of a server that has no room.

    Raises:
        RolloutAdmissionTimeoutError: The time was up first.
        RolloutProtocolError: The server answered with something else than 202 or 429.
        InvalidFieldError: The request holds something that has no JSON form.
        httpx.TransportError: A request failed.

    Cancelling this may leave an admitted rollout behind, which ends with its lease.
    """
    body = dump_request(request)
    progress = progress or Progress()
    notice = notice or BusyNotice()
    started = trio.current_time()

    def sent() -> None:
        progress.admitted = "unknown"

    with trio.CancelScope() as scope:
        if timeout_sec is not None:
            scope.deadline = trio.current_time() + timeout_sec
        while True:
            try:
                answer = await admitter.attempt(request, body, sent)
            except _NEVER_SENT:
                progress.admitted = "no"
                raise
            if is_refusal(answer.response):
                progress.admitted = "no"
            if answer.response.status_code != _TOO_MANY_REQUESTS:
                admission = answer.read()
                progress.admitted = "yes"
                deadline = answer.sent_at + admission.polling_lease_timeout_sec
                return Admission(admission, deadline)
            header = answer.response.headers.get("Retry-After")
            delay = lengthened(
                retry_after_sec(header, datetime.now(UTC)),
                random.random(),  # noqa: S311 - no secret
            )
            now = trio.current_time()
            notice.put_off(request.rollout_id, now - started, now)
            logger.debug("rollout %s: no capacity, again in %.2f s", request.rollout_id, delay)
            await trio.sleep(delay)
    message = f"rollout {request.rollout_id} was not admitted within {timeout_sec:g} s"
    if progress.admitted == "unknown":
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
            before = self.seen
            result = self.take(await self._poll())
            if is_terminal(result.status):
                return result
            await self._pause(started, news=self.seen != before)

    @property
    def seen(self) -> SeenState:
        """What is known so far, as a server is told."""
        return SeenState(self.status, self.agent_started_at is not None)

    def take(self, result: RolloutResultResponse) -> RolloutResultResponse:
        """Merge an answer into what is known, and tell. Nothing known is ever taken back."""
        if may_follow(result.status, self.status):
            self.status = result.status
        if self.agent_started_at is None:
            self.agent_started_at = result.agent_started_at
        merged = evolve(result, status=self.status, agent_started_at=self.agent_started_at)
        self.on_result(merged)
        return merged

    async def _pause(self, started: float, *, news: bool) -> None:
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
            except RETRYABLE as error:
                failure, kind, cause = error, FailureKind.TRANSPORT, type(error).__name__
            except RolloutProtocolError as error:
                if error.status_code not in GATEWAY_STATUS_CODES:
                    raise
                failure, kind, cause = error, FailureKind.GATEWAY, f"HTTP {error.status_code}"
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
                cause,
                schedule.attempts,
            )
            await trio.sleep(delay)
            if not schedule.may_start(trio.current_time()):
                raise failure

    async def _attempt(
        self, request_sec: float, cutoff: float, failure: Exception | None
    ) -> RolloutResultResponse:
        with trio.CancelScope(deadline=cutoff):
            response = await self.wire.result(
                self.admission.response, seen=self.seen, timeout_sec=request_sec
            )
            return self.wire.read_result(response, self.admission.response)
        raise failure or RolloutPollTimeoutError(
            f"the result of rollout {self.rollout_id} was still coming in when its lease ended"
        )
