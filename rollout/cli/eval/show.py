"""``rollout eval show DIR`` and ``rollout eval report DIR``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from rollout.cli.eval.progress import attempt_line
from rollout.cli.eval.summary import incomplete_note, print_summary, summary_document
from rollout.cli.options import json_option
from rollout.cli.text import one_line, print_json
from rollout.codec import unstructure
from rollout.errors import EvaluationDamagedError
from rollout.evaluation import (
    AttemptRecord,
    EvaluationMetrics,
    compute_metrics,
    final_records,
    read_manifest,
    summarize,
    write_report,
)
from rollout.evaluation.folder.journal import indexed_records, read_index
from rollout.evaluation.sequential import replay

__all__ = ["folder_argument", "metrics_of", "report", "show"]

F = TypeVar("F", bound=Callable[..., Any])


def folder_argument(name: str) -> Callable[[F], F]:
    """Add the folder of a run as an argument."""
    return click.argument(name, metavar=name.upper(), type=click.Path(path_type=Path))


def metrics_of(folder: Path, manifest: dict[str, Any]) -> EvaluationMetrics:
    """Work out the figures of a run without changing anything in its folder.

    Raises:
        EvaluationError: They cannot be worked out.
        EvaluationDamagedError: A file of the run is damaged.
    """
    index = read_index(folder)
    stopping = replay(manifest, index)
    return compute_metrics(
        indexed_records(folder, index),
        rows=manifest["dataset"]["selected"],
        n=manifest["run"]["n"],
        stopping=stopping,
    )


@click.command(short_help="Print what came of the run in DIR.")
@folder_argument("dir")
@click.option("--failures", is_flag=True, help="List the attempts that failed, too.")
@json_option
def show(dir: Path, failures: bool, as_json: bool) -> None:
    """Print what came of the run in DIR, complete or not; changes nothing there."""
    manifest = read_manifest(dir)
    metrics = metrics_of(dir, manifest)
    if as_json:
        document = summary_document(dir, manifest, metrics)
        if failures:
            document["failures"] = [unstructure(record) for record in _failed(dir)]
        print_json(document)
        return
    print_summary(dir, manifest, metrics)
    if failures:
        for record in _failed(dir):
            click.echo(attempt_line(record))


@click.command(short_help="Make the report of the run in DIR again.")
@folder_argument("dir")
@json_option
def report(dir: Path, as_json: bool) -> None:
    """Make metrics.json, index.jsonl and report.html of the run in DIR again.

    Works on a run that is not complete, too. Prints where the report is. Of a damaged run, the
    report alone is made, with what can be read, and the exit code is 2.
    """
    damage: EvaluationDamagedError | None = None
    note: str | None = None
    try:
        note = incomplete_note(read_manifest(dir), summarize(dir))
    except EvaluationDamagedError as error:
        damage = error
    path = str(write_report(dir))
    if as_json:
        print_json(
            {"report": path, "damage": None if damage is None else str(damage), "note": note}
        )
    else:
        click.echo(one_line(path))
    if damage is not None:
        raise damage
    if note is not None:
        click.echo(f"rollout: the run is {note}", err=True)


def _failed(folder: Path) -> Iterator[AttemptRecord]:
    return (record for record in final_records(folder) if record.failed)
