"""Graders: classes of the user's that rate a sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rollout.context import GraderContext
from rollout.types import GraderConfig

__all__ = ["Grader"]


class Grader(ABC):
    """Grades one sample. A new instance is made for every rollout, on the event loop.

    Example::

        class Compare(Grader):
            def grade(self, ctx):
                ctx.set_reward(1.0 if ctx.sample.messages[-1]["content"] == ctx.label else 0.0)

    Attributes:
        config: This rollout's copy of the config.
    """

    def __init__(self, config: GraderConfig | None = None) -> None:
        self.config = config

    @abstractmethod
    def grade(self, ctx: GraderContext) -> Any:
        """Set the reward with `GraderContext.set_reward`; async or plain, like `run`.

        The return value is ignored. Leaving the sample without a reward is a failure, unless
        the sample is marked ``remove_sample``.
        """
