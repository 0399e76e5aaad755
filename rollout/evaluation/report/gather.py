"""Read the folder of a run, as much of it as there is.

A report is wanted most where something went wrong, so only a folder that holds no run at all
is refused. Everything else that is missing or damaged is said in a notice on the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import define, field

from rollout.errors import EvaluationDamagedError, EvaluationError
from rollout.evaluation.folder import METRICS
from rollout.evaluation.journal import read_records
from rollout.evaluation.manifest import MANIFEST, read_manifest
from rollout.evaluation.metrics import compute_metrics
from rollout.evaluation.records import AttemptOutcome, AttemptRecord
from rollout.evaluation.report.text import parse

__all__ = ["Attempt", "Run", "gather", "state_of"]

STATES = ("passed", "below", "ungraded", "removed", "failure", "error", "cancelled")
"""How an attempt is shown: a success by whether it passed, everything else by its outcome."""


_MOST_ROWS = 10**12
_MOST_N = 10_000
"""Curves have a point for each k up to n, so a damaged n must not make millions of them."""


def state_of(record: AttemptRecord) -> str:
    """Return the one of `STATES` that a record is in."""
    if record.outcome is not AttemptOutcome.SUCCESS:
        return record.outcome.value
    if record.removed:
        return "removed"
    if record.passed:
        return "passed"
    return "ungraded" if record.reward is None else "below"


@define
class Attempt:
    """An attempt: the record that counts, and the others of it in order."""

    record: AttemptRecord
    others: list[AttemptRecord] = field(factory=list)

    def add(self, record: AttemptRecord) -> None:
        """Take a later record: it counts if it settles the attempt, or nothing did so far."""
        if record.counts or not self.record.counts:
            record, self.record = self.record, record
        self.others.append(record)


@define(kw_only=True)
class Run:
    """What is known of a run.

    Attributes:
        manifest: Its manifest, empty if that cannot be read.
        metrics: The figures: ``results`` and ``timing``, empty if there are none.
        attempts: By row and attempt.
        notices: What is missing or damaged, for people.
    """

    manifest: dict[str, Any]
    metrics: dict[str, Any]
    attempts: list[Attempt]
    notices: list[str]

    def part(self, *way: str) -> Any:
        """Return a value of the manifest, ``None`` where there is none."""
        return _entry(self.manifest, *way)

    def figure(self, *way: str) -> Any:
        """Return a value of the figures, ``None`` where there is none."""
        return _entry(self.metrics, *way)

    @property
    def expected(self) -> int:
        """How many attempts the run has once it is complete; never less than it has now."""
        return max((self.rows or 0) * (self.n or 0), len(self.attempts))

    @property
    def rows(self) -> int | None:
        """How many rows were selected, ``None`` if the manifest has no believable number."""
        return _believable(self.part("dataset", "selected"), 0, _MOST_ROWS)

    @property
    def n(self) -> int | None:
        """How many attempts each row has, likewise."""
        return _believable(self.part("run", "n"), 1, _MOST_N)


def gather(folder: Path) -> Run:
    """Read a run. Blocking.

    Raises:
        EvaluationError: The folder holds no run.
    """
    notices: list[str] = []
    manifest = _manifest(folder, notices)
    attempts = _attempts(folder, notices)
    run = Run(manifest=manifest, metrics={}, attempts=attempts, notices=notices)
    missing = run.expected - len(attempts)
    unsettled = sum(not attempt.record.counts for attempt in attempts)
    if missing + unsettled:
        notices.append(
            f"This run is not complete: {missing + unsettled:,} of {run.expected:,} attempts "
            "have no result yet."
        )
    run.metrics = _metrics(folder, run)
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


def _attempts(folder: Path, notices: list[str]) -> list[Attempt]:
    attempts: dict[tuple[int, int], Attempt] = {}
    try:
        for record in read_records(folder):
            attempt = attempts.get(record.key)
            if attempt is None:
                attempts[record.key] = Attempt(record)
            else:
                attempt.add(record)
    except (EvaluationError, OSError, ValueError, RecursionError) as error:
        notices.append(
            "The journal cannot be read to its end, so attempts are missing here: "
            f"{getattr(error, 'strerror', None) or error}"
        )
    return [attempts[key] for key in sorted(attempts)]


def _metrics(folder: Path, run: Run) -> dict[str, Any]:
    """Return the figures of the run: those that it ended with, or those of what there is."""
    try:
        found = parse((folder / METRICS).read_bytes())
    except (OSError, ValueError):
        found = None
    settled = sum(attempt.record.counts for attempt in run.attempts)
    if isinstance(found, dict) and _entry(found, "results", "attempts", "settled") == settled:
        return found
    # They are missing, damaged, or older than the journal.
    records = [attempt.record for attempt in run.attempts]
    n = max([run.n or 1, *(record.attempt + 1 for record in records)])
    if n > _MOST_N:
        run.notices.append(f"There are no figures of this run: no run has {n:,} attempts of a row")
        return {}
    rows = max(run.expected // n, len({record.row for record in records}))
    try:
        return compute_metrics(records, rows=rows, n=n).to_dict()
    except (EvaluationError, ArithmeticError, ValueError) as error:
        run.notices.append(f"There are no figures of this run: {error}")
        return {}


def _believable(value: Any, least: int, most: int) -> int | None:
    fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    return value if fits else None


def _entry(value: Any, *way: str) -> Any:
    """Return a value inside of nested objects, ``None`` where there is none."""
    for name in way:
        value = value.get(name) if isinstance(value, dict) else None
    return value
