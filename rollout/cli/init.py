"""``rollout init``."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from rollout._files.atomic import reason_of
from rollout.cli.failures import CommandError
from rollout.cli.options import FILE_PATH, json_option
from rollout.cli.text import one_line, print_json

__all__ = ["TEMPLATES", "command"]

TEMPLATES = {
    "answer": "an agent that asks the model once",
    "tools": "an agent that calls tools over several turns",
    "sandbox": "an agent whose commands run in a sandbox (Linux)",
}


@click.command(epilog="\b\nTemplates:\n" + "\n".join(f"  {k:8} {TEMPLATES[k]}" for k in TEMPLATES))
@click.argument("folder", type=FILE_PATH, default=".")
@click.option(
    "--template",
    type=click.Choice(list(TEMPLATES)),
    default="answer",
    show_default=True,
    help="What kind of agent to begin with.",
)
@json_option
def command(folder: str, template: str, as_json: bool) -> None:
    """Begin a project in FOLDER, by default in this one.

    Writes a server with an agent and a grader, a dataset, the config of an evaluation, tests that
    pass, and a README that says how to go on. Replaces no file.
    """
    root = Path(folder)
    source = files("rollout.cli") / "templates" / template
    contents = {each.name: each.read_bytes() for each in source.iterdir() if each.is_file()}
    there = sorted(name for name in contents if (root / name).exists())
    if there:
        raise CommandError(
            f"{one_line(folder)} has {', '.join(there)} already; choose another folder"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            with (root / name).open("xb") as file:
                file.write(content)
    except OSError as error:
        raise CommandError(f"{one_line(folder)} cannot be written: {reason_of(error)}") from None
    if as_json:
        print_json({"folder": str(root), "template": template, "files": sorted(contents)})
        return
    click.echo(f"wrote {', '.join(sorted(contents))} to {one_line(str(root))}")
    click.echo("README.md there says how to go on")
