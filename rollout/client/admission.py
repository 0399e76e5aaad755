"""Admission of a rollout: asking until the server has room, or the time is up."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Literal

import httpx
import trio
from attrs import define

from rollout._logs import get_logger
from rollout.client.answers import AdmissionAnswer, Admitted, Busy
from rollout.codec import dump_request
from rollout.errors import RolloutAdmissionTimeoutError
from rollout.rules.retry import lengthened, retry_after_sec
from rollout.types import RolloutInitRequest, RolloutResultResponse

__all__ = ["Ask", "BusyNotice", "Progress", "WasAdmitted", "admit"]

logger = get_logger(__name__)

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_BUSY_SEC = 30.0

Ask = Callable[[RolloutInitRequest, bytes, Callable[[], None]], Awaitable[AdmissionAnswer]]
"""Sends one request for admission, alone or in a batch: the request, the same encoded, and what
to call when it is on its way. Raises `RolloutProtocolError` or `httpx.TransportError`."""

WasAdmitted = Literal["yes", "no", "unknown"]
"""Whether a rollout was admitted; "unknown" where a request may have arrived."""


@define(eq=False)
class Progress:
    """How far a rollout is known to have come, also where it ends with an error.

    Attributes:
        admitted: Whether a server has admitted it.
        agent_started_at: When its agent started, as far as the client has heard.
    """

    admitted: WasAdmitted = "no"
    agent_started_at: datetime | None = None

    def hear(self, result: RolloutResultResponse) -> None:
        """Record the start time that a result has."""
        self.agent_started_at = result.agent_started_at


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


async def admit(
    ask: Ask,
    request: RolloutInitRequest,
    *,
    timeout_sec: float | None,
    progress: Progress | None = None,
    notice: BusyNotice | None = None,
) -> Admitted:
    """Ask for admission until the server has room, or the time is up.

    Only 429 is tried again, after its ``Retry-After``. A transport error is raised as it is:
    the request may have arrived, and admitting twice is not ours to risk.

    Args:
        ask: Sends one request.
        request: The request.
        timeout_sec: How long to ask, in seconds; ``None`` for as long as it takes.
        progress: Updated with what is known of the admission.
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
            scope.deadline = started + timeout_sec
        while True:
            try:
                answer = await ask(request, body, sent)
            except _NEVER_SENT:
                progress.admitted = "no"
                raise
            if isinstance(answer, Admitted):
                progress.admitted = "yes"
                return answer
            if not isinstance(answer, Busy):
                if answer.certain:
                    progress.admitted = "no"
                raise answer.error
            progress.admitted = "no"
            delay = lengthened(
                retry_after_sec(answer.retry_after, datetime.now(UTC)),
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
