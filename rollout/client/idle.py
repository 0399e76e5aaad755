"""Waiting until a server has no active rollout."""

from __future__ import annotations

from typing import Any

import httpx
import trio

from rollout._checks import check_number
from rollout.client.wire import Wire
from rollout.codec import structure
from rollout.errors import (
    InvalidBodyError,
    RolloutIdleTimeoutError,
    RolloutProtocolError,
)
from rollout.types import RolloutLifecycle

__all__ = ["wait_until_idle"]

_WAITED_OUT = frozenset({408, 429, 500, 502, 503, 504})


async def wait_until_idle(
    wire: Wire, *, timeout_sec: float, poll_interval_sec: float, process_id: str | None
) -> dict[str, Any]:
    """See `rollout.client.RolloutClient.wait_idle`."""
    for name, value in (("timeout_sec", timeout_sec), ("poll_interval_sec", poll_interval_sec)):
        check_number(name, value, above=0)
    last = "the server did not answer"
    with trio.move_on_after(timeout_sec):
        while True:
            try:
                health = await wire.health()
            except RolloutProtocolError as error:
                if error.status_code not in _WAITED_OUT:
                    raise
                last = str(error)
            except httpx.TransportError as error:
                last = f"{type(error).__name__}: {error}"
            else:
                active = _active(health)
                process_id = _same_process(health, process_id)
                if active == 0:
                    return health
                last = f"{active} rollout(s) are active"
            await trio.sleep(poll_interval_sec)
    raise RolloutIdleTimeoutError(
        f"the server did not become idle within {timeout_sec:g} s; at last: {last}"
    )


def _same_process(health: dict[str, Any], expected: str | None) -> str:
    current = health.get("process_id")
    if not isinstance(current, str) or not current:
        raise RolloutProtocolError("the server reports no process_id", status_code=200)
    if expected is not None and current != expected:
        raise RolloutProtocolError(
            "the server restarted: another process_id answers now", status_code=200
        )
    return current


def _active(health: dict[str, Any]) -> int:
    try:
        return structure(health.get("lifecycle"), RolloutLifecycle).active_rollouts
    except InvalidBodyError:
        raise RolloutProtocolError(
            "the server reports no valid lifecycle; it may be too old for wait_idle",
            status_code=200,
        ) from None
