"""Log refused requests at a bounded rate."""

from __future__ import annotations

import math

import trio
from attrs import define, field

from rollout._logs import get_logger

__all__ = ["RefusalLog"]

logger = get_logger(__name__)

_SEC_BETWEEN_LINES = 10.0


@define
class RefusalLog:
    """Logs requests that were refused for want of a key or a lease, one line in ten seconds.

    The line names the request at hand and counts those since the line before it.
    """

    _silent_until: float = field(default=-math.inf, init=False)
    _unsaid: int = field(default=0, init=False)

    def note(self, status: int, method: str, path: str, peer: str | None) -> None:
        """Log a refusal, or count it for the next line."""
        now = trio.current_time()
        if now < self._silent_until:
            self._unsaid += 1
            return
        more = f"; {self._unsaid} more before it" if self._unsaid else ""
        logger.warning("refused %s %s from %s with %d%s", method, path, peer, status, more)
        self._silent_until, self._unsaid = now + _SEC_BETWEEN_LINES, 0
