"""Rows of a JSONL file: an object a line."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from rollout.evaluation.datasets._jsontext import LABEL, VALUE, parse_members, parse_value
from rollout.evaluation.datasets._place import Place
from rollout.evaluation.datasets._text import json_lines
from rollout.evaluation.selection import Picker

__all__ = ["JsonRecord", "read_jsonl"]

_SPACE = " \t\r\n"


class JsonRecord:
    """A row as JSONL has it."""

    def __init__(self, text: str, members: dict[str, tuple[Any, int, int]], place: Place) -> None:
        self._text = text
        self._members = members
        self._place = place

    @property
    def names(self) -> Collection[str]:
        """The keys of the object."""
        return self._members.keys()

    def text(self, column: str) -> str | None:
        """Read a string.

        Raises:
            DatasetError: It is something else.
        """
        value = self._members[column][0]
        if value is not None and not isinstance(value, str):
            raise self._place.error("must be a string or null", column=column)
        return value

    def label(self, column: str) -> str | None:
        """Read a string as it is, and any other value as its JSON text in the file."""
        value, begin, end = self._members[column]
        if value is None:
            return None
        # A whole number is read as the string of its digits too, which is the same text.
        return value if isinstance(value, str) else self._text[begin:end].rstrip(_SPACE)

    def value(self, column: str) -> Any:
        """Read a value, or the JSON text of one.

        Raises:
            DatasetError: The text is not strict JSON.
        """
        value = self._members[column][0]
        if isinstance(value, str):
            return parse_value(value, self._place, column) if value.strip(_SPACE) else None
        return value


def read_jsonl(
    texts: Iterable[str],
    place: Place,
    picker: Picker,
    *,
    labels: Collection[str],
    used: Collection[str],
) -> Iterator[JsonRecord]:
    """Read the rows that *picker* takes; lines of white space alone are not rows.

    Args:
        texts: The file's text, in parts.
        place: Moved along, row by row.
        picker: Asked for each row.
        labels: The columns that are read as a label.
        used: The columns that are read otherwise.

    Raises:
        DatasetError: A row is not strict JSON.
    """
    decoders = dict.fromkeys(used, VALUE) | dict.fromkeys(labels, LABEL)
    place.row, place.line = place.count, 1
    for number, line in enumerate(json_lines(texts), start=2):
        if line.strip(_SPACE):
            if picker.takes(place.count):
                yield JsonRecord(line, parse_members(line, decoders, place), place)
            place.count += 1
            place.row = place.count
        place.line = number
