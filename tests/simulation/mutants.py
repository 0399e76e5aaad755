"""Broken variants of the rules, each of which a check has to find.

The modules ``broken_*.py`` register them here. A mutant wraps or replaces one function of the
product for the length of a block. It names the invariant that has to catch it, and how it is looked
for: by default in drawn workloads, and in a workload of its own where that is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import trio
from attrs import frozen

from rollout.simulation import (
    Fate,
    Fault,
    FaultLevel,
    RolloutPlan,
    ScriptedFaults,
    ServerOptions,
    SimulatedWorld,
    Simulation,
    check_trace,
    simulate,
    simulate_workload,
)
from rollout.simulation.callers import run_workload

Patch = Callable[[pytest.MonkeyPatch], None]
Run = Callable[[int], Simulation[Any]]

LOSSY = FaultLevel(name="lossy", weights={Fault.LOST_AFTER: 0.3})
STOPPING = FaultLevel(name="stopping", shutdowns=1.0)
TIGHT = ServerOptions(result_wait_timeout_sec=2.0, polling_lease_timeout_sec=14.0)


def drawn(level: str | FaultLevel = "harsh", **options: Any) -> Run:
    """Drawn workloads at a fault level."""
    return lambda seed: simulate_workload(seed, faults=level, **options)


def written(*plans: RolloutPlan, fates: tuple[Fate, ...] = (), **options: Any) -> Run:
    """A workload of its own, on a network that is good but for the first requests."""
    server = ServerOptions(**options)

    def run(seed: int) -> Simulation[Any]:
        plan = ScriptedFaults(fates)
        return simulate_workload(seed, faults="none", plans=plans, plan=plan, options=server)

    return run


def interrupted(
    act: Callable[[SimulatedWorld], None],
    *plans: RolloutPlan,
    after: str,
    after_sec: float,
    fates: tuple[Fate, ...] = (),
    feed: bool = False,
    **options: Any,
) -> Run:
    """A workload in which something happens so long after an event of its first rollout.

    It happens a step of the tasks later for every second seed.
    """
    server = ServerOptions(**options)

    def run(seed: int) -> Simulation[Any]:
        async def scenario(world: SimulatedWorld) -> None:
            async def interrupt() -> None:
                await trio.sleep(3)
                event = world.trace.select(after, rollout_id=plans[0].rollout_id)[0]
                await trio.sleep_until(event.time + after_sec)
                for _ in range(seed // 2):
                    await trio.lowlevel.checkpoint()
                act(world)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(interrupt)
                await run_workload(world, plans, limit_sec=1000.0, feed=feed)

        done = simulate(scenario, seed=seed, faults=ScriptedFaults(fates), options=server)
        violations = check_trace(done.trace, server, plans)
        return Simulation(seed, list(plans), done.trace, violations)

    return run


@frozen
class Mutant:
    """A broken variant.

    Attributes:
        name: What it is called.
        invariant: Which one has to catch it.
        line: What is broken, in one line.
        patch: Breaks it.
        run: Runs a simulation that may show it.
    """

    name: str
    invariant: str
    line: str
    patch: Patch
    run: Run

    @contextmanager
    def applied(self) -> Generator[None, None, None]:
        """Break the product for the length of the block."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            self.patch(monkeypatch)
            yield


MUTANTS: list[Mutant] = []


def mutant(invariant: str, run: Run | None = None) -> Callable[[Patch], Patch]:
    """Register a patch under its name; its docstring says what it breaks."""

    def register(patch: Patch) -> Patch:
        name = patch.__name__.replace("_", "-")
        line = (patch.__doc__ or "").strip()
        MUTANTS.append(Mutant(name, invariant, line, patch, run or drawn()))
        return patch

    return register


def wrap(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrapper: Callable[..., Any]
) -> None:
    """Replace a function by *wrapper*, which gets the original one as its first argument."""
    monkeypatch.setattr(
        owner, name, functools.partialmethod(_swapped, wrapper, getattr(owner, name))
    )


def _swapped(self: Any, wrapper: Callable[..., Any], honest: Any, *args: Any, **more: Any) -> Any:
    return wrapper(honest, self, *args, **more)
