"""Simulate many seeds in processes of their own."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from attrs import frozen

from rollout.cli.options import processors
from rollout.simulation import SimulationStats, simulate_workload

HANGS_SEC = 120.0
"""No seed takes longer than a second, so one that takes this long never ends."""


@frozen
class Chunk:
    """Some seeds that one process simulates, one after the other."""

    faults: str
    seeds: range
    feed: bool = False
    crashes: bool = False
    workers: int | None = None


@frozen
class Outcome:
    """What came of a chunk: its figures, and a story of each seed that violates something."""

    stats: SimulationStats
    stories: list[str]


def chunks(faults: str, seeds: range, size: int = 20, *, feed: bool = False) -> list[Chunk]:
    """Cut seeds into chunks."""
    return [Chunk(faults, seeds[at : at + size], feed) for at in range(0, len(seeds), size)]


def run_chunk(chunk: Chunk) -> Outcome:
    """Simulate the seeds of a chunk. One that never ends ends the process, with its stack."""
    logging.getLogger("rollout").setLevel(logging.CRITICAL + 1)
    stats, stories = SimulationStats(), []
    for seed in chunk.seeds:
        faulthandler.dump_traceback_later(HANGS_SEC, exit=True, file=sys.__stderr__)
        run = simulate_workload(
            seed,
            faults=chunk.faults,
            feed=chunk.feed,
            crashes=chunk.crashes,
            workers=chunk.workers,
        )
        faulthandler.cancel_dump_traceback_later()
        stats += run.stats
        if run.violations:
            stories.append(
                f"seed {seed}, faults {chunk.faults}, feed {chunk.feed}: {run.violations[0]}"
            )
    return Outcome(stats, stories)


def run_chunks(todo: list[Chunk]) -> Iterator[Outcome]:
    """Simulate chunks on all processors."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processors(), mp_context=spawn) as pool:
        try:
            yield from pool.map(run_chunk, todo)
        finally:
            pool.shutdown(cancel_futures=True)
