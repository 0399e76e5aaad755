"""Admission of one rollout or of many, each with its own outcome."""

from __future__ import annotations

import random
from typing import Any

import trio

from rollout.codec import structure, unstructure
from rollout.errors import (
    AdmissionsClosedError,
    DuplicateRolloutError,
    FieldProblem,
    InvalidBodyError,
    RolloutCapacityError,
)
from rollout.rules import SeenState
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


def admit(
    registry: RolloutRegistry, body: Any, *, feed: Feed | None = None, now: float | None = None
) -> dict[str, Any]:
    """Admit a rollout, and attach it to the feed if there is one.

    Args:
        registry: Where it is admitted.
        body: The parsed JSON of a `RolloutInitRequest`.
        feed: The feed that reports it.
        now: When its lease starts; see `RolloutRegistry.admit`.

    Returns:
        ``status_code``, with ``admission`` (202) or ``detail`` and maybe ``retry_after_sec``.
    """
    try:
        entry, token = registry.admit(structure(body, RolloutInitRequest), now=now)
    except InvalidBodyError as error:
        return {"status_code": 422, "detail": field_problems("body", error.problems)}
    except DuplicateRolloutError as error:
        return {"status_code": 409, "detail": str(error)}
    except (RolloutCapacityError, AdmissionsClosedError) as error:
        return {
            "status_code": 429 if isinstance(error, RolloutCapacityError) else 503,
            "detail": str(error),
            # Drawn, so that not all callers come back at once.
            "retry_after_sec": random.randint(*RETRY_AFTER_SEC),  # noqa: S311 - no secret
        }
    if feed is not None:
        feed.attach(entry, SeenState())
    admission = RolloutInitResponse(
        rollout_id=entry.rollout_id,
        status=RolloutStatus.QUEUED,
        polling_lease_token=token,
        result_wait_timeout_sec=registry.result_wait_timeout_sec,
        polling_lease_timeout_sec=registry.polling_lease_timeout_sec,
        extensions=list(EXTENSIONS),
    )
    return {"status_code": 202, "admission": unstructure(admission)}


async def admit_batch(
    registry: RolloutRegistry, rollouts: list[Any], feed: Feed | None
) -> list[dict[str, Any]]:
    """Admit what can be admitted; return what `admit` returns of each, in order.

    Cancelled, it has admitted a part of them; nobody has their leases.
    """
    now = trio.current_time()
    outcomes: list[dict[str, Any]] = []
    for start in range(0, len(rollouts), _ADMITTED_AT_ONCE):
        await trio.lowlevel.checkpoint()
        if feed is not None and feed.closed:
            feed = None
        part = rollouts[start : start + _ADMITTED_AT_ONCE]
        outcomes += [admit(registry, item, feed=feed, now=now) for item in part]
    return outcomes
