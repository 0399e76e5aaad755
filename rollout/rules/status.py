"""The order of statuses: they only move forward, and a terminal one is the last."""

from __future__ import annotations

from rollout.types import RolloutStatus

__all__ = ["TERMINAL_STATUSES", "is_terminal", "may_follow", "reached"]

TERMINAL_STATUSES = frozenset(
    {RolloutStatus.SUCCESS, RolloutStatus.FAILURE, RolloutStatus.CANCELLED}
)

_RANK = {
    RolloutStatus.UNKNOWN: -1,
    RolloutStatus.QUEUED: 0,
    RolloutStatus.RUNNING: 1,
    RolloutStatus.GRADING: 2,
    RolloutStatus.SUCCESS: 3,
    RolloutStatus.FAILURE: 3,
    RolloutStatus.CANCELLED: 3,
}


def is_terminal(status: RolloutStatus) -> bool:
    """Whether nothing can follow *status*."""
    return status in TERMINAL_STATUSES


def may_follow(new: RolloutStatus, old: RolloutStatus) -> bool:
    """Whether a rollout in *old* may go to *new*. Phases may be skipped, never repeated."""
    return _RANK[new] > _RANK[old]


def reached(status: RolloutStatus, milestone: RolloutStatus) -> bool:
    """Whether *status* is *milestone*, comes after it, or is terminal."""
    return _RANK[status] >= _RANK[milestone]  # a terminal one has the highest rank
