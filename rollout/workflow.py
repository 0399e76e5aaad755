"""Workflows: classes of the user's that run an agent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic

from rollout.context import AgentWorkflowContext, TConfig

__all__ = ["AgentWorkflow"]


class AgentWorkflow(ABC, Generic[TConfig]):
    """One agent run. A new instance is made for every rollout, on the event loop.

    Example::

        class Solve(AgentWorkflow):
            async def run(self, ctx):
                rollout = get_rollout_context()
                reply = await ask(rollout.chat_completions_url, ctx.prompt)
                return [*ctx.prompt, reply]

    Attributes:
        config: This rollout's copy of the config.
    """

    def __init__(self, config: TConfig | None = None) -> None:
        self.config = config

    @abstractmethod
    def run(self, ctx: AgentWorkflowContext[TConfig]) -> Any:
        """Run the agent; async or plain. A plain function runs in a worker thread.

        A plain function cannot be interrupted. It may ask `trio.from_thread.check_cancelled`
        now and then; until it returns it keeps its concurrency slot.

        Returns:
            A `rollout.types.AgentWorkflowOutput`, or a message list, or ``None`` to take the
            sample of the source that is registered on the `rollout.RolloutContext`.
        """
