"""Broken variants of admissions that are sent again, on both sides."""

from __future__ import annotations

import secrets

import pytest
from simulation.broken_state import killed
from simulation.mutants import LOSSY, drawn, mutant, wrap, written

from rollout.client.admission import _Losses
from rollout.client.replay import ReplayWindow
from rollout.client.wire import Wire
from rollout.errors import DuplicateRolloutError
from rollout.server import registry as registry_module
from rollout.server.registry import RolloutRegistry
from rollout.server.state import Journal
from rollout.simulation import Caller, Fate, Fault, RolloutPlan
from rollout.types import RolloutStatus

LOST = Fate(fault=Fault.LOST_AFTER)


def lost(agent_sec: float = 1.0, **options):
    """A rollout whose first admission is answered in vain."""
    plan = RolloutPlan(rollout_id="r", agent_sec=agent_sec, grade=False)
    return written(plan, fates=(LOST,), **options)


# --- one admission key starts one execution and has one token -----------------------------------


@mutant("admission-keys", lost())
def a_replay_starts_another_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes again is admitted in place of the first one."""

    def admit(honest, registry, request, **more):
        registry._entries.pop(request.rollout_id, None)
        return honest(registry, request, **more)

    wrap(monkeypatch, RolloutRegistry, "admit", admit)


@mutant("admission-keys", lost(agent_sec=0.1, result_retention_sec=0.0))
def a_replay_after_the_retention_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result with a key is forgotten after the retention time, however short that is."""

    def conclude(honest, registry, entry, *args):
        kept, entry.request_digest = entry.request_digest, None
        try:
            honest(registry, entry, *args)
        finally:
            entry.request_digest = kept

    wrap(monkeypatch, RolloutRegistry, "_conclude", conclude)


@mutant("admission-keys", lost())
def a_replay_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes again gets 409, whatever its key."""

    def admit(honest, registry, request, **more):
        if request.rollout_id in registry._entries:
            raise DuplicateRolloutError("active or retained")
        return honest(registry, request, **more)

    wrap(monkeypatch, RolloutRegistry, "admit", admit)


@mutant("admission-keys", lost())
def a_replay_gets_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes again gets a random token."""
    monkeypatch.setattr(registry_module, "lease_token", lambda *_: secrets.token_urlsafe())


@mutant("admission-keys", lost(agent_sec=50.0))
def a_replay_renews_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes again leaves the lease as it is."""

    def admit(honest, registry, request, **more):
        known = request.rollout_id in registry._entries
        with pytest.MonkeyPatch.context() as patch:
            if known:
                patch.setattr(registry, "renew", lambda *_: True, raising=False)
            return honest(registry, request, **more)

    wrap(monkeypatch, RolloutRegistry, "admit", admit)


@mutant(
    "admission-keys",
    written(RolloutPlan(rollout_id="r", agent_sec=20.0, caller=Caller.RIVAL, caller_sec=5.0)),
)
def any_key_opens_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a request makes no difference."""
    monkeypatch.setattr(registry_module, "lease_token", lambda secret, *_: "the-token")
    monkeypatch.setattr(registry_module, "request_digest", lambda *_: b"alike")


# --- what was cancelled by its key before it came never starts ------------------------------------

OVERTAKING = RolloutPlan(rollout_id="r", caller=Caller.OVERTAKE, caller_sec=20.0)


@mutant("early-cancel", written(OVERTAKING))
def an_early_cancel_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel request that overtakes its admission is answered, and nothing more."""

    async def cancel_ahead(_honest, _registry, admission_keys):
        return dict.fromkeys(admission_keys, "cancelled_queued")

    wrap(monkeypatch, RolloutRegistry, "cancel_ahead", cancel_ahead)


@mutant("early-cancel", written(OVERTAKING))
def an_early_cancel_holds_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was cancelled before it came is forgotten after a second."""

    def load(honest, registry, row, until, now):
        return honest(registry, row, registry._clock.time(now) + 1.0, now)

    wrap(monkeypatch, RolloutRegistry, "_load", load)


@mutant("early-cancel", written(OVERTAKING))
def an_admission_displaces_its_early_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An admission starts a rollout in place of one that was cancelled."""

    def admit(honest, registry, request, **more):
        entry = registry._entries.get(request.rollout_id)
        if entry is not None and entry.record.status is RolloutStatus.CANCELLED:
            del registry._entries[request.rollout_id]
        return honest(registry, request, **more)

    wrap(monkeypatch, RolloutRegistry, "admit", admit)


@mutant("early-cancel", written(OVERTAKING))
def an_early_cancel_refuses_its_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """The admission of what was cancelled before it came gets 409."""
    monkeypatch.setattr(registry_module, "cancelled_digest", lambda *_: secrets.token_bytes())


@mutant("early-cancel", killed(OVERTAKING, after="cancel-answered", after_sec=8.0))
def an_early_cancel_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was cancelled before it came is known to its process alone."""

    def put(honest, journal, row, done, **more):
        if row.status == RolloutStatus.CANCELLED:
            done(None)
        else:
            honest(journal, row, done, **more)

    wrap(monkeypatch, Journal, "put", put)


# --- when an admission is sent again --------------------------------------------------------------


@mutant("retry-in-lease", lost())
def an_admission_is_sent_again_with_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request for admission has a key of its own."""

    async def admit(honest, wire, request, body, on_sent):
        fresh = secrets.token_hex(16).encode()
        key = (request.admission_key or "").encode()
        return await honest(wire, request, body.replace(key, fresh), on_sent)

    wrap(monkeypatch, Wire, "admit", admit)


@mutant("retry-in-lease", drawn(LOSSY))
def an_admission_is_sent_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost admission has no backoff."""

    async def delay_after(honest, losses, *args):
        await honest(losses, *args)
        return 0.0

    wrap(monkeypatch, _Losses, "delay_after", delay_after)


@mutant("retry-in-lease", written(RolloutPlan(rollout_id="r"), fates=(LOST, Fate(), *[LOST] * 40)))
def an_admission_is_sent_again_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An admission is sent again for as long as its answers are lost."""

    async def end(honest, window, lost_at):
        await honest(window, lost_at)
        return float("inf")

    wrap(monkeypatch, ReplayWindow, "end", end)
