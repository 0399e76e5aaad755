"""Loggers and printing that foreign text cannot use to forge log lines or drive a terminal."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

__all__ = [
    "JSONFormatter",
    "Lines",
    "LogFormatter",
    "configure_logging",
    "get_logger",
    "printable",
    "with_worker",
]

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


class JSONFormatter(logging.Formatter):
    """Formats each record as a JSON object on a line of its own.

    Args:
        current_rollout: Returns the id of the rollout that the caller works for, if it does.
    """

    def __init__(self, current_rollout: Callable[[], str | None]) -> None:
        super().__init__()
        self._current_rollout = current_rollout

    def format(self, record: logging.LogRecord) -> str:
        """Format a record, also one of other code than this library's."""
        message, exception = record.getMessage(), record.exc_text
        args = record.args if isinstance(record.args, tuple) else ()
        if args and isinstance(args[-1], Lines) and message.endswith(args[-1]):
            message, exception = message.removesuffix(args[-1]).rstrip(), args[-1]
        elif exception is None and record.exc_info:
            exception = self.formatException(record.exc_info)
        rollout_id = self._current_rollout()
        if rollout_id is None and args and record.msg.startswith("rollout %s"):
            rollout_id = str(args[0])
        return _object(
            record.created,
            record.levelname,
            record.name,
            message,
            exception=exception,
            rollout_id=rollout_id,
            trace_id=_trace_id(),
        )


def with_worker(line: bytes, name: str) -> bytes:
    """Add its worker to a line that `JSONFormatter` wrote; make a record of any other line."""
    try:
        record = json.loads(line)
        if isinstance(record, dict) and {"time", "level", "logger", "message"} <= record.keys():
            return json.dumps({**record, "worker": name}, allow_nan=False).encode("ascii")
    except (ValueError, RecursionError):
        pass
    text = printable(line.decode("utf-8", "replace").rstrip())
    return _object(time.time(), "INFO", "output", text, worker=name).encode("ascii")


def configure_logging(formatter: logging.Formatter | None = None) -> None:
    """Log to stderr, unless the program has set up logging of its own.

    Args:
        formatter: Formats the records; `LogFormatter` by default.
    """
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(formatter or LogFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for http in (logging.getLogger("httpx"), logging.getLogger("httpx2")):
        if http.level == logging.NOTSET:
            http.setLevel(logging.WARNING)  # it has a line for every single request


def _object(created: float, level: str, logger: str, message: str, **more: str | None) -> str:
    moment = datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")
    record = {"time": moment, "level": level, "logger": logger, "message": message}
    return json.dumps(record | {name: value for name, value in more.items() if value is not None})


def _trace_id() -> str | None:
    """Return the id of OpenTelemetry's current trace, where a program uses that."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else None


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
        return Lines(_indented(value))
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
