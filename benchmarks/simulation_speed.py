"""How many simulated rollouts one core runs in a second, at each fault level.

    python benchmarks/simulation_speed.py
    python benchmarks/simulation_speed.py --faults mild --seeds 200 --profile 25

Simulates drawn workloads, seed after seed, in this one process, and prints rollouts per second
of processor time and of wall time, and how much simulated time passed in one second. Each seed
runs a few times and its fastest run counts, since a shared machine only ever slows one down. On
an idle core the two rates agree; on a busy one, judge by the processor time. With ``--profile`` it
prints the functions that took most of the time instead. Exits with 1 if an invariant does not
hold, or with ``--at-least`` if one level is slower than that.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import logging
import pstats
import sys
import time

from attrs import frozen

from rollout.simulation import LEVELS, SimulationStats, simulate_workload


@frozen
class Speed:
    """What was measured at one fault level."""

    level: str
    stats: SimulationStats
    violations: int
    processor_sec: float
    wall_sec: float

    @property
    def rollouts_per_processor_sec(self) -> float:
        return self.stats.rollouts / self.processor_sec

    def __str__(self) -> str:
        return (
            f"{self.level:<6} {self.rollouts_per_processor_sec:12,.0f} "
            f"{self.stats.rollouts / self.wall_sec:12,.0f} "
            f"{self.stats.simulated_sec / 3600 / self.processor_sec:14,.2f} "
            f"{self.stats.requests / self.stats.rollouts:14,.1f} "
            f"{self.stats.faults.total():8,} {self.violations:11,}"
        )


HEADER = (
    "faults  rollouts/s   rollouts/s    simulated h    requests per   faults  violations\n"
    "        (processor)      (wall)     per second         rollout"
)


def run(level: str, seeds: int, rollouts: int) -> tuple[SimulationStats, int]:
    stats, violations = SimulationStats(), 0
    for seed in range(seeds):
        simulation = simulate_workload(seed, rollouts=rollouts, faults=level)
        stats += simulation.stats
        violations += len(simulation.violations)
    return stats, violations


def measure(level: str, seeds: int, rollouts: int, rounds: int) -> Speed:
    """Run every seed *rounds* times, and take its fastest time: what disturbs only slows."""
    stats, violations, processor, wall = SimulationStats(), 0, 0.0, 0.0
    gc.collect()
    for seed in range(seeds):
        times: list[tuple[float, float]] = []
        for _ in range(rounds):
            began = time.process_time(), time.perf_counter()
            simulation = simulate_workload(seed, rollouts=rollouts, faults=level)
            times.append((time.process_time() - began[0], time.perf_counter() - began[1]))
        stats += simulation.stats
        violations += len(simulation.violations)
        processor += min(spent for spent, _ in times)
        wall += min(spent for _, spent in times)
    return Speed(level, stats, violations, processor, wall)


def profile(level: str, seeds: int, rollouts: int, lines: int) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(run, level, seeds, rollouts)
    for order in ("tottime", "cumtime"):
        pstats.Stats(profiler).sort_stats(order).print_stats(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", choices=tuple(LEVELS), help="one level instead of all")
    parser.add_argument("--seeds", type=int, default=60, help="seeds for each level")
    parser.add_argument("--rollouts", type=int, default=20, help="rollouts for each seed")
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each seed, of which the fastest counts"
    )
    parser.add_argument("--at-least", type=float, default=0.0, help="rollouts/s (processor)")
    parser.add_argument("--profile", type=int, metavar="LINES", help="print a profile instead")
    options = parser.parse_args()
    logging.getLogger("rollout").setLevel(logging.CRITICAL + 1)  # failures are planned
    levels = [options.faults] if options.faults else list(LEVELS)
    for level in levels:  # imports and caches
        run(level, 2, options.rollouts)
    if options.profile:
        for level in levels:
            print(f"--- {level} faults")
            profile(level, options.seeds, options.rollouts, options.profile)
        return 0
    print(HEADER)
    speeds = []
    for level in levels:
        speeds.append(measure(level, options.seeds, options.rollouts, options.rounds))
        print(speeds[-1], flush=True)
    slow = [speed for speed in speeds if speed.rollouts_per_processor_sec < options.at_least]
    return 1 if slow or any(speed.violations for speed in speeds) else 0


if __name__ == "__main__":
    sys.exit(main())
