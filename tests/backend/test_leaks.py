"""Slots never exceed their limit and none leaks, whatever is cancelled when (by hypothesis)."""

from __future__ import annotations

import math
from functools import partial

import pytest
import trio
import trio.testing
from attrs import frozen
from backend.helpers import Progress, assert_nothing_is_left, backend, counts, execute
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import RolloutStatus
from rollout.types import RolloutErrorCategory

HORIZON = 6
moments = st.integers(0, HORIZON)
ends = st.sampled_from(["return", "raise", "swallow", "shield", "group", "exit"])


@frozen
class Plan:
    """One rollout: when it comes, what its code does, and what happens to it from outside."""

    arrives: int
    run_sec: int
    run_end: str
    grade_sec: int
    grade_end: str
    graded: bool
    agent_timeout: int | None
    grader_timeout: int | None
    cancel_at: int | None
    abandon_at: int | None


plans = st.builds(
    Plan,
    arrives=moments,
    run_sec=moments,
    run_end=ends,
    grade_sec=moments,
    grade_end=ends,
    graded=st.booleans(),
    agent_timeout=st.none() | st.integers(-1, HORIZON),
    grader_timeout=st.none() | st.integers(-1, HORIZON),
    cancel_at=st.none() | moments,
    abandon_at=st.none() | moments,
)


async def act(seconds, end):
    if end == "shield":
        with trio.CancelScope(shield=True):
            await trio.sleep(seconds)
        return
    try:
        await trio.sleep(seconds)
    except trio.Cancelled:
        if end != "swallow":
            raise
    if end == "raise":
        raise KeyError("planned")
    if end == "group":
        raise ExceptionGroup("planned", [ValueError("planned")])
    if end == "exit":
        raise SystemExit


class Workload:
    """Runs plans on a backend, and checks the limits at every turn."""

    def __init__(self, slots, grader_slots, depth):
        self.slots = slots or math.inf
        self.grader_slots = grader_slots or math.inf
        self.running = set()
        self.grading = set()
        self.plans = {}
        self.outcomes = {}
        self.refused = set()
        self.abandoned = set()
        self.progress = {}
        self.local = backend(
            self.run, self.grade, slots=slots, grader_slots=grader_slots, depth=depth
        )

    def check(self):
        queued, running = counts(self.local)
        assert len(self.running) + len(self.grading) <= running <= self.slots
        assert len(self.grading) <= self.grader_slots
        if self.local.max_queue_depth is not None and self.slots < math.inf:
            assert queued + running <= self.slots + self.local.max_queue_depth

    async def run(self, ctx):
        name = ctx.metadata["name"]
        assert ("started", trio.current_time()) in self.progress[name].events
        self.running.add(name)
        self.check()
        try:
            await act(self.plans[name].run_sec, self.plans[name].run_end)
        finally:
            self.check()
            self.running.remove(name)
        return ctx.prompt

    async def grade(self, ctx):
        name = ctx.metadata["name"]
        self.grading.add(name)
        self.check()
        try:
            await act(self.plans[name].grade_sec, self.plans[name].grade_end)
        finally:
            self.check()
            self.grading.remove(name)
        ctx.set_reward(1)

    async def one(self, name, plan):
        await trio.sleep(plan.arrives)
        if not self.local.reserve(name):
            self.refused.add(name)
            return
        try:
            with trio.CancelScope() as scope:
                if plan.abandon_at is not None:
                    scope.deadline = trio.current_time() + plan.abandon_at
                self.outcomes[name] = await execute(
                    self.local,
                    name,
                    progress=self.progress[name],
                    grade=plan.graded,
                    metadata={"name": name},
                    agent_timeout_sec=plan.agent_timeout,
                    grader_timeout_sec=plan.grader_timeout,
                )
            if scope.cancelled_caught:
                self.abandoned.add(name)
        finally:
            self.local.release(name)
        self.check()

    async def cancel(self, name, at):
        await trio.sleep(at)
        (disposition,) = self.local.cancel_rollouts(ids=[name]).values()
        assert disposition in {"cancelled_queued", "cancelled_running", "not_found"}

    async def all(self, chosen):
        async with trio.open_nursery() as nursery:
            for index, plan in enumerate(chosen):
                name = f"r{index}"
                self.plans[name] = plan
                self.progress[name] = Progress()
                nursery.start_soon(self.one, name, plan)
                if plan.cancel_at is not None:
                    nursery.start_soon(self.cancel, name, plan.cancel_at)
        assert not self.running
        assert not self.grading
        assert_nothing_is_left(self.local)
        assert self.outcomes.keys() | self.refused | self.abandoned == self.plans.keys()
        for name, outcome in self.outcomes.items():
            check_outcome(self.plans[name], outcome, self.progress[name])


def check_outcome(plan, outcome, progress):
    result = outcome.result
    assert result.status in {
        RolloutStatus.SUCCESS,
        RolloutStatus.FAILURE,
        RolloutStatus.CANCELLED,
    }
    assert (result.err_category is None) == (result.status is not RolloutStatus.FAILURE)
    assert (result.err_message is None) == (result.status is RolloutStatus.SUCCESS)
    assert progress.names in ([], ["started"], ["started", "grading"])
    if result.status is RolloutStatus.SUCCESS:
        assert "started" in progress.names
        assert (result.sample.reward == 1.0) == plan.graded
        assert plan.run_end not in {"raise", "group", "exit"}
    if result.status is RolloutStatus.CANCELLED:
        assert plan.cancel_at is not None
    if result.err_category is RolloutErrorCategory.TIMEOUT:
        assert plan.agent_timeout is not None or plan.grader_timeout is not None
    if plan.agent_timeout is not None and plan.agent_timeout <= 0:
        assert progress.names == []


@settings(max_examples=150)
@given(
    chosen=st.lists(plans, min_size=1, max_size=8),
    slots=st.sampled_from([1, 2, 3, None]),
    grader_slots=st.sampled_from([1, 2, None]),
    depth=st.sampled_from([None, None, 1, 3]),
)
def test_slots_never_exceed_their_limit_and_none_leaks(chosen, slots, grader_slots, depth):
    workload = Workload(slots, grader_slots, depth)
    trio.run(workload.all, chosen, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("ticks", range(12))
@pytest.mark.parametrize("how", ["from outside", "by id"])
async def test_a_cancel_at_any_checkpoint_leaks_nothing(ticks, how):
    async def run(ctx):
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        return ctx.prompt

    async def grade(ctx):
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        ctx.set_reward(1)

    local = backend(run, grade, slots=1, grader_slots=1)
    outcomes = {}

    async def go(name, scope):
        with scope:
            outcomes[name] = await execute(local, name, grade=True, label="x")

    scopes = {name: trio.CancelScope() for name in ("a", "b", "c")}
    async with trio.open_nursery() as nursery:
        for name, scope in scopes.items():
            nursery.start_soon(partial(go, name, scope))
        for _ in range(ticks):
            await trio.lowlevel.checkpoint()
        for name in ("a", "b"):
            if how == "by id":
                local.cancel_rollouts(ids=[name])
            else:
                scopes[name].cancel()
    assert outcomes["c"].result.status is RolloutStatus.SUCCESS
    if how == "by id":
        assert outcomes.keys() == scopes.keys()
    assert_nothing_is_left(local)
