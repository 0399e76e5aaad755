"""What checks are given, and what they answer with."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from rollout.simulation.lives import History
from rollout.simulation.workload import RolloutPlan
from rollout.simulation.world import ServerOptions

__all__ = ["EPSILON_SEC", "Checked", "Finding", "rank"]

EPSILON_SEC = 1e-6
"""Simulated times are sums of floats; anything closer than this is the same moment."""

_ORDER = ("queued", "running", "grading")


def rank(state: str) -> int:
    """Return how far a status is along the way; all terminal ones are at its end."""
    return _ORDER.index(state) if state in _ORDER else len(_ORDER)


@frozen
class Checked:
    """A run, as checks see it.

    Attributes:
        history: The trace, sorted.
        options: How the server was set up.
        plans: The workload, by id; empty for a scenario of a user's own.
    """

    history: History
    options: ServerOptions
    plans: Mapping[str, RolloutPlan]


@frozen
class Finding:
    """Something that should not have happened.

    Attributes:
        rollout_id: To which rollout; empty if to the server as a whole.
        message: What it was.
        at: When it was plain to see.
    """

    rollout_id: str
    message: str
    at: float
