"""Rows of a CSV file.

The standard library's reader has one limit for the length of a cell, for the whole process,
and is lenient about quotes that are never closed. This one has no limit, and knows the line
that each row begins in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from rollout.evaluation.datasets._jsontext import parse_value
from rollout.evaluation.datasets._place import Place, shown
from rollout.evaluation.datasets._text import csv_lines
from rollout.evaluation.selection import Picker

__all__ = ["CsvRecord", "read_csv"]

_BLANK = " \t"
_ENDS = "\r\n"


class CsvRecord:
    """A row as CSV has it: text in each cell, and nothing in an empty one."""

    def __init__(self, names: dict[str, int], cells: list[str], place: Place) -> None:
        self._names = names
        self._cells = cells
        self._place = place

    @property
    def names(self) -> Collection[str]:
        """The header."""
        return self._names.keys()

    def text(self, column: str) -> str | None:
        """Read a cell."""
        return self._cells[self._names[column]] or None

    def label(self, column: str) -> str | None:
        """Read a cell."""
        return self.text(column)

    def value(self, column: str) -> Any:
        """Read a cell of JSON text.

        Raises:
            DatasetError: It is not strict JSON.
        """
        cell = self.text(column)
        return None if cell is None else parse_value(cell, self._place, column)


class _Cells:
    """Takes lines together to rows of cells.

    Attributes:
        header: The names of the columns, once they are known.
    """

    def __init__(self, texts: Iterable[str], delimiter: str, place: Place) -> None:
        self._lines = csv_lines(texts)
        self._delimiter = delimiter
        self._place = place
        self._next_line = 1
        self.header: list[str] = []

    def rows(self) -> Iterator[list[str]]:
        """The cells of each row; blank lines are not rows."""
        self._place.line = 1
        for line in self._lines:
            self._place.line = self._next_line
            self._next_line += 1
            if '"' in line:
                yield self._quoted(line)
            else:
                cells = line.rstrip(_ENDS).split(self._delimiter)
                if not self._is_blank(cells):
                    yield cells
            self._place.line = self._next_line

    def _is_blank(self, cells: list[str]) -> bool:
        if len(cells) != 1:
            return False
        # In a file of one column, a cell of spaces is a cell.
        return not (cells[0] if len(self.header) == 1 else cells[0].strip(_BLANK))

    def _column(self, at: int) -> str | None:
        return self.header[at] if at < len(self.header) else None

    def _quoted(self, line: str) -> list[str]:
        cells: list[str] = []
        at = 0
        while True:
            if line.startswith('"', at):
                cell, line, at = self._open_cell(line, at + 1, len(cells))
                cells.append(cell)
                if at == len(line) or line[at] in _ENDS:
                    return cells
                if line[at] != self._delimiter:
                    raise self._place.error(
                        "goes on after its closing quote; a quote within a quoted cell has to be "
                        "doubled",
                        column=self._column(len(cells) - 1),
                    )
                at += 1
                continue
            end = line.find(self._delimiter, at)
            cell = line[at:end] if end >= 0 else line[at:].rstrip(_ENDS)
            if cell.lstrip(_BLANK).startswith('"'):
                raise self._place.error(
                    "has white space before its opening quote", column=self._column(len(cells))
                )
            cells.append(cell)
            if end < 0:
                return cells
            at = end + 1

    def _open_cell(self, line: str, at: int, count: int) -> tuple[str, str, int]:
        """Read up to the closing quote, over lines; give the cell and where reading stands."""
        parts: list[str] = []
        while True:
            end = line.find('"', at)
            if end < 0:
                parts.append(line[at:])
                following = next(self._lines, None)
                if following is None:
                    raise self._place.error(
                        "has a quote that is never closed", column=self._column(count)
                    )
                line, at = following, 0
                self._next_line += 1
                continue
            parts.append(line[at:end])
            if not line.startswith('"', end + 1):
                return "".join(parts), line, end + 1
            parts.append('"')
            at = end + 2


def _header(cells: list[str], place: Place) -> dict[str, int]:
    names: dict[str, int] = {}
    for at, name in enumerate(cells):
        # Columns without a name cannot be meant, so there may be several.
        if name in names and name:
            raise place.error(f"the header has the column {shown(name)} twice", column=name)
        names[name] = at
    return names


def read_csv(
    texts: Iterable[str],
    place: Place,
    picker: Picker,
    *,
    delimiter: str,
    check_header: Callable[[Collection[str]], None],
) -> Iterator[CsvRecord]:
    """Read the rows that *picker* takes.

    Args:
        texts: The file's text, in parts.
        place: Moved along, row by row.
        picker: Asked for each row.
        delimiter: What separates cells.
        check_header: Called with the names of the columns, before the first row.

    Raises:
        DatasetError: The header names a column twice, a row has too few or too many cells,
            or quotes are not in order.
    """
    reader = _Cells(texts, delimiter, place)
    rows = reader.rows()
    first = next(rows, None)
    if first is None:
        return
    names = _header(first, place)
    check_header([name for name in first if name] or first)
    reader.header = first
    place.row = place.count
    for cells in rows:
        if picker.takes(place.count):
            if len(cells) != len(first):
                raise _ragged(first, cells, place)
            yield CsvRecord(names, cells, place)
        place.count += 1
        place.row = place.count


def _ragged(header: list[str], cells: list[str], place: Place) -> Exception:
    expected, found = len(header), len(cells)
    if found < expected:
        reason = f"is missing: the row has {found} of {expected} cells"
        return place.error(reason, column=header[found])
    return place.error(
        f"is the last column, but the row goes on: it has {found} cells instead of {expected} "
        "(a cell that holds the delimiter has to be in quotes)",
        column=header[-1],
    )
