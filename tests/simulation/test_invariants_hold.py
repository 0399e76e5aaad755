"""The invariants hold: in three thousand drawn rollouts, and at the borders of every option.

For more of them: ``rollout simulate --seeds 2000 --faults harsh``.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from simulation.many_seeds import Chunk, run_chunks

from rollout.simulation import Fault, simulate_workload
from rollout.simulation.strategies import fault_plans, server_options, workloads

LEAST_ROLLOUTS = 3_000
SIMULATED_DAYS = 0.25
SEEDS = {"none": range(20), "mild": range(40), "harsh": range(100)}


def test_no_invariant_is_violated_in_three_thousand_rollouts():
    stats = run_chunks(Chunk(level, seeds) for level, seeds in SEEDS.items())
    assert stats.rollouts >= LEAST_ROLLOUTS
    assert stats.simulated_sec > SIMULATED_DAYS * 24 * 3600
    kinds = {str(fault) for fault in Fault if fault is not Fault.NONE}
    assert stats.faults.keys() == kinds | {"paused", "server-crashed"}


def test_no_invariant_is_violated_by_servers_that_are_killed():
    stats = run_chunks(
        [
            Chunk("none", range(10), crashes=True),
            Chunk("harsh", range(30), crashes=True),
            Chunk("harsh", range(30), feed=True, crashes=True),
        ]
    )
    assert stats.faults["server-crashed"] > stats.runs


def test_no_invariant_is_violated_by_pools():
    stats = run_chunks(
        [
            Chunk("none", range(5), crashes=True, workers=2),
            Chunk("harsh", range(5), feed=True, crashes=True, workers=3),
            Chunk("harsh", range(5, 10), workers=3),
        ]
    )
    assert {"server-crashed", "cut-off", "drained"} <= stats.faults.keys()


RARE = [
    *((seed, False) for seed in (269, 2394, 2735, 3394, 27461)),
    *((seed, True) for seed in (467, 471, 758, 826, 837, 1013, 30119, 30212)),
]
"""Runs in which things meet in one moment: a pause ends as a block is left, a feed is cut off while
it writes, a batch attaches rollouts while a renewal is on its way."""


@pytest.mark.parametrize(("seed", "feed"), RARE)
def test_no_invariant_is_violated_in_rare_meetings(seed, feed):
    run = simulate_workload(seed, faults="harsh", feed=feed)
    assert run.violations == [], run.violations[0]


@given(
    options=server_options(),
    plans=workloads(max_size=5),
    plan=fault_plans(max_size=20),
    seed=st.integers(0, 9),
)
@settings(max_examples=150, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
def test_no_invariant_is_violated_at_the_borders(options, plans, plan, seed):
    run = simulate_workload(seed, faults="none", plans=plans, plan=plan, options=options)
    assert run.violations == [], run.violations[0]
