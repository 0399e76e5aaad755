"""The pages name every option of the commands and every value of the config."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import click
import pytest

from rollout.cli import main
from rollout.cli.eval.options import _OVERRIDES
from rollout.evaluation import ChatConfig, DatasetConfig, RunConfig, ServerConfig

ROOT = Path(__file__).parents[3]
CLI = (ROOT / "docs/cli.md").read_text("utf-8")
GUIDE = (ROOT / "docs/evaluation.md").read_text("utf-8")
EVAL = main.get_command(click.Context(main), "eval")


def section(text: str, heading: str, level: str) -> str:
    found = re.search(
        rf"^{level} {re.escape(heading)}\n(.*?)(?=^{level[:-1]}#? |\Z)",
        text,
        re.MULTILINE | re.DOTALL,
    )
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", sorted(EVAL.commands))
def test_a_subcommand_is_described_with_its_options(name):
    text = section(CLI, f"rollout eval {name}", "##")
    options = {
        option
        for parameter in EVAL.commands[name].params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
    }
    options.discard("--plain")  # which the beginning of the page has for all commands
    assert set(re.findall(r"`(--[a-z-]+)`", text)) == options
    assert f"`rollout eval {name}`" in section(CLI, "rollout eval", "##")


def test_an_option_is_said_to_replace_what_it_replaces():
    text = section(CLI, "rollout eval run", "##")
    for each in _OVERRIDES:
        assert f"| `{each.option}` | `{each.section}.{each.name}` |" in text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("server", ServerConfig),
        ("chat", ChatConfig),
        ("dataset", DatasetConfig),
        ("run", RunConfig),
    ],
)
def test_the_guide_has_each_value_of_the_config_with_its_default(name, kind):
    text = section(GUIDE, f"[{name}]", "###")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", text, re.MULTILINE))
    fields = attrs.fields_dict(kind)
    assert list(rows) == sorted(fields, key=list(rows).index)
    for field, default in rows.items():
        value = fields[field].default
        if value is attrs.NOTHING:
            assert default == ("`runs/NAME`" if field == "output" else "required")
        elif isinstance(value, (int, float)):
            assert default == f"{value:g}"
        elif isinstance(value, str):
            assert default == f"`{value}`"
