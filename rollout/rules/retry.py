"""Retries of result requests and of admissions, and the wait after a refused admission.

Each result GET has two independent schedules: one for failures of the connection, one for a
gateway that answers 502, 503 or 504 in the server's place. A retry may start only if its
backoff and one full request fit before the last confirmed end of the lease. A failed request
may never have reached the server, so it confirms nothing and moves no deadline.

Where results outlive the server's process, the server may be about to come back. So both schedules
go on at their last pace, for the length of a lease after the first failure: as downtime does not
count, the server keeps the end of every rollout for at least as long once it is back. It has those
ends then, and answers at once, so a full request need not fit.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum

from attrs import define, field

__all__ = [
    "GATEWAY_RETRY_DELAYS_SEC",
    "GATEWAY_STATUS_CODES",
    "RESULT_READ_GRACE_SEC",
    "TRANSPORT_RETRY_DELAYS_SEC",
    "FailureKind",
    "ResultRetrySchedule",
    "admission_retry_delay_sec",
    "fits",
    "lengthened",
    "rerun_delay_sec",
    "retry_after_sec",
    "shortened",
]

TRANSPORT_RETRY_DELAYS_SEC = (0.1, 0.5)
GATEWAY_RETRY_DELAYS_SEC = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
GATEWAY_STATUS_CODES = frozenset({502, 503, 504})
RESULT_READ_GRACE_SEC = 10.0
"""How much longer than the server's wait a result request may take, in seconds."""

DEFAULT_RETRY_AFTER_SEC = 1.0
MIN_RETRY_AFTER_SEC = 0.05
MAX_RETRY_AFTER_SEC = 60.0

_LONGEST_DELAY_SEC = 8.0
_JITTER = 0.5
_LONGEST_RERUN_DELAY_SEC = 30

# Stricter than float(), which also takes underscores, exponents, "inf" and "nan".
_SECONDS = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")


class FailureKind(Enum):
    """Which of the two schedules a failed result request belongs to."""

    TRANSPORT = "transport"
    GATEWAY = "gateway"


_DELAYS = {
    FailureKind.TRANSPORT: TRANSPORT_RETRY_DELAYS_SEC,
    FailureKind.GATEWAY: GATEWAY_RETRY_DELAYS_SEC,
}


def fits(now: float, *, delay_sec: float, request_sec: float, lease_deadline: float) -> bool:
    """Whether a wait and then one full request end before the lease does."""
    return now + delay_sec + request_sec < lease_deadline


@define
class ResultRetrySchedule:
    """The retries of one result GET; make a new one for each.

    Attributes:
        request_sec: How long one full request may take, in seconds.
        lease_deadline: The last confirmed end of the lease; later where results are durable.
        durable_sec: Where results outlive the server's process, how long retries go on after the
            first failure, in seconds; else 0.
        failures: How many failures of each kind there were.
    """

    request_sec: float
    lease_deadline: float
    durable_sec: float = 0.0
    failures: dict[FailureKind, int] = field(factory=lambda: dict.fromkeys(FailureKind, 0))

    @property
    def attempts(self) -> int:
        """How many attempts have failed so far."""
        return sum(self.failures.values())

    def delay_after(self, kind: FailureKind, now: float) -> float | None:
        """Count a failure; return the backoff before the next attempt, ``None`` to give up."""
        if self.durable_sec and not self.attempts:
            self.lease_deadline = max(self.lease_deadline, now + self.durable_sec)
        delays = _DELAYS[kind]
        spent = self.failures[kind]
        self.failures[kind] += 1
        if spent < len(delays):
            delay = delays[spent]
        elif self.durable_sec:
            delay = min(delays[-1] * 2.0 ** min(spent - len(delays) + 1, 8), _LONGEST_DELAY_SEC)
        else:
            return None
        return delay if self.may_start(now, delay_sec=delay) else None

    def may_start(self, now: float, *, delay_sec: float = 0.0) -> bool:
        """Whether an attempt may start after *delay_sec*; ask again once that has passed."""
        return fits(
            now,
            delay_sec=delay_sec,
            request_sec=0.0 if self.durable_sec else self.request_sec,
            lease_deadline=self.lease_deadline,
        )


def admission_retry_delay_sec(failures: int) -> float:
    """Return how long to wait after so many lost answers in a row: 0.25, 0.5, 1, 2 … 8 s."""
    return min(0.25 * 2.0 ** min(failures - 1, 5), _LONGEST_DELAY_SEC)


def lengthened(delay_sec: float, draw: float) -> float:
    """Lengthen a delay by up to a half, so that callers do not come back together.

    Args:
        delay_sec: The delay, which none of them undercuts.
        draw: A random number from 0 to 1, another one for each caller.
    """
    return delay_sec * (1 + _JITTER * draw)


def shortened(delay_sec: float, draw: float) -> float:
    """Shorten a delay by up to a half, so that callers do not come back together."""
    return delay_sec * (1 - _JITTER * draw)


def rerun_delay_sec(attempts: int) -> float:
    """Return how long a rollout that failed so often waits for its next attempt: 1, 2, 4 … 30 s."""
    return float(min(2 ** min(attempts - 1, 5), _LONGEST_RERUN_DELAY_SEC))


def retry_after_sec(header: str | None, wall_clock: datetime) -> float:
    """Read a ``Retry-After`` header (RFC 9110, 10.2.3): seconds, or an HTTP date.

    Args:
        header: The header's value, ``None`` when it is missing.
        wall_clock: The current time, aware, to measure a date against.

    Returns:
        Seconds to wait, held between 0.05 and 60; 1 where the header is missing or nonsense.
    """
    if header is None:
        return DEFAULT_RETRY_AFTER_SEC
    if _SECONDS.fullmatch(header.strip()):
        seconds = float(header)  # infinite where there are too many digits, which is held below
    else:
        try:
            date = parsedate_to_datetime(header)
            if date.tzinfo is None:
                date = date.replace(tzinfo=UTC)
            seconds = (date - wall_clock).total_seconds()
        except (TypeError, ValueError, IndexError, OverflowError):
            return DEFAULT_RETRY_AFTER_SEC
    return min(max(seconds, MIN_RETRY_AFTER_SEC), MAX_RETRY_AFTER_SEC)
