"""Run trio so that the same seed gives the same run, step for step.

Four things make a trio program differ from run to run: time, the order in which tasks that
are ready get their turn, when garbage is collected (which may run code), and randomness of its
own. A `trio.testing.MockClock` takes the first; trio's scheduler has a switch for the second,
which Hypothesis' plugin uses too, and its own random generator can be seeded. Garbage that needs
a collector waits until the end of the run. For the last, the world draws everything from one
seeded generator, and the generator of `random`, which client and server draw from, is seeded.
"""

from __future__ import annotations

import gc
import importlib
import random
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio
from trio.testing import MockClock

from rollout._checks import check_whole

__all__ = ["current_mock_clock", "deterministic_run"]

T = TypeVar("T")

_SWITCH = "_ALLOW_DETERMINISTIC_SCHEDULING"


@contextmanager
def _deterministic_scheduling(seed: int) -> Generator[None, None, None]:
    # Private names, but the ones that trio's own Hypothesis support is built on.
    scheduler: Any = importlib.import_module("trio._core._run")
    generator: random.Random = scheduler._r  # noqa: SLF001
    before = getattr(scheduler, _SWITCH), generator.getstate()
    setattr(scheduler, _SWITCH, True)
    generator.seed(seed)
    drawn = random.getstate()
    random.seed(seed)  # what the client's backoffs draw from
    try:
        yield
    finally:
        setattr(scheduler, _SWITCH, before[0])
        generator.setstate(before[1])
        random.setstate(drawn)


@contextmanager
def _no_garbage_collection() -> Generator[None, None, None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def deterministic_run(function: Callable[..., Awaitable[T]], *args: Any, seed: int) -> T:
    """Run an async function under a mock clock that jumps, with seeded scheduling.

    Args:
        function: The async function; gets *args*.
        args: Its arguments.
        seed: Decides in which order tasks that are ready run.

    Returns:
        What the function returns. Its exceptions come out unchanged.
    """
    check_whole("seed", seed, least=None)
    with _deterministic_scheduling(seed), _no_garbage_collection():
        return trio.run(function, *args, clock=MockClock(autojump_threshold=0))


def current_mock_clock() -> MockClock:
    """Return the running mock clock.

    Raises:
        TypeError: The running clock is a real one.
    """
    clock = trio.lowlevel.current_clock()
    if not isinstance(clock, MockClock):
        raise TypeError("a simulation runs under trio.testing.MockClock (see deterministic_run)")
    return clock
