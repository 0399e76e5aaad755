"""What goes into a sandbox beside the code: prompt, metadata and the workflow's config. Pure.

The config goes by name where it has one, or as the JSON of its fields. The label is for the
grader, so it stays out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rollout.backend.references import resolve_object
from rollout.codec import dump_json
from rollout.errors import BackendConfigurationError
from rollout.types import BaseConfig, ConcurrencyConfig, ExecutionRequest

__all__ = ["API_KEY", "CHAT_URL", "dump_config", "load_config", "make_payload"]

CHAT_URL = "ROLLOUT_CHAT_COMPLETIONS_URL"
"""The environment variable that the chat endpoint goes in by."""

API_KEY = "ROLLOUT_CHAT_API_KEY"
"""The environment variable that its key goes in by: it is never in a file."""

_CONCURRENCY = "concurrency"


def make_payload(
    request: ExecutionRequest,
    *,
    workflow: str,
    config: dict[str, Any] | None,
    instruction: str | None,
    artifacts_dir: str,
) -> bytes:
    """Write the payload of one rollout.

    Args:
        request: The request.
        workflow: ``"module:Class"``.
        config: What `dump_config` returned.
        instruction: What the task says; the prompt of a request that has no messages.
        artifacts_dir: Where artifacts go inside of the sandbox.
    """
    prompt: list[dict[str, Any]] = list(request.prompt)
    if not prompt and instruction is not None:
        prompt = [{"role": "user", "content": instruction}]
    return dump_json(
        {
            "rollout_id": request.id,
            "workflow": workflow,
            "config": config,
            "prompt": prompt,
            "metadata": request.metadata,
            "artifacts_dir": artifacts_dir,
        }
    )


def dump_config(config: Any, class_reference: str | None) -> dict[str, Any] | None:
    """Write a config so that `load_config` finds or makes it again.

    Args:
        config: The config, ``"module:attr"`` of one, or ``None``.
        class_reference: ``"module:Class"`` of its class, for a config that goes by its fields.

    Raises:
        BackendConfigurationError: A field has no JSON form.
    """
    if config is None or isinstance(config, str):
        return None if config is None else {"reference": config}
    fields: dict[str, Any] = {}
    for attribute in attrs.fields(type(config)):
        value = getattr(config, attribute.name)
        if attribute.name == _CONCURRENCY and type(value) is ConcurrencyConfig:
            value = value.max_concurrent
        if not attribute.init:
            continue
        if not _is_json(value):
            raise BackendConfigurationError(
                f"agent_config.{attribute.name} cannot go into a sandbox, since it is not plain "
                "JSON; put the config into a module and give it as 'module:attr'"
            )
        fields[attribute.alias] = value
    return {"class": class_reference, "fields": fields}


def load_config(dumped: Mapping[str, Any] | None) -> BaseConfig | None:
    """Find or make a config that `dump_config` wrote.

    Raises:
        BackendConfigurationError: There is none of that name.
        InvalidFieldError: A field is refused by its class.
    """
    if dumped is None:
        return None
    if "reference" in dumped:
        found = resolve_object(dumped["reference"], name="agent_config")
        if not isinstance(found, BaseConfig):
            raise BackendConfigurationError("agent_config must be an instance of BaseConfig")
        return found
    fields = dict(dumped["fields"])
    if _CONCURRENCY in fields:
        fields[_CONCURRENCY] = ConcurrencyConfig(max_concurrent=fields[_CONCURRENCY])
    made = resolve_object(dumped["class"], name="agent_config")(**fields)
    assert isinstance(made, BaseConfig)  # noqa: S101 - `dump_config` has checked it
    return made


def _is_json(value: Any) -> bool:
    """Whether a value comes back from JSON as the same, its types included."""
    if type(value) is list:
        return all(map(_is_json, value))
    if type(value) is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    if type(value) is float:
        return value - value == 0
    return value is None or type(value) in {str, int, bool}
