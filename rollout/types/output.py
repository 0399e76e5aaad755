"""The output of a workflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from attrs import define, field

from rollout._json.fit import as_float
from rollout.errors import InvalidFieldError
from rollout.types._fields import as_messages, instance_of, messages, optional

__all__ = ["AgentWorkflowOutput", "MessageDict", "Messages", "coerce_output"]

MessageDict: TypeAlias = dict[str, Any]
"""One chat message, in whatever form the agent uses."""

Messages: TypeAlias = list[dict[str, Any]]
"""One message history."""


def _messages(value: Sequence[Any] | None) -> Messages | None:
    return cast("Messages | None", as_messages(value))


def _metrics(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, dict):
        raise InvalidFieldError(attribute.name, "must be an object of numbers", kind="type_error")
    for name, number in value.items():
        is_number = number is None or as_float(number) is not None
        if not isinstance(name, str) or not is_number:
            raise InvalidFieldError(
                f"{attribute.name}.{name}", "must be a number under a string key"
            )


@define(kw_only=True)
class AgentWorkflowOutput:
    """One message history and what was measured on the way.

    Attributes:
        messages: The history, or ``None`` when the workflow made none. An object with
            ``model_dump``, as SDKs make them, becomes a dict.
        metrics: Numbers by name; they travel in `RolloutSample.metrics`. ``None`` is left out
            there, and so are NaN and infinities, which have no JSON form, with a warning.
        info: The workflow's own notes. They never travel: `LocalBackend` keeps them in the
            trajectory, under ``info`` of its ``extra``.

    Raises:
        InvalidFieldError: A field has another type.
    """

    messages: Messages | None = field(
        default=None, converter=_messages, validator=optional(messages)
    )
    metrics: dict[str, float] = field(factory=dict, validator=_metrics)
    info: dict[str, Any] = field(factory=dict, validator=instance_of(dict, name="an object"))


def coerce_output(value: Any) -> AgentWorkflowOutput | None:
    """Read what ``run`` returned; ``None`` means: take the registered sample source.

    Raises:
        TypeError: It is neither an `AgentWorkflowOutput`, nor a message list, nor ``None``.
        InvalidFieldError: It is a list of something else than messages, or an output whose
            fields were changed in place to something invalid.
    """
    if value is None:
        return None
    if isinstance(value, AgentWorkflowOutput):
        given: dict[str, Any] = value.metrics
        metrics = {name: number for name, number in given.items() if number is not None}
        return AgentWorkflowOutput(messages=value.messages, metrics=metrics, info=value.info)
    if isinstance(value, list):
        return AgentWorkflowOutput(messages=value)
    raise TypeError(
        "AgentWorkflow.run must return an AgentWorkflowOutput, a list of messages or None, "
        f"not {type(value).__name__}"
    )
