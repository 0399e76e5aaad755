"""Broken variants of the phases of an execution: deadlines, graders, and what is given back."""

from __future__ import annotations

import math

import pytest
import trio
from simulation.mutants import interrupted, mutant, wrap, written

from rollout.backend.executions import Execution, Phase, Slots
from rollout.backend.local import LocalBackend
from rollout.rules import PollingLease, RolloutRecord
from rollout.server.deadlines import Deadlines
from rollout.simulation import (
    Caller,
    Course,
    RolloutPlan,
    SimulatedWorld,
)
from rollout.types import RolloutStatus

# --- deadlines ------------------------------------------------------------------------------------

LATE = written(
    RolloutPlan(rollout_id="first", agent_sec=15.0, grade=False),
    RolloutPlan(rollout_id="r", arrival_sec=1.0, agent_sec=15.0, agent_timeout_sec=20.0),
    max_concurrent=1,
)


@mutant("deadlines", LATE)
def the_queue_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's deadline counts from its slot, not from its admission."""

    async def run_phases(honest, backend, request, execution, context, phase):
        fresh = Phase(phase.name, phase.limit, trio.current_time())
        return await honest(backend, request, execution, context, fresh)

    wrap(monkeypatch, LocalBackend, "_run_phases", run_phases)


@mutant(
    "deadlines",
    written(
        RolloutPlan(rollout_id="first", agent_sec=60.0),
        RolloutPlan(rollout_id="r", arrival_sec=1.0, agent_timeout_sec=20.0),
        max_concurrent=1,
    ),
)
def who_waits_has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout whose deadline passes in the queue waits on for its slot."""

    async def acquire(honest, slots, execution, deadline):
        return await honest(slots, execution, deadline + 1e6)

    wrap(monkeypatch, Slots, "acquire", acquire)


STUBBORN = RolloutPlan(
    rollout_id="r",
    agent=Course.SWALLOW,
    agent_sec=50.0,
    agent_timeout_sec=20.0,
    caller=Caller.CANCEL,
    caller_sec=40.0,
)


@mutant("deadlines", written(STUBBORN))
def a_cancel_request_wins_over_an_earlier_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout that was cancelled after its deadline ends as cancelled."""

    def interruption(honest, phase, execution, now):
        return execution.interrupted() if execution.cancelled else honest(phase, execution, now)

    wrap(monkeypatch, Phase, "interruption", interruption)


@mutant(
    "deadlines",
    written(RolloutPlan(rollout_id="r", agent_sec=15.0, grader_sec=8.0, grader_timeout_sec=20.0)),
)
def the_graders_time_counts_from_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the agent is taken from the grader."""

    async def run_grader(honest, backend, request, execution, context, phase, sample):
        phase.deadline = execution.submitted_at + (phase.limit or 1e6)
        return await honest(backend, request, execution, context, phase, sample)

    wrap(monkeypatch, LocalBackend, "_run_grader", run_grader)


@mutant("deadlines", written(RolloutPlan(rollout_id="r", agent_sec=90.0, caller=Caller.CANCEL)))
def a_cancel_request_interrupts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout that runs takes note of a cancel request, and runs on."""

    def cancel(honest, execution):
        current, execution.current = execution.current, None
        answer = honest(execution)
        execution.current = current
        return answer

    wrap(monkeypatch, Execution, "cancel", cancel)


@mutant(
    "deadlines",
    written(
        RolloutPlan(rollout_id="first", agent_sec=60.0),
        RolloutPlan(rollout_id="r", arrival_sec=1.0, caller=Caller.CANCEL, caller_sec=5.0),
        max_concurrent=1,
    ),
)
def who_waits_ignores_a_cancel_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel request interrupts user code, and nobody who waits for a slot."""

    def enter(honest, execution, current):
        if not isinstance(current, trio.CancelScope):
            honest(execution, current)

    wrap(monkeypatch, Execution, "enter", enter)


# --- slots of graders -----------------------------------------------------------------------------

GRADED = written(
    *(
        RolloutPlan(rollout_id=f"r{n}", agent_sec=1.0, grader_sec=9.0, grader=course)
        for n, course in enumerate((Course.ERROR, Course.OK, Course.OK, Course.OK))
    ),
    max_graders=2,
)


@mutant("slots", GRADED)
def graders_have_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many graders run as there are rollouts."""

    def init(honest, backend, **options):
        honest(backend, **options)
        backend._grader_slots.limiter.total_tokens = float("inf")

    wrap(monkeypatch, LocalBackend, "__init__", init)


@mutant("slots", GRADED)
def a_failed_grader_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of a grader that failed is not given back."""

    async def run_phases(honest, backend, *args):
        outcome = await honest(backend, *args)
        if outcome.grader is not None and outcome.grader.status is RolloutStatus.FAILURE:
            backend._grader_slots.limiter.total_tokens -= 1
        return outcome

    wrap(monkeypatch, LocalBackend, "_run_phases", run_phases)


@mutant("slots", GRADED)
def one_grader_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer graders run than there may."""

    def init(honest, backend, **options):
        honest(backend, **options)
        backend._grader_slots.limiter.total_tokens = 1

    wrap(monkeypatch, LocalBackend, "__init__", init)


# --- what happens while everything stands still ---------------------------------------------------


ALMOST_A_LEASE_SEC = 120.0 - 5e-7


def stand_still(world: SimulatedWorld) -> None:
    """Stop all processes for five seconds."""
    world.pause(5.0)


TOO_LATE = interrupted(
    stand_still,
    RolloutPlan(rollout_id="first", agent_sec=10.0, grade=False),
    RolloutPlan(rollout_id="r", arrival_sec=0.5, agent_timeout_sec=10.0, grade=False),
    RolloutPlan(rollout_id="third", arrival_sec=1.0, agent_sec=10.0, grade=False),
    RolloutPlan(rollout_id="last", arrival_sec=1.5, agent_sec=10.0, grade=False),
    after="workflow-started",
    after_sec=10.0,
    max_concurrent=1,
)
"""The slot of the first is free when the deadline of the second has passed."""


@mutant("slots", TOO_LATE)
def a_slot_that_comes_too_late_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is granted as its deadline passes is never given back."""

    async def acquire(honest, slots, execution, deadline):
        acquired = await honest(slots, execution, deadline)
        return acquired and trio.current_time() < deadline

    wrap(monkeypatch, Slots, "acquire", acquire)


@mutant("slots", TOO_LATE)
def a_slot_that_comes_too_late_is_given_back_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is granted as its deadline passes is given back here and by its caller."""

    async def acquire(honest, slots, execution, deadline):
        acquired = await honest(slots, execution, deadline)
        if acquired and trio.current_time() >= deadline:
            slots.limiter.total_tokens += 1
        return acquired

    wrap(monkeypatch, Slots, "acquire", acquire)


def cancel_second(world: SimulatedWorld) -> None:
    """Ask the rollout ``r`` to stop, as a cancel request that arrives."""
    assert world.server.app is not None
    world.trace.add("network", "arrived", "r", route="cancel", request=0, lease="", process=1)
    world.server.app.registry.cancel(ids=["r"])


@mutant(
    "slots",
    interrupted(
        cancel_second,
        RolloutPlan(rollout_id="first", agent_sec=10.0, grade=False),
        RolloutPlan(rollout_id="r", arrival_sec=0.5, grade=False),
        RolloutPlan(rollout_id="last", arrival_sec=1.0, agent_sec=10.0, grade=False),
        after="workflow-started",
        after_sec=10.0,
        max_concurrent=1,
    ),
)
def a_slot_that_comes_with_a_cancel_request_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is granted in the moment of a cancel request is never given back."""

    async def acquire(honest, slots, execution, deadline):
        acquired = await honest(slots, execution, deadline)
        return acquired and not execution.cancelled

    wrap(monkeypatch, Slots, "acquire", acquire)


UNSEEN = interrupted(
    stand_still,
    RolloutPlan(
        rollout_id="r",
        agent_sec=ALMOST_A_LEASE_SEC,
        grade=False,
        caller=Caller.VANISH,
        caller_sec=0.025,
    ),
    RolloutPlan(rollout_id="meanwhile", arrival_sec=1.0, agent_sec=200.0),
    after="workflow-started",
    after_sec=ALMOST_A_LEASE_SEC,
)
"""A lease ends, and a workflow with it, before anybody can notice."""


@mutant("lease-safety", UNSEEN)
def a_result_beats_a_lease_that_ended_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result counts though the lease had ended, as long as nobody has noticed."""

    def finish(honest, record, result, now):
        return honest(record, result, min(now, record.lease.deadline - 1))

    def settle(honest, record, result, now):
        return honest(record, result, min(now, record.lease.deadline - 1))

    wrap(monkeypatch, RolloutRecord, "finish", finish)
    wrap(monkeypatch, RolloutRecord, "settle", settle)


@mutant("lease-safety", UNSEEN)
def a_result_is_compared_with_the_last_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a lease ended before the result is asked as of when leases were last looked at."""
    looked_at = -math.inf

    def handle_due(honest, deadlines, now):
        nonlocal looked_at
        looked_at = deadlines.clock.time(now)
        return honest(deadlines, now)

    def settle(honest, record, result, now):
        return honest(record, result, looked_at)

    wrap(monkeypatch, Deadlines, "_handle_due", handle_due)
    wrap(monkeypatch, RolloutRecord, "settle", settle)
    wrap(monkeypatch, RolloutRecord, "finish", settle)


@mutant("lease-safety", UNSEEN)
def the_deadline_itself_is_within_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease has ended only after its deadline, not at it."""
    wrap(monkeypatch, PollingLease, "expired", lambda _, lease, now: now > lease.deadline)
