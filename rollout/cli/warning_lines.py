"""Warnings of the library, as lines for the terminal of a command."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rollout.cli.text import one_line

__all__ = ["WarningLines"]


class WarningLines(logging.Handler):
    """Takes the library's warnings for the length of a block.

    Args:
        show: Shows a line; called from the thread that warns.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def __enter__(self) -> Self:
        logging.getLogger("rollout").addHandler(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        logging.getLogger("rollout").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record as one line."""
        try:
            self._show(f"rollout: warning: {one_line(record.getMessage())}")
        except Exception:  # noqa: BLE001 - as every handler does
            self.handleError(record)
