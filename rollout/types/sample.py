"""The sample of a rollout, and the vocabulary of its end."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

from attrs import define, field

from rollout._moved import moved_names
from rollout.types._fields import (
    as_messages,
    check_objects,
    finite_number,
    instance_of,
    optional_field,
)

__all__ = [
    "MODEL_ENDPOINT",
    "MODEL_KEY",
    "SERVER_RESTART",
    "WORKER_LOST",
    "RolloutErrorCategory",
    "RolloutSample",
    "RolloutStatus",
]

if not TYPE_CHECKING:
    __getattr__ = moved_names(__name__)


class RolloutStatus(StrEnum):
    """Where a rollout stands: in flight (the first three) or ended (the next three)."""

    QUEUED = "queued"
    RUNNING = "running"
    GRADING = "grading"
    SUCCESS = "success"
    FAILURE = "failure"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """Part of the vocabulary; no server publishes it."""


class RolloutErrorCategory(StrEnum):
    """What kind of failure ended a rollout."""

    TIMEOUT = "timeout"
    LEASE_EXPIRED = "lease_expired"
    VALIDATION_ERROR = "validation_error"
    HTTP_ERROR = "http_error"
    AGENT_ERROR = "agent_error"
    INTERNAL_ERROR = "internal_error"


MODEL_ENDPOINT = "model_endpoint"
"""The source of a failure whose reason is the endpoint of the model: nobody listens, it knows no
such model, has too much to do, is broken, or does not answer."""

MODEL_KEY = "model_key"
"""The source of a failure whose reason is that the endpoint of the model refuses the key."""

SERVER_RESTART = "server_restart"
"""The source of a failure of a rollout that was in flight when its server died."""

WORKER_LOST = "worker_lost"
"""The source of a failure of a rollout whose worker, a server behind its server, was lost."""


def to_status(value: Any) -> RolloutStatus:
    """Convert a status or its name to the member, since code compares with ``is``.

    Anything else is left to the validator, which knows the name of the field.
    """
    return cast("RolloutStatus", _member(RolloutStatus, value))


def to_category(value: Any) -> RolloutErrorCategory | None:
    """Convert a category or its name to the member, like `to_status`."""
    return cast("RolloutErrorCategory | None", _member(RolloutErrorCategory, value))


def _member(kind: type[StrEnum], value: Any) -> Any:
    if value is None or type(value) is kind:
        return value
    try:
        return kind(value)
    except ValueError:
        return value


_FROM_MESSAGES: Any = object()


def _message_sequence(_: Any, attribute: Any, value: Any) -> None:
    check_objects(attribute.name, value, Sequence, Mapping)


def _messages(value: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
    return cast("Sequence[Mapping[str, Any]]", as_messages(value))


def _trajectory(instance: Any, attribute: Any, value: Any) -> None:
    if value is not None and value is not _FROM_MESSAGES:
        _message_sequence(instance, attribute, value)


def _reward(value: Any) -> float | None:
    return finite_number("reward", value)


@define(kw_only=True)
class RolloutSample:
    """The conversation of one rollout and what grading made of it.

    Attributes:
        messages: The message history. An object with ``model_dump``, as SDKs make them, becomes
            a dict.
        trajectory_messages: The history to keep on disk; by default a deep copy of
            `messages` taken on construction, ``None`` to keep none. It never travels.
        label: The label that came with the request, or the workflow's own.
        reward: A finite number or ``None``. Foreign number scalars (NumPy, 0-d tensors,
            decimals, booleans) become plain floats; NaN, infinity and everything else is
            refused on construction and on assignment alike.
        remove_sample: The sample should not be trained on; its reward is not reported.
        metrics: Measurements by name. Values without a JSON form are dropped on the way
            out, with one warning.
        extra_fields: Anything else that should travel along, under the same rule.

    Raises:
        InvalidFieldError: A field has the wrong type, or the reward is not finite.
    """

    messages: Sequence[Mapping[str, Any]] = field(
        factory=list, converter=_messages, validator=_message_sequence
    )
    trajectory_messages: Sequence[Mapping[str, Any]] | None = field(
        default=_FROM_MESSAGES, validator=_trajectory, repr=False, eq=False
    )
    label: str | None = optional_field(str, "a string or null")
    reward: float | None = field(default=None, converter=_reward)
    remove_sample: bool = field(default=False, validator=instance_of(bool, name="a boolean"))
    metrics: dict[str, Any] = field(factory=dict, validator=instance_of(dict, name="an object"))
    extra_fields: dict[str, Any] = field(
        factory=dict, validator=instance_of(dict, name="an object")
    )

    def __attrs_post_init__(self) -> None:
        if self.trajectory_messages is not _FROM_MESSAGES:
            return
        try:
            self.trajectory_messages = copy.deepcopy(list(self.messages))
        except Exception:  # noqa: BLE001 - objects among the messages may raise anything
            # What cannot be copied has no JSON form either, and is left out of the trajectory.
            self.trajectory_messages = list(self.messages)
