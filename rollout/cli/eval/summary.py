"""The summary of an evaluation, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from rollout.cli.eval.progress import OUTCOME_STYLES, figure_text
from rollout.cli.terminal import draw_table, make_console
from rollout.cli.text import one_line
from rollout.evaluation import AttemptOutcome, EvaluationMetrics
from rollout.evaluation.estimators import KEstimate
from rollout.evaluation.folder.layout import REPORT
from rollout.evaluation.intervals import Estimate
from rollout.evaluation.metrics import Durations, TokenCount, stop_note, threshold_note
from rollout.evaluation.sequential import SEQUENTIAL

__all__ = [
    "counted",
    "incomplete_note",
    "is_complete",
    "print_summary",
    "print_table",
    "run_threshold_note",
    "summary_document",
]

_Cells = Iterator[tuple[str, str | Text]]

_MOST_K = 6
_CURVE_WIDTH = 26
_LONGEST_NAME = 32
"""So much is shown of the name of a sample's metric."""


def is_complete(metrics: EvaluationMetrics) -> bool:
    """Whether every attempt has ended and none was cancelled."""
    counts = metrics.results.attempts
    return counts.settled >= counts.planned


def incomplete_note(manifest: dict[str, Any], metrics: EvaluationMetrics) -> str | None:
    """Return a note on the attempts that a run lacks, ``None`` if it is complete."""
    if is_complete(metrics):
        return None
    counts = metrics.results.attempts
    cancelled = f" ({counts.cancelled} were cancelled)" if counts.cancelled else ""
    # A run that was graded again has what was on record; nothing runs its agents.
    advice = "" if "regraded" in manifest else "; rollout eval run goes on with it"
    return (
        f"not complete: {counts.settled} of {counts.planned} attempts have ended{cancelled}{advice}"
    )


def run_threshold_note(manifest: dict[str, Any], metrics: EvaluationMetrics) -> str | None:
    """Point out that nothing passes because of the run's threshold, see `threshold_note`."""
    results = metrics.results
    threshold = manifest["run"].get("pass_threshold")
    return threshold_note(results.attempts.passed, results.best_reward, threshold)


def summary_document(
    folder: Path,
    manifest: dict[str, Any],
    metrics: EvaluationMetrics,
    *,
    resumed: int | None = None,
) -> dict[str, Any]:
    """Build what ``--json`` prints.

    Args:
        folder: The folder of the run.
        manifest: What it was started with.
        metrics: What came of it.
        resumed: How many attempts had ended before, of a run that was just left.
    """
    counts = metrics.results.attempts
    report = folder / REPORT
    document: dict[str, Any] = {
        "folder": str(folder),
        "run_id": manifest["run_id"],
        "complete": is_complete(metrics),
        "stopped_early": stop_note(manifest, metrics.results) is not None,
        "counts": {
            "total": counts.planned,
            "settled": counts.settled,
            **metrics.results.outcomes,
        },
        "report": str(report) if report.is_file() else None,
        "metrics": metrics.to_dict(),
    }
    if resumed is not None:
        document["counts"]["resumed"] = resumed
    return document


def print_summary(folder: Path, manifest: dict[str, Any], metrics: EvaluationMetrics) -> None:
    """Print what came of a run, and where its report is."""
    table = Table(title=_title(manifest, metrics), title_justify="left", show_header=False)
    table.add_column(style="dim", overflow="fold")
    table.add_column()
    for section in (_scores, _curves, _attempts, _categories, _costs, _sample_metrics):
        for name, value in section(metrics):
            table.add_row(Text(name), value)
        table.add_section()
    print_table(table)
    if note := incomplete_note(manifest, metrics):
        click.echo(f"The run is {note}.")
    for note in (stop_note(manifest, metrics.results), run_threshold_note(manifest, metrics)):
        if note:
            click.echo(note)
    report = folder / REPORT
    click.echo(f"Report: {one_line(str(report))}" if report.is_file() else _without_report(folder))


def print_table(table: Table) -> None:
    """Print a table; a pipe that nobody reads is an `OSError`, for which rich would exit."""
    console = make_console(highlight=False)
    with console.capture() as capture:
        draw_table(table, console)
    click.echo(capture.get(), nl=False)


def _scores(metrics: EvaluationMetrics) -> _Cells:
    results = metrics.results
    yield "mean reward", _estimate(results.mean_reward)
    yield "pass rate", _estimate(results.pass_rate)


def _curves(metrics: EvaluationMetrics) -> _Cells:
    """Write a few k: the first, the last and the powers of two."""
    results = metrics.results
    if results.n == 1:
        return
    yield "k", f"{'pass@k':<{_CURVE_WIDTH}}pass^k"
    for at, hat in zip(results.pass_at_k, results.pass_hat_k, strict=True):
        if at.k in {1, results.n} or (at.k.bit_count() == 1 and at.k < 2**_MOST_K):
            yield f"  {at.k}", f"{_point(at):<{_CURVE_WIDTH}}{_point(hat)}"


def _point(estimate: KEstimate) -> str:
    if estimate.low is None or estimate.high is None:
        return figure_text(estimate.value)
    low, high = figure_text(estimate.low), figure_text(estimate.high)
    return f"{figure_text(estimate.value)}  ({low} to {high})"


def _attempts(metrics: EvaluationMetrics) -> _Cells:
    counts = metrics.results.attempts
    yield "attempts", f"{counts.settled} of {counts.planned} have ended"
    for outcome in AttemptOutcome:
        if count := metrics.results.outcomes[outcome.value]:
            yield f"  {outcome.value}", Text(str(count), style=OUTCOME_STYLES[outcome])
    for name, count in (("removed", counts.removed), ("without a reward", counts.ungraded)):
        if count:
            yield f"  {name}", str(count)


def _categories(metrics: EvaluationMetrics) -> _Cells:
    for name, count in metrics.results.error_categories.items():
        yield one_line(name), Text(str(count), style="red")


def _costs(metrics: EvaluationMetrics) -> _Cells:
    results, timing = metrics.results, metrics.timing
    yield "duration", _durations(timing.settled)
    if results.prompt_tokens.total or results.completion_tokens.total:
        yield "tokens", _tokens(results.prompt_tokens, results.completion_tokens)
    if timing.retries:
        yield "retries", str(timing.retries)


def _sample_metrics(metrics: EvaluationMetrics) -> _Cells:
    for name, metric in metrics.results.sample_metrics.items():
        if not metric.mean:
            continue  # as of what all samples count and none has
        shown = one_line(name)
        if len(shown) > _LONGEST_NAME:
            shown = f"{shown[: _LONGEST_NAME - 1]}…"
        yield shown, f"{figure_text(metric.mean)}  ({counted(metric.count, 'attempt')})"


def _without_report(folder: Path) -> str:
    return f"Folder: {one_line(str(folder))} (rollout eval report makes the report)"


def _title(manifest: dict[str, Any], metrics: EvaluationMetrics) -> Text:
    parts = [f"Run {manifest['run_id']}"]
    if manifest["chat"].get("model"):
        parts.append(str(manifest["chat"]["model"]))
    results = metrics.results
    rows = counted(results.rows, "row")
    if stop_note(manifest, results):
        rows = f"{results.rows} of {counted(manifest['dataset']['selected'], 'row')}"
    parts.append(f"{rows}, n = {results.n}")
    return Text(one_line(", ".join(parts)))


def counted(number: int, noun: str) -> str:
    """Write a number of things."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _estimate(estimate: Estimate) -> str:
    if estimate.value is None:
        return "-"
    notes = [counted(estimate.attempts, "attempt")]
    if estimate.low is not None and estimate.high is not None:
        low, high = figure_text(estimate.low), figure_text(estimate.high)
        kind = "confidence sequence" if estimate.method == SEQUENTIAL else "interval"
        notes.insert(0, f"{estimate.level:.0%} {kind} {low} to {high}")
    return f"{figure_text(estimate.value)}  ({', '.join(notes)})"


def _durations(durations: Durations) -> str:
    if durations.median is None or durations.p95 is None or durations.max is None:
        return "-"
    return f"median {durations.median:.2f} s, p95 {durations.p95:.2f} s, max {durations.max:.2f} s"


def _tokens(prompt: TokenCount, completion: TokenCount) -> str:
    return f"{prompt.total:,} prompt, {completion.total:,} completion"
