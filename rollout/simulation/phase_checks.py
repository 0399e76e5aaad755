"""Checks of the phases of an execution: who ends them, and when."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attrs import frozen

from rollout.simulation.findings import EPSILON_SEC, Checked, Finding
from rollout.simulation.lives import Life
from rollout.simulation.workload import Course, RolloutPlan, longest_swallow_sec

__all__ = ["check_phases"]

_CANCELLED = ("cancelled", None)
_TIMEOUT = ("failure", "timeout")


def check_phases(checked: Checked) -> Iterator[Finding]:
    """A phase ends at its deadline or at a request to stop, the earlier, and its rollout so.

    The agent's deadline counts from admission, so the time in the queue is part of it; the
    grader's counts from its start. What obeys is over at that moment.
    """
    for life in checked.history.lives:
        plan = checked.plans.get(life.rollout_id)
        over = min(life.over_at, checked.history.ends_at)
        paused = checked.history.pauses and checked.history.paused_sec(
            life.time_of("admitted"), over
        )
        if plan is not None and not paused:
            yield from _check_life(checked, life, plan)


@frozen
class _Phase:
    """One phase, as its plan and its begin have it.

    Attributes:
        began: When its code began; infinity if it never did.
        work_sec: How long it takes by itself.
        course: How it goes.
        deadline: When its time is over.
        stopped: When its execution was asked to stop.
    """

    began: float
    work_sec: float
    course: Course
    deadline: float
    stopped: float

    @property
    def interrupted_at(self) -> float:
        """When it is interrupted, unless it has ended before."""
        return min(self.deadline, self.stopped)

    @property
    def interrupted(self) -> bool:
        return self.began + self.work_sec > self.interrupted_at + EPSILON_SEC

    @property
    def undecided(self) -> bool:
        """Whether its own end and an interruption come at the same moment."""
        return abs(self.began + self.work_sec - self.interrupted_at) <= EPSILON_SEC

    @property
    def latest_end(self) -> float:
        """When its execution is over, if it is interrupted."""
        began = self.began < math.inf
        swallows = began and self.course is Course.SWALLOW
        return self.interrupted_at + (longest_swallow_sec(self.work_sec) if swallows else 0.0)

    @property
    def outcome(self) -> tuple[str, str | None]:
        return _TIMEOUT if self.deadline <= self.stopped else _CANCELLED


def _check_life(checked: Checked, life: Life, plan: RolloutPlan) -> Iterator[Finding]:
    stopped = life.time_of("stop-requested")
    limit = math.inf if plan.agent_timeout_sec is None else plan.agent_timeout_sec
    phase = _Phase(
        life.time_of("workflow-started"),
        plan.agent_sec,
        plan.agent,
        life.time_of("admitted") + max(limit, 0.0),
        stopped,
    )
    graded = life.time_of("grader-started")
    if graded == math.inf or phase.interrupted:
        yield from _check_phase(checked, life, phase, "agent")
    else:
        limit = math.inf if plan.grader_timeout_sec is None else plan.grader_timeout_sec
        phase = _Phase(graded, plan.grader_sec, plan.grader, graded + limit, stopped)
        yield from _check_phase(checked, life, phase, "grader")


def _check_phase(checked: Checked, life: Life, phase: _Phase, name: str) -> Iterator[Finding]:
    at = phase.interrupted_at
    if at < phase.began < math.inf and phase.began - at > EPSILON_SEC:
        yield Finding(life.rollout_id, f"its {name} began after it was to end", phase.began)
    if phase.undecided:
        return
    finished = life.first("finished")
    outcome = finished and (finished.detail["status"], finished.detail["category"])
    until = min(life.over_at, life.closed_at, checked.history.ends_at)
    if phase.interrupted and until > phase.latest_end + EPSILON_SEC:
        what = "at its deadline" if phase.deadline <= phase.stopped else "as it was asked to"
        yield Finding(life.rollout_id, f"its {name} did not end {what}", phase.latest_end)
    elif finished is None or life.expired or phase.began == at:
        return
    elif phase.interrupted and outcome != phase.outcome and finished.time < life.closed_at:
        message = f"ended as {outcome}, not as {phase.outcome}, which came first in its {name}"
        yield Finding(life.rollout_id, message, finished.time)
    elif outcome == _TIMEOUT and finished.time < phase.deadline - EPSILON_SEC:
        if name == "agent" and life.grading:
            return  # its grader had no time at all
        yield Finding(life.rollout_id, f"its {name} timed out too early", finished.time)
