"""Where in a file reading is: what an error names."""

from __future__ import annotations

from rollout.errors import DatasetError

__all__ = ["MAX_SHOWN", "Place", "shown"]

MAX_SHOWN = 80
"""Characters of a name that an error repeats."""


def shown(name: str) -> str:
    """Quote a name, cut to a length that fits a message."""
    return repr(_cut(name))


def _cut(name: str | None) -> str | None:
    return name if name is None or len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}…"


class Place:
    """The row and line that a reader is at. The reader moves it; whatever fails, asks it.

    Attributes:
        path: The file.
        row: The row that is being read, from 0; ``None`` before the first one.
        line: The line where it begins, from 1; ``None`` where there are no lines.
        count: How many rows were read so far.
    """

    __slots__ = ("count", "line", "path", "row")

    def __init__(self, path: str) -> None:
        self.path = path
        self.row: int | None = None
        self.line: int | None = None
        self.count = 0

    def error(self, reason: str, *, column: str | None = None) -> DatasetError:
        """Make the error for something at this place."""
        return DatasetError(self.path, reason, line=self.line, row=self.row, column=_cut(column))

    def file_error(self, reason: str, *, column: str | None = None) -> DatasetError:
        """Make the error for something about the file as a whole."""
        return DatasetError(self.path, reason, column=_cut(column))
