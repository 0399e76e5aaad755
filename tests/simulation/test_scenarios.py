"""Scenarios of a user's own: what they return, how they fail, and what is said then."""

from __future__ import annotations

import pytest
import trio

from rollout.errors import InvalidFieldError, SimulationTimeoutError
from rollout.simulation import (
    Fate,
    FaultLevel,
    RolloutPlan,
    ScriptedFaults,
    simulate,
    simulate_workload,
)


async def ask(world, **plan):
    async with world.client() as client:
        return await client.run_rollout(**RolloutPlan(rollout_id="r1", **plan).arguments())


class MyError(Exception):
    pass


@pytest.mark.parametrize("faults", ["harsh", FaultLevel(name="own"), ScriptedFaults([])])
def test_an_error_comes_out_as_it_is_with_its_seed(faults):
    raised = []

    async def scenario(world):
        await ask(world)
        raised.append(MyError("mine"))
        raise raised[0]

    with pytest.raises(MyError) as caught:
        simulate(scenario, seed=42, faults=faults)
    assert caught.value is raised[0]
    (note,) = caught.value.__notes__
    first, *events = note.splitlines()
    assert first.startswith("simulated with seed=42")
    assert ("harsh" in first, "own" in first) == (faults == "harsh", hasattr(faults, "name"))
    assert 1 <= len(events) <= 10
    assert any(" answered r1 " in event for event in events)


def test_a_group_of_the_scenario_stays_a_group():
    async def fail(text):
        raise MyError(text)

    async def scenario(_):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, "a")
            nursery.start_soon(fail, "b")

    with pytest.raises(ExceptionGroup) as caught:
        simulate(scenario, seed=1)
    assert {str(error) for error in caught.value.exceptions} == {"a", "b"}
    assert "seed=1" in caught.value.__notes__[0]


def test_an_interrupt_comes_out_alone():
    async def scenario(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(scenario, seed=1)


def test_a_scenario_that_is_no_async_function():
    with pytest.raises(TypeError, match="await"):
        simulate(lambda _: 5, seed=1)


def test_a_scenario_in_which_nothing_can_happen_any_longer_is_ended():
    async def scenario(_):
        await trio.Event().wait()

    with pytest.raises(SimulationTimeoutError, match="within 604800 s of simulated time") as caught:
        simulate(scenario, seed=7)
    assert "seed=7" in caught.value.__notes__[0]


def test_a_scenario_that_never_stops_polling_is_ended_in_time():
    async def scenario(world):
        await ask(world, agent_sec=1e9)

    with pytest.raises(SimulationTimeoutError, match="within 600 s"):
        simulate(scenario, seed=7, faults="none", limit_sec=600)


def test_without_a_limit_a_scenario_may_take_its_time():
    async def scenario(world):
        await trio.sleep(30 * 24 * 3600)
        return world.trace.add("caller", "woke-up").time

    run = simulate(scenario, seed=7, faults="none", limit_sec=None)
    assert run.value == 30 * 24 * 3600
    with pytest.raises(SimulationTimeoutError):
        simulate(scenario, seed=7, faults="none")


@pytest.mark.parametrize("seed", [None, "7", 7.0, True])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(InvalidFieldError, match="seed must be a whole number"):
        simulate(ask, seed=seed)
    with pytest.raises(InvalidFieldError, match="seed must be a whole number"):
        simulate_workload(seed)


@pytest.mark.parametrize("faults", [None, 5, [], ScriptedFaults])
def test_faults_that_are_none(faults):
    with pytest.raises(TypeError, match="faults must be a name, a FaultLevel or a plan"):
        simulate(ask, seed=1, faults=faults)


@pytest.mark.parametrize("faults", ["hard", ""])
def test_a_level_that_does_not_exist(faults):
    for run in (
        lambda: simulate(ask, seed=1, faults=faults),
        lambda: simulate_workload(1, faults=faults),
    ):
        with pytest.raises(ValueError, match="faults must be one of none, mild, harsh"):
            run()


def test_a_run_is_short_to_look_at():
    run = simulate(ask, seed=1, faults="none")
    assert (
        repr(run.trace)
        == f"<Trace of {len(run.trace)} events until {run.trace.events[-1].time:.3f} s>"
    )
    assert len(repr(run)) < 1000
    assert repr(type(run.trace)()) == "<Trace of 0 events>"


def test_an_admission_that_is_given_up_on_its_way_arrives_all_the_same():
    async def scenario(world):
        with trio.move_on_after(1):
            await ask(world, grade=False)
        await trio.sleep(10)

    run = simulate(scenario, seed=0, faults=ScriptedFaults([Fate(out_sec=5)]))
    assert run.violations == []
    (gave_up,) = run.trace.select("gave-up")
    (arrived,) = run.trace.select("arrived")
    assert (round(gave_up.time, 3), round(arrived.time, 3)) == (1, 5)
    assert run.trace.select("workflow-ended")
