"""Read the folder of a run, as much of it as there is.

A report is wanted most where something went wrong, so only a folder that holds no run at all
is refused. Everything else that is missing or damaged is said in a notice on the page.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from attrs import define

from rollout.errors import EvaluationDamagedError, EvaluationError
from rollout.evaluation.folder.journal import EVENTS
from rollout.evaluation.folder.layout import METRICS
from rollout.evaluation.folder.manifest import MANIFEST, read_manifest
from rollout.evaluation.metrics import compute_metrics, threshold_note
from rollout.evaluation.report.attempts import Attempts, Overview
from rollout.evaluation.report.text import number, parse

__all__ = ["Run", "gather"]

_MOST_ROWS = 10**12
_MOST_N = 10_000
"""Curves have a point for each k up to n, so a damaged n must not make millions of them."""


@define(kw_only=True)
class Run:
    """What is known of a run.

    Attributes:
        manifest: Its manifest, empty if that cannot be read.
        metrics: The figures: ``results`` and ``timing``, empty if there are none.
        attempts: By row and attempt; they are read anew whenever they are iterated.
        overview: What can be said of all of them together.
        notices: What is missing or damaged, for people.
    """

    manifest: dict[str, Any]
    metrics: dict[str, Any]
    attempts: Attempts
    overview: Overview
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
        return max((self.rows or 0) * (self.n or 0), self.overview.attempts)

    @property
    def rows(self) -> int | None:
        """How many rows were selected, ``None`` if the manifest has no believable number."""
        return _believable(self.part("dataset", "selected"), 0, _MOST_ROWS)

    @property
    def n(self) -> int | None:
        """How many attempts each row has, likewise."""
        return _believable(self.part("run", "n"), 1, _MOST_N)


@contextmanager
def gather(folder: Path) -> Generator[Run, None, None]:
    """Read a run, whose attempts can be read within the block. Blocking.

    Raises:
        EvaluationError: The folder holds no run.
    """
    notices: list[str] = []
    manifest = _manifest(folder, notices)
    file = _journal(folder, notices)
    try:
        attempts = Attempts.read(folder, file)
        if attempts.problem is not None:
            notices.append(_unread(attempts.problem))
        overview = attempts.overview()
        run = Run(
            manifest=manifest, metrics={}, attempts=attempts, overview=overview, notices=notices
        )
        missing = run.expected - overview.settled
        if missing:
            notices.append(
                f"This run is not complete: {missing:,} of {run.expected:,} attempts have no "
                "result yet."
            )
        run.metrics = _metrics(folder, run)
        note = threshold_note(
            run.figure("results", "attempts", "passed"),
            number(run.figure("results", "best_reward")),
            number(run.part("run", "pass_threshold")),
        )
        if note is not None:
            notices.append(note)
        yield run
    finally:
        if file is not None:
            file.close()


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


def _journal(folder: Path, notices: list[str]) -> IO[bytes] | None:
    try:
        return (folder / EVENTS).open("rb")
    except FileNotFoundError:
        return None
    except OSError as error:
        notices.append(_unread(error.strerror or type(error).__name__))
        return None


def _unread(problem: str) -> str:
    return f"The journal cannot be read to its end, so attempts are missing here: {problem}"


def _metrics(folder: Path, run: Run) -> dict[str, Any]:
    """Return the figures of the run: those that it ended with, or those of what there is."""
    try:
        found = parse((folder / METRICS).read_bytes())
    except (OSError, ValueError):
        found = None
    settled = run.overview.settled
    if isinstance(found, dict) and _entry(found, "results", "attempts", "settled") == settled:
        return found
    # They are missing, damaged, or older than the journal.
    n = max(run.n or 1, run.overview.most)
    if n > _MOST_N:
        run.notices.append(f"There are no figures of this run: no run has {n:,} attempts of a row")
        return {}
    rows = max(run.expected // n, run.overview.rows)
    records = (attempt.record for attempt in run.attempts)
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
