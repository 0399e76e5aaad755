"""Run one trial on the asyncio side of the bridge, and take its events on the trio side.

Harbor calls hooks for the events of a trial. A hook that raises does harm there (an agent
that is not verified, an end that is lost), so ours never do: they hand the event over to the
trio thread and return. That of the agent's start waits until the agent may start, and if that
fails, so does the trial. The result is taken from the END event, since a trial that is cancelled
raises and returns nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from attrs import define, field

from rollout._logs import get_logger
from rollout.backend.harbor.limits import AgentTime, EnvironmentWatch, without_own_limit
from rollout.backend.harbor.trial.submission import submit
from rollout.context import RolloutContext
from rollout.integrations.asyncio_bridge import run_in_trio
from rollout.types import RolloutStatus

__all__ = ["TrialRun"]

logger = get_logger(__name__)


@define(eq=False)
class TrialRun:
    """The trial of one rollout.

    Attributes:
        context: The rollout's context, which gets the statuses.
        set_status: Called with each status, for the backend's own table.
        watch: Its environment.
        on_agent_start: Called when an agent is about to run, on the trio thread.
        agent_time: What its agent has, once it runs; ``None`` for as long as the task says.
        events: The names of Harbor's events so far; changed on the trio thread only.
        verifying: Whether its verifier runs: of a task of several steps, the next agent may have
            begun.
        result: Harbor's result of it, as of its END event.
    """

    context: RolloutContext
    set_status: Callable[[RolloutStatus], None]
    watch: EnvironmentWatch
    on_agent_start: Callable[[], None] = lambda: None
    agent_time: AgentTime | None = field(default=None, init=False)
    events: set[str] = field(factory=set, init=False)
    verifying: bool = field(default=False, init=False)
    result: Any = field(default=None, repr=False, init=False)

    @property
    def phase(self) -> str:
        """The current phase, as in ``cancelled while its agent ran``."""
        if self.verifying:
            return "its verifier ran"
        if "AGENT_START" in self.events:
            return "its agent ran"
        if "ENVIRONMENT_START" in self.events:
            return "its environment was set up"
        return "its trial was set up"

    async def run(
        self,
        config: Any,
        call_trio_soon: Callable[..., None],
        agent_sec: float | None = None,
        queue: Any = None,
    ) -> Any:
        """Run a trial to its end; an asyncio function.

        Args:
            config: A ``harbor.models.trial.config.TrialConfig``.
            call_trio_soon: The bridge's way to call a function on the trio thread.
            agent_sec: From now on until the agent has to have ended, in seconds; ``None`` leaves
                that to the task.
            queue: A ``harbor.trial.queue.TrialQueue`` that runs it, and may try it again; see
                `rollout.backend.harbor.trial.submission`.

        Returns:
            Harbor's result. Errors of the trial are in it; what keeps it from starting (a
            task that is not there, an import path that leads nowhere) is raised.
        """
        from harbor.trial.trial import Trial  # noqa: PLC0415 - an extra

        if agent_sec is not None:
            self.agent_time = AgentTime(asyncio.get_running_loop().time() + agent_sec)
        if queue is not None:
            return await submit(queue, config, partial(self._set_up, call_trio_soon))
        trial = await Trial.create(config)
        self._set_up(call_trio_soon, trial)
        return await trial.run()

    def _set_up(self, call_trio_soon: Callable[..., None], trial: Any) -> None:
        from harbor.trial.hooks import TrialEvent  # noqa: PLC0415 - an extra

        self.watch.watch(trial.agent_environment)
        self.watch.record(trial.agent, "setup", "run")
        without_own_limit(trial.agent)
        if self.agent_time is not None:
            self.agent_time.limit(trial.agent)
        for event in TrialEvent:
            trial.add_hook(event, self._hook(event.name, call_trio_soon))

    def _hook(self, name: str, call_trio_soon: Callable[..., None]) -> Any:
        async def hook(event: Any) -> None:
            try:
                if name == "END":
                    self.result = event.result
                call_trio_soon(self.take, name)
            except Exception:
                logger.exception("the event %s of a trial was lost", name)
            if name == "AGENT_START":
                await run_in_trio(self._wait_to_start)

        return hook

    async def _wait_to_start(self) -> None:
        await self.context.wait_start_kept()
        self.on_agent_start()

    def take(self, name: str) -> None:
        """Handle an event, on the trio thread. Unknown events change nothing."""
        if name in {"AGENT_START", "VERIFICATION_START"}:
            self.verifying = name == "VERIFICATION_START"
        if name in self.events:
            return
        self.events.add(name)
        if name == "START":
            self._report(RolloutStatus.RUNNING)
        elif name == "AGENT_START":
            self.context.mark_agent_started()
        elif name == "VERIFICATION_START":
            self._report(RolloutStatus.GRADING)

    def _report(self, status: RolloutStatus) -> None:
        self.set_status(status)
        self.context.report_status(status)
