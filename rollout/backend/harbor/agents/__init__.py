"""The agents that trials run: Harbor's own ones, or a user's workflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.backend.harbor.agents.native import NativeAgent
from rollout.backend.harbor.agents.spec import AgentSpec
from rollout.backend.harbor.agents.workflow import WorkflowAgent
from rollout.errors import BackendConfigurationError

__all__ = ["AgentSpec", "agent_spec"]


def agent_spec(agent: Any, config: Any, options: Any) -> AgentSpec:
    """Return the specification of a backend's agent.

    Args:
        agent: The name of one of Harbor's own agents, or an `AgentWorkflow` class or
            ``"module:Class"``.
        config: The config of a workflow, or ``"module:attr"`` of one.
        options: Keyword arguments of one of Harbor's own agents; for a workflow see
            `rollout.backend.harbor.agents.workflow.WorkflowAgent`.

    Raises:
        BackendConfigurationError: There is no such agent, or it cannot run in a sandbox.
    """
    if options is not None and (
        not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options)
    ):
        raise BackendConfigurationError("agent_options must be a mapping with names as its keys")
    options = dict(options or {})
    if isinstance(agent, str) and ":" not in agent:
        return NativeAgent(agent, options)
    return WorkflowAgent(agent, config, options)
