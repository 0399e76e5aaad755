"""The same seed gives the same run, event for event, in this process and in any other."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import subprocess
import sys

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from rollout.simulation import ServerOptions, deterministic_run, simulate, simulate_workload
from rollout.simulation.determinism import current_mock_clock
from rollout.simulation.strategies import fault_plans, server_options, workloads

LEVELS = ("none", "mild", "harsh")
SEEDS = (0, 1, 7, 2**64 + 3, -5)

scheduler = importlib.import_module("trio._core._run")


def rendered(seed, faults, workers=None):
    run = simulate_workload(
        seed, rollouts=8, faults=faults, workers=workers, crashes=workers is not None
    )
    return run.trace.render()


# --- traces -------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", LEVELS)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_seed_gives_the_same_trace(seed, faults):
    first = rendered(seed, faults)
    random.seed("somebody else draws in between")
    assert rendered(seed, faults) == first
    assert len(first.splitlines()) > 50


@pytest.mark.parametrize("faults", LEVELS)
def test_different_seeds_give_different_traces(faults):
    assert len({rendered(seed, faults) for seed in SEEDS}) == len(SEEDS)


def test_a_seed_is_run_alike_after_any_other():
    alone = rendered(3, "harsh")
    for other in (1, 2):
        rendered(other, "mild")
    assert rendered(3, "harsh") == alone


DIGESTS = """
import hashlib, json, logging, sys
from rollout.simulation import simulate_workload
logging.getLogger("rollout").setLevel(logging.CRITICAL + 1)
for seed, faults, workers in json.load(sys.stdin):
    run = simulate_workload(
        seed, rollouts=8, faults=faults, workers=workers, crashes=workers is not None
    )
    print(hashlib.sha256(run.trace.render().encode()).hexdigest())
"""


def test_another_process_with_other_hashes_gives_the_same_traces():
    runs = [(seed, faults, None) for faults in LEVELS for seed in SEEDS]
    runs += [(0, "harsh", 2), (1, "harsh", 3)]
    here = [hashlib.sha256(rendered(*run).encode()).hexdigest() for run in runs]
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS],
        input=json.dumps(runs),
        env={**os.environ, "PYTHONHASHSEED": "4242"},  # this process has one of its own
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.split() == here


@given(
    plans=workloads(max_size=3),
    plan=fault_plans(max_size=6),
    options=server_options(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25)
def test_drawn_workloads_are_repeated_event_for_event(plans, plan, options, seed):
    def run():
        plan.used = 0
        run = simulate_workload(seed, faults="none", plans=plans, plan=plan, options=options)
        return run.trace.render()

    assert run() == run()


# Enough tasks that are ready at the same moment for every order to show up.
async def orders(world):
    order = []

    async def task(number):
        for _ in range(5):
            await trio.sleep(1)
            order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(task, number)
    return order


def test_the_seed_decides_in_which_order_tasks_run():
    drawn = [
        tuple(simulate(orders, seed=seed, faults="none", options=ServerOptions()).value)
        for seed in [*range(8), *range(8)]
    ]
    assert drawn[:8] == drawn[8:]
    assert len(set(drawn)) > 1


# --- deterministic_run --------------------------------------------------------------------------


@pytest.fixture(params=[True, False])
def switch(request, monkeypatch):
    """trio's own switch, in either position."""
    monkeypatch.setattr(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", request.param)
    return request.param


async def draw_and_return(value):
    assert scheduler._ALLOW_DETERMINISTIC_SCHEDULING is True
    scheduler._r.random()
    await trio.sleep(3600)
    return value


async def draw_and_fail(error):
    await draw_and_return(None)
    raise error


def test_trios_switches_are_restored(switch):
    state = scheduler._r.getstate()
    assert deterministic_run(draw_and_return, "value", seed=1) == "value"
    assert scheduler._ALLOW_DETERMINISTIC_SCHEDULING is switch
    assert scheduler._r.getstate() == state


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_trios_switches_are_restored_after_an_error(switch, kind):
    state = scheduler._r.getstate()
    error = kind("as it is")
    with pytest.raises(kind) as caught:
        deterministic_run(draw_and_fail, error, seed=1)
    assert caught.value is error
    assert scheduler._ALLOW_DETERMINISTIC_SCHEDULING is switch
    assert scheduler._r.getstate() == state


def test_trios_switches_are_restored_when_the_run_cannot_begin(switch):
    async def main():
        state = scheduler._r.getstate()
        with pytest.raises(RuntimeError, match="inside a run"):
            deterministic_run(draw_and_return, None, seed=1)
        assert scheduler._ALLOW_DETERMINISTIC_SCHEDULING is switch
        assert scheduler._r.getstate() == state

    trio.run(main)


def test_time_passes_without_waiting_and_starts_at_zero():
    async def main():
        begin = trio.current_time()
        await trio.sleep(1e6)
        return begin, trio.current_time()

    assert deterministic_run(main, seed=0) == (0.0, 1e6)


# --- current_mock_clock -------------------------------------------------------------------------


def test_the_running_mock_clock_is_found():
    async def main():
        clock = current_mock_clock()
        clock.jump(5.0)
        return clock, trio.current_time()

    clock, now = deterministic_run(main, seed=0)
    assert isinstance(clock, MockClock)
    assert now == 5.0


async def test_a_real_clock_is_no_mock_clock():
    with pytest.raises(TypeError, match=r"MockClock \(see deterministic_run\)"):
        current_mock_clock()
