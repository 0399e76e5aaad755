"""The attempts of a run, one after the other, however many there are.

Theory of operation: one pass over the journal notes where each record is, in a few numbers of
a fixed size. Sorted by row and attempt, they bring the records of an attempt together; its
text is read again whenever the attempt is asked for. So a run of any length costs some forty
bytes for each record.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import IO

from attrs import define, field, frozen

from rollout.errors import EvaluationDamagedError, EvaluationError
from rollout.evaluation.folder.journal import EVENTS, decode_line, read_records, record_of
from rollout.evaluation.records import AttemptOutcome, AttemptRecord
from rollout.evaluation.report.text import number

__all__ = ["STATES", "Attempt", "Attempts", "Overview", "state_of"]

STATES = ("passed", "below", "ungraded", "removed", "failure", "error", "cancelled")
"""How an attempt is shown: a success by whether it passed, everything else by its outcome."""

_COUNTS = 128
"""Added to the number of a state whose record settles its attempt."""

_RUN = 8192
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def state_of(record: AttemptRecord) -> str:
    """Return the one of `STATES` that a record is in."""
    if record.outcome is not AttemptOutcome.SUCCESS:
        return record.outcome.value
    if record.removed:
        return "removed"
    if record.passed:
        return "passed"
    return "ungraded" if record.reward is None else "below"


@frozen
class Attempt:
    """An attempt: the record that counts, and the others of it in order."""

    record: AttemptRecord
    others: list[AttemptRecord]


@define
class Overview:
    """What can be said of all attempts together.

    Attributes:
        attempts: How many have a record.
        settled: How many of them are settled by it.
        rows: How many rows they are of.
        most: How many attempts a row has, going by their numbers.
        states: Attempts by the one of `STATES` that they are in.
        tries: Records beside those that count.
        rewards: The least and the greatest reward, ``None`` if there is none.
        elapsed_sec: From the first request to the last end of any record, pauses included;
            ``None`` of no records.
    """

    attempts: int = 0
    settled: int = 0
    rows: int = 0
    most: int = 0
    states: Counter[str] = field(factory=Counter)
    tries: int = 0
    rewards: tuple[float, float] | None = None
    elapsed_sec: float | None = None


@define
class Attempts:
    """The attempts of a journal, by row and attempt.

    It is iterated any number of times, and reads the records anew each time.

    Attributes:
        problem: Why the journal could not be read to its end, ``None`` if it could.
    """

    _path: Path
    _file: IO[bytes] | None
    problem: str | None = None
    _rows: array[int] = field(factory=lambda: array("Q"))
    _numbers: array[int] = field(factory=lambda: array("Q"))
    _places: array[int] = field(factory=lambda: array("Q"))
    _states: array[int] = field(factory=lambda: array("B"))
    _rewards: array[float] = field(factory=lambda: array("d"))
    _first: float = math.inf
    _last: float = -math.inf

    @classmethod
    def read(cls, folder: Path, file: IO[bytes] | None) -> Attempts:
        """Note the records of a journal, as many as can be read. Blocking.

        Args:
            folder: The folder of the run.
            file: Its journal, which stays open as long as attempts are asked for; ``None`` if
                there is none.
        """
        found = cls(folder / EVENTS, file)
        if file is not None:
            try:
                found._note(folder, file)
            except (EvaluationError, OSError, ValueError, ArithmeticError) as error:
                found.problem = str(getattr(error, "strerror", None) or error)
            except RecursionError:
                found.problem = "a line nests too deep"
        return found

    def _note(self, folder: Path, file: IO[bytes]) -> None:
        place = len(file.readline())
        for record in read_records(folder):
            # A number that is too large for its array ends this before anything is noted.
            row, attempt = array("Q", [record.row]), array("Q", [record.attempt])
            reward = number(record.reward)
            self._rows += row
            self._numbers += attempt
            self._places.append(place)
            self._states.append(STATES.index(state_of(record)) + _COUNTS * record.counts)
            self._rewards.append(math.nan if reward is None else reward)
            started = (record.submitted_at - _EPOCH) / timedelta(seconds=1)
            self._first = min(self._first, started)
            self._last = max(self._last, started + (number(record.duration_sec) or 0))
            place += len(file.readline())

    def overview(self) -> Overview:
        """Sum the attempts up, without reading them again."""
        found = Overview()
        least, greatest, before = math.inf, -math.inf, -1
        for indexes in self._groups():
            final = self._final(indexes)
            found.attempts += 1
            found.settled += self._states[final] >= _COUNTS
            found.states[STATES[self._states[final] % _COUNTS]] += 1
            found.tries += len(indexes) - 1
            found.most = max(found.most, self._numbers[final] + 1)
            found.rows += self._rows[final] != before
            before = self._rows[final]
            # NaN, which stands for none, comes second, so it is never taken.
            least = min(least, self._rewards[final])
            greatest = max(greatest, self._rewards[final])
        if least <= greatest:
            found.rewards = (least, greatest)
        if found.attempts:
            found.elapsed_sec = self._last - self._first
        return found

    def __iter__(self) -> Iterator[Attempt]:
        """Yield the attempts with their records. Blocking.

        Raises:
            EvaluationDamagedError: The journal was changed since it was read first.
        """
        for indexes in self._groups():
            final = self._final(indexes)
            others = [self._record(index) for index in indexes if index != final]
            yield Attempt(self._record(final), others)

    def _groups(self) -> Iterator[list[int]]:
        """Yield the records of each attempt, in the order of the journal."""

        def key(index: int) -> tuple[int, int]:
            return (self._rows[index], self._numbers[index])

        # No more than a run of them at a time is sorted as Python objects.
        runs = [
            array("Q", sorted(range(start, min(start + _RUN, len(self._rows))), key=key))
            for start in range(0, len(self._rows), _RUN)
        ]
        # Of equal ones those of the earlier run come first, so the order of the journal stays.
        for _, indexes in groupby(heapq.merge(*runs, key=key), key):
            yield list(indexes)

    def _final(self, indexes: list[int]) -> int:
        """Return the last record that settles the attempt; else the last one of all."""
        for index in reversed(indexes):
            if self._states[index] >= _COUNTS:
                return index
        return indexes[-1]

    def _record(self, index: int) -> AttemptRecord:
        assert self._file is not None  # noqa: S101 - without a journal there are no indexes
        self._file.seek(self._places[index])
        value = decode_line(self._file.readline())
        if value is None:
            raise EvaluationDamagedError(f"{self._path} was changed while it was read")
        return record_of(value)
