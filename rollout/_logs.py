"""Loggers and printing that foreign text cannot use to forge log lines or drive a terminal."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["Lines", "LogFormatter", "get_logger", "printable"]

_MARGIN = re.compile(r"\n(?=\S)")
_INDENT = "\n    "


class Lines(str):
    """An argument of a log message that keeps its line breaks, such as a traceback."""

    __slots__ = ()


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return *text* with what neither prints nor is a tab escaped; also ``\n`` unless *lines*."""
    if text.isprintable():
        return str(text)
    keep = "\n\t" if lines else "\t"
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def get_logger(name: str) -> logging.Logger:
    """Return a logger that escapes the arguments of its records, whoever handles them."""
    logger = logging.getLogger(name)
    logger.addFilter(_escape)
    return logger


class LogFormatter(logging.Formatter):
    """Formats records for a log of lines: only a new record starts at the margin."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Format a record, also one of other code than this library's."""
        return _indented(super().format(record))


def _escape(record: logging.LogRecord) -> bool:
    if isinstance(record.args, Mapping):
        record.args = {name: _escaped(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(map(_escaped, record.args))
    if record.exc_info and not record.exc_text:
        record.exc_text = _indented(logging.Formatter().formatException(record.exc_info))
    return True


def _escaped(value: Any) -> Any:
    if value is None or isinstance(value, (int, float, _Escaped)):
        return value
    if isinstance(value, Lines):
        return _indented(value)
    return printable(value) if isinstance(value, str) else _Escaped(value)


class _Escaped:
    """An object whose texts are escaped when, and if, a handler asks for them."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __str__(self) -> str:
        return printable(str(self._value))

    def __repr__(self) -> str:
        return printable(repr(self._value))


def _indented(text: str) -> str:
    return _MARGIN.sub(_INDENT, printable(text, lines=True))
