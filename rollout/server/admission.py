"""Admission of one rollout or of many, each with its own outcome."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import trio
from attrs import frozen

from rollout.codec import structure, unstructure
from rollout.errors import (
    AdmissionsClosedError,
    DuplicateRolloutError,
    FieldProblem,
    InvalidBodyError,
    RolloutCapacityError,
    StateUnavailableError,
)
from rollout.rules import SeenState
from rollout.server.entry import Entry
from rollout.server.feed import Feed
from rollout.server.registry import RolloutRegistry
from rollout.types import EXTENSIONS, RolloutInitRequest, RolloutInitResponse, RolloutStatus

__all__ = [
    "MAX_BATCH",
    "MAX_CANCEL_IDS",
    "RETRY_AFTER_SEC",
    "admit",
    "admit_batch",
    "field_problems",
    "retry_after_sec",
]

MAX_BATCH = 4096
"""How many rollouts one request may ask for."""

MAX_CANCEL_IDS = 16 * 1024
"""How many ids one request may cancel."""

_ADMITTED_AT_ONCE = 8
"""How many rollouts are admitted without a checkpoint; their start takes about 1 ms each."""

RETRY_AFTER_SEC = (5, 8)
"""The bounds of the wait, in seconds, that a refused caller is asked for."""


def field_problems(where: str, problems: tuple[FieldProblem, ...]) -> list[dict[str, Any]]:
    """Return the ``detail`` of a 422."""
    return [
        {"loc": [where, *problem.loc], "msg": problem.msg, "type": problem.type}
        for problem in problems
    ]


def retry_after_sec() -> int:
    """Draw the wait that a refused caller is asked for, so that not all come back at once."""
    return random.randint(*RETRY_AFTER_SEC)  # noqa: S311 - no secret


@frozen
class Attempt:
    """An admission that was tried.

    Attributes:
        outcome: What its caller is answered, unless it turns out that the entry is not kept.
        entry: The admitted rollout; ``None`` if it was refused.
    """

    outcome: dict[str, Any]
    entry: Entry | None = None


async def admit(registry: RolloutRegistry, body: Any) -> dict[str, Any]:
    """Admit a rollout.

    Args:
        registry: Where it is admitted.
        body: The parsed JSON of a `RolloutInitRequest`.

    Returns:
        ``status_code``, with ``admission`` (202) or ``detail`` and maybe ``retry_after_sec``.

    Cancelled, it may have admitted it; nobody has its lease.
    """
    (outcome,) = await _settled(registry, [_attempt(registry, body)], None)
    return outcome


def _attempt(
    registry: RolloutRegistry, body: Any, *, feed: Feed | None = None, now: float | None = None
) -> Attempt:
    try:
        entry, token = registry.admit(structure(body, RolloutInitRequest), now=now)
    except InvalidBodyError as error:
        return Attempt({"status_code": 422, "detail": field_problems("body", error.problems)})
    except _REFUSALS as error:
        return Attempt(_refusal(error))
    if feed is not None and not entry.pending:
        feed.attach(entry, SeenState())
    admission = RolloutInitResponse(
        rollout_id=entry.rollout_id,
        status=RolloutStatus.QUEUED,
        polling_lease_token=token,
        result_wait_timeout_sec=registry.result_wait_timeout_sec,
        polling_lease_timeout_sec=registry.polling_lease_timeout_sec,
        extensions=list(EXTENSIONS),
    )
    return Attempt({"status_code": 202, "admission": unstructure(admission)}, entry)


_REFUSALS = (
    AdmissionsClosedError,
    DuplicateRolloutError,
    RolloutCapacityError,
    StateUnavailableError,
)


def _refusal(error: Exception) -> dict[str, Any]:
    if isinstance(error, DuplicateRolloutError):
        return {"status_code": 409, "detail": str(error)}
    return {
        "status_code": 429 if isinstance(error, RolloutCapacityError) else 503,
        "detail": str(error),
        "retry_after_sec": retry_after_sec(),
    }


async def _settled(
    registry: RolloutRegistry, attempts: Sequence[Attempt], feed: Feed | None
) -> list[dict[str, Any]]:
    """Return the outcomes of attempts, once those that the registry has to keep are kept."""
    if any(attempt.entry is not None and attempt.entry.pending for attempt in attempts):
        await registry.settled()
        for entry in (attempt.entry for attempt in attempts):
            if feed is not None and not feed.closed and entry is not None and not entry.refusal:
                feed.attach(entry, SeenState())
    return [
        attempt.outcome
        if attempt.entry is None or attempt.entry.refusal is None
        else _refusal(attempt.entry.refusal)
        for attempt in attempts
    ]


async def admit_batch(
    registry: RolloutRegistry, rollouts: list[Any], feed: Feed | None
) -> list[dict[str, Any]]:
    """Admit what can be admitted, and attach it to the feed if there is one.

    Returns:
        What `admit` returns of each, in order.

    Cancelled, it has admitted a part of them; nobody has their leases.
    """
    now = trio.current_time()
    attempts: list[Attempt] = []
    for start in range(0, len(rollouts), _ADMITTED_AT_ONCE):
        await trio.lowlevel.checkpoint()
        if feed is not None and feed.closed:
            feed = None
        part = rollouts[start : start + _ADMITTED_AT_ONCE]
        attempts += [_attempt(registry, item, feed=feed, now=now) for item in part]
    return await _settled(registry, attempts, feed)
