"""The invariants of rollouts, as checks over a trace."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from rollout.simulation.trace import Trace
from rollout.simulation.workload import RolloutPlan
from rollout.simulation.world import ServerOptions

__all__ = ["Violation", "check_trace"]


@frozen
class Violation:
    invariant: str
    message: str


def check_trace(
    trace: Trace, options: ServerOptions, workload: Sequence[RolloutPlan] = ()
) -> list[Violation]:
    return []
