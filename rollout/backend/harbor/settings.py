"""The settings of a `HarborBackend`, checked once and never changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import field, frozen

from rollout.artifacts import ArtifactStore
from rollout.backend.harbor.agents.spec import AgentSpec
from rollout.backend.harbor.environment import EnvironmentSpec
from rollout.backend.harbor.tasks.images import ImageBindings
from rollout.backend.harbor.tasks.source import TaskSource
from rollout.types import GraderConfig

__all__ = ["HarborSettings"]


@frozen(kw_only=True)
class HarborSettings:
    """The settings that all trials of a backend share; see `HarborBackend`.

    Attributes:
        agent: How Harbor makes the agent.
        environment: Where trials run.
        tasks: Finds the task of each rollout.
        store: Where artifacts, logs and trajectories go.
        trials_dir: Where trials work.
        model: The model's name where a rollout names none.
        grader_cls: The user's grader, if there is one.
        grader_config: Its config.
        secrets: What is probably a secret among the settings; Harbor writes them into trials'
            folders.
        keep_failed_trials: Whether the folder of a failed trial stays.
        max_kept_trials: How many of those stay; ``None`` for no bound.
        stop_timeout_sec: For how long the stop of an environment may take.
        agent_setup_timeout_sec: Time for the setup of an agent; ``None`` leaves it to Harbor.
        images: The images of tasks; ``None`` leaves them to the tasks.
        verified_tasks: Which tasks are known to work, by name, or whether all are.
    """

    agent: AgentSpec
    environment: EnvironmentSpec
    tasks: TaskSource
    store: ArtifactStore
    trials_dir: Path
    model: str | None = None
    grader_cls: Any = None
    grader_config: GraderConfig | None = None
    secrets: tuple[str, ...] = field(default=(), repr=False)
    keep_failed_trials: bool = True
    max_kept_trials: int | None = 100
    stop_timeout_sec: float = 300.0
    agent_setup_timeout_sec: float | None = None
    images: ImageBindings | None = None
    verified_tasks: frozenset[str] | bool = False

    def is_verified(self, task: str) -> bool:
        """Whether a task is known to work, so that it need not be prewarmed."""
        verified = self.verified_tasks
        return verified if isinstance(verified, bool) else task in verified
