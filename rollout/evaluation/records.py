"""The record of an attempt that has ended."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

import attrs
from attrs import field, frozen

from rollout.types import MODEL_ENDPOINT, MODEL_KEY, WORKER_LOST
from rollout.types._fields import count, instance_of, optional, utc_time

__all__ = ["AttemptOutcome", "AttemptRecord"]


class AttemptOutcome(StrEnum):
    """How an attempt ended."""

    SUCCESS = "success"
    """It ran to its end; it has a reward, or its sample was marked for removal."""

    FAILURE = "failure"
    """The server reported a failure."""

    CANCELLED = "cancelled"
    """It was cancelled. It is not a result: the attempt runs again when the run is resumed."""

    ERROR = "error"
    """It got no terminal result at all: the server was out of reach or broke the protocol."""


_text = instance_of(str, name="a string")


@frozen(kw_only=True)
class AttemptRecord:
    """One rollout of one attempt, as `events.jsonl` keeps it, a line each.

    An attempt has several records if its rollout was tried again; the last one counts.

    Attributes:
        row: The row of the dataset, from 0.
        attempt: Which of the row's n attempts, from 0.
        retry: How many records of this attempt there are before this one.
        rollout_id: The rollout's id; fresh for every record.
        outcome: How it ended.
        reward: The reward; ``None`` unless the outcome is `success`, and for a sample that
            the grader marked for removal.
        passed: Whether there is a reward that reaches the run's pass threshold.
        removed: Whether it ended as a success whose sample is marked for removal.
        err_category: A `rollout.types.RolloutErrorCategory`; ``unreachable`` or ``protocol``
            with the outcome `error`; ``None`` for a success.
        err_source: Whose failure it was, where the server knows; see `RolloutResultResponse`.
        err_phase: ``grading`` if the agent had succeeded and its grader failed; ``None`` also if
            the server does not say.
        err_message: What went wrong, for people.
        submitted_at: When the request was made (wall clock, UTC).
        agent_started_at: When the agent started, as the server says.
        duration_sec: Seconds from the request to its end.
        prompt_tokens: Tokens of all prompts, if the sample has them.
        completion_tokens: Tokens of all completions, if the sample has them.
        metrics: The numbers among the sample's metrics.
        may_have_run: Whether the agent has started, or may have for all that is known.
        superseded: Whether the same attempt is tried again at once, under a fresh id.
        trajectory: Name of its file below ``trajectories/``, ``None`` if there is none.

    Raises:
        InvalidFieldError: A field has the wrong type.
    """

    row: int = field(validator=count)
    attempt: int = field(validator=count)
    rollout_id: str = field(validator=_text)
    outcome: AttemptOutcome = field(
        converter=AttemptOutcome, validator=instance_of(AttemptOutcome, name="an outcome")
    )
    submitted_at: datetime = field(validator=utc_time)
    duration_sec: float
    retry: int = field(default=0, validator=count)
    reward: float | None = None
    passed: bool = field(default=False, validator=instance_of(bool, name="a boolean"))
    removed: bool = field(default=False, validator=instance_of(bool, name="a boolean"))
    err_category: str | None = field(default=None, validator=optional(_text))
    err_source: str | None = field(default=None, validator=optional(_text))
    err_phase: str | None = field(default=None, validator=optional(_text))
    err_message: str | None = field(default=None, validator=optional(_text))
    agent_started_at: datetime | None = field(default=None, validator=optional(utc_time))
    prompt_tokens: int | None = field(default=None, validator=optional(count))
    completion_tokens: int | None = field(default=None, validator=optional(count))
    metrics: dict[str, Any] = field(factory=dict, validator=instance_of(dict, name="an object"))
    may_have_run: bool = field(default=True, validator=instance_of(bool, name="a boolean"))
    superseded: bool = field(default=False, validator=instance_of(bool, name="a boolean"))
    trajectory: str | None = field(default=None, validator=optional(_text))

    @property
    def key(self) -> tuple[int, int]:
        """Row and attempt, which name the attempt within its run."""
        return (self.row, self.attempt)

    @property
    def counts(self) -> bool:
        """Whether it settles its attempt, so that a resumed run leaves that alone."""
        return self.outcome is not AttemptOutcome.CANCELLED and not self.superseded

    @property
    def failed(self) -> bool:
        """Whether ``retry_failed`` runs the attempt again."""
        return self.outcome in {AttemptOutcome.FAILURE, AttemptOutcome.ERROR}

    @property
    def reason(self) -> str | None:
        """What a failure is counted as: its source where that is known, else its category."""
        return self.err_source or self.err_category

    @property
    def infrastructure(self) -> bool:
        """Whether it failed for a reason outside of agent and grader.

        A server that broke the protocol is one; a request that it refused is not, since that
        may be about its row.
        """
        if not self.failed:
            return False
        broken = self.outcome is AttemptOutcome.ERROR and self.may_have_run
        outside = {"http_error", "unreachable", MODEL_ENDPOINT, MODEL_KEY, WORKER_LOST}
        return broken or self.reason in outside


FIELDS = tuple(attribute.name for attribute in attrs.fields(AttemptRecord))
"""The names of the fields, in the order in which a line has them."""
