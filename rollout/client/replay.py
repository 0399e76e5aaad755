"""Whether and how long an admission may be sent again after its answer was lost.

Theory of operation: every admission carries a key. A server that announces ``admission-keys``
recognises an admission that it has had before, for at least the length of a lease. Each admission
says so for the next ones; if the first answer of all is lost, the health says so.
"""

from __future__ import annotations

import math
from typing import Any

import httpx
import trio
from attrs import define, field

from rollout._checks import is_finite_number
from rollout._logs import get_logger
from rollout.client.wire import Wire
from rollout.errors import RolloutProtocolError
from rollout.rules.retry import GATEWAY_STATUS_CODES, admission_retry_delay_sec
from rollout.types import ADMISSION_KEYS, RolloutInitResponse

__all__ = ["LOST", "ReplayWindow"]

logger = get_logger(__name__)

LOST = (
    httpx.ConnectTimeout,
    httpx.NetworkError,
    httpx.ReadTimeout,
    httpx.RemoteProtocolError,
    httpx.WriteTimeout,
)
"""Failures of a request that the server may yet answer when it is sent again."""

_PATIENCE_SEC = 10.0
"""How long an unknown server may take to say whether it knows admission keys."""


@define(eq=False)
class ReplayWindow:
    """How long after its first request an admission may be sent again, as a server promises.

    Attributes:
        length_sec: The length in seconds: that of a lease, 0 where the server knows no admission
            keys, ``None`` while nothing is known.
    """

    _wire: Wire = field(repr=False)
    length_sec: float | None = None
    _unanswered_at: float = field(default=-math.inf, init=False, repr=False)
    _asking: trio.Lock = field(factory=trio.Lock, init=False, repr=False)

    def learn(self, admission: RolloutInitResponse) -> None:
        """Take what an admission announces."""
        self._set(admission.extensions, admission.polling_lease_timeout_sec)

    async def end(self, lost_at: float) -> float:
        """Return until when an admission may be sent again (trio time).

        Where nothing is known yet, this asks the server for its health, for some seconds.

        Args:
            lost_at: When the first request was sent that may have been lost.
        """
        async with self._asking:
            if self.length_sec is None and self._unanswered_at < lost_at:
                await self._learn_from_health()
        return lost_at + self.length_sec if self.length_sec else -math.inf

    async def _learn_from_health(self) -> None:
        failures = 0
        with trio.move_on_after(_PATIENCE_SEC):
            while not await self._ask():
                failures += 1
                await trio.sleep(admission_retry_delay_sec(failures))
            return
        self._unanswered_at = trio.current_time()

    async def _ask(self) -> bool:
        """Read the health; whether there was an answer."""
        health: dict[str, Any] = {}
        try:
            health = await self._wire.health()
        except LOST:
            return False
        except RolloutProtocolError as error:
            if error.status_code in GATEWAY_STATUS_CODES:
                return False
        except httpx.TransportError as error:
            logger.debug("the health could not be read: %r", error)
        self._set(health.get("extensions"), health.get("polling_lease_timeout_sec"))
        return True

    def _set(self, extensions: Any, lease_sec: Any) -> None:
        offered = isinstance(extensions, list) and ADMISSION_KEYS in extensions
        self.length_sec = lease_sec if offered and is_finite_number(lease_sec) else 0.0
