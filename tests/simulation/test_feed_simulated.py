"""The simulation covers the result feed and batches: the invariants hold there, and are watched."""

from __future__ import annotations

import json
from collections import Counter

import httpx
import pytest
import trio
from cli.harness import Cli
from simulation.many_seeds import chunks, run_chunks
from simulation.mutants import Mutant, Patch, Run, wrap

import rollout.cli.simulate
import rollout.simulation.run
from rollout.cli.seeds import run_seed
from rollout.client.feed import ResultFeed
from rollout.client.followed import Followed
from rollout.client.wire import Wire
from rollout.server.feed import Feed, FeedHub
from rollout.simulation import (
    Fault,
    FaultLevel,
    RolloutPlan,
    SimulationStats,
    Violation,
    simulate,
    simulate_workload,
)

SEEDS = {"none": range(60), "mild": range(100), "harsh": range(140)}
LEAST_ROLLOUTS = 5_500
MUTANT_SEEDS = 30
SLOW = FaultLevel(name="slow", latency_sec=5.0)
BROKEN = FaultLevel(name="broken", weights={Fault.GATEWAY: 0.9})
LATE_SEC = 3600.0
RESTARTING = FaultLevel(name="restarting", restarts=1.0)


def fed(level: str | FaultLevel = "harsh") -> Run:
    """Drawn workloads on a network that lets the extensions through."""
    return lambda seed: simulate_workload(seed, faults=level, feed=True)


# --- the invariants hold --------------------------------------------------------------------------


def test_no_invariant_is_violated_with_feeds_and_batches():
    stats = SimulationStats()
    todo = [part for level in SEEDS for part in chunks(level, SEEDS[level], feed=True)]
    for outcome in run_chunks(todo):
        assert not outcome.stories, outcome.stories[0]
        stats += outcome.stats
    assert stats.rollouts >= LEAST_ROLLOUTS
    kinds = {str(fault) for fault in Fault if fault is not Fault.NONE}
    assert stats.faults.keys() == kinds | {"paused", "server-crashed"}


def routes_of(run) -> Counter[str]:
    return run.trace.count("sent", "route")


def test_the_extensions_are_used_where_the_network_lets_them_through():
    count = sum((routes_of(fed("none")(seed)) for seed in range(3)), Counter())
    assert count["batch"] > count["admit"]
    assert count["feed"]
    assert count["renew"]


def test_by_default_the_network_knows_the_four_routes_alone():
    for seed in range(3):
        run = simulate_workload(seed, faults="harsh")
        assert routes_of(run).keys() <= {"admit", "poll", "cancel", "health"}


def test_results_come_through_the_feed():
    run = fed("none")(0)
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


# --- broken variants are found --------------------------------------------------------------------

MUTANTS: list[Mutant] = []


def mutant(invariant: str, run: Run | None = None):
    def register(patch: Patch) -> Patch:
        name = patch.__name__.replace("_", "-")
        MUTANTS.append(Mutant(name, invariant, patch.__doc__ or "", patch, run or fed()))
        return patch

    return register


@mutant("lease-safety")
def streaming_renews_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a feed waits or says renews what is attached to it."""
    honest_open = FeedHub.open
    hubs: dict[Feed, FeedHub] = {}

    def open_feed(self, claims):
        feed, token, refused = honest_open(self, claims)
        hubs[feed] = self
        return feed, token, refused

    def take(honest, feed):
        hubs[feed].renew(feed)
        return honest(feed)

    monkeypatch.setattr(FeedHub, "open", open_feed)
    wrap(monkeypatch, Feed, "take", take)


@mutant("lease-safety", fed("none"))
def a_renewal_renews_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The renewal request is answered, and does nothing."""
    monkeypatch.setattr(FeedHub, "renew", lambda hub, feed: len(feed.entries))


@mutant("lease-safety")
def opening_renews_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that opens a feed renews no lease."""

    def open_feed(honest, hub, claims):
        with pytest.MonkeyPatch.context() as within:
            within.setattr(hub._registry, "renew", lambda *_: True)
            return honest(hub, claims)

    wrap(monkeypatch, FeedHub, "open", open_feed)


@mutant("slots", fed(SLOW))
def what_changes_during_a_write_is_told_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a write, the state of that moment counts as told, not the one that was written."""

    def sent(honest, feed, taken):
        now = [(entry, entry.record.state) for entry, _ in taken]
        for entry, _ in now:
            feed._marked.pop(entry, None)
        honest(feed, now)

    wrap(monkeypatch, Feed, "sent", sent)


@mutant("retention")
def a_new_feed_says_nothing_of_what_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feed tells of what happens from now on, and not of what has happened."""

    def attach(honest, feed, entry, seen):
        honest(feed, entry, seen)
        feed._marked.pop(entry, None)

    wrap(monkeypatch, Feed, "attach", attach)


@mutant("slots", fed(RESTARTING))
def a_lost_claim_counts_as_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server refuses is taken as followed."""

    def greet(honest, feed, first, claimed, sent_at):
        hello = json.loads(first or b"{}")
        if "refused" in hello:
            hello["refused"] = []
        return honest(feed, json.dumps(hello).encode(), claimed, sent_at)

    wrap(monkeypatch, ResultFeed, "_greet", greet)


@mutant("retry-in-lease")
def a_batch_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose answer was lost is sent again."""

    async def post(honest, wire, path, body):
        try:
            return await honest(wire, path, body)
        except httpx.TransportError:
            return await honest(wire, path, body)

    wrap(monkeypatch, Wire, "post", post)


@mutant("local-cancel", fed("none"))
def who_was_left_behind_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts whose handle was cancelled stay in the feed, and are renewed with the rest."""

    def remove(honest, feed, followed):
        honest(feed, followed)
        feed._left_behind = False

    wrap(monkeypatch, ResultFeed, "_remove", remove)


@mutant("retry-in-lease", fed(BROKEN))
def a_feed_is_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feed that fails is opened again and again, whatever has become of the leases."""
    monkeypatch.setattr(Followed, "delay_after", lambda followed, kind, now: 8.0)
    monkeypatch.setattr(Followed, "may_try", lambda followed, now: trio.current_time() < LATE_SEC)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_feed_is_found(mutant: Mutant):
    with mutant.applied():
        found = next(
            (
                (seed, violation)
                for seed in range(MUTANT_SEEDS)
                for violation in mutant.run(seed).violations
                if violation.invariant == mutant.invariant
            ),
            None,
        )
    assert found is not None, f"survived {MUTANT_SEEDS} seeds: {mutant.line}"
    seed, violation = found
    assert violation.story
    assert mutant.run(seed).violations == [], "the healthy product fails too"
