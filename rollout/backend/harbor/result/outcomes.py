"""Decide the outcome of a rollout from the facts of its trial. Pure.

The agent's part is the workflow's result, the verifier's part the grader's. A trial may have
both an error of its agent and a verified reward (Harbor from 0.26 on grades after some of
them): the rollout fails for the agent's error, and the graded sample is kept beside it.
"""

from __future__ import annotations

import errno
from typing import Any

import attrs

from rollout._json.fit import plain_number
from rollout._redaction import redact
from rollout.backend.executions import failure
from rollout.backend.harbor.errors import UserCodeError
from rollout.backend.harbor.opensandbox import is_provider_failure
from rollout.backend.harbor.result.facts import TrialError, TrialFacts
from rollout.types import (
    ExecutionOutcome,
    ExecutionResult,
    RolloutErrorCategory,
    RolloutSample,
    RolloutStatus,
)

__all__ = ["REWARD", "STORAGE_ERRORS", "categorize_trial_error", "lacks_reward", "outcome_of"]

STORAGE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
"""What says that this machine's storage is full or broken, for which no agent is to blame."""

REWARD = "reward"
"""The channel of a verifier's result that becomes the reward."""

_TIMEOUTS = frozenset(
    {
        "AgentSetupTimeoutError",
        "AgentTimeoutError",
        "EnvironmentStartTimeoutError",
        "SandboxReadyTimeoutException",
        "SandboxTimeoutException",
        "TimeoutError",
        "TooSlowError",
        "VerifierTimeoutError",
    }
)
_VALIDATION = frozenset(
    {
        "AssertionError",
        "InvalidFieldError",
        "RewardFileEmptyError",
        "RewardFileNotFoundError",
        "TypeError",
        "ValidationError",
        "ValueError",
        "VerifierOutputParseError",
    }
)
_UNREADABLE = frozenset({"IsADirectoryError", "MemoryError", "RecursionError"})
"""Errors of Harbor's verifier for a file of rewards that is a folder, or JSON nested deeply."""

_STORAGE = tuple(f"[Errno {number}] " for number in STORAGE_ERRORS)

_PROVIDER = frozenset(
    {
        "PoolStateStoreUnavailableException",
        "SandboxConnectionException",
        "SandboxRateLimitException",
    }
)


def categorize_trial_error(error: TrialError) -> RolloutErrorCategory:
    """Return the category of an error that a trial recorded."""
    if isinstance(error.exception, UserCodeError):
        return error.exception.category
    if error.type in _TIMEOUTS:
        return RolloutErrorCategory.TIMEOUT
    if error.type in _VALIDATION or (error.in_verifier and error.type in _UNREADABLE):
        return RolloutErrorCategory.VALIDATION_ERROR
    if error.type == "OSError" and error.message.startswith(_STORAGE):
        return RolloutErrorCategory.INTERNAL_ERROR
    if error.type in _PROVIDER or (error.exception and is_provider_failure(error.exception)):
        return RolloutErrorCategory.HTTP_ERROR
    return RolloutErrorCategory.AGENT_ERROR


def outcome_of(
    facts: TrialFacts,
    sample: RolloutSample | None,
    *,
    grade: bool,
    secrets: list[str | None],
    graded: RolloutSample | None = None,
    missing: str | None = None,
) -> ExecutionOutcome:
    """Return the outcome of a rollout whose trial was not cancelled.

    Args:
        facts: What the trial left behind.
        sample: What the agent made, if anything; it gets the reward, and the trial's tokens and
            cost among its metrics.
        grade: Whether a grading was asked for.
        secrets: What may not stand in a message.
        graded: The sample as a user's grader left it; ``None`` if none graded. It may be
            without a reward if the grader marked it as removed.
        missing: Why there is no sample.
    """
    sample, graded = _measured(facts, sample), _measured(facts, graded)
    first = facts.errors[0] if facts.errors else None
    if first is not None and not first.in_verifier:
        workflow = _failed(first, secrets)
        workflow.sample = sample
        if not grade or facts.rewards is None or _reward(facts) is None:
            return ExecutionOutcome(workflow=workflow)
        return ExecutionOutcome(workflow=workflow, grader=_graded(facts, sample))
    workflow = ExecutionResult(status=RolloutStatus.SUCCESS, sample=sample)
    if not grade:
        return ExecutionOutcome(workflow=workflow)
    if sample is None:
        grader = failure(
            f"there is no sample to grade: {missing or 'the agent left none'}",
            RolloutErrorCategory.VALIDATION_ERROR,
        )
        return ExecutionOutcome(workflow=workflow, grader=grader)
    if first is not None:
        grader = _failed(first, secrets)
        grader.sample = sample
        return ExecutionOutcome(workflow=workflow, grader=grader)
    if graded is not None:
        grader = ExecutionResult(status=RolloutStatus.SUCCESS, sample=graded)
        return ExecutionOutcome(workflow=workflow, grader=grader)
    return ExecutionOutcome(workflow=workflow, grader=_graded(facts, sample))


def _failed(error: TrialError, secrets: list[str | None]) -> ExecutionResult:
    text = redact(error.message or error.type, secrets)
    category = categorize_trial_error(error)
    if isinstance(error.exception, UserCodeError):
        failed = failure(text, category)
        failed.err_source = error.exception.source
        return failed
    return failure(text if error.type in text else f"{error.type}: {text}", category)


def _measured(facts: TrialFacts, sample: RolloutSample | None) -> RolloutSample | None:
    """Add the trial's tokens and cost to a sample's metrics, whose own values go first."""
    if sample is None or not facts.metrics:
        return sample
    return attrs.evolve(sample, metrics={**facts.metrics, **sample.metrics})


def lacks_reward(rewards: dict[str, Any] | None, sample: RolloutSample | None) -> bool:
    """Whether a rollout that was to be graded has no usable reward.

    The verifier's goes first. Without one, a reward that the agent's code has set counts, and a
    sample that is marked as removed needs none.
    """
    reward = (rewards or {}).get(REWARD)
    if reward is not None:
        return isinstance(reward, bool) or plain_number(reward) is None
    return sample is None or (sample.reward is None and not sample.remove_sample)


def _reward(facts: TrialFacts) -> float | None:
    return plain_number((facts.rewards or {}).get(REWARD))


def _graded(facts: TrialFacts, sample: RolloutSample | None) -> ExecutionResult:
    """Return the grader's result for a verifier's rewards."""
    rewards = facts.rewards or {}
    if sample is None or lacks_reward(rewards, sample):
        channels = ", ".join(sorted(map(str, rewards))) or "none"
        result = failure(
            f"the verifier gave no finite number as its {REWARD!r} (its channels: {channels})",
            RolloutErrorCategory.VALIDATION_ERROR,
        )
        result.sample = sample
        return result
    extra = {name: value for name, value in rewards.items() if name != REWARD}
    reward = rewards.get(REWARD)
    graded = attrs.evolve(
        sample,
        reward=sample.reward if reward is None else reward,
        extra_fields=sample.extra_fields | ({"rewards": extra} if extra else {}),
    )
    return ExecutionResult(status=RolloutStatus.SUCCESS, sample=graded)
