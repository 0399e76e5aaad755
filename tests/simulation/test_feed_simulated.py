"""The simulation covers the result feed and batches: the invariants hold there, and are watched."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from cli.harness import Cli
from simulation.many_seeds import Chunk, run_chunks

import rollout.cli.simulate
import rollout.simulation.run
from rollout.cli.seeds import run_seed
from rollout.simulation import (
    Fault,
    RolloutPlan,
    Violation,
    simulate,
    simulate_workload,
)

SEEDS = {"none": range(15), "mild": range(25), "harsh": range(60)}
LEAST_ROLLOUTS = 1_900


# --- the invariants hold --------------------------------------------------------------------------


def test_no_invariant_is_violated_with_feeds_and_batches():
    stats = run_chunks(Chunk(level, seeds, feed=True) for level, seeds in SEEDS.items())
    assert stats.rollouts >= LEAST_ROLLOUTS
    kinds = {str(fault) for fault in Fault if fault is not Fault.NONE}
    assert stats.faults.keys() == kinds | {"paused", "server-crashed"}


def routes_of(run) -> Counter[str]:
    return run.trace.count("sent", "route")


def test_the_extensions_are_used_where_the_network_lets_them_through():
    count = sum(
        (routes_of(simulate_workload(seed, faults="none", feed=True)) for seed in range(3)),
        Counter(),
    )
    assert count["batch"] > count["admit"]
    assert count["feed"]
    assert count["renew"]


def test_by_default_the_network_knows_the_four_routes_alone():
    for seed in range(3):
        run = simulate_workload(seed, faults="harsh")
        assert routes_of(run).keys() <= {"admit", "poll", "cancel", "health"}


def test_results_come_through_the_feed():
    run = simulate_workload(0, faults="none", feed=True)
    told = {event.rollout_id for event in run.trace.select("told") if "digest" in event.detail}
    got = {event.rollout_id for event in run.trace.select("result")}
    assert len(told & got) > len(run.value) / 4


def test_a_scenario_of_ones_own_has_feeds_if_it_asks_for_them():
    async def scenario(world):
        async with world.client(feed=True) as client:
            for number in range(3):
                plan = RolloutPlan(rollout_id=f"mine-{number}")
                await client.run_rollout(**plan.arguments())

    run = simulate(scenario, seed=1, faults="none")
    assert run.violations == []
    assert routes_of(run)["feed"] == 1


@pytest.mark.parametrize("faults", ["none", "mild", "harsh"])
@pytest.mark.parametrize("seed", [0, 7])
def test_with_feeds_too_the_same_seed_gives_the_same_trace(seed, faults):
    first = simulate_workload(seed, faults=faults, feed=True).trace.render()
    simulate_workload(seed + 1, faults="harsh", feed=True)
    assert simulate_workload(seed, faults=faults, feed=True).trace.render() == first
    assert simulate_workload(seed, faults=faults).trace.render() != first


def test_the_command_line_simulates_with_feeds_and_says_how_to_replay_it(monkeypatch):
    def check(trace, options, workload=()):
        assert trace.select("told"), "there was no feed"
        return [Violation(invariant="slots", rollout_id="", message="the moon is full")]

    def run(seeds, recipe, *, workers):
        assert workers == 1
        return (run_seed(seed, recipe) for seed in seeds)

    monkeypatch.setattr(rollout.cli.simulate, "run_seeds", run)
    monkeypatch.setattr(rollout.simulation.run, "check_trace", check)
    ended = Cli()("simulate", "--seed", "3", "--feed", "--faults", "none", "--json")
    assert ended.exit_code == 1
    replay = json.loads(ended.stdout)["first_bad"]["replay"]
    assert replay == "rollout simulate --seed 3 --faults none --rollouts 20 --feed"
