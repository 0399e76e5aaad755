"""Harbor's own agents, wired to the chat endpoint and the key of each rollout."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from rollout.backend.harbor.agents.spec import AgentSpec, timeout_fields
from rollout.backend.harbor.plan import TrialPlan
from rollout.errors import BackendConfigurationError, InvalidFieldError
from rollout.types import RolloutSample

__all__ = ["NATIVE_AGENTS", "NO_KEY", "NativeAgent", "chat_base", "litellm_model", "require_model"]


NO_KEY = "no-key-needed"
"""Stands for the key of an endpoint that needs none; model libraries insist on one."""

_ROUTE = "/chat/completions"
_OPENAI_PROVIDERS = frozenset({"openai", "hosted_vllm", "litellm_proxy", "custom_openai"})


def chat_base(url: str) -> str:
    """Return the base URL of an endpoint, which model libraries add the route to."""
    return url.rstrip("/").removesuffix(_ROUTE)


def require_model(model: object) -> str:
    """Return the model's name.

    Raises:
        InvalidFieldError: It is missing, or not a string.
    """
    if model is None:
        raise InvalidFieldError(
            "metadata.harbor_model",
            "is missing: this agent calls a model, so the request or the backend has to name it",
            kind="missing",
        )
    if not isinstance(model, str) or not model.strip("/ "):
        raise InvalidFieldError(
            "metadata.harbor_model", "must be a model's name", kind="type_error"
        )
    return model


def litellm_model(model: str) -> str:
    """Return the name by which litellm calls a model behind an OpenAI-compatible endpoint.

    The rollout's endpoint speaks that protocol whatever model is behind it. So every name gets
    the prefix ``openai/``, unless it has one of a provider that speaks it too: the endpoint is
    sent what follows the prefix.
    """
    return model if model.partition("/")[0] in _OPENAI_PROVIDERS else f"openai/{model}"


@frozen
class _Native:
    """How one of Harbor's own agents is wired.

    Attributes:
        make: Its class of ours in `rollout.backend.harbor.agents.harbor_classes`; ``None`` for
            Harbor's own.
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
    # Compaction rewrites the conversation, which training wants as it was.
    compaction = {"auto": False, "prune": False}
    config = {"provider": {"rollout": provider}, "compaction": compaction}
    return f"rollout/{name}", {"opencode_config": config}


NATIVE_AGENTS = {
    "terminus-2": _Native("RolloutTerminus2", on_host=True, wire=_terminus),
    "mini-swe-agent": _Native("RolloutMiniSweAgent", on_host=False, wire=_mini_swe_agent),
    "opencode": _Native("RolloutOpenCode", on_host=False, wire=_opencode),
    "oracle": _Native(None, on_host=True, wire=None),
}
_MODULE = "rollout.backend.harbor.agents.harbor_classes"


class NativeAgent(AgentSpec):
    """One of Harbor's own agents, wired to the chat endpoint and the key of each rollout.

    Args:
        name: Its name.
        options: Keyword arguments for it; they go before what this library sets.

    Attributes:
        calls_model: Whether it calls a model, so that it has a conversation to write down.

    Raises:
        BackendConfigurationError: The agent is unknown.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        if name not in NATIVE_AGENTS:
            raise BackendConfigurationError(
                f"agent must be one of {', '.join(NATIVE_AGENTS)}, or an AgentWorkflow class or "
                f"'module:Class', not {name!r}"
            )
        if "model_name" in options:
            raise BackendConfigurationError("agent_options: the model's name goes into `model`")
        self.name = name
        self.options = options
        self._native = NATIVE_AGENTS[name]
        self.on_host = self._native.on_host
        self.calls_model = self._native.wire is not None

    def prepare(self) -> None:
        """Import Harbor and its model library, which takes seconds; see `AgentSpec.prepare`."""
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
            InvalidFieldError: The agent calls a model, and no model is named.
        """
        fields: dict[str, Any] = timeout_fields(plan)
        if self._native.make is None:
            fields["name"] = self.name
        else:
            fields["import_path"] = f"{_MODULE}:{self._native.make}"
        kwargs: dict[str, Any] = {}
        if self._native.wire is not None:
            url = chat_base(plan.chat_url)
            fields["model_name"], kwargs = self._native.wire(require_model(plan.model), url)
        return {**fields, "kwargs": _merged(kwargs, self.options)}

    def sample(self, plan: TrialPlan) -> RolloutSample | None:  # noqa: ARG002 - nothing to read
        """Return ``None``: these agents leave a trajectory, no sample."""
        return None


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge *over* into *base*, recursively for nested mappings."""
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        if isinstance(below, dict) and isinstance(value, Mapping):
            merged[name] = _merged(below, value)
        else:
            merged[name] = value
    return merged
