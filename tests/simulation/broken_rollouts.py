"""Broken variants of what a server makes of one rollout."""

from __future__ import annotations

import json

import pytest
import trio
from attrs import evolve
from simulation.mutants import drawn, mutant, wrap, written

from rollout.backend.local import LocalBackend
from rollout.rules import PollingLease, RolloutRecord, ServingClock
from rollout.server.registry import RolloutRegistry
from rollout.simulation import (
    Caller,
    Course,
    RolloutPlan,
)
from rollout.types import RolloutErrorCategory, RolloutStatus

# --- one-execution --------------------------------------------------------------------------------


@mutant("one-execution", drawn("none"))
def admits_a_known_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id that is active or retained is admitted again."""

    def admit(honest, registry, request, **more):
        if registry._entries.pop(request.rollout_id, None) is not None:
            registry.backend.release(request.rollout_id)
        return honest(registry, request, **more)

    wrap(monkeypatch, RolloutRegistry, "admit", admit)


@mutant(
    "one-execution",
    written(
        RolloutPlan(rollout_id="r", agent=Course.SWALLOW, agent_sec=150.0, caller=Caller.VANISH),
        RolloutPlan(rollout_id="meanwhile", agent_sec=400.0),
    ),
)
def completion_overwrites_an_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of an execution replaces the expiry of its lease."""

    def end(honest, registry, entry, *args):
        known = entry.record.result
        if known is not None and known.err_category is RolloutErrorCategory.LEASE_EXPIRED:
            entry.record.result = entry.body = None
            entry.concluded = False
            entry.record.lease.deadline = trio.current_time() + 1e6
        return honest(registry, entry, *args)

    wrap(monkeypatch, RolloutRegistry, "_end", end)


@mutant("one-execution")
def every_reading_is_another_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal result differs from one poll to the next."""
    readings = iter(range(10**9))

    async def wait_for_result(honest, registry, *args, **more):
        result = json.loads(await honest(registry, *args, **more))
        if result["status"] in {"success", "failure", "cancelled"}:
            result["err_message"] = f"reading {next(readings)}"
        return json.dumps(result).encode()

    wrap(monkeypatch, RolloutRegistry, "wait_for_result", wait_for_result)


@mutant("one-execution", drawn("none"))
def executes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """An execution runs its workflow a second time."""

    async def execute(honest, backend, request):
        await honest(backend, request)
        backend.executions[request.id].started = False
        return await honest(backend, request)

    wrap(monkeypatch, LocalBackend, "execute", execute)


# --- forward-only ---------------------------------------------------------------------------------


@mutant("forward-only", drawn("none"))
def statuses_without_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of an earlier phase is published."""

    def advance(honest, record, status):
        if record.result is None and status is not record.status:
            record.status = status
            return True
        return honest(record, status)

    wrap(monkeypatch, RolloutRecord, "advance", advance)


@mutant(
    "forward-only",
    written(
        RolloutPlan(rollout_id="r", agent=Course.SWALLOW, agent_sec=150.0, caller=Caller.VANISH),
        RolloutPlan(rollout_id="meanwhile", agent_sec=400.0),
    ),
)
def a_late_report_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status report that comes after the end is published."""

    def advance(honest, record, status):
        if record.result is None:
            return honest(record, status)
        record.status = status
        return True

    wrap(monkeypatch, RolloutRecord, "advance", advance)


@mutant("forward-only", drawn("none"))
def the_start_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last report of the agent's start counts, not the first."""

    def mark_agent_started(_, record, when):
        record.agent_started_at = when
        return True

    wrap(monkeypatch, RolloutRecord, "mark_agent_started", mark_agent_started)


@mutant("forward-only", drawn("none"))
def the_end_forgets_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal result has no start time."""

    def settle(honest, record, result, now):
        return evolve(honest(record, result, now), agent_started_at=None)

    wrap(monkeypatch, RolloutRecord, "settle", settle)


# --- lease-safety ---------------------------------------------------------------------------------


@mutant("lease-safety", drawn("none"))
def a_poll_does_not_renew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls leave the lease as it is."""
    wrap(monkeypatch, PollingLease, "renew", lambda _, lease, now: not lease.expired(now))


@mutant(
    "lease-safety",
    written(
        RolloutPlan(
            rollout_id="r",
            agent=Course.SWALLOW,
            agent_sec=200.0,
            caller=Caller.LATE,
            caller_sec=125.0,
        )
    ),
)
def a_poll_revives_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll after the end of the lease takes the expiry back."""

    async def wait_for_result(honest, registry, rollout_id, *args, **more):
        entry = registry._entries.get(rollout_id)
        if entry is not None and entry.executing and entry.record.result is not None:
            entry.record.result = entry.body = None
            entry.record.status = RolloutStatus.RUNNING
            entry.record.lease.deadline = trio.current_time() + 120.0
        return await honest(registry, rollout_id, *args, **more)

    wrap(monkeypatch, RolloutRegistry, "wait_for_result", wait_for_result)


SILENT = written(
    RolloutPlan(rollout_id="r", agent_sec=500.0, caller=Caller.VANISH),
    RolloutPlan(rollout_id="meanwhile", agent_sec=400.0),
)
"""The lease of a rollout ends while another one keeps the server busy."""


@mutant("lease-safety", SILENT)
def nobody_watches_the_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease ever ends by itself."""
    wrap(monkeypatch, RolloutRegistry, "_due", _forget_alone)


def _forget_alone(honest, registry, entry, now):
    if entry.record.result is not None:
        honest(registry, entry, now)


@mutant("lease-safety", SILENT)
def leases_are_watched_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a lease is noticed five seconds late."""
    wrap(monkeypatch, PollingLease, "expired", lambda honest, lease, now: honest(lease, now - 5))
    wrap(monkeypatch, RolloutRegistry, "_expire", _expire_when_due)


def _expire_when_due(honest, registry, entry, now):
    honest(registry, entry, now)
    if entry.record.result is None:
        registry._clock.tick(now, at_most=now + 5)
        registry._nursery.start_soon(_expire_later, registry, entry, now + 5)


async def _expire_later(registry, entry, when):
    await trio.sleep_until(when)
    registry._expire(entry, when)


@mutant("lease-safety", SILENT)
def an_expiry_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout whose lease has ended runs on."""

    def request_stop(honest, registry, entry):
        result = entry.record.result
        if result is not None and result.err_category is RolloutErrorCategory.LEASE_EXPIRED:
            return "not_found"
        return honest(registry, entry)

    wrap(monkeypatch, RolloutRegistry, "_request_stop", request_stop)


@mutant(
    "lease-safety",
    written(RolloutPlan(rollout_id="r", agent_sec=500.0, caller=Caller.INTRUDE, caller_sec=180.0)),
)
def a_wrong_token_renews(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll renews the lease before its token is checked."""

    async def wait_for_result(honest, registry, rollout_id, *args, **more):
        entry = registry._entries.get(rollout_id)
        if entry is not None:
            entry.record.renew(registry._clock.time(trio.current_time()))
        return await honest(registry, rollout_id, *args, **more)

    wrap(monkeypatch, RolloutRegistry, "wait_for_result", wait_for_result)


@mutant("lease-safety")
def standing_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in which the server stood still is held against its callers."""
    wrap(monkeypatch, ServingClock, "_late", lambda *_: 0.0)


@mutant("lease-safety", drawn("none"))
def half_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """An admission grants half of the lease that it promises."""

    def starting(now: float, timeout_sec: float) -> PollingLease:
        return PollingLease(timeout_sec, now + timeout_sec / 8)

    monkeypatch.setattr(PollingLease, "starting", starting)
