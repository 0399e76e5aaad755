"""The shared state of a backend's trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import trio
from attrs import define, field

from rollout.backend.harbor.trial.limits import Stops
from rollout.errors import BackendConfigurationError
from rollout.integrations.asyncio_bridge import AsyncioBridge

__all__ = ["Runtime"]

T = TypeVar("T")

_MOST_THREADS = 16


@define(eq=False)
class Runtime:
    """The loop that trials run on, their limiters, and what went wrong so far.

    Attributes:
        grader_slots: What a user's grader waits for.
        open_bridge: The loop that trials run on; ``None`` while the backend is not running.
        threads: Bounds the threads that rollouts work in.
        stops: Stops of environments that outlived their trials.
        problem: Why no trial can run any more.
        unfit_tasks: Tasks that `HarborBackend.prewarm` found out of order, and why.
    """

    grader_slots: trio.CapacityLimiter
    open_bridge: AsyncioBridge | None = None
    threads: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(_MOST_THREADS))
    stops: Stops = field(factory=Stops)
    problem: str | None = None
    unfit_tasks: dict[str, str] = field(factory=dict)

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
