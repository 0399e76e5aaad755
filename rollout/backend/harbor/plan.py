"""The plan of a trial: its rollout, task, folder and time limits."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

from attrs import field, frozen

from rollout.context import RolloutContext
from rollout.types import ExecutionRequest, RolloutSample

__all__ = ["LEAST_SEC", "ResolvedTask", "TrialPlan", "recorded_sample", "trial_name"]

LEAST_SEC = 0.001
"""Harbor takes a timeout of zero for none at all, so a time that has run out is this long."""

_LONGEST_STEM = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9]+")


async def recorded_sample(plan: TrialPlan) -> RolloutSample | None:
    """Return what a model gateway has recorded of a trial's agent, with the request's label."""
    sample = await plan.context.get_sample()
    if sample is not None and sample.label is None:
        sample.label = plan.request.label
    return sample


def trial_name(rollout_id: str) -> str:
    """Return a name for a rollout's trial: readable, safe for every provider, never the same."""
    stem = _UNSAFE.sub("-", rollout_id).strip("-")[:_LONGEST_STEM].strip("-")
    return f"{stem or 'rollout'}-{secrets.token_hex(5)}".lower()


@frozen(kw_only=True)
class ResolvedTask:
    """A Harbor task that is about to run.

    Attributes:
        name: What it is called in messages and by `prewarm`.
        folder: Where it is on this machine; ``None`` while Harbor has yet to fetch it.
        source: The fields of Harbor's ``TaskConfig``.
        own_tests: Whether it grades itself: with a script in ``tests``, for each step if it
            has steps, or with a verifier environment of its own that holds its tests. ``None``
            while it is not fetched.
        instruction: The text for its agent, empty for a task of several steps; ``None`` while
            it is not fetched.
        allowlisted: Whether its agent runs under an allowlist of hosts, in any step.
        offline: Whether its agent runs without a network, in any step.
        steps: The names of its steps.
    """

    name: str
    source: dict[str, Any] = field(repr=False)
    folder: Path | None = None
    own_tests: bool | None = None
    instruction: str | None = None
    allowlisted: bool = False
    offline: bool = False
    steps: tuple[str, ...] = ()


@frozen(kw_only=True)
class TrialPlan:
    """The trial of one rollout, before Harbor sees it.

    Attributes:
        request: What the caller asked for.
        context: The rollout's context, which has the chat endpoint and its key.
        workspace: A folder of this rollout alone, removed afterwards. Harbor's trial folder
            is ``workspace/trials/<name>``.
        name: The trial's name.
        task: The task, fetched.
        model: The model's name for native agents, as in ``openai/policy``.
        agent_timeout_sec: What is left for the agent, in seconds; ``None`` leaves it to the
            task.
        grader_timeout_sec: Time for the verifier, likewise.
        url_inside: The chat endpoint as the agent in the sandbox reaches it; ``None`` if that is
            the context's.
        more_secrets: Secrets among the settings of the backend.
    """

    request: ExecutionRequest
    context: RolloutContext = field(repr=False)
    workspace: Path
    name: str
    task: ResolvedTask
    model: str | None = None
    agent_timeout_sec: float | None = None
    grader_timeout_sec: float | None = None
    url_inside: str | None = None
    more_secrets: tuple[str, ...] = field(default=(), repr=False)

    @property
    def chat_url(self) -> str:
        """The chat endpoint that the agent calls."""
        return self.url_inside or self.context.chat_completions_url

    @property
    def trials_dir(self) -> Path:
        """The folder that Harbor makes the trial's folder in."""
        return self.workspace / "trials"

    @property
    def trial_dir(self) -> Path:
        """The trial's own folder."""
        return self.trials_dir / self.name

    @property
    def secrets(self) -> list[str | None]:
        """Values that must not appear in a file, a log or a message."""
        return [*self.context.secrets, *self.more_secrets]
