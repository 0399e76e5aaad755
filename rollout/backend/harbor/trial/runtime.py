"""The shared state of a backend's trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import trio
from attrs import define, field

from rollout.backend.harbor.limits import EnvironmentWatch
from rollout.errors import BackendConfigurationError
from rollout.integrations.asyncio_bridge import AsyncioBridge

__all__ = ["Runtime"]

T = TypeVar("T")

_MOST_THREADS = 16
_MOST_LOST = 20


@define(eq=False)
class Runtime:
    """The loop that trials run on, their limiters, and what went wrong so far.

    Attributes:
        grader_slots: What a user's grader waits for.
        open_bridge: The loop that trials run on; ``None`` while the backend is not running.
        queue: The caller's own ``TrialQueue``, if trials go through one.
        threads: Bounds the threads that rollouts work in.
        problem: Why no trial can run any more.
        unfit_tasks: Tasks that `HarborBackend.prewarm` found out of order, and why.
    """

    grader_slots: trio.CapacityLimiter
    open_bridge: AsyncioBridge | None = None
    queue: Any = None
    threads: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(_MOST_THREADS))
    problem: str | None = None
    unfit_tasks: dict[str, str] = field(factory=dict)
    _stops: list[EnvironmentWatch] = field(factory=list, init=False)

    @property
    def bridge(self) -> AsyncioBridge:
        """The loop that trials run on.

        Raises:
            BackendConfigurationError: The backend is not running; a server does that.
        """
        if self.open_bridge is None:
            raise BackendConfigurationError(
                "HarborBackend runs within `async with backend.running():`, which a rollout "
                "server enters by itself"
            )
        return self.open_bridge

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking function of a rollout in a worker thread, to its end.

        A cancellation waits for it, so that nothing is written during the cleanup.
        """
        return await trio.to_thread.run_sync(function, *args, limiter=self.threads)

    def note_stop(self, watch: EnvironmentWatch) -> None:
        """Remember the environment of a trial that has ended, unless its stop went well.

        Of those that are lost, the latest are remembered.
        """
        known = [each for each in (*self._stops, watch) if each.is_running or each.may_run]
        lost = [each for each in known if not each.is_running]
        self._stops = [each for each in known if each not in lost[:-_MOST_LOST]]

    def unstopped(self) -> list[str]:
        """Return the names of trials whose environment has not stopped, as far as is known."""
        return [each.trial for each in self._stops if each.is_running or each.may_run]
