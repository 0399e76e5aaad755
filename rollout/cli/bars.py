"""Bars that are drawn where there is a terminal to draw on, and nowhere else."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn

__all__ = ["LiveBar", "can_draw"]


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
        console = Console(stderr=True, highlight=False)
        self._drawn = not silent and can_draw(console)
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not self._drawn, **options
        )

    def __enter__(self) -> Self:
        if self._drawn:
            self._bar.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # One that was not drawn has nothing to end: some releases of rich end it with a line.
        if self._drawn:
            self._bar.stop()
        sys.stderr.flush()
