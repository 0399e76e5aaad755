"""Broken variants of the result feed and of batches."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from heapq import heappush
from typing import Any

import httpx
import pytest
import trio
from attrs import define, evolve
from simulation.mutants import STOPPING, Run, drawn, interrupted, mutant, wrap

from rollout.client.answers import Admitted
from rollout.client.batching import AdmissionBatcher
from rollout.client.feed import Followed, ResultFeed
from rollout.client.wire import Wire
from rollout.rules import SeenState
from rollout.server.deadlines import Deadlines
from rollout.server.feed import Feed, FeedHub
from rollout.server.registry import RolloutRegistry
from rollout.simulation import (
    Caller,
    Fate,
    Fault,
    FaultLevel,
    FaultPlan,
    RolloutPlan,
    Route,
    ServerOptions,
    Simulation,
    simulate_workload,
)

SLOW = FaultLevel(name="slow", latency_sec=5.0)
BROKEN = FaultLevel(name="broken", weights={Fault.REFUSED: 0.8})
SILENT = FaultLevel(name="silent", weights={Fault.SILENCE: 0.3})
LATE_SEC = 3600.0
RESTARTING = FaultLevel(name="restarting", restarts=1.0)


def fed(level: str | FaultLevel = "harsh") -> Run:
    """Drawn workloads on a network that lets the extensions through."""
    return drawn(level, feed=True)


@mutant("lease-safety", fed())
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


@mutant("lease-safety", fed())
def opening_renews_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that opens a feed renews no lease."""

    def open_feed(honest, hub, claims):
        with pytest.MonkeyPatch.context() as within:
            within.setattr(hub._registry, "renew", lambda *_: True)
            return honest(hub, claims)

    wrap(monkeypatch, FeedHub, "open", open_feed)


@mutant("news", fed(SLOW))
def what_changes_during_a_write_is_told_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a write, the state of that moment counts as told, not the one that was written."""

    def sent(honest, feed, taken):
        now = [(entry, entry.record.state) for entry, _ in taken]
        for entry, _ in now:
            feed._marked.pop(entry, None)
        honest(feed, now)

    wrap(monkeypatch, Feed, "sent", sent)


@mutant("news", fed())
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


@mutant("retry-in-lease", fed())
def a_batch_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose answer was lost is sent again."""

    async def post(honest, wire, *request, **options):
        try:
            return await honest(wire, *request, **options)
        except httpx.TransportError:
            return await honest(wire, *request, **options)

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


@define
class _Dead:
    """A client whose feed is cut off after its first renewal, and which is not heard of again."""

    dead: bool = False

    def fate(self, route: Route) -> Fate:
        """Return the fate of the next request."""
        if self.dead:
            return Fate(fault=Fault.REFUSED)
        self.dead = route is Route.RENEW
        if route is Route.FEED:
            return Fate(fault=Fault.LOST_DURING, after_sec=15.0)
        return Fate()


@define
class _FirstOnly:
    """Lets the first request to some of the routes through, and nothing else."""

    fates: dict[Route, Fate]

    def fate(self, route: Route) -> Fate:
        """Return the fate of the next request."""
        return self.fates.pop(route, Fate(fault=Fault.GATEWAY))


def dead_client(plan: Callable[[], FaultPlan]) -> Run:
    """Six rollouts of one client, which dies while two of them run."""
    options = ServerOptions(
        max_concurrent=2, result_wait_timeout_sec=10.0, polling_lease_timeout_sec=40.0
    )
    plans = [RolloutPlan(rollout_id=f"r{n}", agent_sec=500.0) for n in range(6)]
    plans.append(RolloutPlan(rollout_id="late", arrival_sec=100.0))
    return lambda seed: simulate_workload(
        seed, faults="none", plans=plans, plan=plan(), options=options, feed=True
    )


@mutant("lease-safety", dead_client(_Dead))
def each_lease_is_renewed_at_its_own_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leases of one renewal end one after the other."""

    def renew(honest, registry, entry, _):
        return honest(registry, entry, trio.current_time())

    wrap(monkeypatch, RolloutRegistry, "renew", renew)


@mutant("lease-safety", dead_client(_Dead))
def one_lease_ends_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of leases that end together, the next one is looked at when the task is scheduled again."""

    def handle_due(honest, deadlines, now):
        first, *later = deadlines._heap or [None]
        deadlines._heap = [first] if first else []
        honest(deadlines, now)
        for each in later:
            heappush(deadlines._heap, each)
        return deadlines._heap[0][0] if deadlines._heap else math.inf

    wrap(monkeypatch, Deadlines, "_handle_due", handle_due)


@mutant(
    "lease-safety",
    dead_client(lambda: _FirstOnly({Route.ADMIT: Fate(), Route.BATCH: Fate()})),
)
def each_lease_of_a_batch_starts_at_its_own_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leases of one batch end one after the other."""
    wrap(
        monkeypatch,
        RolloutRegistry,
        "admit",
        lambda honest, registry, request, **_: honest(registry, request),
    )


@mutant("news", fed("none"))
def a_feed_tells_results_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the status is not told."""

    def mark(honest, feed, entry):
        if entry.record.result is not None:
            honest(feed, entry)

    wrap(monkeypatch, Feed, "mark", mark)


@mutant("news", fed(SILENT))
def a_feed_does_not_say_what_it_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feed whose rollouts another one has taken over is silent about it."""
    wrap(monkeypatch, Feed, "lose", lambda _, feed, entry: feed.detach(entry))


@mutant("news", fed(SILENT))
def two_feeds_tell_of_one_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feed goes on with what another one has taken over."""
    attached: dict[object, list[Feed]] = {}

    def attach(honest, feed, entry, seen):
        entry.feed = None
        honest(feed, entry, seen)
        attached.setdefault(entry, []).append(feed)

    def mark(honest, feed, entry):
        for each in attached.get(entry, [feed]):
            if entry in each._seen:
                honest(each, entry)

    wrap(monkeypatch, Feed, "attach", attach)
    wrap(monkeypatch, Feed, "mark", mark)


@mutant("news", fed("none"))
def a_feed_repeats_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a feed has told is news again with the next change."""

    def take(honest, feed):
        for entry in feed.entries.values():
            if feed._marked and entry.record.has_news(SeenState()):
                feed._seen[entry] = SeenState()
                feed._marked[entry] = None
        return honest(feed)

    wrap(monkeypatch, Feed, "take", take)


@mutant("shutdown", fed(STOPPING))
def a_feed_that_is_gone_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts stay attached to a feed whose connection is gone."""
    wrap(monkeypatch, Feed, "close", lambda _, feed: feed.end())


def slow_feed(act: float) -> Run:
    """A shutdown while a feed writes slowly what came of a rollout."""
    return interrupted(
        lambda world: world.server.stop(),
        RolloutPlan(rollout_id="r", agent_sec=20.0, grade=False),
        after="workflow-started",
        after_sec=act,
        fates=(Fate(), Fate(back_sec=2.0)),
        feed=True,
    )


@mutant("shutdown", slow_feed(19.0))
def a_shutdown_does_not_wait_for_feeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads a feed counts as one who has not polled for long."""

    def awaited(honest, registry):
        feeds = {entry: entry.feed for entry in registry._entries.values()}
        for entry in feeds:
            entry.feed = None
        try:
            return honest(registry)
        finally:
            for entry, feed in feeds.items():
                entry.feed = feed

    wrap(monkeypatch, RolloutRegistry, "awaited", awaited)


@mutant("shutdown", slow_feed(19.0))
def a_result_is_told_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state counts as told as soon as a feed is about to write it."""

    def take(honest, feed):
        data, taken = honest(feed)
        feed.sent(taken)
        return data, []

    wrap(monkeypatch, Feed, "take", take)


@define
class _LateBatch:
    """Answers batches late."""

    def fate(self, route: Route) -> Fate:
        """Return the fate of the next request."""
        return Fate(fault=Fault.LATE, after_sec=5.0) if route is Route.BATCH else Fate()


def left_during_its_admission(seed: int) -> Simulation[Any]:
    """A caller who leaves while the batch with its admission is under way."""
    plans = [
        RolloutPlan(rollout_id="keeper", agent_sec=300.0),
        RolloutPlan(rollout_id="other", arrival_sec=2.0, agent_sec=300.0),
        RolloutPlan(
            rollout_id="r", arrival_sec=2.0, agent_sec=300.0, caller=Caller.VANISH, caller_sec=2.0
        ),
    ]
    return simulate_workload(seed, faults="none", plans=plans, plan=_LateBatch(), feed=True)


@mutant("local-cancel", left_during_its_admission)
def who_left_during_an_admission_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a batch brought for a caller who has left stays attached, and is renewed."""
    wrap(monkeypatch, AdmissionBatcher, "_leave_behind", lambda *_: None)


@define
class _LateRenewal:
    """Answers each renewal late, and lets nothing through once the feed is cut off."""

    feeds: int = 0

    def fate(self, route: Route) -> Fate:
        """Return the fate of the next request."""
        self.feeds += route is Route.FEED
        if route is Route.RENEW:
            return Fate(fault=Fault.LATE, after_sec=4.0)
        if route is Route.FEED and self.feeds == 1:
            return Fate(fault=Fault.LOST_DURING, after_sec=36.0)
        return Fate(fault=Fault.GATEWAY) if self.feeds > 1 else Fate()


def short_of_lease(plan: Callable[[], FaultPlan]) -> Run:
    """Two rollouts whose lease is little longer than a poll, on a network that fails soon."""
    options = ServerOptions(result_wait_timeout_sec=30.0, polling_lease_timeout_sec=45.0)
    plans = [
        RolloutPlan(rollout_id="r", agent_sec=500.0),
        RolloutPlan(rollout_id="later", arrival_sec=0.5, agent_sec=500.0),
    ]
    return lambda seed: simulate_workload(
        seed, faults="none", plans=plans, plan=plan(), options=options, feed=True
    )


@mutant("retry-in-lease", short_of_lease(_LateRenewal))
def a_renewal_counts_from_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is believed to hold from the moment when the answer to a renewal came."""
    wrap(
        monkeypatch,
        Followed,
        "renewed",
        lambda honest, followed, _: honest(followed, trio.current_time()),
    )


BREAKS_AFTER_HELLO = Fate(fault=Fault.LOST_DURING, back_sec=4.0, after_sec=6.0)


@mutant(
    "retry-in-lease",
    short_of_lease(lambda: _FirstOnly({Route.ADMIT: Fate(), Route.FEED: BREAKS_AFTER_HELLO})),
)
def an_open_feed_counts_from_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is believed to hold from the moment when a feed said hello."""
    wrap(
        monkeypatch,
        Followed,
        "opened",
        lambda honest, followed, _: honest(followed, trio.current_time()),
    )


@mutant(
    "retry-in-lease",
    short_of_lease(lambda: _FirstOnly({Route.ADMIT: Fate(), Route.BATCH: Fate(back_sec=4.0)})),
)
def a_batch_counts_from_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is believed to hold from the moment when the answer to a batch came."""

    async def admit(honest, batcher, *args):
        answer = await honest(batcher, *args)
        if isinstance(answer, Admitted):
            answer = evolve(answer, sent_at=trio.current_time())
        return answer

    wrap(monkeypatch, AdmissionBatcher, "admit", admit)
