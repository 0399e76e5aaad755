"""Simulate many seeds, and keep what is wrong with each.

In this process: the session has one for each processor already.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from attrs import frozen

from rollout.simulation import SimulationStats, simulate_workload


@frozen
class Chunk:
    """Some seeds with the same options."""

    faults: str
    seeds: range
    feed: bool = False
    crashes: bool = False
    workers: int | None = None


def run_chunks(todo: Iterable[Chunk]) -> SimulationStats:
    """Simulate all seeds; the first violation is an error."""
    logger = logging.getLogger("rollout")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    stats = SimulationStats()
    try:
        for chunk in todo:
            for seed in chunk.seeds:
                run = simulate_workload(
                    seed,
                    faults=chunk.faults,
                    feed=chunk.feed,
                    crashes=chunk.crashes,
                    workers=chunk.workers,
                )
                assert run.violations == [], f"seed {seed} of {chunk}: {run.violations[0]}"
                stats += run.stats
    finally:
        logger.setLevel(before)
    return stats
