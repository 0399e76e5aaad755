"""The interface of a trial's agent: how Harbor makes it, and what it handed back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rollout.backend.harbor.plan import LEAST_SEC, TrialPlan
from rollout.types import RolloutSample

__all__ = ["AgentSpec", "timeout_fields"]


class AgentSpec(ABC):
    """How Harbor makes the agent of a trial.

    Attributes:
        name: What it is called in `HarborBackend.health`.
        on_host: Whether its model calls, if it makes any, come from this process rather than
            from inside the sandbox.
    """

    name: str
    on_host: bool

    @abstractmethod
    def prepare(self) -> None:
        """Prepare the agent once, before the first trial. Blocking.

        Raises:
            BackendConfigurationError: The agent cannot run.
        """

    @abstractmethod
    def fields(self, plan: TrialPlan) -> dict[str, Any]:
        """Return the fields of Harbor's ``AgentConfig`` for a trial. Blocking.

        None of them holds the rollout's key, since Harbor writes them to files. The agent
        takes it out of the rollout's context, within the trial's own asyncio task.

        Raises:
            InvalidFieldError: The request lacks what the agent needs.
        """

    @abstractmethod
    def sample(self, plan: TrialPlan) -> RolloutSample | None:
        """Return what the agent of a trial handed back, ``None`` if nothing. Blocking."""


def timeout_fields(plan: TrialPlan) -> dict[str, Any]:
    """Return the fields of the agent's deadline; empty if the task decides."""
    if plan.agent_timeout_sec is None:
        return {}
    return {"override_timeout_sec": max(plan.agent_timeout_sec, LEAST_SEC)}
