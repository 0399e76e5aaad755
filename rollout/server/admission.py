"""Admission of one rollout or of many, each with its own outcome."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import trio
from attrs import define

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
from rollout.types import RolloutInitRequest, RolloutInitResponse, RolloutStatus

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


@define
class _Attempt:
    """An admission that is tried: the rollout or the error, and what both came from."""

    traceparent: str | None = None
    request: RolloutInitRequest | None = None
    entry: Entry | None = None
    token: str = ""
    error: Exception | None = None
    pending: bool = False


_REFUSALS = (
    AdmissionsClosedError,
    DuplicateRolloutError,
    InvalidBodyError,
    RolloutCapacityError,
    StateUnavailableError,
)


async def admit(
    registry: RolloutRegistry, body: Any, traceparent: str | None = None
) -> dict[str, Any]:
    """Admit a rollout.

    Args:
        registry: Where it is admitted.
        body: The parsed JSON of a `RolloutInitRequest`.
        traceparent: The span of its caller, as W3C writes it.

    Returns:
        ``status_code``, with ``admission`` (202) or ``detail`` and maybe ``retry_after_sec``.

    Cancelled, it may have admitted it; nobody has its lease.
    """
    attempt = _attempt(registry, body, traceparent)
    await _settle(registry, [attempt], None)
    return _counted(registry, _outcome(registry, attempt))


async def admit_batch(
    registry: RolloutRegistry,
    rollouts: list[Any],
    feed: Feed | None,
    traceparents: Sequence[str | None] = (),
) -> list[dict[str, Any]]:
    """Admit what can be admitted, and attach it to the feed if there is one.

    Args:
        registry: Where they are admitted.
        rollouts: The parsed JSON of each `RolloutInitRequest`.
        feed: The feed.
        traceparents: The spans of their callers, as W3C writes them, in the same order.

    Returns:
        What `admit` returns of each, in order.

    Cancelled, it has admitted a part of them; nobody has their leases.
    """
    now = trio.current_time()
    attempts: list[_Attempt] = []
    callers = list(zip_longest(rollouts, traceparents))
    for start in range(0, len(rollouts), _ADMITTED_AT_ONCE):
        await trio.lowlevel.checkpoint()
        if feed is not None and feed.closed:
            feed = None
        part = callers[start : start + _ADMITTED_AT_ONCE]
        attempts += [_attempt(registry, item, span, feed=feed, now=now) for item, span in part]
    await _settle(registry, attempts, feed)
    return [_counted(registry, _outcome(registry, attempt)) for attempt in attempts]


def _attempt(
    registry: RolloutRegistry,
    body: Any,
    traceparent: str | None,
    *,
    feed: Feed | None = None,
    now: float | None = None,
) -> _Attempt:
    attempt = _Attempt(traceparent=traceparent)
    try:
        attempt.request = structure(body, RolloutInitRequest)
        _try(registry, attempt, feed, now)
    except InvalidBodyError as error:
        attempt.error = error
    return attempt


def _try(
    registry: RolloutRegistry, attempt: _Attempt, feed: Feed | None, now: float | None = None
) -> None:
    if attempt.request is None:
        return
    attempt.error = None
    try:
        attempt.entry, attempt.token = registry.admit(
            attempt.request, now=now, traceparent=attempt.traceparent
        )
    except _REFUSALS as error:
        attempt.error = error
        return
    attempt.pending = attempt.entry.pending
    if feed is not None and not attempt.pending:
        feed.attach(attempt.entry, SeenState())


async def _settle(
    registry: RolloutRegistry, attempts: Sequence[_Attempt], feed: Feed | None
) -> None:
    """Wait until those that the state has to keep are kept; a feed reports them from then on.

    An attempt that is refused may be one that was admitted long ago, with the same key: that is
    looked up in the state.
    """
    pending = [attempt for attempt in attempts if attempt.pending]
    if pending:
        await registry.settled()
    feed = None if feed is None or feed.closed else feed
    for attempt in pending:
        entry = attempt.entry
        attempt.error = None if entry is None else entry.refusal
        if feed is not None and entry is not None and attempt.error is None:
            feed.attach(entry, SeenState())
    if registry.store is not None:
        for attempt in attempts:
            if attempt.error is None or attempt.request is None:
                continue
            try:
                if await registry.recall_admitted(attempt.request):
                    _try(registry, attempt, feed)
            except StateUnavailableError as error:
                attempt.error = error


def _counted(registry: RolloutRegistry, outcome: dict[str, Any]) -> dict[str, Any]:
    registry.hooks.counts.admissions[outcome["status_code"]] += 1
    return outcome


def _outcome(registry: RolloutRegistry, attempt: _Attempt) -> dict[str, Any]:
    error = attempt.error
    if isinstance(error, InvalidBodyError):
        return {"status_code": 422, "detail": field_problems("body", error.problems)}
    if isinstance(error, DuplicateRolloutError):
        return {"status_code": 409, "detail": str(error)}
    if error is not None or attempt.entry is None:
        return {
            "status_code": 429 if isinstance(error, RolloutCapacityError) else 503,
            "detail": str(error),
            "retry_after_sec": retry_after_sec(),
        }
    admission = RolloutInitResponse(
        rollout_id=attempt.entry.rollout_id,
        status=RolloutStatus.QUEUED,
        polling_lease_token=attempt.token,
        result_wait_timeout_sec=registry.result_wait_timeout_sec,
        polling_lease_timeout_sec=registry.polling_lease_timeout_sec,
        extensions=list(registry.extensions),
    )
    return {"status_code": 202, "admission": unstructure(admission)}
