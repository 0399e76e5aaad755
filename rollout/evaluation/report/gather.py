"""Read the folder of a run, as much of it as there is.

A report is wanted most where something went wrong, so only a folder that holds no run at all
is refused. Everything else that is missing or damaged is said in a notice on the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from rollout._page.text import number, parse
from rollout.errors import EvaluationDamagedError, EvaluationError
from rollout.evaluation.folder.journal import (
    indexed_records,
    open_journal,
    read_index,
    record_at,
)
from rollout.evaluation.folder.manifest import MANIFEST, read_manifest
from rollout.evaluation.index import AttemptIndex
from rollout.evaluation.metrics import (
    EvaluationMetrics,
    compute_metrics,
    stop_note,
    threshold_note,
)
from rollout.evaluation.records import AttemptRecord
from rollout.evaluation.sequential import Stopping, replay

__all__ = ["Attempt", "Overview", "Run", "gather"]

_MOST_ROWS = 10**12
_MOST_N = 10_000
"""Curves have a point for each k up to n, so a damaged n must not make millions of them."""


@frozen
class Attempt:
    """An attempt: the record that counts, and its other records in order."""

    record: AttemptRecord
    others: list[AttemptRecord]


@define
class Overview:
    """Counts over all attempts, from their index.

    Attributes:
        attempts: How many have a record.
        settled: How many of them are settled by it.
        rows: How many rows they are of.
        most: How many attempts a row has, going by their numbers.
        states: Attempts by their state, see `rollout.evaluation.index.STATES`.
        tries: Records that do not count.
        rewards: The least and the greatest reward, ``None`` without rewards.
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

    @classmethod
    def of(cls, index: AttemptIndex) -> Overview:
        """Count the attempts of an index."""
        found, row = cls(), -1
        for attempt in index:
            found.attempts += 1
            found.settled += attempt.settled
            found.states[attempt.state] += 1
            found.tries += len(attempt.others)
            found.most = max(found.most, attempt.attempt + 1)
            found.rows += attempt.row != row
            row = attempt.row
            if (reward := attempt.reward) is not None:
                least, greatest = found.rewards or (reward, reward)
                found.rewards = (min(least, reward), max(greatest, reward))
        if found.attempts:
            found.elapsed_sec = index.ended - index.began
        return found


@define(kw_only=True)
class Run:
    """A run as far as its folder can be read.

    Attributes:
        manifest: Its manifest, empty if that cannot be read.
        metrics: The figures; ``None`` if they cannot be computed.
        overview: Counts over all attempts.
        notices: What is missing or damaged, for people.
        stopping: Where it stands, if it stops when it knows enough.
    """

    manifest: dict[str, Any]
    metrics: EvaluationMetrics | None
    overview: Overview
    notices: list[str]
    stopping: Stopping | None = None
    _folder: Path = field(alias="folder")
    _index: AttemptIndex = field(alias="index")

    def attempts(self) -> Iterator[Attempt]:
        """Read the attempts, by row and number. Blocking.

        Raises:
            EvaluationDamagedError: The journal was changed since it was indexed.
        """
        with open_journal(self._folder) as file:
            for each in self._index:
                others = [record_at(self._folder, file, place) for place in each.others]
                yield Attempt(record_at(self._folder, file, each.place), others)

    def part(self, *way: str) -> Any:
        """Return a value of the manifest, ``None`` where there is none."""
        value: Any = self.manifest
        for name in way:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    @property
    def expected(self) -> int:
        """How many attempts the run has once it is complete; never less than it has now."""
        return max((self.rows or 0) * (self.n or 0), self.overview.attempts)

    @property
    def rows(self) -> int | None:
        """How many rows the run has: those that were enough, else those that were selected.

        ``None`` if the manifest has no believable number.
        """
        if self.stopping is not None:
            return self.stopping.rows
        return _believable(self.part("dataset", "selected"), 0, _MOST_ROWS)

    @property
    def n(self) -> int | None:
        """How many attempts each row has, likewise."""
        return _believable(self.part("run", "n"), 1, _MOST_N)


def gather(
    folder: Path,
    index: AttemptIndex | None = None,
    metrics: EvaluationMetrics | None = None,
    stopping: Stopping | None = None,
) -> Run:
    """Read a run. Blocking.

    Args:
        folder: The folder of the run.
        index: The index of its journal, if there is one already.
        metrics: Its figures, if they are known already.
        stopping: Where a run stands that stops when it knows enough, if that is known already.

    Raises:
        EvaluationError: The folder holds no run.
    """
    notices: list[str] = []
    manifest = _manifest(folder, notices)
    index = _index(folder, notices) if index is None else index
    stopping = _stopping(manifest, index, notices) if stopping is None else stopping
    overview = Overview.of(index)
    run = Run(
        manifest=manifest,
        metrics=metrics,
        overview=overview,
        notices=notices,
        stopping=stopping,
        folder=folder,
        index=index,
    )
    if run.metrics is None:
        run.metrics = _metrics(folder, index, run)
    if run.metrics is not None and (note := stop_note(manifest, run.metrics.results)):
        notices.append(note)
    missing = run.expected - overview.settled
    if missing:
        notices.append(
            f"This run is not complete: {missing:,} of {run.expected:,} attempts have no "
            "result yet."
        )
    if run.metrics is not None:
        results, threshold = run.metrics.results, number(run.part("run", "pass_threshold"))
        note = threshold_note(results.attempts.passed, results.best_reward, threshold)
        if note is not None:
            notices.append(note)
    return run


def _manifest(folder: Path, notices: list[str]) -> dict[str, Any]:
    try:
        return read_manifest(folder)
    except EvaluationDamagedError:
        notices.append(f"{MANIFEST} is damaged, so little is said about the inputs of this run.")
    try:
        found = parse((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _index(folder: Path, notices: list[str]) -> AttemptIndex:
    """Index the journal as far as it can be read."""
    index = AttemptIndex()
    try:
        read_index(folder, index)
    except (EvaluationError, OSError) as error:
        notices.append(
            f"The journal cannot be read to its end, so attempts are missing here: {error}"
        )
    return index


def _stopping(manifest: dict[str, Any], index: AttemptIndex, notices: list[str]) -> Stopping | None:
    run = manifest.get("run")
    if not isinstance(run, dict) or run.get("until") is None:
        return None
    try:
        return replay(manifest, index)
    except (EvaluationError, KeyError, TypeError, AttributeError):
        notices.append(
            "The manifest is damaged, so it is not known whether this run stopped early."
        )
        return None


def _metrics(folder: Path, index: AttemptIndex, run: Run) -> EvaluationMetrics | None:
    """Compute the figures of what can be read."""
    n = max(run.n or 1, run.overview.most)
    if n > _MOST_N:
        run.notices.append(
            f"The figures cannot be computed: the journal has an attempt {n:,} of a row"
        )
        return None
    rows = max(run.expected // n, run.overview.rows)
    try:
        return compute_metrics(
            indexed_records(folder, index), rows=rows, n=n, stopping=run.stopping
        )
    except (EvaluationError, ArithmeticError, ValueError) as error:
        run.notices.append(f"The figures cannot be computed: {error}")
        return None


def _believable(value: Any, least: int, most: int) -> int | None:
    fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    return value if fits else None
