"""``rollout eval compare A B``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import click
from rich.table import Table

from rollout._page.conversation import first_prompt, last_answer, read_document
from rollout.cli.eval.progress import figure_text, reward_text
from rollout.cli.eval.show import folder_argument, metrics_of
from rollout.cli.eval.summary import (
    counted,
    incomplete_note,
    is_complete,
    print_table,
    run_threshold_note,
)
from rollout.cli.options import json_option
from rollout.cli.text import one_line, print_json
from rollout.errors import TrajectoryError
from rollout.evaluation import Comparison, compare_runs, final_records, read_manifest
from rollout.evaluation.comparison import SequentialDifference
from rollout.evaluation.folder.layout import TRAJECTORIES
from rollout.evaluation.intervals import PairedDifference

__all__ = ["command"]

_MOST_RANGES = 20
_MOST_ANSWERS = 10
_ANSWER = 70
"""Characters of a prompt and of an answer."""


@click.command("compare")
@folder_argument("a")
@folder_argument("b")
@click.option(
    "--allow-different-datasets",
    is_flag=True,
    help="Pair rows by their number although the datasets differ.",
)
@click.option(
    "--sequential",
    is_flag=True,
    help="Say which run is ahead, valid however often one looks while they go on.",
)
@json_option
def command(
    a: Path, b: Path, allow_different_datasets: bool, sequential: bool, as_json: bool
) -> None:
    """Compare the runs in the folders A and B, row by row.

    Prints how pass rate and mean reward changed from A to B on the rows that both have, with
    an interval, and the rows that flipped, the first of them with prompt and answers: a row
    passes if more than half of its attempts do.
    """
    manifests = {name: read_manifest(folder) for name, folder in _named(a, b)}
    metrics = {name: metrics_of(folder, manifests[name]) for name, folder in _named(a, b)}
    comparison = compare_runs(
        a, b, allow_different_datasets=allow_different_datasets, sequential=sequential
    )
    if as_json:
        print_json(
            {
                "a": {"folder": str(a), "complete": is_complete(metrics["A"])},
                "b": {"folder": str(b), "complete": is_complete(metrics["B"])},
                **comparison.to_dict(),
            }
        )
        return
    for name, folder in _named(a, b):
        note = incomplete_note(manifests[name], metrics[name])
        click.echo(f"{name}: {one_line(str(folder))}" + (f" ({note})" if note else ""))
    _print(comparison, a, b)
    for name, figures in metrics.items():
        if note := run_threshold_note(manifests[name], figures):
            click.echo(f"{name}: {note}")


def _named(a: Path, b: Path) -> tuple[tuple[str, Path], tuple[str, Path]]:
    return ("A", a), ("B", b)


def _print(comparison: Comparison, a: Path, b: Path) -> None:
    title = counted(comparison.pass_rate.rows, "paired row")
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("A", "B", "B - A", "interval"):
        table.add_column(name, justify="right")
    for name, difference in (
        ("pass rate", comparison.pass_rate),
        ("mean reward", comparison.mean_reward),
    ):
        table.add_row(name, *_cells(difference))
    print_table(table)
    counts = comparison.table
    click.echo(
        f"Rows: {counts.better} better, {counts.worse} worse, {counts.same} the same "
        f"(sign test p = {comparison.sign_test_p:.3g})"
    )
    if comparison.sequential is not None:
        click.echo(_ahead(comparison.sequential))
    _print_rows("Passed in A, not in B", comparison.pass_to_fail)
    _print_answers(comparison.pass_to_fail, (a, True), (b, False))
    _print_rows("Passed in B, not in A", comparison.fail_to_pass)
    _print_answers(comparison.fail_to_pass, (a, False), (b, True))
    for name, rows in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        if rows:
            _print_rows(f"Only in {name}", rows)
    for line in comparison.differences:
        click.echo(f"Differs: {one_line(line)}")


def _ahead(found: SequentialDifference) -> str:
    verdict = (
        "open which run is ahead" if found.ahead is None else f"{found.ahead.upper()} is ahead"
    )
    line = f"Sequential: {verdict} after {found.rows} of {counted(found.common, 'row')}"
    if found.difference is not None:
        line += (
            f"; B - A of the pass rate {found.difference:+.3f}, {found.level:.0%} confidence "
            f"sequence {found.low:+.3f} to {found.high:+.3f}"
        )
    return line


def _print_rows(title: str, rows: tuple[int, ...]) -> None:
    ranges = list(_ranges(rows))
    shown = ", ".join(ranges[:_MOST_RANGES]) or "no row"
    more = len(ranges) - _MOST_RANGES
    click.echo(f"{title}: {shown}" + (f" and {more} more (--json has all)" if more > 0 else ""))


def _ranges(rows: tuple[int, ...]) -> Iterator[str]:
    """Write rows, which are in order, as single ones and ranges."""
    for _, group in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        run = [row for _, row in group]
        yield str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def _print_answers(rows: tuple[int, ...], a: tuple[Path, bool], b: tuple[Path, bool]) -> None:
    """Print prompt and answers of the first rows; of each run, whether it passes them is given."""
    shown = rows[:_MOST_ANSWERS]
    first, second = (dict(_answers(folder, set(shown), passed=passed)) for folder, passed in (a, b))
    for row in shown:
        (prompt, before), (same, after) = first[row], second[row]
        click.echo(f"  row {row}: {prompt or same}\n    A: {before}\n    B: {after}")


def _answers(
    folder: Path, rows: set[int], *, passed: bool
) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield prompt and answer of an attempt of each row that passed, or that did not."""
    for record in final_records(folder):
        graded = record.failed or (record.counts and record.reward is not None)
        if record.row not in rows or not graded or record.passed != passed:
            continue
        rows.discard(record.row)
        try:
            document = read_document(folder / TRAJECTORIES, record.trajectory or "")
        except TrajectoryError:
            document = {}
        answer = last_answer(document, _ANSWER) or "(no answer on record)"
        answer += f" (reward {reward_text(record.reward)})"
        if record.failed:
            answer = f"{record.outcome.value}, {record.err_category}: {record.err_message}"
        yield record.row, (one_line(first_prompt(document, _ANSWER)), one_line(answer))


def _cells(difference: PairedDifference) -> list[str]:
    change = "-"
    if difference.difference is not None:
        change = f"{difference.difference:+.3f}" if difference.difference else "0"
    interval = "-"
    if difference.low is not None and difference.high is not None:
        interval = f"{difference.low:+.3f} to {difference.high:+.3f} ({difference.level:.0%})"
    return [figure_text(difference.a), figure_text(difference.b), change, interval]
