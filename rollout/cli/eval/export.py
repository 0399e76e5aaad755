"""``rollout eval export RUN --to FORMAT``."""

from __future__ import annotations

from pathlib import Path

import click

from rollout.cli.eval.show import folder_argument
from rollout.cli.eval.summary import counted
from rollout.cli.options import json_option
from rollout.cli.text import one_line, print_json
from rollout.evaluation.export import FORMATS, export_run

__all__ = ["command"]


@click.command("export", short_help="Write RUN in the format of another tool.")
@folder_argument("run")
@click.option(
    "--to",
    required=True,
    type=click.Choice(FORMATS),
    help="The format; each needs the extra of its name.",
)
@click.option(
    "--output",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Where to: RUN.parquet, RUN.eval, or the folders mlruns and wandb by default.",
)
@click.option("--replace", is_flag=True, help="Replace an earlier export.")
@json_option
def command(run: Path, to: str, output: Path | None, replace: bool, as_json: bool) -> None:
    """Write the run in the folder RUN, complete or not, in the format of another tool.

    parquet is a table of attempts; inspect a log of Inspect; mlflow a run in an MLflow file
    store; wandb an offline run of Weights & Biases. RUN stays as it is. Prints what was written.
    """
    export = export_run(run, to, output=output, replace=replace)
    if as_json:
        print_json({"target": str(export.target), "unread": list(export.unread)})
    else:
        click.echo(one_line(str(export.target)))
    if export.unread:
        missing = counted(len(export.unread), "conversation")
        first = one_line(export.unread[0])
        click.echo(f"rollout: {missing} could not be read, the first: {first}", err=True)
