"""The chat endpoint and the model's name, in the forms that agents want them in. Pure."""

from __future__ import annotations

from rollout.errors import InvalidFieldError

__all__ = ["NO_KEY", "chat_base", "litellm_model", "require_model"]

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
        InvalidFieldError: There is none, or it is no string.
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
