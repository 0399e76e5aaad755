"""Rules of a run, without I/O: which attempt is tried again at once, and when the run stops."""

from __future__ import annotations

from attrs import define

from rollout.evaluation.records import AttemptOutcome, AttemptRecord
from rollout.rules.retry import rerun_delay_sec

__all__ = ["CircuitBreaker", "setup_retry_delay_sec", "wants_setup_retry"]


def wants_setup_retry(record: AttemptRecord, used: int, allowed: int) -> bool:
    """Whether an attempt is tried again at once, under a fresh id.

    Only if its agent never started (`agent_started_at` is null), so that no agent's result is
    ever rolled again. Without a terminal result nobody knows whether the
    agent ran, so the attempt is left alone, unless the server refused or could not be reached
    at admission.

    Args:
        record: How it ended.
        used: How often it was tried again before.
        allowed: ``retry_setup_failures`` of the run.
    """
    return record.failed and not record.may_have_run and used < allowed


def setup_retry_delay_sec(used: int) -> float:
    """Return how long to wait before the next try, in seconds: 1, 2, 4, up to 30."""
    return rerun_delay_sec(used + 1)


@define
class CircuitBreaker:
    """Stops a run after so many infrastructure failures without another end in between.

    Attributes:
        limit: How many infrastructure failures in a row it takes; 0 for never.
        streak: Consecutive infrastructure failures.
        tripped: The record that reached the limit.
    """

    limit: int
    streak: int = 0
    tripped: AttemptRecord | None = None

    def add(self, record: AttemptRecord) -> bool:
        """Count the end of an attempt; ``True`` if the run has to stop now."""
        if record.outcome is AttemptOutcome.CANCELLED:
            return False
        self.streak = self.streak + 1 if record.infrastructure else 0
        if self.tripped is None and 0 < self.limit <= self.streak:
            self.tripped = record
            return True
        return False
