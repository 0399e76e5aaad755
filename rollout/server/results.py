"""Results: from the outcome of a backend to the bytes that every poll gets.

A sample is user data: it may hold NaN, objects, NumPy scalars or a structure that contains
itself. Whatever has no JSON form is left out and named; the reward is never the price.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rollout._json.fit import fit, plain_number
from rollout._json.text import utf8
from rollout._logs import get_logger
from rollout._threads import is_large
from rollout.backend.failures import redact
from rollout.codec import MAX_JSON_DEPTH, dump_json, dump_large_json, format_timestamp, unstructure
from rollout.rules.status import TERMINAL_STATUSES
from rollout.types import (
    ExecutionOutcome,
    ExecutionResult,
    RolloutErrorCategory,
    RolloutResultResponse,
    RolloutSample,
    RolloutStatus,
)

__all__ = ["encode", "encode_state", "result_of"]

logger = get_logger(__name__)

_SAMPLE_DEPTH = MAX_JSON_DEPTH - 2
"""What is left for a sample's values within the response and the sample."""

_DROPS_NAMED = 10
"""How many of the values that were left out a warning names."""


def result_of(
    rollout_id: str, outcome: Any, *, secrets: Sequence[str | None]
) -> RolloutResultResponse:
    """Make the terminal result out of what ``execute`` returned.

    A backend that returned something else, or a status that is not terminal, has a defect:
    the rollout fails as `internal_error`.
    """
    result = outcome.result if isinstance(outcome, ExecutionOutcome) else None
    if not isinstance(result, ExecutionResult) or not _is_end(result.status):
        logger.error("rollout %s: the backend returned %s", rollout_id, type(outcome).__name__)
        return RolloutResultResponse(
            rollout_id=rollout_id,
            status=RolloutStatus.FAILURE,
            err_message="the execution backend returned no terminal outcome",
            err_category=RolloutErrorCategory.INTERNAL_ERROR,
        )
    response = RolloutResultResponse(
        rollout_id=rollout_id,
        status=RolloutStatus(result.status),
        err_message=None
        if result.err_message is None
        else redact(utf8(str(result.err_message)), secrets),
        err_category=_category(result.err_category),
        err_source=result.err_source,
        err_phase=_phase(outcome),
    )
    if isinstance(result.sample, RolloutSample):
        _attach_sample(response, result.sample)
    return response


def _phase(outcome: ExecutionOutcome) -> str | None:
    grader = outcome.grader
    failed = grader is not None and grader.status is RolloutStatus.FAILURE
    return "grading" if failed and outcome.result is grader else None


def _is_end(status: Any) -> bool:
    return isinstance(status, str) and status in TERMINAL_STATUSES


def _category(category: Any) -> RolloutErrorCategory | None:
    """Return a backend's error category; `internal_error` for one that the protocol lacks."""
    if category is None:
        return None
    try:
        return RolloutErrorCategory(category)
    except ValueError:
        return RolloutErrorCategory.INTERNAL_ERROR


def encode(response: RolloutResultResponse) -> bytes:
    """Encode a response that `result_of` or the registry made."""
    dump = dump_large_json if is_large(response.sample) else dump_json
    return dump(unstructure(response))


def encode_state(
    rollout_id: str, status: RolloutStatus, agent_started_at: datetime | None
) -> bytes:
    """Encode the response for a rollout in flight, as `encode` would."""
    started = None if agent_started_at is None else format_timestamp(agent_started_at)
    return dump_json(
        {
            "rollout_id": rollout_id,
            "status": str(status),
            "sample": None,
            "err_message": None,
            "err_category": None,
            "agent_started_at": started,
        }
    )


def _attach_sample(response: RolloutResultResponse, sample: RolloutSample) -> None:
    """Attach a copy of the sample from which values without a JSON form are left out."""
    dropped: list[str] = []
    messages = _plain("messages", list(sample.messages), dropped)
    if dropped:
        # A history with holes must not be taken for what the agent said.
        note = f"left out of the sample's messages, having no JSON form: {_named(dropped)}"
        response.err_message = response.err_message or note
    metrics = _plain("metrics", sample.metrics, dropped)
    extra_fields = _plain("extra_fields", sample.extra_fields, dropped)
    if dropped:
        logger.warning(
            "rollout %s: left out of the sample, having no JSON form: %s",
            response.rollout_id,
            _named(dropped),
        )
    response.sample = RolloutSample(
        messages=messages,
        trajectory_messages=None,
        label=sample.label if isinstance(sample.label, str) else None,
        reward=_reward(response, sample),
        remove_sample=bool(sample.remove_sample),
        metrics=metrics,
        extra_fields=extra_fields,
    )


def _named(dropped: list[str]) -> str:
    more = len(dropped) - _DROPS_NAMED
    return "; ".join(dropped[:_DROPS_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _plain(name: str, value: Any, dropped: list[str]) -> Any:
    fitted, left_out = fit(value, max_depth=_SAMPLE_DEPTH)
    dropped += [f"{name}{'' if line[0] == '[' else '.'}{line}" for line in left_out]
    return type(value)() if fitted is None else fitted


def _reward(response: RolloutResultResponse, sample: RolloutSample) -> float | None:
    """Return the reward to report: only a success has one, and it is a finite number."""
    if response.status is not RolloutStatus.SUCCESS or sample.remove_sample:
        return None
    if sample.reward is None:
        return None
    reward = plain_number(sample.reward)
    if reward is None:
        response.status = RolloutStatus.FAILURE
        response.err_category = RolloutErrorCategory.VALIDATION_ERROR
        response.err_message = f"reward must be a finite number, not {type(sample.reward).__name__}"
    return reward
