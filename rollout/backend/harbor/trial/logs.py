"""Pass Harbor's log to the root logger, filtered and without keys.

Harbor sets its loggers to the lowest level, for the file that each trial writes, and so every
step of every trial would go to the server's log too, whatever its level. Here a record goes on
from Harbor's loggers to the root only if the root's own level lets it, and without the key of
the rollout that it belongs to.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator
from contextlib import contextmanager

from rollout._redaction import redact
from rollout.backend.harbor.handover import entered_handover

__all__ = ["harbor_logs"]

_HARBOR = "harbor"
_users = 0


class _Onward(logging.Handler):
    """Passes records to the root logger."""

    def emit(self, record: logging.LogRecord) -> None:
        root = logging.getLogger()
        if record.levelno >= root.getEffectiveLevel():
            root.callHandlers(_without_key(record))


_onward = _Onward(logging.DEBUG)


def _without_key(record: logging.LogRecord) -> logging.LogRecord:
    """Return a record without the key of the trial that logs it."""
    handover = entered_handover()
    if handover is None:
        return record
    clean = copy.copy(record)
    clean.msg, clean.args = redact(record.getMessage(), handover.plan.secrets), None
    if record.exc_info:
        text = record.exc_text or logging.Formatter().formatException(record.exc_info)
        clean.exc_info, clean.exc_text = None, redact(text, handover.plan.secrets)
    return clean


@contextmanager
def harbor_logs() -> Generator[None, None, None]:
    """Filter Harbor's log for the length of the block; blocks may overlap."""
    global _users  # noqa: PLW0603 - loggers are global
    logger = logging.getLogger(_HARBOR)
    _users += 1
    if _users == 1:
        logger.addHandler(_onward)
        logger.propagate = False
    try:
        yield
    finally:
        _users -= 1
        if _users == 0:
            logger.removeHandler(_onward)
            logger.propagate = True
