"""``rollout eval compare A B``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from rollout.cli.eval_progress import reward_text
from rollout.cli.eval_show import folder_argument, metrics_of
from rollout.cli.eval_summary import counted, incomplete_note, is_complete, print_table
from rollout.cli.options import json_option
from rollout.cli.text import one_line, print_json
from rollout.evaluation import Comparison, compare_runs, read_manifest
from rollout.evaluation.intervals import PairedDifference

__all__ = ["compare"]

_MOST_ROWS = 40


@click.command()
@folder_argument("a")
@folder_argument("b")
@click.option(
    "--allow-different-datasets",
    is_flag=True,
    help="Pair rows by their number although the datasets differ.",
)
@json_option
def compare(a: Path, b: Path, allow_different_datasets: bool, as_json: bool) -> None:
    """Compare the runs in the folders A and B, row by row.

    Prints how pass rate and mean reward changed from A to B on the rows that both have, with
    an interval, and the rows that flipped: a row passes if more than half of its attempts do.
    """
    metrics = {name: metrics_of(folder, read_manifest(folder)) for name, folder in _named(a, b)}
    comparison = compare_runs(a, b, allow_different_datasets=allow_different_datasets)
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
        note = incomplete_note(metrics[name])
        click.echo(f"{name}: {one_line(str(folder))}" + (f" ({note})" if note else ""))
    _print(comparison)


def _named(a: Path, b: Path) -> tuple[tuple[str, Path], tuple[str, Path]]:
    return ("A", a), ("B", b)


def _print(comparison: Comparison) -> None:
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
    _print_rows("Passed in A, not in B", comparison.pass_to_fail)
    _print_rows("Passed in B, not in A", comparison.fail_to_pass)
    for name, rows in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        if rows:
            _print_rows(f"Only in {name}", rows)
    for line in comparison.differences:
        click.echo(f"Differs: {one_line(line)}")


def _print_rows(title: str, rows: tuple[int, ...]) -> None:
    shown = ", ".join(map(str, rows[:_MOST_ROWS])) or "no row"
    more = f" and {len(rows) - _MOST_ROWS} more (--json has all)" if len(rows) > _MOST_ROWS else ""
    click.echo(f"{title}: {shown}{more}")


def _cells(difference: PairedDifference) -> list[str]:
    change = "-"
    if difference.difference is not None:
        change = f"{difference.difference:+.4g}" if difference.difference else "0"
    interval = "-"
    if difference.low is not None and difference.high is not None:
        interval = f"{difference.low:+.4g} to {difference.high:+.4g} ({difference.level:.0%})"
    return [reward_text(difference.a), reward_text(difference.b), change, interval]
