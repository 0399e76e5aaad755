"""The page on the command line names every option."""

from __future__ import annotations

import re
import shlex

import click
import pytest
from documentation.blocks import (
    BLOCKS,
    CLI,
    README,
    ROOT,
)

from rollout.cli import main as cli


def _section(text: str, heading: str) -> str:
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]


@pytest.mark.parametrize("name", cli.list_commands(click.Context(cli)))
def test_a_command_is_described_with_its_options_and_defaults(name):
    section = _section((ROOT / CLI).read_text("utf-8"), f"rollout {name}")
    command = cli.get_command(click.Context(cli), name)
    options = [
        item for item in command.params if isinstance(item, click.Option) and not item.hidden
    ]
    names = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    names -= {"--help", "--plain"}  # which the beginning of the page has for all
    if isinstance(command, click.Group):
        names.discard("--json")
    assert {name for name in names if f"`{name}`" not in section} == set()
    assert set(re.findall(r"`(--[a-z-]+)`", section)) <= names
    for option in options:
        if type(option.default) in {int, float}:
            assert re.search(rf"`{option.opts[0]}` \| {option.default:g} \|", section)
    assert f"`rollout {name}" in (ROOT / README).read_text("utf-8")


# --- every command line -----------------------------------------------------------------------

LINES = [
    pytest.param(line.replace("\\\n", " "), id=f"{block.page}:{block.line} {line[:40]!r}")
    for block in BLOCKS
    if block.language == "console"
    for line in re.findall(r"^\$ ((?:.*\\\n)*.*)$", block.code, re.MULTILINE)
]


def _words(line: str) -> list[str]:
    """The words of a command line, without what is for the shell and not for the command."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"\w+=", words[0]):
        del words[0]
    return [word for word in words if word != "&"]


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_one_that_is_taken(line):
    for part in re.split(r" && | \| ", line):
        program, *arguments = _words(part)
        if program == "rollout":
            context = click.Context(cli, **cli.context_settings)
            command: click.Command = cli
            while isinstance(command, click.Group) and not arguments[0].startswith("-"):
                name = arguments.pop(0)
                found = command.get_command(context, name)
                assert found is not None, name
                command = found
            asks = "--help" in arguments
            # A command remembers how help is asked for, which its parent says.
            command.make_context("rollout", arguments, parent=context, resilient_parsing=asks)
        elif program == "python" and arguments[0].endswith(".py"):
            assert (ROOT / arguments[0]).exists() or arguments[0].startswith("my_"), arguments[0]
        elif program == "nox":
            session = arguments[arguments.index("-s") + 1] if "-s" in arguments else "tests"
            sessions = (ROOT / "noxfile.py").read_text("utf-8")
            assert f"\ndef {session}(" in sessions, session
        for argument in arguments:
            if argument.startswith("examples/") and "*" not in argument:
                path = argument.partition(":")[0]
                assert (ROOT / path).exists() or "/run" in path, path
