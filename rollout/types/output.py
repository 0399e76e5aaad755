"""What a workflow hands back."""

from __future__ import annotations

from typing import Any, TypeAlias

from attrs import define, field

from rollout.errors import InvalidFieldError
from rollout.types._fields import as_float, instance_of, messages, optional

__all__ = ["AgentWorkflowOutput", "MessageDict", "Messages", "coerce_output"]

MessageDict: TypeAlias = dict[str, Any]
"""One chat message, in whatever form the agent uses."""

Messages: TypeAlias = list[dict[str, Any]]
"""One message history."""


def _metrics(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, dict):
        raise InvalidFieldError(attribute.name, "must be an object of numbers", kind="type_error")
    for name, number in value.items():
        if not isinstance(name, str) or as_float(number) is None:
            raise InvalidFieldError(
                f"{attribute.name}.{name}", "must be a number under a string key"
            )


@define(kw_only=True)
class AgentWorkflowOutput:
    """One message history and what was measured on the way.

    Attributes:
        messages: The history, or ``None`` when the workflow made none.
        metrics: Numbers by name; they travel in `RolloutSample.metrics`. NaN and infinities have
            no JSON form and are left out there, with a warning.
        info: The workflow's own notes. Backends keep them out of the sample.

    Raises:
        InvalidFieldError: A field has another type.
    """

    messages: Messages | None = field(default=None, validator=optional(messages))
    metrics: dict[str, float] = field(factory=dict, validator=_metrics)
    info: dict[str, Any] = field(factory=dict, validator=instance_of(dict, name="an object"))


def coerce_output(value: Any) -> AgentWorkflowOutput | None:
    """Read what ``run`` returned; ``None`` means: take the registered sample source.

    Raises:
        TypeError: It is neither an `AgentWorkflowOutput`, nor a message list, nor ``None``.
        InvalidFieldError: It is a list of something else than objects, or an output whose
            fields were changed in place to something invalid.
    """
    if value is None:
        return None
    if isinstance(value, AgentWorkflowOutput):
        return AgentWorkflowOutput(messages=value.messages, metrics=value.metrics, info=value.info)
    if isinstance(value, list):
        return AgentWorkflowOutput(messages=value)
    raise TypeError(
        "AgentWorkflow.run must return an AgentWorkflowOutput, a list of messages or None, "
        f"not {type(value).__name__}"
    )
