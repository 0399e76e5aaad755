"""Broken variants of `run_rollouts` and `first_successes`."""

from __future__ import annotations

import pytest
from simulation.mutants import drawn, mutant, wrap

from rollout.client.bulk import Runner, _Places
from rollout.client.finished import FinishedRollout
from rollout.simulation import Caller, Course, FaultLevel, RolloutPlan, simulate_workload

PLANS = [
    RolloutPlan(
        rollout_id=f"r{n}",
        agent_sec=2.0 + n,
        agent=Course.ERROR if n % 2 else Course.OK,
        grade=False,
        caller=Caller.BULK,
        caller_sec=5.0,
    )
    for n in range(6)
]


def together(seed: int):
    """One block of six rollouts, whose seed decides how it is used."""
    return simulate_workload(seed, faults="none", plans=PLANS)


BUSY = [
    RolloutPlan(rollout_id=f"r{n}", agent_sec=0.1, grade=False, caller=Caller.BULK, caller_sec=2.0)
    for n in range(30)
]
SLOW = FaultLevel(name="slow", latency_sec=2.0)


@mutant("bulk", together)
def one_more_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one place more than asked for."""

    def init(honest, places, limit, per_key, set_aside):
        honest(places, limit + 1, per_key, set_aside)

    wrap(monkeypatch, _Places, "__init__", init)


@mutant("bulk", together)
def keys_have_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound for each key is not kept."""

    def init(honest, places, limit, per_key, set_aside):
        honest(places, limit, None if per_key is None else limit, set_aside)

    wrap(monkeypatch, _Places, "__init__", init)


@mutant("bulk", together)
def a_block_leaves_its_rollouts_on_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a block cancels nothing."""
    wrap(monkeypatch, Runner, "left", lambda *_: {})


@mutant("bulk", drawn(SLOW, plans=BUSY))
def a_block_leaves_its_admissions_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a block cancels what was admitted alone."""

    def left(honest, runner):
        return {name: key for name, key in honest(runner).items() if key is None}

    wrap(monkeypatch, Runner, "left", left)


@mutant("bulk", drawn(SLOW, plans=BUSY))
def admissions_under_way_are_cancelled_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a block cancels admissions under way without their keys."""
    wrap(monkeypatch, Runner, "left", lambda honest, runner: dict.fromkeys(honest(runner)))


@mutant("bulk", together)
def what_has_ended_is_cancelled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a block cancels all that it has ever run."""
    ran: dict[Runner, list[str]] = {}

    async def run(honest, runner, request):
        ran.setdefault(runner, []).append(request.rollout_id)
        return await honest(runner, request)

    wrap(monkeypatch, Runner, "run", run)
    wrap(monkeypatch, Runner, "left", lambda _honest, runner: dict.fromkeys(ran.get(runner, ())))


@mutant("bulk", together)
def any_result_is_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """first_successes() takes what comes first, whatever it is."""
    monkeypatch.setattr(FinishedRollout, "succeeded", property(lambda _: True))
