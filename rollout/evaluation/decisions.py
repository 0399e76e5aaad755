"""Rules of a run that need no I/O: what is done, what runs again, and when to give up."""

from __future__ import annotations

from attrs import define, field

from rollout.evaluation._sparse import SparseArray
from rollout.evaluation.records import AttemptOutcome, AttemptRecord
from rollout.rules.retry import rerun_delay_sec

__all__ = ["CircuitBreaker", "Ledger", "setup_retry_delay_sec", "wants_setup_retry"]

_OUTCOMES = tuple(AttemptOutcome)
_CODES = {outcome: code for code, outcome in enumerate(_OUTCOMES, start=1)}


def wants_setup_retry(record: AttemptRecord, used: int, allowed: int) -> bool:
    """Whether an attempt is tried again at once, under a fresh id.

    Only a failure counts whose agent never started (`agent_started_at` is null), so that no
    agent's result is ever rolled again. Without a terminal result nobody knows whether the
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
    """Says when a run has met nothing but one outside trouble for long enough.

    Attributes:
        limit: How many infrastructure failures in a row it takes; 0 for never.
        row: How many there were in a row so far.
        tripped: The record that was too much.
    """

    limit: int
    row: int = 0
    tripped: AttemptRecord | None = None

    def add(self, record: AttemptRecord) -> bool:
        """Take the end of an attempt; ``True`` if the run has to stop now."""
        if record.outcome is AttemptOutcome.CANCELLED:
            return False
        self.row = self.row + 1 if record.infrastructure else 0
        if self.tripped is None and 0 < self.limit <= self.row:
            self.tripped = record
            return True
        return False


@define
class Ledger:
    """What is settled and how, and how often it was tried, in a few bytes for each attempt.

    Attributes:
        n: Attempts for each row.
        retry_failed: Whether failures count as not settled.
    """

    n: int
    retry_failed: bool = False
    _settled: SparseArray = field(factory=lambda: SparseArray("B"), init=False)
    _records: SparseArray = field(factory=lambda: SparseArray("I"), init=False)
    _setup_retries: SparseArray = field(factory=lambda: SparseArray("I"), init=False)

    def add(self, record: AttemptRecord) -> None:
        """Take a record, in the order in which they were written.

        One that does not count changes nothing about what was settled before it: a failure
        stands until the rollout that was to replace it has ended.
        """
        place = self._place(*record.key)
        self._records[place] = record.retry + 1
        if record.superseded:
            self._setup_retries[place] += 1
        elif record.counts:
            again = self.retry_failed and record.failed
            self._settled[place] = 0 if again else _CODES[record.outcome]
            self._setup_retries[place] = 0

    def settled(self, row: int, attempt: int) -> AttemptOutcome | None:
        """Return how the attempt ended, ``None`` if it has no result that stands."""
        code = self._settled[self._place(row, attempt)]
        return _OUTCOMES[code - 1] if code else None

    def records(self, row: int, attempt: int) -> int:
        """How many records an attempt has."""
        return self._records[self._place(row, attempt)]

    def setup_retries(self, row: int, attempt: int) -> int:
        """How often an attempt that is not settled was tried again for its setup."""
        return self._setup_retries[self._place(row, attempt)]

    def _place(self, row: int, attempt: int) -> int:
        return row * self.n + attempt
