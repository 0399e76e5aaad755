"""``rollout eval``: run evaluations, and look at what came of them."""

from __future__ import annotations

import click

from rollout.cli.eval_compare import compare
from rollout.cli.eval_run import run
from rollout.cli.eval_show import report, show

__all__ = ["command"]


@click.group(no_args_is_help=False)
def command() -> None:
    """Run evaluations, and look at what came of them.

    An evaluation sends every row of a dataset to a rollout server, n times each, and keeps
    what comes of it in a folder. It can be stopped at any point; the same command goes on.
    """


for _each in (run, report, show, compare):
    command.add_command(_each)
