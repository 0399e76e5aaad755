"""Text from elsewhere, made fit for a terminal.

A model may write anything: escape sequences that repaint the screen, or code points that no
encoding takes. Both are shown as what they are.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Any

import click

from rollout._logs import printable
from rollout.codec import dump_json
from rollout.errors import InvalidBodyError

__all__ = ["PLAIN", "echo_lines", "is_plain", "not_json", "one_line", "print_fields", "print_json"]

PLAIN = f"{__name__}.plain"
"""Says in the contexts of a command line that ``--plain`` was given."""

_HANGING = 4
_LONGEST_LINE = 1_000


def is_plain() -> bool:
    """Whether ``--plain`` was given: no colours, bars and boxes, even on a terminal."""
    context = click.get_current_context(silent=True)
    return context is not None and PLAIN in context.meta


def one_line(text: str) -> str:
    """Return *text* as a single line of bounded length."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"


def not_json(error: InvalidBodyError) -> str:
    """Word an error of `parse_json` for a text that is not the body of a request."""
    return str(error).replace("the body", "it", 1).partition(";")[0]


def echo_lines(text: str) -> None:
    """Print text; a terminal's lines break between words, and go on further to the right."""
    wraps = sys.stdout.isatty() and not is_plain()
    width = shutil.get_terminal_size().columns if wraps else None
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + _HANGING)
        wrapped = (
            [line]
            if width is None or len(line) <= width
            else textwrap.wrap(
                line,
                width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
        for part in wrapped:
            click.echo(part)


def print_json(value: Any) -> None:
    """Print one JSON object on one line, in ASCII."""
    click.echo(dump_json(value).decode("ascii"))


def print_fields(fields: dict[str, Any]) -> None:
    """Print names and values in two columns; nested objects get dotted names."""
    flat = _flatten(fields)
    width = max((len(name) for name in flat), default=0)
    for name, value in flat.items():
        click.echo(f"{name:<{width}}  {value}")


def _flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in fields.items():
        label = prefix + one_line(str(name))
        if isinstance(value, dict) and value:
            flat.update(_flatten(value, f"{label}."))
        else:
            flat[label] = one_line(value) if isinstance(value, str) else _scalar(value)
    return flat


def _scalar(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return dump_json(value).decode("ascii")
