"""Limits that Harbor does not have: of an agent's time, an environment's stop, a file's size.

asyncio code. Each changes one object of a trial that has been created and not run.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from attrs import define, field

from rollout._logs import get_logger
from rollout.backend.harbor.plan import LEAST_SEC

__all__ = ["AgentTime", "EnvironmentWatch", "drop_large_files", "without_own_limit"]

logger = get_logger(__name__)

_LAST_SEC = 5.0
"""For how long a stop that was given up may react to its cancellation."""

_MOST_RAISED = 50
_MIB = 1024**2
_MOST_BYTES = {"reward.txt": _MIB, "reward.json": _MIB, "trajectory.json": 64 * _MIB}
"""Files that Harbor parses as a whole, in its loop. A trajectory takes some 25 times its size."""
_OWN_LIMIT = "_agent_timeout_sec"
_CALLS = ("start", "exec", "upload_file", "upload_dir", "download_file", "download_dir")


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
        """End an agent's ``run`` with `TimeoutError`, which Harbor takes for its own."""
        run = agent.run
        self._budget = None  # of a trial that is tried again, the agent gets what is left

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
    """Turn off ``oracle``'s own limit: whole seconds, rounded down, without a timeout."""
    if getattr(agent, _OWN_LIMIT, None) is not None:
        setattr(agent, _OWN_LIMIT, None)


@define(eq=False)
class EnvironmentWatch:
    """Watches the calls of a trial's environment, and bounds its stop, which may hang or fail.

    Harbor waits for a stop without a limit, and takes an error of it for one of the trial,
    whatever the trial has come to. Here neither costs the rollout anything: it is logged and noted.

    Attributes:
        trial: The trial's name, by which providers know what it left.
        timeout_sec: For how long its stop may take.
        raised: The last exceptions of its other calls; Harbor keeps their names and texts alone.
        has_no_sandbox: Whether its start failed before it had an OpenSandbox sandbox.
        is_running: Whether its stop is under way.
        problem: What went wrong with its stop, if anything.
        may_run: Whether the environment may still be there.
    """

    trial: str
    timeout_sec: float
    raised: deque[BaseException] = field(factory=lambda: deque(maxlen=_MOST_RAISED), init=False)
    has_no_sandbox: bool = field(default=False, init=False)
    is_running: bool = field(default=False, init=False)
    problem: str | None = field(default=None, init=False)
    may_run: bool = field(default=False, init=False)
    _is_mounted: bool = field(default=False, init=False)
    _stop: asyncio.Future[None] | None = field(default=None, init=False)

    def watch(self, environment: Any) -> None:
        """Watch an environment, and drop files that would fill the memory."""
        capabilities = getattr(environment, "capabilities", None)
        self._is_mounted = bool(getattr(capabilities, "mounted", False))
        self.record(environment, *_CALLS)
        start, download, stop = environment.start, environment.download_dir, environment.stop

        @functools.wraps(start)
        async def started(*args: Any, **kwargs: Any) -> None:
            try:
                await start(*args, **kwargs)
            except BaseException:
                self.has_no_sandbox = getattr(environment, "_sandbox", None) is None
                raise

        @functools.wraps(download)
        async def downloaded(source_dir: Any, target_dir: Any, *args: Any, **kwargs: Any) -> Any:
            result = await download(source_dir, target_dir, *args, **kwargs)
            await asyncio.to_thread(drop_large_files, Path(target_dir), logger)
            return result

        @functools.wraps(stop)
        async def stopped(*args: Any, **kwargs: Any) -> None:
            self.is_running = True
            try:
                await self._bounded(stop(*args, **kwargs))
            finally:
                self.is_running = False

        environment.start, environment.download_dir = started, downloaded
        environment.stop = stopped

    def record(self, target: Any, *names: str) -> None:
        """Keep what the asynchronous methods of an object raise."""
        for name in names:
            setattr(target, name, self._recorded(getattr(target, name)))

    def _recorded(self, call: Any) -> Any:
        @functools.wraps(call)
        async def recorded(*args: Any, **kwargs: Any) -> Any:
            try:
                return await call(*args, **kwargs)
            except Exception as error:
                self.raised.append(error)
                raise

        return recorded

    @property
    def may_write(self) -> bool:
        """Whether the environment may still change the trial's folder, which is mounted in it."""
        return self._is_mounted and (self.is_running or self.may_run)

    @property
    def note(self) -> str | None:
        """What to say of its stop, unless it went well."""
        return "was under way when the rollout ended" if self.is_running else self.problem

    async def _bounded(self, stop: Awaitable[None]) -> None:
        task = self._stop = asyncio.ensure_future(stop)
        task.add_done_callback(_take_error)
        try:
            await asyncio.wait([task], timeout=self.timeout_sec)
        except asyncio.CancelledError:  # the loop is about to end
            task.cancel()
            await asyncio.wait([task])
            raise
        if not task.done():
            self.problem = f"had not ended after {self.timeout_sec:g} s and was given up"
            self.may_run = True
            logger.error(
                "trial %s: its environment has not stopped within %g s. It is left to itself, and "
                "may still be there under the name of the trial",
                self.trial,
                self.timeout_sec,
            )
            task.cancel()
            await asyncio.wait([task], timeout=_LAST_SEC)
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.problem = f"{type(error).__name__}: {error}"
            self.may_run = True
            logger.warning("trial %s: its environment did not stop: %s", self.trial, self.problem)


def _take_error(task: asyncio.Future[None]) -> None:
    """Mark the error of a stop as seen, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def drop_large_files(folder: Path, log: logging.Logger) -> None:
    """Remove files that are too large for Harbor to parse: rewards and trajectories. Blocking.

    Args:
        folder: What was copied out of a sandbox, where anybody may have written them.
        log: Gets a warning for each.
    """
    for name, most in _MOST_BYTES.items():
        path = folder / name
        if not path.is_symlink() and path.is_file() and path.stat().st_size > most:
            path.unlink()
            log.warning("%s is larger than %d bytes, and is left out", name, most)
