"""What commands draw on a terminal: bars and spinners where it can move, and warnings as lines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.table import Table

from rollout.cli.text import is_plain, one_line

__all__ = ["LiveBar", "WarningLines", "can_draw", "draw_table", "make_console"]

_PLAIN_WIDTH = 100_000
"""Columns of a console that is to break no line."""


def make_console(**options: Any) -> Console:
    """Make a console; with ``--plain`` it writes as to a file, also on a terminal."""
    if is_plain():
        options |= {"force_terminal": False, "force_interactive": False, "width": _PLAIN_WIDTH}
    return Console(**options)


def draw_table(table: Table, console: Console) -> None:
    """Print a table, without its box with ``--plain``."""
    if is_plain():
        table.box = None
    console.print(table)


def can_draw(console: Console) -> bool:
    """Whether a console takes what moves.

    A log may ask for colour and a terminal may be a dumb one: neither goes back on a line.
    """
    return console.is_interactive and console.file.isatty()


class LiveBar:
    """A bar on stderr for the length of a block, if that is a terminal; gone afterwards.

    Args:
        columns: What it shows.
        silent: Whether nothing is drawn in any case.
        options: For `rich.progress.Progress`.
    """

    def __init__(self, *columns: ProgressColumn, silent: bool, **options: Any) -> None:
        console = make_console(stderr=True, highlight=False)
        self._drawn = not silent and can_draw(console)
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not self._drawn, **options
        )

    def __enter__(self) -> Self:
        if self._drawn:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        # One that was not drawn has nothing to end: some releases of rich end it with a line.
        if self._drawn:
            self._bar.stop()
        sys.stderr.flush()


class WarningLines(logging.Handler):
    """Takes the library's warnings for the length of a block.

    Args:
        show: Shows a line; called from the thread that warns.
        level: From which level on records are shown; less than a warning is logged for that.
    """

    def __init__(self, show: Callable[[str], None], level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._show = show
        self._before = logging.NOTSET

    def __enter__(self) -> Self:
        library = logging.getLogger("rollout")
        self._before = library.level
        if not library.isEnabledFor(self.level):
            library.setLevel(self.level)
        library.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        library = logging.getLogger("rollout")
        if self in library.handlers:
            library.setLevel(self._before)
        library.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record as one line."""
        try:
            level = record.levelname.lower()
            self._show(f"rollout: {level}: {one_line(record.getMessage())}")
        except Exception:  # noqa: BLE001 - as every handler does
            self.handleError(record)
