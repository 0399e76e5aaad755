"""The table of attempts, column by column, as the page reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from struct import pack
from typing import IO, Any

from attrs import frozen

from rollout._page.text import line, number
from rollout.evaluation.index import STATES, state_of
from rollout.evaluation.records import AttemptRecord
from rollout.evaluation.report.gather import Attempt
from rollout.evaluation.report.packing import Stream

__all__ = ["Columns", "Glance", "category", "figures", "message"]

_MESSAGE = 240
_ROW_TEXTS = ("prompt", "label")
"""Texts that attempts of one row share."""
_MANY = 200
"""Categories that are told apart; a hostile server could invent one for each attempt."""

# Formats of `struct`, and kinds of arrays on the page. A figure that is missing is NaN.
_KINDS = {
    "row": "d",
    "attempt": "d",
    "state": "B",
    "reward": "d",
    "category": "h",
    "duration": "d",
    "tokens_in": "d",
    "tokens_out": "d",
    "submitted": "d",
    "tries": "I",
    "block": "I",
    "slot": "H",
}


class _Texts:
    """A column of texts: a JSON array."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._before = b"["

    def add(self, text: str) -> None:
        # ASCII alone, so that lone surrogates survive.
        self._stream.write(self._before + json.dumps(text).encode("ascii"))
        self._before = b","

    def copy_to(self, target: IO[bytes]) -> None:
        self._stream.write(b"[]" if self._before == b"[" else b"]")
        self._stream.copy_to(target)


@frozen
class Glance:
    """The columns of the table that come from a conversation, each on one line.

    Attributes:
        prompt: What the user said first.
        label: What the grader compares with.
        answer: What the agent said last.
    """

    prompt: str = ""
    label: str = ""
    answer: str = ""


def figures(record: AttemptRecord, *, tries: int) -> dict[str, float | None]:
    """Return the figures of an attempt, by the names of their columns."""
    return {
        "row": record.row,
        "attempt": record.attempt,
        "state": STATES.index(state_of(record)),
        "reward": number(record.reward),
        "duration": _short(record.duration_sec),
        "tokens_in": number(record.prompt_tokens),
        "tokens_out": number(record.completion_tokens),
        "submitted": round(record.submitted_at.timestamp() * 1000),
        "tries": tries,
    }


def message(record: AttemptRecord) -> str:
    """Return the beginning of an attempt's error, on one line."""
    return line(record.err_message or "", _MESSAGE)


def category(record: AttemptRecord) -> str:
    """Return the name of an attempt's error category, empty without one."""
    return line(record.reason or "", 80)


class Columns:
    """Collects the attempts, which come by row.

    Names that repeat are kept once and referred to by number; a prompt is kept once for the
    row.

    Args:
        temporary: Opens a temporary file, one for each column.
    """

    def __init__(self, temporary: Callable[[], IO[bytes]]) -> None:
        self._numbers = {name: Stream(temporary()) for name in _KINDS}
        self._texts = {
            name: _Texts(Stream(temporary())) for name in (*_ROW_TEXTS, "message", "answer")
        }
        self._size = 0
        self._row = -1
        self._shared = Glance()
        self._categories: dict[str, int] = {}

    def add(self, attempt: Attempt, glance: Glance, place: tuple[int, int]) -> None:
        """Add an attempt whose conversation lies at *place*."""
        record = attempt.record
        found: dict[str, float | None] = {
            **figures(record, tries=len(attempt.others) + 1),
            "category": self._category(category(record)),
            "block": place[0],
            "slot": place[1],
        }
        for name, kind in _KINDS.items():
            value = found[name]
            self._numbers[name].write(pack(f"<{kind}", math.nan if value is None else value))
        self._texts["message"].add(message(record))
        self._texts["answer"].add(glance.answer)
        if record.row != self._row:
            self._end_row()
            self._row, self._shared = record.row, glance
        elif not self._shared.prompt:
            self._shared = glance
        self._size += 1

    def head(self) -> dict[str, Any]:
        """Return what the page needs to read the columns, in plain JSON types."""
        return {**self.empty(), "size": self._size, "categories": list(self._categories)}

    @staticmethod
    def empty() -> dict[str, Any]:
        """Return the same of a table without attempts."""
        return {"size": 0, "states": list(STATES), "categories": [], "kinds": _KINDS}

    def copy_to(self, target: IO[bytes]) -> None:
        """Write the columns as elements of the page, and be done."""
        self._end_row()
        columns: dict[str, Stream | _Texts] = {**self._numbers, **self._texts}
        for name, column in columns.items():
            target.write(b'<script type="text/plain" id="column-%s">' % name.encode("ascii"))
            column.copy_to(target)
            target.write(b"</script>\n")

    def _end_row(self) -> None:
        if self._row >= 0:
            for name in _ROW_TEXTS:
                self._texts[name].add(getattr(self._shared, name))

    def _category(self, name: str) -> int:
        """Return the number of a category, -1 for none."""
        if not name:
            return -1
        if name not in self._categories and len(self._categories) >= _MANY:
            name = "other"
        return self._categories.setdefault(name, len(self._categories))


def _short(seconds: float) -> float | None:
    found = number(seconds)
    return None if found is None else round(found, 4)
