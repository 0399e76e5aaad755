"""The JSON documents that go into a sandbox and come back out of it.

Into it goes a payload beside the code: prompt, metadata and the workflow's config, by name where
it has one, or as the JSON of its fields. The label is for the grader, so it stays out.

Back comes a sample, or the error of a workflow. The sandbox is not trusted: what is read here has
a bounded size and depth, is strict JSON, and goes through the same checks as what travels over
the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from rollout._json.fit import fit
from rollout._json.text import utf8
from rollout.backend.references import resolve_object
from rollout.codec import MAX_JSON_DEPTH, dump_json, parse_json, structure
from rollout.errors import BackendConfigurationError, InvalidBodyError, InvalidFieldError
from rollout.types import (
    BaseConfig,
    ConcurrencyConfig,
    ExecutionRequest,
    RolloutErrorCategory,
    RolloutSample,
)

__all__ = [
    "API_KEY",
    "CHAT_URL",
    "MOST_BYTES",
    "WorkflowFailure",
    "WorkflowResult",
    "dump_config",
    "dump_result",
    "load_config",
    "make_payload",
    "read_result",
]

CHAT_URL = "ROLLOUT_CHAT_COMPLETIONS_URL"
"""The environment variable that the chat endpoint goes in by."""

API_KEY = "ROLLOUT_CHAT_API_KEY"
"""The environment variable that its key goes in by: it is never in a file."""

_CONCURRENCY = "concurrency"

MOST_BYTES = 64 * 1024 * 1024
"""The largest result that is taken out of a sandbox."""

_LONGEST_TEXT = 100_000
_ABOVE = 2
"""How many levels of the document are above a sample's own values."""


# --- into the sandbox -------------------------------------------------------------------------


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
        artifacts_dir: Where artifacts go inside the sandbox.
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
    """Serialise a config for `load_config`.

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
    """Load a config that `dump_config` wrote.

    Raises:
        BackendConfigurationError: The name cannot be found.
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
    """Whether a value survives JSON unchanged, types included."""
    if type(value) is list:
        return all(map(_is_json, value))
    if type(value) is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    if type(value) is float:
        return value - value == 0
    return value is None or type(value) in {str, int, bool}


# --- out of it --------------------------------------------------------------------------------


@frozen(kw_only=True)
class WorkflowFailure:
    """How a workflow failed.

    Attributes:
        message: What went wrong, for people.
        category: What went wrong, for programs.
        source: Whose failure it was, where that is known.
        traceback: Where, for the server's log.
    """

    message: str
    category: RolloutErrorCategory = RolloutErrorCategory.AGENT_ERROR
    source: str | None = None
    traceback: str = ""


@frozen(kw_only=True)
class WorkflowResult:
    """The result of a workflow.

    Attributes:
        sample: Its sample, if it made one.
        failure: How it failed, if it did.
        dropped: What of the sample had no JSON form, one line each.
    """

    sample: RolloutSample | None = None
    failure: WorkflowFailure | None = None
    dropped: tuple[str, ...] = ()


def dump_result(result: WorkflowResult) -> bytes:
    """Serialise a result; values without a JSON form are dropped and named."""
    if result.failure is not None:
        failure = result.failure
        return dump_json(
            {
                "failure": {
                    "message": failure.message[:_LONGEST_TEXT],
                    "category": failure.category,
                    "source": failure.source or "",
                    "traceback": failure.traceback[-_LONGEST_TEXT:],
                }
            }
        )
    if result.sample is None:
        return dump_json({"sample": None})
    sample, dropped = _fitted(result.sample)
    return dump_json({"sample": sample, "dropped": dropped})


def _fitted(sample: RolloutSample) -> tuple[dict[str, Any], list[str]]:
    document: dict[str, Any] = {
        "label": sample.label,
        "reward": sample.reward,
        "remove_sample": sample.remove_sample,
    }
    dropped: list[str] = []
    trajectory = sample.trajectory_messages
    same = trajectory is not None and list(trajectory) == list(sample.messages)
    parts = {
        "messages": list(sample.messages),
        "metrics": sample.metrics,
        "extra_fields": sample.extra_fields,
        "trajectory_messages": None if trajectory is None or same else list(trajectory),
    }
    for name, value in parts.items():
        document[name], lost = fit(value, max_depth=MAX_JSON_DEPTH - _ABOVE)
        dropped += [f"{name}: {line}" for line in lost]
    if same:
        document["trajectory_messages"] = True
    return document, dropped


def read_result(path: Path) -> WorkflowResult:
    """Read a result. Blocking.

    Raises:
        FileNotFoundError: The file is missing.
        InvalidFieldError: The file is not a result: too large, not strict JSON, too deep, or of
            another form.
    """
    if path.is_symlink() or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise InvalidFieldError("result", f"is larger than {MOST_BYTES // 1024**2} MiB")
    try:
        document = parse_json(data)
        if not isinstance(document, dict):
            raise InvalidFieldError("result", "must be an object")  # noqa: TRY301
        if "failure" in document:
            return WorkflowResult(failure=_failure(document["failure"]))
        return WorkflowResult(sample=_sample(document["sample"]), dropped=_lines(document))
    except KeyError as error:
        raise InvalidFieldError("result", f"lacks {error}") from None
    except (InvalidBodyError, InvalidFieldError) as error:
        raise InvalidFieldError("result", f"cannot be read: {error}") from None


def _sample(value: Any) -> RolloutSample | None:
    if value is None:
        return None
    sample = structure(value, RolloutSample)
    trajectory = value.get("trajectory_messages")
    if trajectory is True:
        trajectory = [dict(message) for message in sample.messages]
    sample.trajectory_messages = trajectory
    return sample


def _failure(value: Any) -> WorkflowFailure:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise InvalidFieldError("failure", "must be an object of strings")
    try:
        category = RolloutErrorCategory(value.get("category", ""))
    except ValueError:
        category = RolloutErrorCategory.AGENT_ERROR
    return WorkflowFailure(
        message=utf8(value["message"])[:_LONGEST_TEXT],
        category=category,
        source=value.get("source") or None,
        traceback=utf8(value.get("traceback", ""))[:_LONGEST_TEXT],
    )


def _lines(document: dict[str, Any]) -> tuple[str, ...]:
    dropped = document.get("dropped", [])
    if not isinstance(dropped, list) or not all(isinstance(line, str) for line in dropped):
        raise InvalidFieldError("dropped", "must be a list of strings")
    return tuple(utf8(line)[:1000] for line in dropped[:100])
