"""Run simulations: one scenario of a user, or the built-in workload over many seeds."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import trio
from attrs import define, evolve, field, frozen

from rollout._checks import check_flag, check_number, check_whole
from rollout._tasks import sole_error
from rollout.backend.base import ExecutionBackend
from rollout.errors import InvalidFieldError, SimulationTimeoutError
from rollout.server import ShutdownBudget
from rollout.server.state import Durability
from rollout.simulation.callers import run_workload
from rollout.simulation.determinism import deterministic_run
from rollout.simulation.faults import FaultLevel, FaultPlan, level_of
from rollout.simulation.invariants import Violation, check_pool, check_trace
from rollout.simulation.pool import LONGEST_CUT_SEC, SimulatedPool, kill_at_some_moment
from rollout.simulation.pool_checks import Pool
from rollout.simulation.store import COMMIT_MOMENTS
from rollout.simulation.trace import Trace
from rollout.simulation.workload import (
    LONGEST_SWALLOW_SEC,
    RolloutPlan,
    draw_workload,
    longest_work_sec,
)
from rollout.simulation.world import ServerOptions, SimulatedWorld, simulated_world

__all__ = ["Simulation", "SimulationStats", "simulate", "simulate_workload"]

T = TypeVar("T")

_LONGEST_PAUSE_SEC = 200.0
_LONGEST_OUTAGE_SEC = 20.0
_SPARE_SEC = 3600.0
_MOST_CRASHES = 5
_SYNCED = 0.5
"""How likely a state with crashes is to survive cuts of the power."""

_POWER_CUTS = 0.3
"""How likely it is that a crash is a cut of the power."""

_WEEK_SEC = 7 * 24 * 3600.0
_LAST_EVENTS = 10

_RUNS = ("first", "second")
_TROUBLES = 2
"""How many troubles of workers there are for each pause of a level, at most."""

_FEEDS = 0.7
"""How likely it is that the network between a front and its workers lets feeds through."""

_DURABLE_WORKERS = 0.5

"""How many events the note on an error of a scenario tells."""

_WAITS_AND_LEASES = (*[(30.0, 120.0)] * 5, (30.0, 45.0), (20.0, 31.0), (15.0, 60.0))
_BUDGETS = (
    *[ShutdownBudget()] * 3,
    ShutdownBudget(drain_sec=2, cleanup_sec=5, forced_sec=3, delivery_sec=5, backend_sec=10),
)


@frozen
class SimulationStats:
    """Figures of one or more runs.

    Attributes:
        runs: How many runs.
        rollouts: How many rollouts were asked for.
        requests: How many HTTP requests were sent.
        faults: How many faults were injected, by kind.
        simulated_sec: How much time passed in the simulated worlds, in seconds.
    """

    runs: int = 0
    rollouts: int = 0
    requests: int = 0
    faults: Counter[str] = field(factory=Counter)
    simulated_sec: float = 0.0

    def __add__(self, other: SimulationStats) -> SimulationStats:
        return SimulationStats(
            self.runs + other.runs,
            self.rollouts + other.rollouts,
            self.requests + other.requests,
            self.faults + other.faults,
            self.simulated_sec + other.simulated_sec,
        )


@define
class Simulation(Generic[T]):
    """One finished run.

    Attributes:
        seed: Its seed.
        value: What the scenario returned.
        trace: Everything that happened.
        violations: The invariants that did not hold.
    """

    seed: int
    value: T
    trace: Trace
    violations: list[Violation]

    @property
    def stats(self) -> SimulationStats:
        """The figures of the run."""
        sent = {event.detail["request"]: event for event in self.trace.select("sent")}
        faults = Counter(event.detail["fault"] for event in sent.values())
        requests = len(sent)
        del faults["none"]
        for event in self.trace.select("paused", "server-crashed", "cut-off", "drained"):
            faults[event.what] += 1
        return SimulationStats(
            runs=1,
            rollouts=len(
                {
                    event.rollout_id
                    for event in self.trace.select("admitted", "called")
                    if "worker" not in event.detail
                }
            ),
            requests=requests,
            faults=faults,
            simulated_sec=self.trace.events[-1].time if self.trace.events else 0.0,
        )


def simulate(
    scenario: Callable[[SimulatedWorld], Awaitable[T]],
    *,
    seed: int,
    faults: str | FaultLevel | FaultPlan = "mild",
    options: ServerOptions | None = None,
    backend: Callable[[Trace], ExecutionBackend] | None = None,
    limit_sec: float | None = _WEEK_SEC,
) -> Simulation[T]:
    """Run a scenario in a world of its own, in simulated time, and check the trace.

    The same seed and the same scenario give the same trace, event for event, in this process
    or another, as long as the scenario draws only from `SimulatedWorld.generator`, uses trio's
    clock and starts no threads.

    Args:
        scenario: An async function that gets the world. What it raises comes out as it is, with
            a note that says the seed and the last events.
        seed: Where every draw comes from.
        faults: The name of a level (``none``, ``mild``, ``harsh``), a level, or a plan.
        options: How the server is set up.
        backend: Makes the execution backend of each server process, given the trace.
        limit_sec: How long the scenario may take, in simulated seconds; a week by default.
            ``None`` sets no bound, and what waits for ever then does so in real time.

    Returns:
        The run, with what the scenario returned and the violations, if any.

    Raises:
        SimulationTimeoutError: The scenario did not end in time.
        InvalidFieldError: The seed is no whole number.
    """
    check_number("limit_sec", limit_sec, above=0, none=True)
    value, world = _run(scenario, seed, faults, options, backend, limit_sec)
    return Simulation(seed, value, world.trace, check_trace(world.trace, world.options))


def _run(
    scenario: Callable[[SimulatedWorld], Awaitable[T]],
    seed: int,
    faults: str | FaultLevel | FaultPlan,
    options: ServerOptions | None,
    backend: Callable[[Trace], ExecutionBackend] | None = None,
    limit_sec: float | None = None,
) -> tuple[T, SimulatedWorld]:
    """Run a scenario; raise its error without the group around it."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidFieldError("seed", "must be a whole number", kind="type_error")
    values: list[T] = []
    failure: BaseException | None = None

    async def main() -> SimulatedWorld:
        nonlocal failure
        async with simulated_world(seed, faults=faults, options=options, backend=backend) as world:
            try:
                with trio.move_on_after(math.inf if limit_sec is None else limit_sec):
                    values.append(await scenario(world))
                if not values:
                    raise SimulationTimeoutError(  # noqa: TRY301 - as if the scenario had raised it
                        f"the scenario did not end within {limit_sec:g} s of simulated time"
                    )
            except Exception as error:
                failure = error
                failure.add_note(_where(world, faults))
                raise
        return world

    try:
        world = deterministic_run(main, seed=seed)
    except BaseExceptionGroup as group:  # of the world's nursery
        failure = failure or sole_error(group)
    else:
        return values[0], world
    raise failure


def _where(world: SimulatedWorld, faults: str | FaultLevel | FaultPlan) -> str:
    """Describe how to reproduce a failure, and the events just before it."""
    level = faults if isinstance(faults, str) else getattr(faults, "name", None)
    after = trio.current_time() - world.trace.started
    said = f"simulated with seed={world.seed}" + (f" and {level} faults" if level else "")
    last = world.trace.events[-_LAST_EVENTS:]
    lines = [
        f"{said}; {after:.3f} s after the start, and {len(world.trace)} events",
        *map(str, last),
    ]
    return "\n  ".join(lines)


def simulate_workload(
    seed: int,
    *,
    rollouts: int = 20,
    faults: str | FaultLevel = "mild",
    plans: Sequence[RolloutPlan] | None = None,
    plan: FaultPlan | None = None,
    options: ServerOptions | None = None,
    feed: bool = False,
    crashes: bool = False,
    workers: int | None = None,
) -> Simulation[list[RolloutPlan]]:
    """Run a drawn workload under drawn faults, and check the trace.

    Args:
        seed: Where every draw comes from.
        rollouts: How many rollouts the workload has.
        faults: The name of a fault level, or a level; decides on restarts and pauses too.
        plans: A workload to run instead of a drawn one.
        plan: A fault plan to use instead of drawn faults.
        options: How the server is set up; drawn if left out.
        feed: Whether the network lets batches and the result feed through.
        crashes: Whether the server has a state and is killed several times, at any step, some
            of them in the middle of a commit, some by a cut of the power.
        workers: How many workers the server has behind it, as the front of a pool; ``None``
            for a server that runs its rollouts itself. Workers are killed, cut off and drained
            as the level says, and with *crashes* more often.
    """
    check_whole("seed", seed, least=None)
    check_whole("rollouts", rollouts, least=0)
    check_flag("feed", feed)
    check_flag("crashes", crashes)
    check_whole("workers", workers, least=1, none=True)
    level = level_of(faults)
    draw = random.Random(f"workload {seed}")  # noqa: S311 - simulation, no secrets
    workload = list(plans) if plans is not None else draw_workload(draw, rollouts)
    if options is None:
        options = _draw_options(draw)
    if crashes:
        durability: Durability = "power" if draw.random() < _SYNCED else "process"
        options = evolve(options, durable=True, durability=durability)
    if workers is not None:
        return _simulate_pool(
            seed, workers, level, draw, workload, plan, options, feed=feed, crashes=crashes
        )

    async def scenario(world: SimulatedWorld) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_trouble, world, level, draw, workload, world.pause)
            if crashes:
                nursery.start_soon(_crash, world, draw.random(), workload)
            await run_workload(world, workload, limit_sec=_limit_sec(workload), feed=feed)
            nursery.cancel_scope.cancel()

    _, world = _run(scenario, seed, plan or level, options)
    violations = check_trace(world.trace, options, workload)
    return Simulation(seed, workload, world.trace, violations)


def _simulate_pool(
    seed: int,
    workers: int,
    level: FaultLevel,
    draw: random.Random,
    plans: Sequence[RolloutPlan],
    plan: FaultPlan | None,
    options: ServerOptions,
    *,
    feed: bool,
    crashes: bool,
) -> Simulation[list[RolloutPlan]]:
    """Run a workload on the front of a pool; its rollouts belong to two runs in turn."""
    workload = [
        evolve(each, run=each.run or _RUNS[number % 2]) for number, each in enumerate(plans)
    ]
    durable = crashes and draw.random() < _DURABLE_WORKERS
    depth = draw.choice((None, None, 1))
    pool = SimulatedPool(
        workers,
        options=evolve(options, max_queue_depth=depth, durable=durable),
        max_queue_depth=options.max_queue_depth,
        level=level,
        draw=draw,
        feed=feed or draw.random() < _FEEDS,
    )
    times = round(draw.random() * level.pauses * _TROUBLES)
    times += crashes * draw.randint(1, _MOST_CRASHES)
    horizon = max((each.arrival_sec for each in workload), default=0.0) + 60.0
    # A front without a state forgets what its workers run, so it lives.
    calmer = level if crashes else evolve(level, restarts=0.0)

    async def trouble(world: SimulatedWorld) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(pool.trouble, draw, times=times, horizon_sec=horizon))
            nursery.start_soon(_trouble, world, calmer, draw, workload, partial(pool.pause, world))
            if crashes:
                nursery.start_soon(_crash, world, draw.random(), workload)

    return simulate_pool(
        seed, pool, workload, faults=plan or level, options=options, trouble=trouble, feed=feed
    )


def simulate_pool(
    seed: int,
    pool: SimulatedPool,
    workload: list[RolloutPlan],
    *,
    options: ServerOptions,
    trouble: Callable[[SimulatedWorld], Awaitable[None]],
    faults: str | FaultLevel | FaultPlan = "none",
    feed: bool = False,
    limit_sec: float | None = None,
) -> Simulation[list[RolloutPlan]]:
    """Run a workload on the front of a pool, and check front, workers and pool.

    Args:
        seed: Decides the order of the tasks.
        pool: The workers.
        workload: The rollouts.
        options: How the front is set up.
        trouble: What happens meanwhile.
        faults: What goes wrong between the callers and the front.
        feed: Whether the network between them lets batches and the result feed through.
        limit_sec: When callers that still wait are given up, in seconds.
    """

    async def scenario(world: SimulatedWorld) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.serve)
            nursery.start_soon(trouble, world)
            limit = _limit_sec(workload) if limit_sec is None else limit_sec
            await run_workload(world, workload, limit_sec=limit, feed=feed)
            await pool.settle(world, _settle_sec(options, pool.options))
            pool.stop()
            nursery.cancel_scope.cancel()

    _run(scenario, seed, faults, options, pool.backend)
    traces = {each.address.name: each.trace for each in pool.members}
    violations = check_pool(Pool(pool.front, traces, options, pool.options), pool.whole)
    return Simulation(seed, workload, pool.whole, violations)


def _settle_sec(front: ServerOptions, workers: ServerOptions) -> float:
    """Return a time within which a pool is through with rollouts that nobody polls any more."""
    leases = front.polling_lease_timeout_sec + workers.polling_lease_timeout_sec
    return leases + LONGEST_CUT_SEC + LONGEST_SWALLOW_SEC + _LONGEST_OUTAGE_SEC


def _draw_options(draw: random.Random) -> ServerOptions:
    wait, lease = draw.choice(_WAITS_AND_LEASES)
    return ServerOptions(
        max_concurrent=draw.choice((1, 2, 4, 4, 8, None)),
        max_queue_depth=draw.choice((None, None, 1, 5)),
        max_graders=draw.choice((None, None, 1, 2)),
        result_wait_timeout_sec=wait,
        polling_lease_timeout_sec=lease,
        result_retention_sec=draw.choice((0.0, 5.0, 60.0, 900.0)),
        shutdown=draw.choice(_BUDGETS),
    )


def _limit_sec(workload: Sequence[RolloutPlan]) -> float:
    """Return a time by which every caller of a workload has its answer or its error."""
    arrived = max((plan.arrival_sec for plan in workload), default=0.0)
    work = sum(longest_work_sec(plan) + plan.caller_sec for plan in workload)
    return arrived + work + _SPARE_SEC


async def _crash(world: SimulatedWorld, seed: float, workload: list[RolloutPlan]) -> None:
    """Kill the server several times: at some step of the tasks, or at a moment of a commit."""
    draw = random.Random(seed)  # noqa: S311 - simulation, no secrets
    horizon = max((plan.arrival_sec for plan in workload), default=0.0) + 60.0
    for moment in sorted(draw.uniform(0, horizon) for _ in range(draw.randint(1, _MOST_CRASHES))):
        await trio.sleep_until(world.trace.started + moment)
        kill = partial(
            world.restart_server,
            down_sec=round(draw.random() ** 2 * _LONGEST_OUTAGE_SEC, 3),
            power_cut=draw.random() < _POWER_CUTS,
        )
        when = draw.choice(("at-any-step", *COMMIT_MOMENTS))
        await kill_at_some_moment(world.server, when, draw, kill)


async def _trouble(
    world: SimulatedWorld,
    level: FaultLevel,
    draw: random.Random,
    workload: list[RolloutPlan],
    pause: Callable[[float], None],
) -> None:
    """Pause all processes, restart the server or stop it, as often as the level says."""
    horizon = max((plan.arrival_sec for plan in workload), default=0.0) + 60.0
    troubles: list[tuple[float, Callable[[], None]]] = []
    for _ in range(draw.randint(0, level.pauses)):
        length = draw.random() ** 2 * _LONGEST_PAUSE_SEC
        troubles.append((draw.uniform(0, horizon), partial(pause, length)))
    if draw.random() < level.restarts:
        down = draw.random() ** 2 * _LONGEST_OUTAGE_SEC
        restart = partial(world.restart_server, down_sec=down)
        troubles.append((draw.uniform(0, horizon), restart))
    if draw.random() < level.shutdowns:
        troubles.append((draw.uniform(0, horizon), world.server.stop))
    now = 0.0
    for moment, trouble in sorted(troubles, key=lambda pair: pair[0]):
        await trio.sleep(max(0.0, moment - now))
        now = max(now, moment)
        trouble()
