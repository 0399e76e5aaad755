"""Broken variants of what a server does with all of its rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from attrs import evolve
from simulation.mutants import Run, drawn, interrupted, mutant, wrap, written

from rollout.backend.executions import SlotBackend
from rollout.backend.local import LocalBackend
from rollout.errors import UnknownRolloutError
from rollout.server import RolloutServer, ShutdownBudget
from rollout.server.registry import RolloutRegistry
from rollout.server.shutdown import StagedShutdown
from rollout.simulation import (
    Caller,
    Course,
    Fate,
    Fault,
    RolloutPlan,
    Simulation,
)
from rollout.types import RolloutStatus

# --- slots ----------------------------------------------------------------------------------------


def _leak(monkeypatch: pytest.MonkeyPatch, *statuses: RolloutStatus) -> None:
    async def execute(honest, backend, request, execution, context):
        outcome = await honest(backend, request, execution, context)
        if outcome.result.status in statuses and backend.slots.limiter.total_tokens > 1:
            backend.slots.limiter.total_tokens -= 1
        return outcome

    wrap(monkeypatch, LocalBackend, "_execute", execute)


@mutant("slots", drawn("none"))
def an_error_keeps_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is not given back when the rollout fails."""
    _leak(monkeypatch, RolloutStatus.FAILURE)


@mutant("slots", drawn("none"))
def a_cancellation_keeps_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is not given back when the rollout is cancelled."""
    _leak(monkeypatch, RolloutStatus.CANCELLED)


@mutant("slots", drawn("none"))
def one_slot_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one slot more than configured."""

    def init(honest, backend, **options):
        honest(backend, **options)
        backend.slots.limiter.total_tokens += 1

    wrap(monkeypatch, LocalBackend, "__init__", init)


@mutant(
    "slots",
    written(
        RolloutPlan(
            rollout_id="r",
            agent=Course.SWALLOW,
            agent_sec=30.0,
            caller=Caller.CANCEL,
            caller_sec=2.0,
        ),
        RolloutPlan(rollout_id="next", arrival_sec=1.0),
        max_concurrent=1,
    ),
)
def a_cancel_gives_two_slots_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled rollout gives its slot back before it has ended, and then again."""

    def cancel_rollouts(honest, backend, *args, **more):
        answer = honest(backend, *args, **more)
        backend.slots.limiter.total_tokens += list(answer.values()).count("cancelled_running")
        return answer

    wrap(monkeypatch, LocalBackend, "cancel_rollouts", cancel_rollouts)


BUSY = written(
    RolloutPlan(rollout_id="r", agent_sec=50.0, caller=Caller.CANCEL, caller_sec=2.0),
    *(RolloutPlan(rollout_id=f"r{n}", arrival_sec=10.0 + n, agent_sec=30.0) for n in range(3)),
    max_concurrent=1,
    max_queue_depth=1,
)
"""A cancelled rollout, and then one rollout more than there is room for."""


@mutant("slots", BUSY)
def one_place_too_many_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue holds one rollout more than configured."""

    def has_capacity(honest, table):
        if table.max_concurrent is None or table.max_queue_depth is None:
            return honest(table)
        return len(table.executions) <= table.max_concurrent + table.max_queue_depth

    wrap(monkeypatch, SlotBackend, "has_capacity", has_capacity)


@mutant("slots", BUSY)
def a_place_in_the_queue_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout that was cancelled is counted for ever."""

    def release(honest, backend, rollout_id):
        execution = backend.executions.get(rollout_id)
        if execution is None or execution.cancelled_at == float("inf"):
            honest(backend, rollout_id)

    wrap(monkeypatch, LocalBackend, "release", release)


# --- retention ------------------------------------------------------------------------------------


@mutant("retention", drawn("none"))
def a_result_is_forgotten_at_its_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result can be read once."""

    async def wait_for_result(honest, registry, rollout_id, *args, **more):
        entry = registry._entries.get(rollout_id)
        if entry is not None and entry.record.delivered:
            raise UnknownRolloutError("read already")
        return await honest(registry, rollout_id, *args, **more)

    wrap(monkeypatch, RolloutRegistry, "wait_for_result", wait_for_result)


@mutant("retention", drawn("none"))
def half_the_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result is forgotten after half of its time."""

    def conclude(honest, registry, entry, *args):
        registry.result_retention_sec /= 2
        try:
            honest(registry, entry, *args)
        finally:
            registry.result_retention_sec *= 2

    wrap(monkeypatch, RolloutRegistry, "_conclude", conclude)


@mutant(
    "retention",
    written(
        RolloutPlan(rollout_id="r", agent=Course.SWALLOW, agent_sec=300.0, caller=Caller.VANISH),
        RolloutPlan(rollout_id="meanwhile", agent_sec=400.0),
        result_wait_timeout_sec=20.0,
        polling_lease_timeout_sec=31.0,  # as long is the retention, at least
        result_retention_sec=5.0,
    ),
)
def an_id_is_free_during_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id is given back when the retention is over, though the execution is not."""

    def forget_if_over(honest, registry, entry):
        executing, entry.executing = entry.executing, False
        try:
            honest(registry, entry)
        finally:
            entry.executing = executing

    wrap(monkeypatch, RolloutRegistry, "_forget_if_over", forget_if_over)


@mutant("retention", drawn("none"))
def nothing_is_ever_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id is never given back."""
    wrap(monkeypatch, RolloutRegistry, "_forget_if_over", lambda *_: None)


@mutant("retention", drawn("none"))
def an_id_is_free_once_its_result_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retained id is admitted again."""

    def admit(honest, registry, request, **more):
        entry = registry._entries.get(request.rollout_id)
        if entry is not None and entry.record.result is not None:
            del registry._entries[request.rollout_id]
        return honest(registry, request, **more)

    wrap(monkeypatch, RolloutRegistry, "admit", admit)


# --- shutdown -------------------------------------------------------------------------------------


def _budget(monkeypatch: pytest.MonkeyPatch, **changes: float) -> None:
    async def stop_executions(honest, stages):
        stages.budget = evolve(stages.budget, **changes)
        await honest(stages)

    wrap(monkeypatch, StagedShutdown, "_stop_executions", stop_executions)


def left_behind(agent: Course, agent_sec: float, **options: Any) -> Run:
    """A rollout whose caller is gone when the server shuts down."""
    return written(
        RolloutPlan(
            rollout_id="r", agent=agent, agent_sec=agent_sec, caller=Caller.VANISH, grade=False
        ),
        **options,
    )


@mutant("shutdown", left_behind(Course.OK, 300.0))
def a_drain_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shutdown waits for work to finish by itself, however long that takes."""
    _budget(monkeypatch, drain_sec=1e6)


@mutant("shutdown", left_behind(Course.OK, 300.0))
def no_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is asked to stop as soon as the shutdown begins."""
    _budget(monkeypatch, drain_sec=0.0)


@mutant("shutdown", left_behind(Course.SWALLOW, 300.0))
def no_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executions are forced to end as soon as they were asked to."""
    _budget(monkeypatch, cleanup_sec=0.0)


@mutant(
    "shutdown",
    left_behind(
        Course.SWALLOW,
        300.0,
        shutdown=ShutdownBudget(drain_sec=1, cleanup_sec=2, forced_sec=3, delivery_sec=1),
    ),
)
def force_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shutdown waits for executions that ignore the force, however long that takes."""
    _budget(monkeypatch, forced_sec=1e6)


@mutant(
    "shutdown",
    interrupted(
        lambda world: world.server.stop(),
        RolloutPlan(rollout_id="r", agent_sec=20.0),
        RolloutPlan(rollout_id="late", arrival_sec=5.0),
        after="workflow-started",
        after_sec=3.0,
    ),
)
def admissions_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts are admitted while the server shuts down."""
    always = property(lambda registry: registry._nursery is not None, lambda *_: None)
    monkeypatch.setattr(RolloutRegistry, "accepting", always, raising=False)


@mutant(
    "shutdown",
    interrupted(
        lambda world: world.restart_server(),
        RolloutPlan(rollout_id="r", agent_sec=50.0),
        after="workflow-started",
        after_sec=5.0,
    ),
)
def an_execution_outlives_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executions belong to no nursery of the server."""

    class Nobody:
        def start_soon(self, function, *args):
            trio.lowlevel.spawn_system_task(function, *args)

    def admit(honest, registry, request, **more):
        owner = registry._nursery
        registry._nursery = Nobody() if owner is not None else None
        try:
            return honest(registry, request, **more)
        finally:
            registry._nursery = owner

    wrap(monkeypatch, RolloutRegistry, "admit", admit)


# --- disconnect -----------------------------------------------------------------------------------


def _at_disconnect(
    monkeypatch: pytest.MonkeyPatch, harm: Callable[[RolloutRegistry, Any], None]
) -> None:
    async def wait_for_result(honest, registry, rollout_id, *args, **more):
        entry = registry._entries.get(rollout_id)
        try:
            return await honest(registry, rollout_id, *args, **more)
        except trio.Cancelled:
            if entry is not None:
                harm(registry, entry)
            raise

    wrap(monkeypatch, RolloutRegistry, "wait_for_result", wait_for_result)


@mutant("disconnect")
def a_disconnect_cancels_the_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The execution ends with the poll that is cancelled."""
    _at_disconnect(monkeypatch, lambda _, entry: entry.call.cancel())


@mutant("disconnect")
def a_disconnect_counts_as_a_cancel_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout whose caller disconnects is cancelled as if somebody had asked for it."""
    _at_disconnect(monkeypatch, lambda registry, entry: registry.cancel(ids=[entry.rollout_id]))


def cut_off(seed: int) -> Simulation[Any]:
    """A result whose delivery is cut off, a step of the server later for each seed."""
    plan = RolloutPlan(rollout_id="r", agent_sec=1.0, caller=Caller.LATE, caller_sec=5.0)
    cut = Fate(fault=Fault.LOST_DURING, after_sec=0.0, after_steps=seed)
    return written(plan, fates=(Fate(), cut))(seed)


@mutant("disconnect", cut_off)
def a_disconnect_deletes_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result counts as read although the connection was lost while it was sent."""

    async def asgi_app(honest, app, scope, receive, send):
        entry = app.registry._entries.get("".join(scope["path"].split("/")[2:3]))

        async def sending(message):
            if message["type"] == "http.response.body":
                with trio.move_on_after(0.001):
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    if entry is not None and entry.record.result is not None:
                        app.registry._entries.pop(entry.rollout_id, None)
            await send(message)

        await honest(app, scope, receive, sending)

    wrap(monkeypatch, RolloutServer, "asgi_app", asgi_app)
