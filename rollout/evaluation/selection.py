"""Which rows of a dataset are taken. Pure: text to ranges, and membership in them."""

from __future__ import annotations

import re
from bisect import bisect_right

from attrs import field, frozen

from rollout.errors import InvalidFieldError

__all__ = ["Picker", "RowRange", "RowSelection", "parse_rows"]

_PART = re.compile(r"\s*(?P<first>[0-9]+)\s*(?:(?P<dash>-)\s*(?P<last>[0-9]+)?\s*)?", re.ASCII)

_MAX_DIGITS = 18


@frozen
class RowRange:
    """Rows from *first* to *last*, both included.

    Attributes:
        first: The first row, from 0.
        last: The last row; ``None`` for all that follow.
    """

    first: int
    last: int | None

    def __str__(self) -> str:
        if self.last == self.first:
            return str(self.first)
        return f"{self.first}-{'' if self.last is None else self.last}"


def _merge(ranges: tuple[RowRange, ...]) -> tuple[RowRange, ...]:
    merged: list[RowRange] = []
    for each in sorted(ranges, key=lambda part: part.first):
        before = merged[-1] if merged else None
        if before is None or (before.last is not None and each.first > before.last + 1):
            merged.append(each)
        elif before.last is not None and (each.last is None or each.last > before.last):
            merged[-1] = RowRange(before.first, each.last)
    return tuple(merged)


@frozen
class RowSelection:
    """Ranges of rows. A row in several of them is selected once; the file decides the order.

    Attributes:
        ranges: As they were written.
    """

    ranges: tuple[RowRange, ...] = (RowRange(0, None),)
    _merged: tuple[RowRange, ...] = field(init=False, repr=False, eq=False)
    _starts: list[int] = field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        merged = _merge(self.ranges)
        object.__setattr__(self, "_merged", merged)
        object.__setattr__(self, "_starts", [each.first for each in merged])

    def __contains__(self, row: int) -> bool:
        return self.overlaps(row, row)

    def overlaps(self, first: int, last: int) -> bool:
        """Whether any row from *first* to *last*, both included, is selected."""
        at = bisect_right(self._starts, last) - 1
        if at < 0:
            return False
        end = self._merged[at].last
        return end is None or end >= first

    def ends_before(self, row: int) -> bool:
        """Whether neither *row* nor any row after it is selected."""
        last = self._merged[-1].last
        return last is not None and last < row

    def without_rows(self, count: int) -> RowRange | None:
        """The first of the ranges that selects nothing of *count* rows, if there is one."""
        return next((each for each in self.ranges if each.first >= count), None)


class Picker:
    """A selection and a limit, over the rows of one pass through the file."""

    def __init__(self, selection: RowSelection, limit: int | None) -> None:
        self._selection = selection
        self._left = limit

    def takes(self, row: int) -> bool:
        """Whether the row is one to take. Asked once for each row, in order."""
        if self._left == 0 or row not in self._selection:
            return False
        if self._left is not None:
            self._left -= 1
        return True

    def takes_any(self, first: int, last: int) -> bool:
        """Whether there may be one to take from *first* to *last*, both included."""
        return self._left != 0 and self._selection.overlaps(first, last)

    def is_done(self, row: int) -> bool:
        """Whether neither *row* nor any row after it will be taken."""
        return self._left == 0 or self._selection.ends_before(row)


def parse_rows(text: str) -> RowSelection:
    """Read a selection such as ``0-99,150,200-``.

    Args:
        text: Single rows and ranges, from 0, both ends included, separated by commas; a range
            without an end goes on to the last row. They may overlap and come in any order.

    Raises:
        InvalidFieldError: It is something else; the message says at which character.
    """
    ranges: list[RowRange] = []
    at = 0
    while True:
        match = _PART.match(text, at)
        if match is None:
            raise _refusal("a row or a range is expected", at + _blanks(text[at:]))
        if max(len(match["first"]), len(match["last"] or "")) > _MAX_DIGITS:
            raise _refusal("this number is too large", match.start("first"))
        first = int(match["first"])
        last = first if match["dash"] is None else int(match["last"]) if match["last"] else None
        if last is not None and last < first:
            raise _refusal("a range must not end before it begins", match.start("first"))
        ranges.append(RowRange(first, last))
        at = match.end()
        if at == len(text):
            return RowSelection(tuple(ranges))
        if text[at] != ",":
            raise _refusal("a comma is expected", at)
        at += 1


def _blanks(text: str) -> int:
    return len(text) - len(text.lstrip(" \t\n\r\f\v"))


def _refusal(problem: str, at: int) -> InvalidFieldError:
    return InvalidFieldError(
        "rows", f"must be rows and ranges, as in 0-99,150,200-: {problem} at character {at + 1}"
    )
