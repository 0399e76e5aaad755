"""The check of the API key, and a log of refused requests."""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable

import trio
from attrs import define, field

from rollout._logs import get_logger

__all__ = ["Authorized", "RefusalLog", "authorizer"]

logger = get_logger(__name__)

Authorized = Callable[[list[tuple[bytes, bytes]]], bool]
"""Says whether the headers of a request carry the server's key."""

_SEC_BETWEEN_LINES = 10.0


def authorizer(key: str | None) -> Authorized:
    """Return a function that checks the API key; without a key it accepts every request."""
    expected = b"" if key is None else f"Bearer {key}".encode()

    def authorized(headers: list[tuple[bytes, bytes]]) -> bool:
        if key is None:
            return True
        given = [value for name, value in headers if name.lower() == b"authorization"]
        return hmac.compare_digest(b"\n".join(given), expected)

    return authorized


@define
class RefusalLog:
    """Logs refused requests, one line in ten seconds.

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
