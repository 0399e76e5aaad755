"""Broken variants of a server whose state outlives its processes."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from attrs import evolve
from simulation.mutants import Run, interrupted, mutant, wrap

from rollout.client.polling import Poller
from rollout.server import registry as registry_module
from rollout.server.state import Journal
from rollout.server.state import rows as rows_module
from rollout.simulation import (
    Caller,
    RolloutPlan,
    ServerOptions,
    SimulatedWorld,
    Simulation,
    check_trace,
    simulate,
)
from rollout.simulation.callers import run_workload
from rollout.simulation.run import simulate_workload
from rollout.simulation.store import SimulatedStore


def crash(world: SimulatedWorld) -> None:
    """Kill the server, but for two seconds."""
    world.restart_server(down_sec=2.0)


def crashes(seed: int) -> Simulation[Any]:
    """Drawn workloads on a good network, and a server that is killed at any step."""
    return simulate_workload(seed, faults="none", crashes=True)


def killed(*plans: RolloutPlan, after: str, after_sec: float, **options: Any) -> Run:
    """A server with a state that is killed so long after an event of the first rollout."""
    return interrupted(crash, *plans, after=after, after_sec=after_sec, durable=True, **options)


IN_FLIGHT = killed(
    RolloutPlan(rollout_id="r", agent_sec=60.0), after="workflow-started", after_sec=9.0
)
ENDED = killed(
    RolloutPlan(rollout_id="r", agent_sec=1.0, caller=Caller.AGAIN, caller_sec=30.0, grade=False),
    after="finished",
    after_sec=9.0,
)


@mutant("durability", ENDED)
def results_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end is published and never written."""

    def put(honest, journal, row, done, **more):
        if row.status is None:
            honest(journal, row, done, **more)
        else:
            done(None)

    wrap(monkeypatch, Journal, "put", put)


def killed_as_it_answers(seed: int) -> Simulation[Any]:
    """A server that is killed in the moment in which it has answered with a result."""
    options = ServerOptions(durable=True)
    plan = RolloutPlan(rollout_id="r", grade=False, caller=Caller.AGAIN, caller_sec=30.0)

    async def scenario(world: SimulatedWorld) -> None:
        async def kill() -> None:
            await trio.sleep(0.5)
            began = world.trace.select("workflow-started")[0].time
            await trio.sleep_until(began + plan.agent_sec)
            for _ in range(200):
                await trio.lowlevel.checkpoint()
                answers = world.trace.select("server-answered")
                if any("digest" in event.detail for event in answers):
                    crash(world)
                    return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            await run_workload(world, [plan], limit_sec=1000.0)

    run = simulate(scenario, seed=seed, faults="none", options=options)
    return Simulation(seed, [plan], run.trace, check_trace(run.trace, options, [plan]))


@mutant("durability", killed_as_it_answers)
def results_are_published_before_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end is published as it is put into the journal."""

    def put(honest, journal, row, done, **more):
        if row.status is not None:
            done(None)
            done = lambda _: None  # noqa: E731
        honest(journal, row, done, **more)

    wrap(monkeypatch, Journal, "put", put)


@mutant("durability", ENDED)
def a_restart_drops_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process begins with an empty state."""

    async def open_(honest, store):
        restored = await honest(store)
        store.disk.rows.clear()
        return evolve(restored, in_flight=())

    wrap(monkeypatch, SimulatedStore, "open", open_)


@mutant("durability", IN_FLIGHT)
def what_was_in_flight_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process ends nothing of what was in flight."""

    async def open_(honest, store):
        return evolve(await honest(store), in_flight=())

    wrap(monkeypatch, SimulatedStore, "open", open_)


@mutant("durability", IN_FLIGHT)
def a_restart_forgets_that_the_agent_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was in flight ends without the time at which its agent started."""

    def ended(row, until):
        return rows_module.ended_by_restart(row._replace(agent_started_at=None), until)

    monkeypatch.setattr(registry_module, "ended_by_restart", ended)


@mutant("durability", crashes)
def an_agent_starts_before_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of an agent is never written by itself."""

    def put(honest, journal, row, done, **more):
        if row.status is None and row.agent_started_at is not None:
            done(None)
        else:
            honest(journal, row, done, **more)

    wrap(monkeypatch, Journal, "put", put)


@mutant(
    "durability",
    killed(
        RolloutPlan(rollout_id="r", arrival_sec=1.0),
        RolloutPlan(rollout_id="first", agent_sec=60.0),
        after="admitted",
        after_sec=5.0,
        max_concurrent=1,
    ),
)
def an_admission_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An execution starts before its admission is written."""

    def put(honest, journal, row, done, **more):
        if row.status is None and row.agent_started_at is None:
            done(None)
        else:
            honest(journal, row, done, **more)

    wrap(monkeypatch, Journal, "put", put)


@mutant("retry-in-lease", IN_FLIGHT)
def a_restart_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls of a server with a state are given up as those of any other."""
    monkeypatch.setattr(Poller, "durable_sec", 0.0)
