"""``rollout state show PATH`` and ``rollout state export PATH``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from rich.table import Table

from rollout.cli.failures import CommandError
from rollout.cli.options import FILE_PATH, help_alone, json_option_with
from rollout.cli.terminal import draw_table, make_console
from rollout.cli.text import one_line, print_json
from rollout.errors import RolloutServerError
from rollout.server.state import KeptRollout, read_state

__all__ = ["command"]

_COLUMNS = ("rollout_id", "status", "agent_started_at", "kept_for_sec")


@click.group(invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Look at what a server has kept of rollouts, also while it runs.

    PATH is what the server was given as --state.
    """
    help_alone(ctx)


@command.command()
@click.argument("path", type=FILE_PATH)
@json_option_with("Print a JSON object for each instead.")
def show(path: str, as_json: bool) -> None:
    """List the rollouts: those in flight, and those whose results are kept.

    The last column says for how many seconds of serving a result is kept, as of some seconds ago.
    """
    table = Table(*_COLUMNS, box=None, pad_edge=False, header_style="bold")
    for row, time in _rows(path, bodies=False):
        left = None if row.until is None else max(0, round(row.until - time))
        values = (row.rollout_id, row.status or "in flight", row.agent_started_at, left)
        if as_json:
            print_json(dict(zip(_COLUMNS, values, strict=True)))
        else:
            table.add_row(*("" if value is None else one_line(str(value)) for value in values))
    if not as_json:
        draw_table(table, make_console(highlight=False, markup=False, soft_wrap=True))


@command.command()
@click.argument("path", type=FILE_PATH)
@json_option_with("As it does anyway.")
def export(path: str, as_json: bool) -> None:
    """Print the results that are kept, a JSON object each, as polls get them."""
    del as_json
    for row, _ in _rows(path, bodies=True):
        if row.body is not None:
            click.echo(row.body.decode("ascii", "backslashreplace"))


def _rows(path: str, *, bodies: bool) -> Iterator[tuple[KeptRollout, float]]:
    """Read a state.

    Raises:
        CommandError: It cannot be read.
    """
    try:
        yield from read_state(Path(path), bodies=bodies)
    except RolloutServerError as error:
        raise CommandError(str(error)) from None
