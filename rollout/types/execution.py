"""Requests to a backend, and their outcomes."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import define, field

from rollout.types._fields import (
    instance_of,
    messages,
    optional,
    optional_field,
    path_segment,
    short_text,
    timeout,
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

__all__ = ["ExecutionOutcome", "ExecutionRequest", "ExecutionResult"]


@define(kw_only=True)
class ExecutionRequest:
    """One rollout, as a backend gets it.

    Attributes:
        id: The rollout's id; one path segment.
        prompt: The initial messages.
        label: The text that a grader compares with.
        metadata: The caller's own data.
        agent_timeout_sec: Time for the agent in seconds, queue time included; ``None`` runs
            unbounded, zero or below is a deadline that has already passed.
        grader_timeout_sec: Time for the grader in seconds, its own full window.
        grade: Whether the rollout is graded.
        run: The name of the run that it belongs to, for backends that take turns between runs.
        limits: How much it may ask of its model, for backends that hand it on to a server with a
            model gateway; see `RolloutInitRequest.limits`.
        extra_fields: More of the caller's data, which is kept in the trajectory alone.

    Raises:
        InvalidFieldError: A field breaks its rule.
    """

    id: str = field(validator=path_segment)
    prompt: list[MessageDict] = field(validator=messages)
    label: str | None = optional_field(str, "a string or null")
    metadata: dict[str, Any] | None = optional_field(dict, "an object or null")
    agent_timeout_sec: float | None = field(default=None, validator=timeout)
    grader_timeout_sec: float | None = field(default=None, validator=timeout)
    grade: bool = field(default=True, validator=instance_of(bool, name="a boolean"))
    run: str | None = field(default=None, validator=short_text)
    limits: dict[str, Any] | None = field(default=None, validator=limits_object)
    extra_fields: dict[str, Any] | None = optional_field(dict, "an object or null")


@define(kw_only=True)
class ExecutionResult:
    """How one phase of an execution ended.

    Attributes:
        status: `success`, `failure` or `cancelled`.
        sample: The sample, if there is one.
        err_message: What went wrong, for people.
        err_category: What went wrong, for programs.
        err_source: Whose failure it was, where that is known: `MODEL_ENDPOINT` or `MODEL_KEY`.
        extra_fields: The backend's diagnostics; they never travel.

    Raises:
        InvalidFieldError: A field has the wrong type.
    """

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
    err_source: str | None = optional_field(str, "a string or None")
    extra_fields: dict[str, Any] | None = optional_field(dict, "an object or None")


@define(kw_only=True)
class ExecutionOutcome:
    """The outcome of one execution: the workflow's result and, if it came so far, the grader's.

    Attributes:
        workflow: The workflow's result.
        grader: The grader's result, if it came so far.
        encoded: The terminal response, with the sample, as another server of this version has
            encoded it for this rollout; it is published as it is. Only for backends whose workers
            are such servers; the result then needs no sample.

    Raises:
        InvalidFieldError: One of them is no `ExecutionResult`.
    """

    workflow: ExecutionResult = field(
        validator=instance_of(ExecutionResult, name="an ExecutionResult")
    )
    grader: ExecutionResult | None = optional_field(ExecutionResult, "an ExecutionResult or None")
    encoded: bytes | None = field(default=None, repr=False)

    @property
    def result(self) -> ExecutionResult:
        """The result to report: the workflow's failure, else the grader's word, if any.

        A failed workflow without a sample of its own reports the sample of a grader that
        ran all the same.
        """
        if self.workflow.status is RolloutStatus.SUCCESS:
            return self.grader or self.workflow
        if self.workflow.sample is None and self.grader is not None and self.grader.sample:
            return attrs.evolve(self.workflow, sample=self.grader.sample)
        return self.workflow

    @property
    def result_to_save(self) -> ExecutionResult:
        """The result to keep on disk: the one that has the graded sample."""
        if self.grader is not None and self.grader.sample is not None:
            return self.grader
        return self.workflow
