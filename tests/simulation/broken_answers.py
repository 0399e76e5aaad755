"""Broken variants of what a server answers, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import trio
from simulation.mutants import STOPPING, drawn, interrupted, mutant, wrap, written

from rollout.backend.executions import Execution
from rollout.errors import InvalidLeaseError, UnknownRolloutError
from rollout.rules import RolloutRecord
from rollout.server import registry as registry_module
from rollout.server.entry import Entry
from rollout.server.registry import RolloutRegistry
from rollout.simulation import Caller, Course, Fate, RolloutPlan

# --- tokens ---------------------------------------------------------------------------------------

INTRUDED = written(
    RolloutPlan(rollout_id="other", agent_sec=90.0, caller=Caller.LATE, caller_sec=80.0),
    RolloutPlan(rollout_id="r", agent_sec=90.0, caller=Caller.INTRUDE, caller_sec=50.0),
)


@mutant("tokens", INTRUDED)
def any_token_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is compared with the one of the lease."""
    lax = SimpleNamespace(compare_digest=lambda *_: True)
    monkeypatch.setattr(registry_module, "hmac", lax)


@mutant("tokens", INTRUDED)
def the_token_of_any_rollout_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is compared with those of all rollouts."""
    known: set[bytes] = set()

    def admit(honest, registry, *args, **more):
        entry, token = honest(registry, *args, **more)
        known.add(entry.token_digest)
        return entry, token

    lax = SimpleNamespace(compare_digest=lambda _, given: given in known)
    wrap(monkeypatch, RolloutRegistry, "admit", admit)
    monkeypatch.setattr(registry_module, "hmac", lax)


@mutant("tokens", INTRUDED)
def a_wrong_token_is_an_unknown_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll with another token is answered as if there were no such rollout."""

    async def wait_for_result(honest, registry, *args, **more):
        try:
            return await honest(registry, *args, **more)
        except InvalidLeaseError:
            raise UnknownRolloutError("unknown rollout_id") from None

    wrap(monkeypatch, RolloutRegistry, "wait_for_result", wait_for_result)


# --- cancel ---------------------------------------------------------------------------------------

QUEUED = written(
    RolloutPlan(rollout_id="first", agent_sec=30.0),
    RolloutPlan(rollout_id="r", arrival_sec=1.0, caller=Caller.CANCEL, caller_sec=5.0),
    max_concurrent=1,
)


@mutant("cancel", QUEUED)
def who_waits_is_said_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout that waits for a slot is cancelled as one that runs."""

    def cancel(honest, execution):
        honest(execution)
        return "cancelled_running"

    wrap(monkeypatch, Execution, "cancel", cancel)


@mutant(
    "cancel",
    written(RolloutPlan(rollout_id="r", caller=Caller.CANCEL, caller_sec=5.0, grade=False)),
)
def who_has_ended_is_said_to_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout that has its result is cancelled as one that runs."""

    def cancel(honest, registry, **selectors):
        answer = honest(registry, **selectors)
        return dict.fromkeys(answer, "cancelled_running")

    wrap(monkeypatch, RolloutRegistry, "cancel", cancel)


@mutant(
    "cancel",
    written(
        RolloutPlan(rollout_id="r", agent=Course.SWALLOW, agent_sec=50.0, caller=Caller.CANCEL)
    ),
)
def a_repeated_cancel_asks_the_backend_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cancel request asks the execution to stop, not only the first one."""

    def request_stop(honest, registry, entry):
        entry.disposition = None
        return honest(registry, entry)

    wrap(monkeypatch, RolloutRegistry, "_request_stop", request_stop)


# --- news -----------------------------------------------------------------------------------------


@mutant("news", written(RolloutPlan(rollout_id="r", agent_sec=50.0, grader_sec=10.0)))
def only_results_wake_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the status wakes no poll."""

    def notify(honest, entry):
        if entry.record.result is not None:
            honest(entry)

    wrap(monkeypatch, Entry, "notify", notify)


@mutant(
    "news",
    written(RolloutPlan(rollout_id="r", agent_sec=50.0, caller=Caller.LATE, caller_sec=5.0)),
)
def a_poll_compares_with_the_state_that_it_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has happened before a poll came is no news for it."""

    async def wait_for_result(honest, registry, rollout_id, token, seen):
        entry = registry._entries.get(rollout_id)
        return await honest(registry, rollout_id, token, entry and entry.record.state)

    wrap(monkeypatch, RolloutRegistry, "wait_for_result", wait_for_result)


@mutant("news", written(RolloutPlan(rollout_id="r", agent_sec=1.5)))
def a_running_rollout_is_always_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll of a rollout that runs is answered at once, again and again."""
    wrap(monkeypatch, RolloutRecord, "has_news", lambda *_: True)


# --- who still reads at a shutdown ----------------------------------------------------------------


BETWEEN_POLLS = interrupted(
    lambda world: world.server.stop(),
    RolloutPlan(rollout_id="r", agent_sec=9.5, grade=False),
    after="workflow-started",
    after_sec=9.0,
    fates=(Fate(out_sec=1.0, back_sec=1.0),) * 20,
    result_wait_timeout_sec=1.0,
    polling_lease_timeout_sec=60.0,
)
"""The rollout ends, in a shutdown, while its caller is between two polls."""


@mutant("shutdown", BETWEEN_POLLS)
def a_shutdown_waits_for_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is gone as soon as the work is done, whoever is about to poll."""

    async def wait_delivered(_honest, _registry):
        await trio.lowlevel.checkpoint()

    wrap(monkeypatch, RolloutRegistry, "wait_delivered", wait_delivered)


@mutant("shutdown", BETWEEN_POLLS)
def a_poll_does_not_show_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal leaves the time when its caller was last heard of."""

    def renew(honest, registry, entry, now):
        before = entry.polled_at
        held = honest(registry, entry, now)
        entry.polled_at = before
        return held

    wrap(monkeypatch, RolloutRegistry, "renew", renew)
    wrap(
        monkeypatch,
        RolloutRegistry,
        "answered",
        lambda _honest, _registry, entry, state=None: entry.record.answered(state),
    )


@mutant("shutdown", drawn(STOPPING))
def a_shutdown_waits_for_who_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shutdown waits for every caller, whether or not it has its result."""

    def answered(honest, registry, entry, state=None):
        honest(registry, entry, state)
        entry.record.delivered = False

    wrap(monkeypatch, RolloutRegistry, "answered", answered)
