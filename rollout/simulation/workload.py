"""Plans of simulated rollouts, and a backend that follows them.

A `RolloutPlan` says how long its workflow and grader take and how they end, and what its
caller does: waits, follows a handle, stops polling, cancels, vanishes, or comes back later for
what it knows already, and so on. Since all of it is known, so is what may come out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import trio
from attrs import asdict, evolve, field, frozen

from rollout._checks import check_flag, check_number, setting
from rollout.backend import LocalBackend
from rollout.context import AgentWorkflowContext, GraderContext, get_rollout_context
from rollout.grader import Grader
from rollout.simulation.trace import Trace
from rollout.types import (
    AgentWorkflowConfig,
    ConcurrencyConfig,
    GraderConfig,
    Messages,
    RolloutStatus,
)
from rollout.types._fields import timeout
from rollout.workflow import AgentWorkflow

__all__ = [
    "Caller",
    "Course",
    "RolloutPlan",
    "draw_workload",
    "expected_outcomes",
    "longest_swallow_sec",
    "longest_work_sec",
    "simulated_backend",
]

_METADATA_KEY = "simulation"
_OVERTAKING = 0.15
"""How many of the callers that would wait cancel their rollouts before they ask for them."""

LONGEST_SWALLOW_SEC = 60.0
"""Nothing ends a task that shields itself, so it has to end within a shutdown's cleanup."""


class Course(StrEnum):
    """How a workflow or a grader goes."""

    OK = "ok"
    ERROR = "error"
    SWALLOW = "swallow"
    """Ignores one cancellation and takes as long again to end, though at most a minute."""


class Caller(StrEnum):
    """What the caller of a rollout does."""

    WAIT = "wait"
    """Calls ``run_rollout`` and waits."""
    FOLLOW = "follow"
    """Follows a handle through its statuses."""
    STOP = "stop"
    """Cancels its handle after a while: polling ends, the rollout does not."""
    CANCEL = "cancel"
    """Cancels the rollout on the server after a while, and keeps polling."""
    VANISH = "vanish"
    """Is cancelled itself after a while, wherever it is."""
    REPEAT = "repeat"
    """Once it has the result, asks for admission of the same id again."""
    RIVAL = "rival"
    """Asks for admission of the same id while the rollout is under way."""
    AGAIN = "again"
    """Once it has the result, reads it again after a while, with the same token."""
    PAIR = "pair"
    """Polls from two processes at a time, with the same token."""
    LATE = "late"
    """Is silent for a while between its admission and its first poll."""
    INTRUDE = "intrude"
    """Polls with a wrong token for a while, and only then with its own."""
    OVERTAKE = "overtake"
    """Cancels the rollout by its admission key, and asks for its admission a while later."""
    BULK = "bulk"
    """Is run together with all others of its kind, by one call that may leave early."""


_from_zero = setting(check_number, least=0)


@frozen(kw_only=True)
class RolloutPlan:
    """One rollout of a workload.

    Attributes:
        rollout_id: Its id.
        arrival_sec: When its caller begins, in seconds.
        agent_sec: How long the workflow takes.
        agent: How it goes.
        grade: Whether it is graded.
        grader_sec: How long the grader takes.
        grader: How it goes.
        reward: The reward that the grader gives.
        agent_timeout_sec: The workflow's deadline.
        grader_timeout_sec: The grader's deadline.
        caller: What the caller does.
        caller_sec: When it does so, counted from its admission (or its beginning).
        run: The name of its run.
    """

    rollout_id: str
    arrival_sec: float = field(default=0.0, validator=_from_zero)
    agent_sec: float = field(default=1.0, validator=_from_zero)
    agent: Course = Course.OK
    grade: bool = field(default=True, validator=setting(check_flag))
    grader_sec: float = field(default=0.0, validator=_from_zero)
    grader: Course = Course.OK
    reward: float = field(default=1.0, validator=setting(check_number))
    agent_timeout_sec: float | None = field(default=None, validator=timeout)
    grader_timeout_sec: float | None = field(default=None, validator=timeout)
    caller: Caller = Caller.WAIT
    caller_sec: float = field(default=1.0, validator=_from_zero)
    run: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``RolloutClient.run_rollout`` for this rollout."""
        return {
            "initial_messages": [{"role": "user", "content": self.rollout_id}],
            "chat_completions_url": "http://model.invalid/v1",
            "rollout_id": self.rollout_id,
            "label": self.rollout_id,
            "metadata": {_METADATA_KEY: asdict(self)},
            "grade": self.grade,
            "agent_timeout_sec": self.agent_timeout_sec,
            "grader_timeout_sec": self.grader_timeout_sec,
            "run": self.run,
        }


def expected_outcomes(plan: RolloutPlan) -> set[tuple[str, str | None]]:
    """Return the (status, error category) pairs that an undisturbed rollout may end with.

    Undisturbed means: it was not cancelled, its lease held, its server lived. Time in the queue
    counts against the agent's deadline, so with a deadline a timeout is always possible.
    """
    outcomes: set[tuple[str, str | None]] = set()
    if plan.agent_timeout_sec is not None:
        outcomes.add(("failure", "timeout"))
        if plan.agent_sec >= plan.agent_timeout_sec:
            return outcomes
    if plan.agent is Course.ERROR:
        return outcomes | {("failure", "agent_error")}
    if not plan.grade:
        return outcomes | {("success", None)}
    if plan.grader_timeout_sec is not None and plan.grader_sec >= plan.grader_timeout_sec:
        return outcomes | {("failure", "timeout")}
    if plan.grader is Course.ERROR:
        return outcomes | {("failure", "agent_error")}
    return outcomes | {("success", None)}


def longest_work_sec(plan: RolloutPlan) -> float:
    """Return how long workflow and grader may take together, if interrupted at the worst time."""
    longest = plan.agent_sec + (plan.grader_sec if plan.grade else 0.0)
    if plan.agent is Course.SWALLOW:
        longest += longest_swallow_sec(plan.agent_sec)
    if plan.grade and plan.grader is Course.SWALLOW:
        longest += longest_swallow_sec(plan.grader_sec)
    return longest


def draw_workload(generator: random.Random, count: int, *, prefix: str = "r") -> list[RolloutPlan]:
    """Draw a workload of *count* rollouts: mostly well-behaved, some of every other kind."""
    spread = count * 2.0
    plans = [
        RolloutPlan(
            rollout_id=f"{prefix}{number}",
            arrival_sec=round(generator.uniform(0, spread), 3),
            agent_sec=_duration(generator),
            agent=_pick(generator, ((Course.OK, 8), (Course.ERROR, 1), (Course.SWALLOW, 1))),
            grade=generator.random() < 0.8,  # noqa: PLR2004
            grader_sec=round(_duration(generator) / 4, 3),
            grader=_pick(generator, ((Course.OK, 8), (Course.ERROR, 1), (Course.SWALLOW, 1))),
            reward=round(generator.random(), 3),
            agent_timeout_sec=_pick(generator, ((None, 6), (0.0, 1), (20.0, 1), (90.0, 2))),
            grader_timeout_sec=_pick(generator, ((None, 6), (10.0, 2))),
            caller=_pick(
                generator,
                (
                    (Caller.WAIT, 6),
                    (Caller.FOLLOW, 4),
                    (Caller.STOP, 1),
                    (Caller.CANCEL, 2),
                    (Caller.VANISH, 1),
                    (Caller.REPEAT, 2),
                    (Caller.RIVAL, 1),
                    (Caller.AGAIN, 1),
                    (Caller.PAIR, 1),
                    (Caller.LATE, 1),
                    (Caller.INTRUDE, 1),
                    (Caller.BULK, 3),
                ),
            ),
            caller_sec=_duration(generator),
        )
        for number in range(count)
    ]
    # Of a generator of their own, so that a seed goes on to bring what it has brought before.
    chance = random.Random()  # noqa: S311 - simulation, no secrets
    chance.setstate(generator.getstate())
    return [
        evolve(plan, caller=Caller.OVERTAKE)
        if plan.caller is Caller.WAIT and chance.random() < _OVERTAKING
        else plan
        for plan in plans
    ]


def _duration(generator: random.Random) -> float:
    longest: float = _pick(generator, ((1.0, 3), (10.0, 4), (60.0, 2), (400.0, 1)))
    return round(generator.random() * longest, 3)


def _pick(generator: random.Random, choices: Sequence[tuple[Any, int]]) -> Any:
    values = [value for value, _ in choices]
    weights = [weight for _, weight in choices]
    return generator.choices(values, weights)[0]


def longest_swallow_sec(seconds: float) -> float:
    """Return how long a phase goes on if it ignores its cancellation."""
    return min(seconds, LONGEST_SWALLOW_SEC)


def _report_again() -> None:
    """Report a status and a start that are known already, as user code may do."""
    context = get_rollout_context()
    if context is not None:
        context.report_status(RolloutStatus.RUNNING)
        context.mark_agent_started()


async def _go(course: Course, seconds: float) -> None:
    try:
        await trio.sleep(seconds)
    except trio.Cancelled:
        if course is not Course.SWALLOW:
            raise
        with trio.CancelScope(shield=True):
            await trio.sleep(longest_swallow_sec(seconds))
    _report_again()
    if course is Course.ERROR:
        raise RuntimeError("as planned")


def simulated_backend(
    trace: Trace,
    *,
    max_concurrent: int | None = 4,
    max_queue_depth: int | None = None,
    max_graders: int | None = None,
    process: int = 1,
) -> LocalBackend:
    """Make a LocalBackend whose workflow and grader do as their `RolloutPlan` says.

    Args:
        trace: Where they record when they start and end.
        max_concurrent: Slots; ``None`` for no limit.
        max_queue_depth: How many rollouts may wait for one; ``None`` for no bound.
        max_graders: How many graders run at a time; ``None`` for no limit but the slots.
        process: Of which server process it is, for the trace.
    """

    def record(who: str, what: str, plan: dict[str, Any]) -> None:
        context = get_rollout_context()  # a worker may know it by another id than its plan
        rollout_id = plan["rollout_id"] if context is None else context.rollout_id
        trace.add(who, what, rollout_id, process=process)

    class SimulatedWorkflow(AgentWorkflow[AgentWorkflowConfig]):
        async def run(self, ctx: AgentWorkflowContext[AgentWorkflowConfig]) -> Messages:
            plan = (ctx.metadata or {})[_METADATA_KEY]
            record("workflow", "workflow-started", plan)
            try:
                await _go(Course(plan["agent"]), plan["agent_sec"])
            finally:
                record("workflow", "workflow-ended", plan)
            return [*ctx.prompt, {"role": "assistant", "content": plan["rollout_id"]}]

    class SimulatedGrader(Grader):
        async def grade(self, ctx: GraderContext) -> None:
            plan = (ctx.metadata or {})[_METADATA_KEY]
            record("grader", "grader-started", plan)
            try:
                await _go(Course(plan["grader"]), plan["grader_sec"])
            finally:
                record("grader", "grader-ended", plan)
            ctx.set_reward(plan["reward"])

    return LocalBackend(
        workflow=SimulatedWorkflow,
        workflow_config=AgentWorkflowConfig(
            name="simulated", concurrency=ConcurrencyConfig(max_concurrent=max_concurrent)
        ),
        grader=SimulatedGrader,
        grader_config=GraderConfig(
            name="simulated", concurrency=ConcurrencyConfig(max_concurrent=max_graders)
        ),
        max_queue_depth=max_queue_depth,
        artifact_root=False,
    )
