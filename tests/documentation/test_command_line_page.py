"""The page on the command line names every option."""

from __future__ import annotations

import re

import click
import pytest
from documentation.blocks import (
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
    options = [item for item in command.params if isinstance(item, click.Option)]
    names = {name for option in options for name in option.opts if name != "--help"}
    assert {name for name in names if f"`{name}`" not in section} == set()
    assert set(re.findall(r"`(--[a-z-]+)`", section)) <= names
    for option in options:
        if type(option.default) in {int, float}:
            assert re.search(rf"`{option.opts[0]}` \| {option.default:g} \|", section)
    assert f"`rollout {name}" in (ROOT / README).read_text("utf-8")
