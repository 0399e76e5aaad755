"""The index of a run's attempts: which record of each one counts, and its verdict.

An attempt has several records where its rollout was tried again. The last one that settles it
counts; where none does, the last one of all. A failure therefore stands until the rollout that
was to replace it has ended. Resuming, figures, comparisons and the report all go by this index.

It takes some twenty bytes for each attempt: blocks hold the same attempt of rows next to each
other, so that a selection of rows with gaps costs little.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from fractions import Fraction
from itertools import groupby

from attrs import define, field, frozen

from rollout._checks import is_finite_number
from rollout.errors import EvaluationError
from rollout.evaluation.records import AttemptOutcome, AttemptRecord

__all__ = ["STATES", "AttemptIndex", "IndexedAttempt", "RowScore", "reward_of", "state_of"]

STATES = ("passed", "below", "ungraded", "removed", "failure", "error", "cancelled")
"""The verdict on an attempt: a success by whether it passed, everything else by its outcome."""

_OUTCOMES = {outcome.value: outcome for outcome in AttemptOutcome}
_COUNTED = frozenset({"passed", "below", "failure", "error"})
_FAILED = frozenset({"failure", "error"})
_BLOCK = 128
_SETTLED = 16
"""Added to a code whose record settles its attempt; 0 stands for no record."""


def state_of(record: AttemptRecord) -> str:
    """Return the one of `STATES` that a record is in."""
    if record.outcome is not AttemptOutcome.SUCCESS:
        return record.outcome.value
    if record.removed:
        return "removed"
    if record.passed:
        return "passed"
    return "ungraded" if record.reward is None else "below"


def reward_of(record: AttemptRecord) -> float | None:
    """The reward that enters the figures: that of a settled success that was not removed.

    Raises:
        EvaluationError: It is not a finite number.
    """
    settled = record.outcome is AttemptOutcome.SUCCESS and record.counts
    if not settled or record.removed or record.reward is None:
        return None
    if not is_finite_number(record.reward):
        raise EvaluationError(
            f"row {record.row}, attempt {record.attempt}: the reward is not a finite number"
        )
    return float(record.reward)


@frozen
class IndexedAttempt:
    """An attempt that has a record.

    Attributes:
        row: The row of the dataset.
        attempt: Which of the row's attempts, from 0.
        state: The one of `STATES` that its record is in.
        settled: Whether that record settles it.
        reward: Its reward, see `reward_of`.
        place: Where its record begins in the journal, in bytes.
        others: Where its other records begin, in order.
    """

    row: int
    attempt: int
    state: str
    settled: bool
    reward: float | None
    place: int
    others: tuple[int, ...]

    @property
    def outcome(self) -> AttemptOutcome:
        """How it ended."""
        return _OUTCOMES.get(self.state, AttemptOutcome.SUCCESS)

    @property
    def passed(self) -> bool:
        """Whether it passed."""
        return self.state == "passed"


@frozen
class RowScore:
    """The attempts of one row.

    Attributes:
        row: The row.
        counted: Attempts that count in a rate: settled, neither removed nor ungraded.
        passed: Those that passed.
        rewards: The rewards of its attempts, in their order.
    """

    row: int
    counted: int
    passed: int
    rewards: tuple[float, ...]

    @property
    def reward_sum(self) -> Fraction:
        """The exact sum of the rewards."""
        return sum(map(Fraction, self.rewards), Fraction())


class _Block:
    """The same attempt of `_BLOCK` rows next to each other."""

    __slots__ = ("codes", "places", "rewards")

    def __init__(self) -> None:
        self.codes = bytearray(_BLOCK)
        self.rewards = array("d", bytes(8 * _BLOCK))
        self.places = array("Q", bytes(8 * _BLOCK))


def _score(row: int, attempts: list[IndexedAttempt]) -> RowScore:
    counted = [each for each in attempts if each.settled and each.state in _COUNTED]
    return RowScore(
        row,
        len(counted),
        sum(each.passed for each in counted),
        tuple(each.reward for each in attempts if each.reward is not None),
    )


@define
class AttemptIndex:
    """The attempts of a run by row and number.

    Attributes:
        began: When the first request was made, in seconds since the epoch.
        ended: When the last rollout ended.
    """

    began: float = math.inf
    ended: float = -math.inf
    _blocks: dict[tuple[int, int], _Block] = field(factory=dict, init=False, repr=False)
    _others: dict[tuple[int, int], list[int]] = field(factory=dict, init=False, repr=False)
    _setup_retries: Counter[tuple[int, int]] = field(factory=Counter, init=False, repr=False)

    @classmethod
    def of_final(cls, records: Iterable[AttemptRecord]) -> AttemptIndex:
        """Make the index of records that count, one for each attempt, in any order.

        Raises:
            EvaluationError: There are two of one attempt, or a reward is not a finite number.
        """
        index = cls()
        for record in records:
            index.add_final(record)
        return index

    def add_final(self, record: AttemptRecord) -> None:
        """Add the only record of an attempt.

        Raises:
            EvaluationError: There is one already, or its reward is not a finite number.
        """
        if self._code(*record.key):
            raise EvaluationError(
                f"row {record.row}, attempt {record.attempt}: there are two records that count"
            )
        self.add(record)

    def add(self, record: AttemptRecord, place: int = 0) -> None:
        """Add a record, in the order in which they were written.

        Args:
            record: The record.
            place: Where it begins in the journal, in bytes.

        Raises:
            EvaluationError: Its reward is not a finite number.
        """
        key, at = record.key, record.row % _BLOCK
        reward = reward_of(record)
        block = self._blocks.get((record.row // _BLOCK, record.attempt))
        if block is None:
            block = self._blocks[record.row // _BLOCK, record.attempt] = _Block()
        before = block.codes[at]
        if before >= _SETTLED and not record.counts:
            self._others.setdefault(key, []).append(place)
        else:
            if before:
                self._others.setdefault(key, []).append(block.places[at])
            code = 1 + STATES.index(state_of(record))
            block.codes[at] = code + _SETTLED if record.counts else code
            block.rewards[at] = math.nan if reward is None else reward
            block.places[at] = place
        if record.superseded:
            self._setup_retries[key] += 1
        elif record.counts:
            self._setup_retries.pop(key, None)
        began = record.submitted_at.timestamp()
        self.began = min(self.began, began)
        self.ended = max(self.ended, began + record.duration_sec)

    def is_open(self, row: int, attempt: int, *, retry_failed: bool) -> bool:
        """Whether a run that goes on has to run an attempt.

        Args:
            row: Its row.
            attempt: Its number.
            retry_failed: Whether failures are run again.
        """
        code = self._code(row, attempt)
        return code < _SETTLED or (retry_failed and STATES[code - _SETTLED - 1] in _FAILED)

    def records(self, row: int, attempt: int) -> int:
        """How many records an attempt has."""
        return bool(self._code(row, attempt)) + len(self._others.get((row, attempt), ()))

    def setup_retries(self, row: int, attempt: int) -> int:
        """How often an attempt that is not settled was tried again for its setup."""
        return self._setup_retries[row, attempt]

    def __iter__(self) -> Iterator[IndexedAttempt]:
        """Yield the attempts that have a record, by row and number."""
        for first, group in groupby(sorted(self._blocks), key=lambda key: key[0]):
            blocks = [(attempt, self._blocks[first, attempt]) for _, attempt in group]
            for at in range(_BLOCK):
                row = first * _BLOCK + at
                for attempt, block in blocks:
                    if block.codes[at]:
                        yield self._indexed(row, attempt, block)

    def find(self, row: int, attempt: int) -> IndexedAttempt | None:
        """Return an attempt; ``None`` if it has no record."""
        if not self._code(row, attempt):
            return None
        return self._indexed(row, attempt, self._blocks[row // _BLOCK, attempt])

    def _indexed(self, row: int, attempt: int, block: _Block) -> IndexedAttempt:
        at = row % _BLOCK
        code, reward = block.codes[at], block.rewards[at]
        return IndexedAttempt(
            row,
            attempt,
            STATES[code % _SETTLED - 1],
            code >= _SETTLED,
            None if math.isnan(reward) else reward,
            block.places[at],
            tuple(sorted(self._others.get((row, attempt), ()))),
        )

    def rows(self) -> Iterator[RowScore]:
        """Yield the rows that have a record of any kind, in order."""
        for row, group in groupby(self, key=lambda attempt: attempt.row):
            yield _score(row, list(group))

    def whole_row(self, row: int, n: int) -> RowScore | None:
        """Return a row all of whose *n* attempts are settled; ``None`` if one is not."""
        attempts = [found for number in range(n) if (found := self.find(row, number)) is not None]
        if len(attempts) < n or not all(each.settled for each in attempts):
            return None
        return _score(row, attempts)

    def keep(self, rows: Container[int]) -> None:
        """Drop all rows but these."""
        for (first, attempt), block in self._blocks.items():
            for at in range(_BLOCK):
                row = first * _BLOCK + at
                if block.codes[at] and row not in rows:
                    block.codes[at] = 0
                    self._others.pop((row, attempt), None)

    def _code(self, row: int, attempt: int) -> int:
        block = self._blocks.get((row // _BLOCK, attempt))
        return 0 if block is None else block.codes[row % _BLOCK]
