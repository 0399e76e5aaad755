"""Broken variants of the client."""

from __future__ import annotations

import httpx
import pytest
import trio
from attrs import evolve
from simulation.mutants import LOSSY, TIGHT, drawn, mutant, wrap, written

from rollout.client import RolloutClient, RolloutHandle, RolloutHandleCancelled, polling
from rollout.client.polling import Poller
from rollout.client.wire import Wire
from rollout.rules import ResultRetrySchedule
from rollout.rules import retry as retry_rules
from rollout.simulation import Caller, Course, Fate, Fault, RolloutPlan
from rollout.types import RolloutStatus

# --- forward-only ---------------------------------------------------------------------------------


@mutant(
    "forward-only",
    written(
        RolloutPlan(rollout_id="r", agent_sec=2.0, grader_sec=90.0, caller=Caller.FOLLOW),
        fates=(Fate(), Fate(), Fate(), Fate(fault=Fault.STALE)),
    ),
)
def the_client_takes_every_answer_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client shows an older state when a cache answers with one."""

    monkeypatch.setattr(polling, "may_follow", lambda *_: True)


# --- retry-in-lease -------------------------------------------------------------------------------


@mutant("retry-in-lease")
def a_failed_request_extends_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client believes that a request that failed has renewed the lease."""

    def delay_after(honest, schedule, kind, now):
        schedule.lease_deadline = now + 120.0
        return honest(schedule, kind, now)

    wrap(monkeypatch, ResultRetrySchedule, "delay_after", delay_after)


@mutant(
    "retry-in-lease",
    written(
        RolloutPlan(rollout_id="r", agent_sec=500.0),
        fates=(Fate(), Fate(back_sec=4.0), *[Fate(fault=Fault.GATEWAY)] * 9),
        polling_lease_timeout_sec=45.0,
    ),
)
def an_answer_confirms_from_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline counts from when the answer came in, not from when the request went out."""

    async def poll(honest, poller):
        result = await honest(poller)
        lease = poller.admission.polling_lease_timeout_sec
        poller.lease_deadline = trio.current_time() + lease
        return result

    wrap(monkeypatch, Poller, "_poll", poll)


@mutant("retry-in-lease", drawn("harsh", options=TIGHT))
def the_backoff_need_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a retry fits is asked without its backoff, and not again after it."""

    def may_start(honest, schedule, now, *, delay_sec=None):
        return True if delay_sec is None else honest(schedule, now)

    wrap(monkeypatch, ResultRetrySchedule, "may_start", may_start)


@mutant("retry-in-lease")
def the_request_need_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry starts although its full timeout does not fit the lease."""

    def fits(now, *, delay_sec, request_sec, lease_deadline):
        del request_sec
        return now + delay_sec < lease_deadline

    monkeypatch.setattr(retry_rules, "fits", fits)


@mutant("retry-in-lease")
def retries_ignore_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry starts whenever its schedule has one."""
    wrap(monkeypatch, ResultRetrySchedule, "may_start", lambda *_, **__: True)


@mutant("retry-in-lease")
def retries_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry starts without its backoff."""

    def delay_after(honest, schedule, kind, now):
        return None if honest(schedule, kind, now) is None else 0.0

    wrap(monkeypatch, ResultRetrySchedule, "delay_after", delay_after)


@mutant(
    "retry-in-lease",
    written(RolloutPlan(rollout_id="r"), fates=(Fate(), *[Fate(fault=Fault.LOST_BEFORE)] * 4)),
)
def retries_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures of the connection are retried more often than twice."""
    delays = {**retry_rules._DELAYS, retry_rules.FailureKind.TRANSPORT: (0.1, 0.5, 0.5, 0.5)}
    monkeypatch.setattr(retry_rules, "_DELAYS", delays)


@mutant(
    "retry-in-lease",
    written(
        RolloutPlan(rollout_id="r"),
        fates=(
            Fate(),
            Fate(fault=Fault.LOST_BEFORE),
            Fate(fault=Fault.TRICKLE, after_sec=20.0),
        ),
    ),
)
def a_retry_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry whose answer trickles in goes on past the end of the lease."""

    async def attempt(honest, poller, request_sec, cutoff, failure):
        return await honest(poller, request_sec, cutoff + 1e6, failure)

    wrap(monkeypatch, Poller, "_attempt", attempt)


def _twice(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    async def send(honest, wire, *args, **more):
        try:
            return await honest(wire, *args, **more)
        except httpx.TransportError:
            return await honest(wire, *args, **more)

    wrap(monkeypatch, Wire, name, send)


@mutant("retry-in-lease")
def an_admission_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An admission is sent again after a failure of the connection."""
    _twice(monkeypatch, "admit")


@mutant("retry-in-lease", drawn(LOSSY))
def a_cancel_request_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel request is sent again after a failure of the connection."""
    _twice(monkeypatch, "cancel")


# --- local-cancel ---------------------------------------------------------------------------------


@mutant("local-cancel", drawn("none"))
def a_handle_cancels_on_the_server_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """handle.cancel() sends a cancel request."""

    async def poll(honest, client, handle, admission):
        await honest(client, handle, admission)
        if isinstance(handle._failure, RolloutHandleCancelled):
            await client.cancel_rollout(handle.rollout_id)

    wrap(monkeypatch, RolloutClient, "_poll", poll)


@mutant("local-cancel", drawn("none"))
def a_cancelled_handle_polls_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """handle.cancel() wakes the awaiters and leaves the poll under way."""

    def cancel(_, handle):
        if handle.done():
            return False
        handle._end(failure=RolloutHandleCancelled("cancelled"))
        return True

    wrap(monkeypatch, RolloutHandle, "cancel", cancel)


CANCELLED = written(
    RolloutPlan(
        rollout_id="r", agent=Course.SWALLOW, agent_sec=50.0, caller=Caller.CANCEL, caller_sec=5.0
    )
)


@mutant("local-cancel", CANCELLED)
def cancel_rollout_cancels_the_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """cancel_rollout() ends the polling of that rollout's handle."""

    async def cancel_rollouts(honest, client, **selectors):
        answer = await honest(client, **selectors)
        for handle in list(client._handles):
            if handle.rollout_id in answer.dispositions:
                handle.cancel()
        return answer

    wrap(monkeypatch, RolloutClient, "cancel_rollouts", cancel_rollouts)


@mutant("local-cancel", CANCELLED)
def cancel_rollout_makes_a_result_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """cancel_rollout() ends the handle as cancelled, without the server's result."""

    async def cancel_rollouts(honest, client, **selectors):
        answer = await honest(client, **selectors)
        for handle in list(client._handles):
            known = handle.latest_result
            if handle.rollout_id in answer.dispositions and known and not handle.done():
                handle._end(result=evolve(known, status=RolloutStatus.CANCELLED))
                handle._scope.cancel()
        return answer

    wrap(monkeypatch, RolloutClient, "cancel_rollouts", cancel_rollouts)
