"""The bodies that travel between client and server."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from attrs import define, field

from rollout._checks import is_finite
from rollout._redaction import environment_secrets, public_url, url_secrets
from rollout.errors import InvalidFieldError
from rollout.types._fields import (
    count,
    given_text,
    http_url,
    instance_of,
    messages,
    optional,
    optional_field,
    path_segment,
    rule,
    short_text,
    string_map,
    strings,
    timeout,
    utc_time,
)
from rollout.types.limits import limits_object
from rollout.types.output import MessageDict
from rollout.types.sample import (
    RolloutErrorCategory,
    RolloutSample,
    RolloutStatus,
    to_category,
    to_status,
)

__all__ = [
    "ADMISSION_KEYS",
    "CONFIRMED_START",
    "DURABLE_RESULTS",
    "EXTENSIONS",
    "POLLING_LEASE_HEADER",
    "SEEN_STATE_HEADER",
    "TRAJECTORIES",
    "CancelRolloutsRequest",
    "CancelRolloutsResponse",
    "RolloutInitRequest",
    "RolloutInitResponse",
    "RolloutLifecycle",
    "RolloutResultResponse",
]

ADMISSION_KEYS = "admission-keys"
"""The extension that lets an admission be sent again."""

CONFIRMED_START = "confirmed-start"
"""The extension that lets a caller decide when an admitted rollout's agent may start."""

TRAJECTORIES = "trajectories"
"""The extension that hands out the trajectories of rollouts that have ended."""

EXTENSIONS = ("batch-admission", "result-feed", ADMISSION_KEYS, CONFIRMED_START, TRAJECTORIES)
"""The extensions that a server of this library announces.

``batch-admission``: ``POST /rollouts`` admits many rollouts. ``result-feed``:
``POST /rollouts/feed`` streams the results of all that a client waits for, and
``POST /rollouts/renew`` renews their leases. ``admission-keys``: an admission with an
`RolloutInitRequest.admission_key` may be sent again, and gets the same answer.
``confirmed-start``: the agent of a rollout with `RolloutInitRequest.confirm_start` starts once
``POST /rollouts/start`` has named it. Other clients and servers ignore the announcement.
"""

DURABLE_RESULTS = "durable-results"
"""An extension that only a server with a durable state announces: leases and results outlive it."""

POLLING_LEASE_HEADER = "X-Osmosis-Rollout-Lease"
"""The header that carries the polling lease token of a result request."""

SEEN_STATE_HEADER = "X-Rollout-Seen"
"""What the caller has seen so far: a status, then ``;agent-started`` once it knows of it.

A server of this library answers a poll at once when it knows more than that. Without the
header it compares with what it last reported, which a lost response makes wrong. Other
servers ignore the header.
"""


@define(kw_only=True)
class RolloutInitRequest:
    r"""``POST /rollout``: ask the server to admit one rollout.

    Attributes:
        rollout_id: A fresh id; one path segment: not empty, not ``.`` or ``..``, without
            ``/``, ``\`` and NUL.
        initial_messages: The prompt.
        chat_completions_url: The OpenAI-compatible endpoint that the agent talks to, an
            ``http://`` or ``https://`` URL with a host. User, password and query in it are
            secret; `repr` does not show them.
        llm_api_key: The key for that endpoint; hidden from `repr`, never logged. One of less
            than eight characters is a dummy, which is not looked for in messages and files.
        label: The text that a grader compares with.
        metadata: The caller's own data.
        extra_fields: More of it, kept with the trajectory.
        grade: Whether the rollout is graded.
        agent_timeout_sec: Seconds for the agent, queue time included; ``None``: unbounded.
        grader_timeout_sec: Seconds for the grader; ``None``: unbounded.
        admission_key: A random text of the caller's. A server that announces ``admission-keys``
            answers the same request with the same key as it did the first time, while it keeps
            the id. As secret as the lease token, which it can be exchanged for.
        run: The name of the run that the rollout belongs to, 1 to 256 characters. A server that
            hands rollouts out to others takes turns between runs; other servers ignore it.
        confirm_start: Whether the agent starts only once its start is confirmed, which
            `rollout.client.RolloutClient` does not do by itself. For servers that announce
            ``confirmed-start``; others ignore it.
        limits: How much the rollout may ask of its model, less than the server allows: an object
            with any of ``calls``, ``prompt_tokens``, ``completion_tokens``, ``total_tokens`` and
            ``cost_usd``. For servers with a model gateway; one of this library without a gateway
            refuses it, others ignore it.

    Raises:
        InvalidFieldError: A field breaks its rule; the message names it.
    """

    initial_messages: list[MessageDict] = field(validator=messages)
    label: str | None = optional_field(str, "a string or null")
    metadata: dict[str, Any] | None = optional_field(dict, "an object or null")
    rollout_id: str = field(validator=path_segment)
    chat_completions_url: str = field(validator=http_url, repr=public_url)
    llm_api_key: str | None = field(default=None, validator=given_text, repr=False)
    grade: bool = field(default=True, validator=instance_of(bool, name="a boolean"))
    agent_timeout_sec: float | None = field(default=None, validator=timeout)
    grader_timeout_sec: float | None = field(default=None, validator=timeout)
    extra_fields: dict[str, Any] | None = optional_field(dict, "an object or null")
    admission_key: str | None = field(default=None, validator=short_text, repr=False)
    run: str | None = field(default=None, validator=short_text)
    confirm_start: bool = field(default=False, validator=instance_of(bool, name="a boolean"))
    limits: dict[str, Any] | None = field(default=None, validator=limits_object)

    @property
    def secrets(self) -> list[str | None]:
        """Secrets that nobody may repeat: both keys, and those in the URL and the environment."""
        url = url_secrets(self.chat_completions_url)
        return [self.llm_api_key, self.admission_key, *url, *environment_secrets()]


@rule(exclusiveMinimum=0)
def _positive_finite(_: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidFieldError(attribute.name, "must be a number", kind="type_error")
    if not is_finite(value) or value <= 0:
        raise InvalidFieldError(attribute.name, "must be positive and finite")


@rule(minLength=1)
def _token(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidFieldError(attribute.name, "must be a string that is not empty")


@rule(exclusiveMinimum=0)
def _exceeds_wait(admission: Any, attribute: Any, value: float) -> None:
    _positive_finite(admission, attribute, value)
    if value <= admission.result_wait_timeout_sec:
        raise InvalidFieldError(attribute.name, "must exceed result_wait_timeout_sec")


@define(kw_only=True)
class RolloutInitResponse:
    """The admission (202).

    Attributes:
        rollout_id: The id that was admitted.
        status: `queued`.
        polling_lease_token: Proves on every poll who asks; hidden from `repr`.
        result_wait_timeout_sec: How long a poll may be held, in seconds.
        polling_lease_timeout_sec: How long the lease lasts without a poll, in seconds.
        extensions: What the server offers beyond the protocol; see `EXTENSIONS`.

    Raises:
        InvalidFieldError: The token is empty, or the times are not positive and finite, or
            the lease does not exceed the wait.
    """

    rollout_id: str = field(validator=instance_of(str, name="a string"))
    status: RolloutStatus = field(
        converter=to_status,
        validator=instance_of(RolloutStatus, name="a RolloutStatus"),
    )
    polling_lease_token: str = field(repr=False, validator=_token)
    result_wait_timeout_sec: float = field(validator=_positive_finite)
    polling_lease_timeout_sec: float = field(validator=_exceeds_wait)
    extensions: list[str] = field(factory=list, validator=strings)


@define(kw_only=True)
class RolloutResultResponse:
    """``GET /rollout/{rollout_id}/result`` (200): where a rollout stands, or how it ended.

    Attributes:
        rollout_id: The rollout.
        status: Where it stands.
        sample: The sample, once it has ended and has one. Its ``trajectory_messages`` never
            travel, and its reward is null unless the status is `success`.
        err_message: What went wrong, for people.
        err_category: What went wrong, for programs.
        agent_started_at: When the agent started (UTC), or ``None`` while it has not. A
            failure without it happened before the agent ran.
        err_source: Whose failure it was, where the server knows: `MODEL_ENDPOINT`,
            `MODEL_KEY`, `SERVER_RESTART`, or something newer. It travels only if there is one.
        err_phase: ``grading`` if the agent had succeeded and its grader failed, else ``None``. It
            travels only if there is one.

    Raises:
        InvalidFieldError: A field has the wrong type, or the time has no time zone.
    """

    rollout_id: str = field(validator=instance_of(str, name="a string"))
    status: RolloutStatus = field(
        converter=to_status,
        validator=instance_of(RolloutStatus, name="a RolloutStatus"),
    )
    sample: RolloutSample | None = optional_field(RolloutSample, "a RolloutSample or None")
    err_message: str | None = optional_field(str, "a string or None")
    err_category: RolloutErrorCategory | None = field(
        default=None,
        converter=to_category,
        validator=optional(instance_of(RolloutErrorCategory, name="a RolloutErrorCategory")),
    )
    agent_started_at: datetime | None = field(default=None, validator=optional(utc_time))
    err_source: str | None = optional_field(str, "a string or None")
    err_phase: str | None = optional_field(str, "a string or None")


@rule(minLength=1)
def _prefix(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str):
        raise InvalidFieldError(attribute.name, "must be a string or null", kind="type_error")
    if not value:
        raise InvalidFieldError(attribute.name, "must not be empty; use all to select everything")


@define(kw_only=True)
class CancelRolloutsRequest:
    """``POST /rollout/cancel``: exactly one of the three selects rollouts.

    Attributes:
        ids: These ids.
        prefix: Every id that starts with this; not empty.
        all: Every rollout.
        admission_keys: Admission keys by id, of rollouts whose admission may not have arrived
            yet: it does not start them when it does. For servers that announce
            ``admission-keys``.

    Raises:
        InvalidFieldError: A field has the wrong type, or the prefix is empty.
    """

    ids: list[str] | None = field(default=None, validator=optional(strings))
    prefix: str | None = field(default=None, validator=optional(_prefix))
    all: bool = field(default=False, validator=instance_of(bool, name="a boolean"))
    admission_keys: dict[str, str] | None = field(
        default=None, validator=optional(string_map), repr=False
    )

    @property
    def selectors(self) -> int:
        """How many of the three are given; a server refuses all but one."""
        return (self.ids is not None) + (self.prefix is not None) + self.all


@define(kw_only=True)
class CancelRolloutsResponse:
    """The outcome of a cancel request, by id.

    Attributes:
        dispositions: ``cancelled_queued``, ``cancelled_running``, or ``not_found`` for an id
            that is unknown or has already ended.

    Raises:
        InvalidFieldError: It is not a mapping from strings to strings.
    """

    dispositions: dict[str, str] = field(validator=string_map)


@define(kw_only=True)
class RolloutLifecycle:
    """The state of a server as a whole, whatever its backend.

    Attributes:
        accepting_rollouts: Whether admissions are open.
        active_rollouts: How many rollouts are not final yet.

    Raises:
        InvalidFieldError: A field has the wrong type, or the count is negative.
    """

    accepting_rollouts: bool = field(validator=instance_of(bool, name="a boolean"))
    active_rollouts: int = field(validator=count)
