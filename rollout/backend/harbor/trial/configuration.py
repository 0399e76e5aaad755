"""From a plan to the configuration of a Harbor trial."""

from __future__ import annotations

import os
from typing import Any

from rollout.backend.harbor.grading.verifier import verifier_fields
from rollout.backend.harbor.plan import TrialPlan
from rollout.backend.harbor.settings import HarborSettings
from rollout.backend.harbor.trial.network import agent_extra_hosts
from rollout.backend.harbor.validation import problems_of
from rollout.errors import BackendConfigurationError

__all__ = ["trial_config"]


def trial_config(settings: HarborSettings, plan: TrialPlan) -> Any:
    """Build a ``harbor.models.trial.config.TrialConfig``. Blocking: the first call imports Harbor.

    Raises:
        BackendConfigurationError: Harbor refuses the agent's options or the environment.
    """
    from harbor.models.trial.config import TrialConfig  # noqa: PLC0415 - an extra, and slow

    agent = dict(settings.agent.fields(plan))
    hosts = agent_extra_hosts(plan, agent_on_host=settings.agent.on_host)
    if hosts:
        agent["extra_allowed_hosts"] = [*agent.get("extra_allowed_hosts", ()), *hosts]
    if settings.agent_setup_timeout_sec is not None:
        agent["override_setup_timeout_sec"] = settings.agent_setup_timeout_sec
    try:
        return TrialConfig.model_validate(
            {
                "task": plan.task.source,
                "trial_name": plan.name,
                "trials_dir": plan.trials_dir,
                "agent": agent,
                "environment": settings.environment.fields(os.environ),
                "verifier": verifier_fields(plan),
            }
        )
    except ValueError as error:  # pydantic's own, which holds the values too
        raise BackendConfigurationError(
            f"Harbor refuses the trial's settings: {problems_of(error)}"
        ) from None
