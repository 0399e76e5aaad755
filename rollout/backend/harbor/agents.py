"""The agents that trials run: Harbor's own ones by name, or a user's workflow.

An `AgentSpec` says how Harbor is to make the agent of a trial, and reads afterwards what the
agent handed back.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from attrs import frozen

from rollout.backend.harbor.endpoint import chat_base, litellm_model, require_model
from rollout.backend.harbor.plan import TrialPlan
from rollout.backend.harbor.verifier import LEAST_SEC
from rollout.errors import BackendConfigurationError
from rollout.types import RolloutSample

__all__ = ["AgentSpec", "NativeAgent", "agent_spec"]


class AgentSpec(ABC):
    """How to make the agent of a trial.

    Attributes:
        name: What it is called in `HarborBackend.health`.
        on_host: Whether its model calls, if it makes any, come from this process rather than
            from inside of the sandbox.
    """

    name: str
    on_host: bool

    @abstractmethod
    def prepare(self) -> None:
        """Do once what takes long, before the first trial. Blocking.

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

    def read_only_paths(self) -> list[str]:
        """Return which of this machine's folders a sandbox that shows some had better show."""
        return []


def agent_spec(agent: Any, config: Any, options: Any) -> AgentSpec:
    """Return how to make the agent that a backend is given.

    Args:
        agent: The name of one of Harbor's own agents, or an `AgentWorkflow` class or
            ``"module:Class"``.
        config: The config of a workflow, or ``"module:attr"`` of one.
        options: Keyword arguments of one of Harbor's own agents; for a workflow see
            `rollout.backend.harbor.workflow_agent.WorkflowAgent`.

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
    from rollout.backend.harbor.workflow_agent import WorkflowAgent  # noqa: PLC0415 - a cycle

    return WorkflowAgent(agent, config, options)


# --- Harbor's own agents ------------------------------------------------------------------------


@frozen
class _Native:
    """What is special about one of Harbor's own agents.

    Attributes:
        make: Its class of ours in `rollout.backend.harbor.native`; ``None`` for Harbor's own.
        on_host: See `AgentSpec`.
        wire: From its model's name and the chat endpoint to its model's name and keyword
            arguments; ``None`` if it calls no model.
    """

    make: str | None
    on_host: bool
    wire: Callable[[str, str], tuple[str, dict[str, Any]]] | None


def _terminus(model: str, url: str) -> tuple[str, dict[str, Any]]:
    return litellm_model(model), {
        "api_base": url,
        "record_terminal_session": False,
        "enable_summarize": False,
    }


def _mini_swe_agent(model: str, _: str) -> tuple[str, dict[str, Any]]:
    return litellm_model(model), {}


def _opencode(model: str, url: str) -> tuple[str, dict[str, Any]]:
    # Its own provider "openai" calls another route than chat completions.
    name = model.removeprefix("openai/")
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": url, "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {name: {}},
    }
    return f"rollout/{name}", {"opencode_config": {"provider": {"rollout": provider}}}


_NATIVE = {
    "terminus-2": _Native("RolloutTerminus2", on_host=True, wire=_terminus),
    "mini-swe-agent": _Native("RolloutMiniSweAgent", on_host=False, wire=_mini_swe_agent),
    "opencode": _Native("RolloutOpenCode", on_host=False, wire=_opencode),
    "oracle": _Native(None, on_host=True, wire=None),
}
_MODULE = "rollout.backend.harbor.native"


class NativeAgent(AgentSpec):
    """One of Harbor's own agents, wired to the chat endpoint and the key of each rollout.

    Args:
        name: Its name.
        options: Keyword arguments for it; they go before what this library sets.

    Raises:
        BackendConfigurationError: There is no such agent here.
    """

    NAMES: ClassVar[tuple[str, ...]] = tuple(_NATIVE)

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        if name not in _NATIVE:
            raise BackendConfigurationError(
                f"agent must be one of {', '.join(_NATIVE)}, or an AgentWorkflow class or "
                f"'module:Class', not {name!r}"
            )
        if "model_name" in options:
            raise BackendConfigurationError("agent_options: the model's name goes into `model`")
        self.name = name
        self.options = options
        self._native = _NATIVE[name]
        self.on_host = self._native.on_host

    def prepare(self) -> None:
        """Import Harbor and its model library, which takes seconds; see `AgentSpec.prepare`."""
        # The library would otherwise fetch a list of prices when it is imported.
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        for module in ("harbor.trial.trial", *([_MODULE] if self._native.make else [])):
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise BackendConfigurationError(
                    f"agent {self.name} cannot be imported: {error}"
                ) from error

    def fields(self, plan: TrialPlan) -> dict[str, Any]:
        """See `AgentSpec.fields`.

        Raises:
            InvalidFieldError: The agent calls a model, and nobody says which.
        """
        fields: dict[str, Any] = timeout_fields(plan)
        if self._native.make is None:
            fields["name"] = self.name
        else:
            fields["import_path"] = f"{_MODULE}:{self._native.make}"
        kwargs: dict[str, Any] = {}
        if self._native.wire is not None:
            url = chat_base(plan.context.chat_completions_url)
            fields["model_name"], kwargs = self._native.wire(require_model(plan.model), url)
        return {**fields, "kwargs": _merged(kwargs, self.options)}

    def sample(self, plan: TrialPlan) -> RolloutSample | None:  # noqa: ARG002 - nothing to read
        """Return ``None``: these agents leave a trajectory, no sample."""
        return None


def timeout_fields(plan: TrialPlan) -> dict[str, Any]:
    """Return the fields that hold the agent's deadline; none leaves it to the task."""
    if plan.agent_timeout_sec is None:
        return {}
    return {"override_timeout_sec": max(plan.agent_timeout_sec, LEAST_SEC)}


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return *base* with *over* on top, mappings of mappings included."""
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        if isinstance(below, dict) and isinstance(value, Mapping):
            merged[name] = _merged(below, value)
        else:
            merged[name] = value
    return merged
