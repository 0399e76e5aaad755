"""Limits that Harbor does not have: of an agent's time, an environment's stop, a file's size.

asyncio code. Each changes one object of a trial that has been created and not run, as
`rollout.backend.harbor.opensandbox.tell_statuses` does.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from attrs import define, field

from rollout._logs import get_logger
from rollout.backend.harbor.grading.verifier import LEAST_SEC

__all__ = [
    "AgentTime",
    "StopWatch",
    "Stops",
    "drop_large_files",
    "without_large_files",
    "without_own_limit",
]

logger = get_logger(__name__)

_LAST_SEC = 5.0
"""For how long a stop that was given up may react to its cancellation."""

_MOST_STOPS = 20
_MIB = 1024**2
_MOST_BYTES = {"reward.txt": _MIB, "reward.json": _MIB, "trajectory.json": 64 * _MIB}
"""Files that Harbor parses as a whole, in its loop. A trajectory takes some 25 times its size."""
_OWN_LIMIT = "_agent_timeout_sec"

_left: set[asyncio.Task[Any]] = set()
"""Stops that ignored their cancellation; the end of their loop is theirs."""


@define(eq=False)
class AgentTime:
    """What is left for a trial's agent when its environment and itself are set up.

    Harbor counts an agent's time from its start. This counts from the trial's, since the time
    of a rollout's agent is one deadline. Of several steps each gets what the first one got.

    Attributes:
        deadline: When the agent's time is over, by the clock of the loop.
        is_over: Whether it ended an agent.
    """

    deadline: float
    is_over: bool = False
    _budget: float | None = None

    def limit(self, agent: Any) -> None:
        """Have an agent's ``run`` end with `TimeoutError`, which Harbor takes for its own."""
        run = agent.run

        @functools.wraps(run)
        async def limited(*args: Any, **kwargs: Any) -> Any:
            if self._budget is None:
                left = self.deadline - asyncio.get_running_loop().time()
                self._budget = max(left, LEAST_SEC)
            limit = asyncio.timeout(self._budget)
            try:
                async with limit:
                    return await run(*args, **kwargs)
            finally:
                self.is_over = self.is_over or limit.expired()

        agent.run = limited


def without_own_limit(agent: Any) -> None:
    """Have ``oracle`` count no time itself: whole seconds, rounded down, and no timeout after."""
    if getattr(agent, _OWN_LIMIT, None) is not None:
        setattr(agent, _OWN_LIMIT, None)


@define(eq=False)
class StopWatch:
    """The stop of a trial's environment, which may hang or fail.

    Harbor waits for it without a limit, and takes an error of it for one of the trial, whatever
    the trial has come to. Here neither costs the rollout anything: it is logged and noted.

    Attributes:
        trial: The trial's name, by which providers know what it left.
        timeout_sec: For how long it may take.
        is_running: Whether it is under way.
        problem: What went wrong with it, if anything.
        may_run: Whether the environment may still be there.
    """

    trial: str
    timeout_sec: float
    is_running: bool = field(default=False, init=False)
    problem: str | None = field(default=None, init=False)
    may_run: bool = field(default=False, init=False)
    _is_mounted: bool = field(default=False, init=False)

    def watch(self, environment: Any) -> None:
        """Bound the stop of an environment."""
        stop = environment.stop
        capabilities = getattr(environment, "capabilities", None)
        self._is_mounted = bool(getattr(capabilities, "mounted", False))

        @functools.wraps(stop)
        async def bounded(*args: Any, **kwargs: Any) -> None:
            self.is_running = True
            try:
                await self._bounded(stop(*args, **kwargs))
            finally:
                self.is_running = False

        environment.stop = bounded

    @property
    def may_write(self) -> bool:
        """Whether the environment may still change the trial's folder, which is mounted in it."""
        return self._is_mounted and (self.is_running or self.may_run)

    @property
    def note(self) -> str | None:
        """What there is to say of it, if it did not just end."""
        if self.is_running:
            return "was under way when the rollout ended"
        return self.problem

    async def _bounded(self, stop: Awaitable[None]) -> None:
        task: asyncio.Future[None] = asyncio.ensure_future(stop)
        try:
            await asyncio.wait([task], timeout=self.timeout_sec)
        except asyncio.CancelledError:  # the loop is about to end
            task.cancel()
            await asyncio.wait([task])
            raise
        if not task.done():
            await self._give_up(task)
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.problem = f"{type(error).__name__}: {error}"
            self.may_run = True
            logger.warning("trial %s: its environment did not stop: %s", self.trial, self.problem)

    async def _give_up(self, task: asyncio.Future[None]) -> None:
        self.problem = f"had not ended after {self.timeout_sec:g} s and was given up"
        self.may_run = True
        logger.error(
            "trial %s: its environment has not stopped within %g s. It is left to itself, and may "
            "still be there under the name of the trial",
            self.trial,
            self.timeout_sec,
        )
        task.cancel()
        await asyncio.wait([task], timeout=_LAST_SEC)
        if isinstance(task, asyncio.Task) and not task.done():
            _left.add(task)
            task.add_done_callback(_drop)
        elif not task.cancelled():
            task.exception()  # it counts as seen: what there is to say has been said


def _drop(task: asyncio.Task[Any]) -> None:
    _left.discard(task)
    if not task.cancelled():
        task.exception()


class Stops:
    """The stops that outlived their trials; the latest, of those whose environment is lost."""

    def __init__(self) -> None:
        self._stops: list[StopWatch] = []

    def note(self, stop: StopWatch) -> None:
        """Remember the stop of a trial that has ended, unless it went well."""
        self._stops = [each for each in (*self._stops, stop) if each.is_running or each.may_run]
        lost = [each for each in self._stops if not each.is_running]
        for each in lost[:-_MOST_STOPS]:
            self._stops.remove(each)

    def names(self) -> list[str]:
        """Return the names of trials whose environment has not stopped, as far as is known."""
        return [each.trial for each in self._stops if each.is_running or each.may_run]


def without_large_files(environment: Any) -> None:
    """Have an environment that copies folders out leave nothing behind that fills the memory."""
    download = environment.download_dir

    @functools.wraps(download)
    async def guarded(source_dir: Any, target_dir: Any, *args: Any, **kwargs: Any) -> Any:
        result = await download(source_dir, target_dir, *args, **kwargs)
        await asyncio.to_thread(drop_large_files, Path(target_dir), logger)
        return result

    environment.download_dir = guarded


def drop_large_files(folder: Path, log: logging.Logger) -> None:
    """Remove files that Harbor had better not parse: rewards and trajectories. Blocking.

    Args:
        folder: What was copied out of a sandbox, where anybody may have written them.
        log: Told of it.
    """
    for name, most in _MOST_BYTES.items():
        path = folder / name
        if not path.is_symlink() and path.is_file() and path.stat().st_size > most:
            path.unlink()
            log.warning("%s is larger than %d bytes, and is left out", name, most)
