"""The agents that trials run: Harbor's own ones, or a user's workflow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.backend.harbor.agents.native import NativeAgent
from rollout.backend.harbor.agents.spec import AgentSpec
from rollout.backend.harbor.agents.workflow import WorkflowAgent
from rollout.errors import BackendConfigurationError

__all__ = ["AgentSpec", "agent_spec"]


def agent_spec(
    agent: Any,
    config: Any,
    options: Any,
    *,
    bundle: str | os.PathLike[str] | None = None,
    code_dir: str | os.PathLike[str] | None = None,
) -> AgentSpec:
    """Return the specification of a backend's agent.

    Args:
        agent: The name of one of Harbor's own agents, or an `AgentWorkflow` class or
            ``"module:Class"``.
        config: The config of a workflow, or ``"module:attr"`` of one.
        options: Keyword arguments of one of Harbor's own agents; for a workflow see
            `rollout.backend.harbor.agents.workflow.WorkflowAgent`.
        bundle: A wheel that has a workflow in it.
        code_dir: A folder that has one.

    Raises:
        BackendConfigurationError: There is no such agent, or it cannot run in a sandbox.
    """
    if options is not None and (
        not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options)
    ):
        raise BackendConfigurationError("agent_options must be a mapping with names as its keys")
    options = dict(options or {})
    if isinstance(agent, str) and ":" not in agent:
        if bundle is not None or code_dir is not None:
            raise BackendConfigurationError(
                f"bundle and code_dir are for a workflow, named as 'module:Class'; {agent!r} is an "
                "agent of Harbor's"
            )
        return NativeAgent(agent, options)
    return WorkflowAgent(agent, config, options, _code(bundle, code_dir))


def _code(
    bundle: str | os.PathLike[str] | None, code_dir: str | os.PathLike[str] | None
) -> Path | None:
    if bundle is not None and code_dir is not None:
        raise BackendConfigurationError("bundle and code_dir exclude each other")
    if bundle is not None and not Path(bundle).is_file():
        raise BackendConfigurationError(f"bundle is not a file: {bundle}")
    if code_dir is not None and not Path(code_dir).is_dir():
        raise BackendConfigurationError(f"code_dir is not a folder: {code_dir}")
    found = code_dir if bundle is None else bundle
    return None if found is None else Path(found).absolute()
