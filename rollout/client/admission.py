"""Admission of a rollout: asking until the server has room, or the time is up.

An admission whose answer was lost is sent again where the server knows its key, see
`rollout.client.replay`. Elsewhere it may have arrived, and a second one might run it twice.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Literal

import httpx
import trio
from attrs import define

from rollout._logs import get_logger
from rollout.client.answers import AdmissionAnswer, Admitted, Busy, Refused
from rollout.client.replay import LOST, ReplayWindow
from rollout.codec import dump_request
from rollout.errors import (
    RolloutAdmissionTimeoutError,
    RolloutCapacityError,
    RolloutProtocolError,
)
from rollout.rules.retry import (
    GATEWAY_STATUS_CODES,
    admission_retry_delay_sec,
    lengthened,
    retry_after_sec,
    shortened,
)
from rollout.types import RolloutInitRequest, RolloutInitResponse, RolloutResultResponse

__all__ = ["AdmissionNotices", "Ask", "Progress", "WasAdmitted", "WhenBusy", "admit"]

logger = get_logger(__name__)

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_KEY_BYTES = 24
_BUSY_SEC = 30.0
_LOST_SEC = 5.0

Ask = Callable[[RolloutInitRequest, bytes, Callable[[], None]], Awaitable[AdmissionAnswer]]
"""Sends one request for admission, alone or in a batch: the request, the same encoded, and what
to call when it is on its way. Raises `RolloutProtocolError` or `httpx.TransportError`."""

WasAdmitted = Literal["yes", "no", "unknown"]
"""Whether a rollout was admitted; "unknown" where a request may have arrived."""

WhenBusy = Literal["wait", "raise"]
"""What follows where a server is certain not to have admitted a rollout, but might do so later:
ask it again, or raise an error, so that the caller can go elsewhere."""


@define(eq=False)
class Progress:
    """How far a rollout is known to have come, also where it ends with an error.

    Attributes:
        admitted: Whether a server has admitted it.
        admission: The answer that admitted it, once there is one.
        agent_started_at: When its agent started, as far as the client has heard.
        body: Its terminal result as the server encoded it, where the client has kept that.
    """

    admitted: WasAdmitted = "no"
    admission: RolloutInitResponse | None = None
    agent_started_at: datetime | None = None
    body: bytes | None = None

    def hear(self, result: RolloutResultResponse) -> None:
        """Record the start time that a result has."""
        self.agent_started_at = result.agent_started_at


@define(eq=False)
class AdmissionNotices:
    """Warns now and then, for all rollouts of a client, while none is admitted."""

    _next_at: float = -math.inf
    _next_lost_at: float = -math.inf

    def lost(self, rollout_id: str, failure: Exception, delay_sec: float, now: float) -> None:
        """Log that an admission is sent again; a warning if none was logged lately."""
        level = logging.DEBUG
        if now >= self._next_lost_at:
            self._next_lost_at = now + _LOST_SEC
            level = logging.WARNING
        what = f"HTTP {failure.status_code}" if isinstance(failure, RolloutProtocolError) else None
        logger.log(
            level,
            "rollout %s: sending its admission again in %.2f s after %s",
            rollout_id,
            delay_sec,
            what or type(failure).__name__,
        )

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


@define(eq=False)
class _Losses:
    """The latest requests for an admission, in a row, that the server did not answer.

    Attributes:
        replay: How long the admission may be sent again.
        count: How many they are.
        first_at: When the first of them was sent.
        end: Until when the admission may be sent again.
        failure: How they failed: the last of them that may have arrived, if any may have.
    """

    replay: ReplayWindow
    count: int = 0
    first_at: float = math.inf
    end: float = math.inf
    failure: Exception | None = None

    async def delay_after(self, failure: Exception, asked_at: float) -> float:
        """Count a failure; return the backoff, or raise the failure where nothing more is sent."""
        self.count += 1
        self.first_at = min(self.first_at, asked_at)
        if self.failure is None or not isinstance(failure, _NEVER_SENT):
            self.failure = failure
        self.end = await self.replay.end(self.first_at)
        delay = shortened(admission_retry_delay_sec(self.count), random.random())  # noqa: S311
        self.check(delay)
        return delay

    def check(self, delay_sec: float = 0.0) -> None:
        """Raise the failure if the time is over when a delay is."""
        if self.failure is not None and trio.current_time() + delay_sec >= self.end:
            raise self.failure


async def admit(
    ask: Ask,
    request: RolloutInitRequest,
    *,
    timeout_sec: float | None,
    replay: ReplayWindow,
    progress: Progress | None = None,
    notices: AdmissionNotices | None = None,
    when_busy: WhenBusy = "wait",
) -> Admitted:
    """Ask for admission until the server has room, or the time is up.

    After a 429 the request is sent again when its ``Retry-After`` is over. After an answer that
    was lost, or a 502, 503 or 504, it is where *replay* allows that: elsewhere the request may
    have arrived, and admitting twice is not ours to risk.

    Args:
        ask: Sends one request.
        request: The request; gets an admission key if it has none.
        timeout_sec: How long to ask, in seconds; ``None`` for as long as it takes.
        replay: How long the request may be sent again.
        progress: Updated with what is known of the admission.
        notices: Warns of a server that admits nothing.
        when_busy: Whether to wait after a refusal that may pass. "raise" never waits unless a
            request may have arrived.

    Raises:
        RolloutCapacityError: The server has no room (429), and *when_busy* is "raise".
        RolloutAdmissionTimeoutError: The time was up first.
        RolloutProtocolError: The server answered with something else than 202 or 429.
        InvalidFieldError: The request holds something that has no JSON form.
        httpx.TransportError: A request failed.

    Cancelling this may leave an admitted rollout behind, which ends with its lease.
    """
    if request.admission_key is None:
        request.admission_key = secrets.token_urlsafe(_KEY_BYTES)
    body = dump_request(request)
    progress = progress or Progress()
    notices = notices or AdmissionNotices()
    started = trio.current_time()
    losses = _Losses(replay)
    with trio.CancelScope() as scope:
        if timeout_sec is not None:
            scope.deadline = started + timeout_sec
        while True:
            asked_at = trio.current_time()
            answer = await _ask_once(ask, request, body, progress, losses)
            if isinstance(answer, Admitted):
                progress.admitted, progress.admission = "yes", answer.response
                replay.learn(answer.response)
                return answer
            if when_busy == "raise" and progress.admitted == "no":
                raise _error_of(answer)
            if isinstance(answer, Busy):
                delay = lengthened(
                    retry_after_sec(answer.retry_after, datetime.now(UTC)),
                    random.random(),  # noqa: S311 - no secret
                )
                if progress.admitted == "no":
                    losses = _Losses(replay)
                losses.check(delay)
                now = trio.current_time()
                notices.put_off(request.rollout_id, now - started, now)
                logger.debug("rollout %s: no capacity, again in %.2f s", request.rollout_id, delay)
            else:
                if progress.admitted == "no" and not replay.length_sec:
                    raise answer  # nothing is lost that could be found by asking again
                delay = await losses.delay_after(answer, asked_at)
                notices.lost(request.rollout_id, answer, delay, trio.current_time())
            await trio.sleep(delay)
    message = f"rollout {request.rollout_id} was not admitted within {timeout_sec:g} s"
    if progress.admitted == "unknown":
        message += (
            "; the admission may have succeeded: a request was under way. The server stops a "
            "rollout that nobody polls once its polling lease has ended"
        )
    raise RolloutAdmissionTimeoutError(message) from losses.failure


def _error_of(answer: Busy | Exception) -> Exception:
    if isinstance(answer, Busy):
        return RolloutCapacityError("the server has no capacity (HTTP 429)")
    return answer


async def _ask_once(
    ask: Ask,
    request: RolloutInitRequest,
    body: bytes,
    progress: Progress,
    losses: _Losses,
) -> Admitted | Busy | Exception:
    """Send one request; return its answer, or the failure that an answer may yet follow."""
    before = progress.admitted
    losses.check()  # the process may have stood still

    def sent() -> None:
        progress.admitted = "unknown"

    with trio.CancelScope(deadline=losses.end):
        try:
            answer = await ask(request, body, sent)
        except httpx.TransportError as error:
            if isinstance(error, _NEVER_SENT):
                progress.admitted = before
            if isinstance(error, LOST):
                return error
            raise
        if isinstance(answer, Busy):
            disproved = answer.certain and bool(losses.replay.length_sec)
            progress.admitted = "no" if disproved else before
        if not isinstance(answer, Refused):
            return answer
        code = answer.error.status_code
        if answer.certain:
            # With a key, a duplicate is somebody else's rollout.
            other = bool(losses.replay.length_sec) and code == httpx.codes.CONFLICT
            progress.admitted = "no" if other else before
        if code in GATEWAY_STATUS_CODES:
            return answer.error
        raise answer.error
    raise losses.failure or RolloutAdmissionTimeoutError("the admission took too long")
