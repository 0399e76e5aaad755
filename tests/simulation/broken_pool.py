"""Broken variants of a front and its workers."""

from __future__ import annotations

import heapq
import random
from collections.abc import Awaitable, Callable

import httpx
import pytest
import trio
from attrs import evolve
from simulation.mutants import TIGHT, Run, mutant, wrap

from rollout.backend.executions import failure
from rollout.context import RolloutContext
from rollout.errors import RolloutError
from rollout.pool import backend as backend_module
from rollout.pool.backend import PoolBackend, judge
from rollout.pool.queue import FairQueue
from rollout.pool.worker import Attempt, Worker
from rollout.server.registry import RolloutRegistry
from rollout.simulation import (
    Caller,
    Course,
    Fault,
    FaultLevel,
    RolloutPlan,
    ServerOptions,
    SimulatedWorld,
)
from rollout.simulation.pool import SimulatedPool
from rollout.simulation.run import simulate_pool
from rollout.types import ExecutionOutcome, RolloutErrorCategory

NOTHING = FaultLevel(name="none")
BUSY = FaultLevel(name="busy", weights={Fault.BUSY: 0.9})
Act = Callable[[SimulatedPool], Awaitable[None]]


async def nothing(pool: SimulatedPool) -> None:
    """Leave everything as it is."""


def at(what: str, act: Act, *, after_sec: float = 0.0) -> Act:
    """Do something when something has happened on a worker."""

    async def wait(pool: SimulatedPool) -> None:
        while not any(worker.trace.select(what) for worker in pool.members):
            await trio.sleep(0.001)
        await trio.sleep(after_sec)
        await act(pool)

    return wait


async def kill(pool: SimulatedPool) -> None:
    """Kill the worker that has the rollout; it is back in a moment."""
    pool.kill(_busy(pool), down_sec=0.5)


async def cut(pool: SimulatedPool) -> None:
    """Cut off the worker that has the rollout."""
    await pool.cut(_busy(pool), 60.0)


def failed(category: RolloutErrorCategory) -> ExecutionOutcome:
    """The outcome of a rollout that has failed."""
    return ExecutionOutcome(workflow=failure("as the mutant says", category))


def _busy(pool: SimulatedPool):
    return next(worker for worker in pool.members if worker.trace.select("admitted"))


def pooled(
    act: Act,
    *plans: RolloutPlan,
    workers: int = 2,
    level: FaultLevel = NOTHING,
    durable: bool = False,
    options: ServerOptions = TIGHT,
) -> Run:
    """A workload on a front with workers, to which something happens."""

    def run(seed: int):
        pool = SimulatedPool(
            workers,
            options=evolve(options, durable=durable),
            max_queue_depth=None,
            level=level,
            draw=random.Random(seed),
            latest_sec=0.0,
        )

        async def trouble(world: SimulatedWorld) -> None:
            await act(pool)

        return simulate_pool(
            seed, pool, list(plans), options=options, trouble=trouble, limit_sec=200.0
        )

    return run


ONE = RolloutPlan(rollout_id="r", agent_sec=5.0, grade=False)
LONG = evolve(ONE, agent_sec=30.0)
UNDISTURBED = pooled(nothing, ONE)
KILLED = pooled(at("workflow-started", kill, after_sec=1.0), LONG)
KILLED_BEFORE = pooled(at("agent-started", kill), ONE)
CUT_BEFORE = pooled(at("agent-started", cut), ONE)


# --- an agent is started once at most -------------------------------------------------------------


@mutant("agent-once", CUT_BEFORE)
def workers_need_no_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front does not ask its workers to wait for a confirmation."""
    honest = backend_module._admission
    monkeypatch.setattr(
        backend_module, "_admission", lambda *args: evolve(honest(*args), confirm_start=False)
    )


@mutant("agent-once", KILLED)
def a_started_rollout_goes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout whose agent had started runs on another worker when its own is lost."""
    honest = backend_module._judge_started

    def judge_started(attempt, result, error):
        ended = honest(attempt, result, error)
        return ended if result else backend_module._Elsewhere("it was lost")

    monkeypatch.setattr(backend_module, "_judge_started", judge_started)


@mutant("agent-once", CUT_BEFORE)
def a_worker_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker starts agents at once, whatever it was asked for."""

    def admit(honest, registry, request, **more):
        return honest(registry, evolve(request, confirm_start=False), **more)

    wrap(monkeypatch, RolloutRegistry, "admit", admit)


@mutant("agent-once", UNDISTURBED)
def a_front_makes_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time at which an agent started is when its front hears of it."""
    wrap(
        monkeypatch,
        RolloutContext,
        "mark_agent_started",
        lambda honest, context, *_: honest(context),
    )


# --- every rollout ends ---------------------------------------------------------------------------


@mutant("one-end", UNDISTURBED)
def a_result_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front goes on waiting when a worker has ended a rollout."""

    async def follow(honest, worker, attempt, request):
        await honest(worker, attempt, request)
        await trio.sleep_forever()

    wrap(monkeypatch, Worker, "follow", follow)


@mutant("one-end", KILLED)
def a_dead_worker_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout that its worker has forgotten is asked for again and again."""

    async def follow(honest, worker, attempt, request):
        while True:
            try:
                return await honest(worker, attempt, request)
            except (RolloutError, httpx.HTTPError):
                await trio.sleep(5)

    wrap(monkeypatch, Worker, "follow", follow)
    monkeypatch.setattr(Attempt, "give_up", lambda *_: None)


@mutant("one-end", KILLED_BEFORE)
def what_is_put_back_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout that goes back to the queue is in none."""
    monkeypatch.setattr(FairQueue, "put_back", lambda queue, run_name, _: queue.ended(run_name))


# --- what was not started runs elsewhere ----------------------------------------------------------


@mutant("elsewhere", KILLED_BEFORE)
def one_attempt_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout fails with the first worker that does not start it."""
    monkeypatch.setattr(backend_module, "_MOST_ATTEMPTS", 1)


@mutant("elsewhere", pooled(nothing, ONE, level=BUSY))
def a_full_worker_fails_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has no room is a failure of the rollout."""

    def judged(*args, **more):
        verdict = judge(*args, **more)
        if getattr(verdict, "busy", False):
            return failed(RolloutErrorCategory.INTERNAL_ERROR)
        return verdict

    monkeypatch.setattr(backend_module, "judge", judged)


@mutant("elsewhere", pooled(at("agent-started", kill, after_sec=0.03), ONE, durable=True))
def a_restart_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker's restart has ended fails, though its agent had not started."""
    monkeypatch.setattr(backend_module, "SERVER_RESTART", "something else")
    monkeypatch.setattr(backend_module, "_NOT_ITS_OWN", frozenset())


# --- a lost agent says so -------------------------------------------------------------------------


@mutant("worker-lost", KILLED)
def a_loss_is_any_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout whose agent was lost does not say why it failed."""
    monkeypatch.setattr(backend_module, "_lost", lambda _: failed(RolloutErrorCategory.AGENT_ERROR))


@mutant("worker-lost", KILLED_BEFORE)
def what_had_not_started_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout is lost with its worker before its agent has started."""
    monkeypatch.setattr(
        backend_module, "_judge_error", lambda attempt, _: backend_module._lost("it is gone")
    )


@mutant("worker-lost", pooled(nothing, evolve(ONE, agent=Course.ERROR)))
def a_failure_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout whose agent has failed is said to be lost."""
    monkeypatch.setattr(backend_module, "_passed_on", lambda *_: backend_module._lost("it failed"))


# --- places come back -----------------------------------------------------------------------------


@mutant("places", UNDISTURBED)
def a_front_keeps_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front remembers rollouts that are over."""
    monkeypatch.setattr(PoolBackend, "release", lambda *_: None)


@mutant("places", UNDISTURBED)
def a_place_on_a_worker_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front counts a rollout on its worker after it has ended."""
    monkeypatch.setattr(Worker, "end", lambda *_, **__: None)


@mutant("places", pooled(nothing, evolve(LONG, caller=Caller.CANCEL, caller_sec=0.011)))
def a_cancel_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker does not hear that nobody wants a rollout any more."""
    monkeypatch.setattr(Worker, "cancel", lambda *_: None)


@mutant("places", UNDISTURBED)
def a_turn_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue counts a rollout of a run after it has ended."""
    monkeypatch.setattr(FairQueue, "ended", lambda *_: None)


# --- no run starves -------------------------------------------------------------------------------

TWO_RUNS = pooled(
    nothing,
    *(
        RolloutPlan(rollout_id=f"{run}{number}", run=run, arrival_sec=at_sec, grade=False)
        for run, at_sec in (("first", 0.0), ("second", 3.5))
        for number in range(9)
    ),
    workers=1,
    options=evolve(TIGHT, max_concurrent=1),
)


@mutant("fairness", TWO_RUNS)
def one_run_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run has a hundred times the share of the others."""

    def init(honest, queue, **_more):
        honest(queue, weights={"first": 100.0})

    wrap(monkeypatch, FairQueue, "__init__", init)


@mutant("fairness", TWO_RUNS)
def a_late_run_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that comes late gets the turns that it had not asked for before."""

    def push(honest, queue, run_name, item):
        now, queue._now = queue._now, 0.0
        honest(queue, run_name, item)
        queue._now = now

    wrap(monkeypatch, FairQueue, "push", push)


@mutant("fairness", TWO_RUNS)
def the_longest_queue_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of which most rollouts wait goes next."""

    def pop(honest, queue):
        queue._heap = []
        for number, run in enumerate(queue._runs.values()):
            run.tag, run.listed = -float(len(run.waiting)), True
            queue._heap.append((run.tag, number, run))
        heapq.heapify(queue._heap)
        return honest(queue)

    wrap(monkeypatch, FairQueue, "pop", pop)
