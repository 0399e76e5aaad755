"""Deterministic simulation of clients, a faulty network and a server, in simulated time.

The client, the application, the registry and the backend are the real ones; between them is
a network that loses, delays and garbles requests as a seed or a script says. A run is checked
against the invariants of rollouts, and the same seed gives the same run, event for event::

    async def scenario(world):
        async with world.client() as client:
            return await client.run_rollout(...)

    run = simulate(scenario, seed=7, faults="harsh")
    assert not run.violations
"""

from rollout.simulation.determinism import deterministic_run
from rollout.simulation.faults import (
    LEVELS,
    Fate,
    Fault,
    FaultLevel,
    FaultPlan,
    RandomFaults,
    Route,
    ScriptedFaults,
)
from rollout.simulation.invariants import Violation, check_trace
from rollout.simulation.run import Simulation, SimulationStats, simulate, simulate_workload
from rollout.simulation.trace import Event, Trace
from rollout.simulation.workload import Caller, Course, RolloutPlan
from rollout.simulation.world import ServerOptions, SimulatedWorld

__all__ = [
    "LEVELS",
    "Caller",
    "Course",
    "Event",
    "Fate",
    "Fault",
    "FaultLevel",
    "FaultPlan",
    "RandomFaults",
    "RolloutPlan",
    "Route",
    "ScriptedFaults",
    "ServerOptions",
    "SimulatedWorld",
    "Simulation",
    "SimulationStats",
    "Trace",
    "Violation",
    "check_trace",
    "deterministic_run",
    "simulate",
    "simulate_workload",
]
