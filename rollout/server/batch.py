"""Admission of many rollouts in one request, each with its own outcome."""

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
from rollout.server.entry import Entry
from rollout.server.feed import Feed
from rollout.server.registry import RolloutRegistry
from rollout.types import EXTENSIONS, RolloutInitRequest, RolloutInitResponse, RolloutStatus

__all__ = [
    "MAX_BATCH",
    "RETRY_AFTER_SEC",
    "admission_of",
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
"""The shortest and the longest wait that is asked for where there is no room."""


def retry_after_sec() -> int:
    """Draw how long a refused caller waits, so that not all of them come back at once."""
    return random.randint(*RETRY_AFTER_SEC)  # noqa: S311 - no secret


def field_problems(where: str, problems: tuple[FieldProblem, ...]) -> list[dict[str, Any]]:
    """Return the ``detail`` of a 422."""
    return [
        {"loc": [where, *problem.loc], "msg": problem.msg, "type": problem.type}
        for problem in problems
    ]


def admission_of(registry: RolloutRegistry, entry: Entry, token: str) -> RolloutInitResponse:
    """Return what a caller is told of its admission."""
    return RolloutInitResponse(
        rollout_id=entry.rollout_id,
        status=RolloutStatus.QUEUED,
        polling_lease_token=token,
        result_wait_timeout_sec=registry.result_wait_timeout_sec,
        polling_lease_timeout_sec=registry.polling_lease_timeout_sec,
        extensions=list(EXTENSIONS),
    )


async def admit_batch(
    registry: RolloutRegistry, rollouts: list[Any], feed: Feed | None
) -> list[dict[str, Any]]:
    """Admit what can be admitted, and attach it to the feed if there is one.

    Returns:
        One object for each rollout, in order: ``status_code`` as the single route would have
        it, with ``admission`` (202) or ``detail`` and maybe ``retry_after_sec``.

    Cancelled, it has admitted a part of them; nobody has their leases.
    """
    now = trio.current_time()
    outcomes: list[dict[str, Any]] = []
    for start in range(0, len(rollouts), _ADMITTED_AT_ONCE):
        await trio.lowlevel.checkpoint()
        if feed is not None and feed.closed:
            feed = None
        part = rollouts[start : start + _ADMITTED_AT_ONCE]
        outcomes += [_admit(registry, item, feed, now) for item in part]
    return outcomes


def _admit(registry: RolloutRegistry, item: Any, feed: Feed | None, now: float) -> dict[str, Any]:
    try:
        entry, token = registry.admit(structure(item, RolloutInitRequest), now=now)
    except InvalidBodyError as error:
        return {"status_code": 422, "detail": field_problems("body", error.problems)}
    except DuplicateRolloutError as error:
        return {"status_code": 409, "detail": str(error)}
    except RolloutCapacityError as error:
        return {"status_code": 429, "detail": str(error), "retry_after_sec": retry_after_sec()}
    except AdmissionsClosedError as error:
        return {"status_code": 503, "detail": str(error), "retry_after_sec": retry_after_sec()}
    if feed is not None:
        feed.attach(entry, SeenState())
    return {"status_code": 202, "admission": unstructure(admission_of(registry, entry, token))}
