"""Simulate many seeds in worker processes; outcomes come in the order of the seeds.

Theory of operation: a seed knows nothing of another one, so any process may run any seed. Each
worker process has a pipe to this one; it gets a seed, sends back the outcome, and gets the
next. Its end shows at the pipe, and so does ours to the workers: none outlives this process,
however that ends.

A simulation never runs in this process: an interrupt would tear it apart in the middle.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from attrs import define, frozen

from rollout.cli.failures import EXIT_FAILED, CommandError

if TYPE_CHECKING:
    from rollout.simulation import SimulationStats, Trace, Violation

__all__ = ["Recipe", "SeedOutcome", "run_seed", "run_seeds"]


@frozen
class Recipe:
    """The settings of each seed's simulation.

    Attributes:
        faults: The name of the fault level.
        rollouts: How many rollouts a seed has.
        keep_trace: Whether the outcome has the trace.
        feed: Whether the network lets batches and the result feed through.
        crashes: Whether the server has a state and is killed several times.
        workers: How many workers it has, as the front of a pool; ``None`` without one.
    """

    faults: str
    rollouts: int
    keep_trace: bool = False
    feed: bool = False
    crashes: bool = False
    workers: int | None = None


@frozen(kw_only=True)
class SeedOutcome:
    """The outcome of one seed.

    Attributes:
        seed: The seed.
        stats: What the run amounted to; ``None`` if it raised.
        violations: The invariants that did not hold.
        error: The traceback of what it raised, if it did.
        trace: Everything that happened, where that was asked for.
    """

    seed: int
    stats: SimulationStats | None
    violations: Sequence[Violation] = ()
    error: str | None = None
    trace: Trace | None = None

    @property
    def bad(self) -> bool:
        """Whether the seed shows a fault."""
        return bool(self.violations) or self.error is not None


@define(eq=False)
class _Worker:
    """A worker process.

    Attributes:
        process: The process.
        pipe: Our end of its pipe.
        seed: What it works on; ``None`` while it is idle.
    """

    process: BaseProcess
    pipe: Connection[Any, Any]
    seed: int | None = None


def run_seed(seed: int, recipe: Recipe) -> SeedOutcome:
    """Simulate one seed, as a worker does.

    An exception is part of the outcome: which seed shows it is what has to be known.
    """
    from rollout.simulation import simulate_workload  # noqa: PLC0415 - loads a web server

    with _silence():
        try:
            run = simulate_workload(
                seed,
                rollouts=recipe.rollouts,
                faults=recipe.faults,
                feed=recipe.feed,
                crashes=recipe.crashes,
                workers=recipe.workers,
            )
        except Exception:  # noqa: BLE001 - reported, with its traceback
            return SeedOutcome(seed=seed, stats=None, error=traceback.format_exc())
    return SeedOutcome(
        seed=seed,
        stats=run.stats,
        violations=run.violations,
        trace=run.trace if recipe.keep_trace else None,
    )


def run_seeds(seeds: Sequence[int], recipe: Recipe, *, workers: int) -> Generator[SeedOutcome]:
    """Simulate *seeds*, and yield their outcomes in this order, each as soon as it may.

    Closing this early, or an exception in it, ends the workers at once.

    Raises:
        CommandError: A worker process died.
    """
    crew = _start_workers(workers, recipe)
    try:
        yield from _in_order(seeds, _distribute(iter(seeds), crew))
    finally:
        for worker in crew:
            worker.process.kill()
        for worker in crew:
            worker.process.join()
            worker.pipe.close()


def _in_order(seeds: Sequence[int], outcomes: Iterator[SeedOutcome]) -> Iterator[SeedOutcome]:
    early: dict[int, SeedOutcome] = {}
    for seed in seeds:
        while seed not in early:
            outcome = next(outcomes)
            early[outcome.seed] = outcome
        yield early.pop(seed)


def _distribute(seeds: Iterator[int], crew: Sequence[_Worker]) -> Iterator[SeedOutcome]:
    """Keep every worker busy; yield outcomes as they come."""
    for worker in crew:
        _assign(worker, seeds)
    while busy := {worker.pipe: worker for worker in crew if worker.seed is not None}:
        for pipe in wait(list(busy)):
            worker = busy[pipe]  # type: ignore[index]
            try:
                outcome: SeedOutcome = worker.pipe.recv()
            except (EOFError, ConnectionError):
                raise _died(worker) from None
            _assign(worker, seeds)
            yield outcome


def _assign(worker: _Worker, seeds: Iterator[int]) -> None:
    worker.seed = next(seeds, None)
    if worker.seed is None:
        return
    try:
        worker.pipe.send(worker.seed)
    except ConnectionError:
        raise _died(worker) from None


def _died(worker: _Worker) -> CommandError:
    worker.process.join()
    return CommandError(
        f"a worker process ended with exit code {worker.process.exitcode} while it simulated "
        f"seed {worker.seed}; try that one alone, with --seed {worker.seed}",
        exit_code=EXIT_FAILED,
    )


# --- worker processes -------------------------------------------------------------------------


def _start_workers(count: int, recipe: Recipe) -> list[_Worker]:
    context = multiprocessing.get_context("spawn")
    crew = []
    # Its start lets go of all signals that were held back, on some releases of Python.
    resource_tracker.ensure_running()
    with _signals_held_back():
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, recipe), daemon=True)
            process.start()
            theirs.close()
            crew.append(_Worker(process, ours))
    return crew


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Keep signals from coming between a process and our knowledge of it.

    Processes that are started meanwhile hold them back for good: Ctrl-C at a terminal reaches
    them too, and what it means is for this process to say.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection[Any, Any], recipe: Recipe) -> None:
    """Run seeds until the other end of the pipe is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        while True:
            pipe.send(run_seed(pipe.recv(), recipe))
    except (EOFError, ConnectionError):
        return


@contextmanager
def _silence() -> Iterator[None]:
    """Keep off stderr what the library logs: workflows fail as planned, with tracebacks."""
    logger = logging.getLogger("rollout")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
