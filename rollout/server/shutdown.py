"""The staged shutdown: drain, cleanup, forced cancellation, delivery, backend.

Each stage has a budget and ends within it. Polls are served all the while, so a caller that
keeps polling gets its result before the process exits.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from itertools import islice

import trio
from attrs import field, frozen

from rollout._checks import check_number, setting
from rollout._logs import get_logger
from rollout._tasks import background_tasks
from rollout.server.registry import RolloutRegistry

__all__ = ["ShutdownBudget", "StagedShutdown"]

logger = get_logger(__name__)

_NAMED = 5
"""How many rollouts a line names."""

_SILENT_SEC = 1.0
"""How long the backend's shutdown may take before a line says so."""


_seconds = setting(check_number, least=0)


@frozen(kw_only=True)
class ShutdownBudget:
    """How long each stage of a shutdown may take, in seconds.

    Attributes:
        drain_sec: For work to finish by itself; admissions are refused from here on.
        cleanup_sec: For executions to stop after they were asked to.
        forced_sec: For executions to stop after they were cancelled by force.
        delivery_sec: For callers that still poll to fetch their results.
        backend_sec: For the backend's own shutdown.

    Raises:
        InvalidFieldError: One of them is negative or not finite.
    """

    drain_sec: float = field(default=10.0, validator=_seconds)
    cleanup_sec: float = field(default=120.0, validator=_seconds)
    forced_sec: float = field(default=10.0, validator=_seconds)
    delivery_sec: float = field(default=10.0, validator=_seconds)
    backend_sec: float = field(default=60.0, validator=_seconds)

    @property
    def total_sec(self) -> float:
        """The longest time that a shutdown can take."""
        return (
            self.drain_sec
            + self.cleanup_sec
            + self.forced_sec
            + self.delivery_sec
            + self.backend_sec
        )


class StagedShutdown:
    """Runs the stages once.

    Attributes:
        budget: How long they may take; may be replaced before they run.
        stuck: The ids of executions that did not even stop by force.
    """

    def __init__(self, registry: RolloutRegistry, budget: ShutdownBudget) -> None:
        self.budget = budget
        self.stuck: list[str] = []
        self._registry = registry
        self._drain_scope = trio.CancelScope()
        self._started = False
        self._finished = trio.Event()

    def skip_drain(self) -> None:
        """Stop waiting for work to finish by itself. The cleanup is never skipped."""
        self._drain_scope.cancel()

    async def run(self) -> None:
        """Run the stages, or wait until an earlier call has run them.

        Cancelling this cuts the stages short; the executions end with the server's nursery.
        """
        if self._started:
            await self._finished.wait()
            return
        self._started = True
        try:
            await self._stop_executions()
            self._say("waiting for results to be fetched", "delivery", self._registry.awaited())
            with trio.move_on_after(self.budget.delivery_sec):
                await self._registry.wait_delivered()
            await self._shut_down_backend()
            self._registry.release_polls()
        finally:
            self._finished.set()

    async def _say_that_backend_takes_long(self) -> None:
        await trio.sleep(_SILENT_SEC)
        seconds = self.budget.backend_sec
        logger.info("shutting down: waiting for the backend's own shutdown, up to %g s", seconds)

    async def _stop_executions(self) -> None:
        registry, budget = self._registry, self.budget
        registry.accepting = False
        self._say("waiting for rollouts to end", "drain", registry.active_ids)
        self._drain_scope.deadline = trio.current_time() + budget.drain_sec
        with self._drain_scope:
            await registry.wait_idle()
        if not registry.active_ids:
            return
        self._say("rollouts were asked to stop", "cleanup", registry.active_ids)
        registry.stop_all()
        with trio.move_on_after(budget.cleanup_sec):
            await registry.wait_idle()
        if not registry.active_ids:
            return
        self._say("rollouts are cancelled by force", "forced", registry.active_ids)
        registry.stop_all(force=True)
        with trio.move_on_after(budget.forced_sec):
            await registry.wait_idle()
        self.stuck = registry.abandon()
        if self.stuck:
            logger.error("shutting down: these did not stop: %s", ", ".join(self.stuck))

    def _say(self, what: str, stage: str, rollout_ids: Collection[str]) -> None:
        """Log what a stage waits for, how long at most, and whose rollouts it concerns."""
        if rollout_ids:
            seconds = getattr(self.budget, f"{stage}_sec")
            names = ", ".join(islice(rollout_ids, _NAMED))
            more = f" and {len(rollout_ids) - _NAMED} more" if len(rollout_ids) > _NAMED else ""
            level = logging.WARNING if stage == "forced" else logging.INFO
            logger.log(level, "shutting down: %s, up to %g s: %s%s", what, seconds, names, more)

    async def _shut_down_backend(self) -> None:
        with trio.move_on_after(self.budget.backend_sec) as scope:
            async with background_tasks(self._say_that_backend_takes_long):
                try:
                    await self._registry.backend.shutdown()
                except Exception:
                    logger.exception("the backend's shutdown failed")
        if scope.cancelled_caught:
            logger.error("the backend's shutdown took longer than %g s", self.budget.backend_sec)
