"""Concurrency slots and the queue in front of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import trio
import trio.testing
from attrs import define, field
from backend.helpers import (
    Progress,
    assert_nothing_is_left,
    backend,
    counts,
    echo,
    execute,
    workflow,
)

from rollout import AgentWorkflowConfig, LocalBackend, RolloutStatus
from rollout.backend.executions import Execution, Slots, Span
from rollout.errors import BackendConfigurationError, DuplicateRolloutError


class Gate:
    """A workflow that notes who runs and waits until it is let go."""

    def __init__(self):
        self.running = []
        self.order = []
        self.peak = 0
        self.open = {}

    async def run(self, ctx):
        name = ctx.metadata["name"]
        self.running.append(name)
        self.order.append(name)
        self.peak = max(self.peak, len(self.running))
        try:
            await self.open.setdefault(name, trio.Event()).wait()
        finally:
            self.running.remove(name)
        return ctx.prompt

    def let_go(self, name):
        self.open.setdefault(name, trio.Event()).set()


async def start(nursery, local, name, results=None, **fields):
    async def run():
        outcome = await execute(local, name, metadata={"name": name}, **fields)
        if results is not None:
            results[name] = outcome.result.status

    nursery.start_soon(run)
    await trio.testing.wait_all_tasks_blocked()


def test_timings_count_the_queue_each_phase_and_all():
    execution = Execution("r", submitted_at=1.0)
    timings = {"queue_sec": 2.0, "agent_sec": None, "grader_sec": None, "total_sec": 2.0}
    assert execution.timings(3.0) == timings
    execution.agent_at = Span(4.0)
    timings |= {"queue_sec": 3.0, "agent_sec": 5.0, "total_sec": 8.0}
    assert execution.timings(9.0) == timings
    execution.agent_at.until = 9.0
    execution.grader_at = Span(10.0)
    timings |= {"grader_sec": 2.0, "total_sec": 11.0}
    assert execution.timings(12.0) == timings
    execution.grader_at.until = 12.5
    timings |= {"grader_sec": 2.5, "total_sec": 19.0}
    assert execution.timings(20.0) == timings


@pytest.mark.parametrize(
    ("config", "slots"),
    [(None, 4), (AgentWorkflowConfig(name="w"), None)],
)
def test_slots_without_a_number(config, slots):
    local = LocalBackend(workflow=workflow(echo), workflow_config=config)
    assert local.max_concurrent == slots
    assert local.health() == {
        "status": "ok",
        "concurrency": {"max_concurrent": slots, "queued": 0, "running": 0},
        "max_queue_depth": None,
        "counts": {},
    }


@pytest.mark.parametrize(("slots", "at_once"), [(1, 1), (2, 2), (4, 4), (None, 7)])
async def test_at_most_as_many_run_as_there_are_slots(slots, at_once):
    gate = Gate()
    local = backend(gate.run, slots=slots)
    results = {}
    async with trio.open_nursery() as nursery:
        for index in range(7):
            await start(nursery, local, f"r{index}", results)
        assert len(gate.running) == at_once
        assert counts(local) == (7 - at_once, at_once)
        for index in range(7):
            gate.let_go(f"r{index}")
    assert gate.peak == at_once
    assert set(results.values()) == {RolloutStatus.SUCCESS}
    assert len(results) == 7
    assert_nothing_is_left(local)


async def test_the_queue_is_first_come_first_served():
    gate = Gate()
    local = backend(gate.run, slots=1)
    names = [f"r{index}" for index in range(5)]
    async with trio.open_nursery() as nursery:
        for name in names:
            await start(nursery, local, name)
        for name in names:
            assert gate.running == [name]
            gate.let_go(name)
            await trio.testing.wait_all_tasks_blocked()
    assert gate.order == names


async def test_a_rollout_is_queued_until_it_has_a_slot_and_running_from_then_on(autojump_clock):
    gate = Gate()
    local = backend(gate.run, slots=1)
    progress = Progress()
    async with trio.open_nursery() as nursery:
        await start(nursery, local, "first")
        await start(nursery, local, "second", progress=progress)
        assert local.rollout_status("first") == {"status": "running"}
        assert local.rollout_status("second") == {"status": "queued"}
        assert local.rollout_status("third") is None
        await trio.sleep(10)
        assert progress.names == []
        gate.let_go("first")
        await trio.testing.wait_all_tasks_blocked()
        assert local.rollout_status("first") is None
        assert local.rollout_status("second") == {"status": "running"}
        assert progress.names == ["started"]
        assert progress.events[0][1] == trio.current_time()
        gate.let_go("second")
    assert local.rollout_status("second") is None


async def test_a_grading_rollout_says_so_and_keeps_its_slot():
    grading, go_on = trio.Event(), trio.Event()

    async def grade(ctx):
        grading.set()
        await go_on.wait()
        ctx.set_reward(1)

    local = backend(grade=grade, slots=1)
    progress = Progress()
    async with trio.open_nursery() as nursery:
        await start(nursery, local, "first", grade=True, label="42", progress=progress)
        await start(nursery, local, "second")
        assert grading.is_set()
        assert local.rollout_status("first") == {"status": "grading"}
        assert local.rollout_status("second") == {"status": "queued"}
        assert counts(local) == (1, 1)
        assert progress.names == ["started", "grading"]
        go_on.set()
    assert_nothing_is_left(local)


# --- the length of the queue ------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, -1, True, False, 1.5, 1.0, "3", [], float("inf")])
def test_a_depth_is_a_whole_number_from_one(depth):
    with pytest.raises(BackendConfigurationError, match="max_queue_depth"):
        LocalBackend(workflow=workflow(echo), max_queue_depth=depth)


@pytest.mark.parametrize(("slots", "depth"), [(1, 1), (1, 3), (4, 2)])
async def test_a_burst_is_cut_at_slots_plus_depth(slots, depth):
    local = backend(slots=slots, depth=depth)
    admitted = [local.reserve(f"r{index}") for index in range(20)]
    assert admitted == [True] * (slots + depth) + [False] * (20 - slots - depth)
    assert not local.has_capacity()
    assert counts(local) == (slots + depth, 0)
    local.release("r0")
    assert local.has_capacity()
    assert local.reserve("again")
    assert not local.reserve("once more")


async def test_a_reserved_place_lasts_from_admission_to_release():
    gate = Gate()
    local = backend(gate.run, slots=1, depth=1)
    async with trio.open_nursery() as nursery:
        for name in ("a", "b"):
            assert local.reserve(name)
            await start(nursery, local, name)
        assert not local.reserve("c")
        gate.let_go("a")
        gate.let_go("b")
    assert not local.has_capacity()
    local.release("a")
    local.release("b")
    assert_nothing_is_left(local)


@pytest.mark.parametrize(("slots", "depth"), [(None, None), (2, None), (None, 2)])
async def test_without_a_bound_there_is_always_room(slots, depth):
    local = backend(slots=slots, depth=depth)
    assert all(local.reserve(f"r{index}") for index in range(100))
    assert local.has_capacity()


async def test_one_id_is_reserved_and_executed_once():
    gate = Gate()
    local = backend(gate.run)
    assert local.reserve("a")
    assert not local.reserve("a")
    async with trio.open_nursery() as nursery:
        await start(nursery, local, "a")
        with pytest.raises(DuplicateRolloutError):
            await execute(local, "a", metadata={"name": "a"})
        assert gate.running == ["a"]
        gate.let_go("a")
    local.release("a")
    local.release("a")
    assert_nothing_is_left(local)


async def test_a_rollout_that_was_never_reserved_is_counted_while_it_executes():
    gate = Gate()
    local = backend(gate.run, slots=1, depth=1)
    async with trio.open_nursery() as nursery:
        await start(nursery, local, "a")
        assert counts(local) == (0, 1)
        assert local.reserve("b")
        assert not local.has_capacity()
        gate.let_go("a")
    local.release("b")
    assert_nothing_is_left(local)


async def test_an_id_may_come_again():
    local = backend()
    for _ in range(3):
        assert (await execute(local, "a")).result.status is RolloutStatus.SUCCESS
    assert_nothing_is_left(local)


# --- slots of the grader ----------------------------------------------------------------------


async def test_graders_have_slots_of_their_own(autojump_clock):
    busy = peak = 0

    async def grade(ctx):
        nonlocal busy, peak
        busy += 1
        peak = max(peak, busy)
        await trio.sleep(5)
        busy -= 1
        ctx.set_reward(1)

    local = backend(grade=grade, slots=4, grader_slots=2)
    results = []

    async def run(name):
        results.append(await execute(local, name, grade=True, label="", grader_timeout_sec=6))

    async with trio.open_nursery() as nursery:
        for index in range(4):
            nursery.start_soon(run, f"r{index}")
        await trio.sleep(1)
        assert counts(local) == (0, 4)
        assert all(local.rollout_status(f"r{index}") == {"status": "grading"} for index in range(4))
    assert peak == 2
    # Waiting for the grader takes nothing from its window.
    assert [outcome.result.status for outcome in results] == [RolloutStatus.SUCCESS] * 4
    assert trio.current_time() == pytest.approx(10)
    assert_nothing_is_left(local)


@define(eq=False)
class RunningThread:
    """Stands for the last call of an execution, whose thread runs on."""

    runs_on: bool = True
    callbacks: list[Callable[[], object]] = field(factory=list)

    def when_ended(self, callback):
        self.callbacks.append(callback)


@pytest.mark.parametrize(("threads", "end"), [(1, (None, 1000)), (2, (False, 60))])
async def test_the_queue_gives_up_only_if_threads_hold_all_slots(threads, end, autojump_clock):
    slots = Slots(2)
    for number in range(2):
        execution = Execution(f"r{number}", 0.0)
        assert await slots.acquire(execution, math.inf)
        if number < threads:
            execution._last_call = RunningThread()
            slots.release(execution)
    acquired = None
    with trio.move_on_after(1000):
        acquired = await slots.acquire(Execution("waiting", 0.0), math.inf)
    assert (acquired, trio.current_time()) == end
