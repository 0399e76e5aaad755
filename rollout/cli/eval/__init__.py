"""``rollout eval``: run evaluations, and look at what came of them."""

from __future__ import annotations

import click

from rollout.cli.eval import compare, export, fuzz_grader, regrade, rubric, run, show
from rollout.cli.options import help_alone

__all__ = ["command"]


@click.group(invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Run evaluations, and look at what came of them.

    An evaluation sends every row of a dataset to a rollout server, n times each, and keeps
    what comes of it in a folder. It can be stopped at any point; the same command goes on.
    """
    help_alone(ctx)


for _each in (
    run.command,
    show.report,
    show.show,
    compare.command,
    regrade.command,
    fuzz_grader.command,
    export.command,
    rubric.command,
):
    command.add_command(_each)
