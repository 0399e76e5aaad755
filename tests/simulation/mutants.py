"""Broken variants of the rules, each of which a check has to find.

`simulation.broken_rollouts`, `simulation.broken_server` and `simulation.broken_client` register
them here. A mutant wraps or replaces one function of the product for the length of a block. It
names the invariant that has to catch it, and how it is looked for: by default in drawn workloads,
where those would take long to come to the point in a workload of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
from attrs import frozen

from rollout.simulation import (
    Fate,
    Fault,
    FaultLevel,
    RolloutPlan,
    ScriptedFaults,
    ServerOptions,
    Simulation,
    simulate_workload,
)

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
