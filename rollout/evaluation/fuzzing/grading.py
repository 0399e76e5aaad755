"""Grading of single answers, without an agent."""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from attrs import evolve, frozen

from rollout.backend import LocalBackend
from rollout.evaluation.fuzzing.findings import Finding, FindingKind, FuzzSettings
from rollout.types import ExecutionRequest, RolloutErrorCategory, RolloutSample, RolloutStatus

__all__ = ["AnswerGrading", "Verdict"]

_PREFIX = "fuzz-"
_LOGGER = "rollout.backend.local"


@frozen
class Verdict:
    """What a grader made of an answer.

    Attributes:
        reward: The reward, ``None`` for none.
        error: How the grader failed.
        timed_out: Whether it took too long.
    """

    reward: float | None
    error: str | None = None
    timed_out: bool = False


class AnswerGrading:
    """Has the grader of a backend grade answers to rows."""

    def __init__(self, backend: LocalBackend, settings: FuzzSettings) -> None:
        self._backend = backend
        self._settings = settings
        self._numbers = count()

    @staticmethod
    @contextmanager
    def unlogged() -> Generator[None, None, None]:
        """Keep failures of the grader, which become findings, out of the log for a block."""
        logger = logging.getLogger(_LOGGER)
        logger.addFilter(_is_of_others)
        try:
            yield
        finally:
            logger.removeFilter(_is_of_others)

    async def grade(
        self,
        answer: str,
        prompt: Sequence[dict[str, Any]],
        label: str | None,
        metadata: dict[str, Any] | None,
    ) -> Verdict:
        """Grade one answer; the grader gets copies of prompt and metadata."""
        request = ExecutionRequest(
            id=f"{_PREFIX}{next(self._numbers)}",
            prompt=copy.deepcopy(list(prompt)),
            label=label,
            metadata=metadata,
            grader_timeout_sec=self._settings.grader_timeout_sec,
        )
        messages = [*request.prompt, {"role": "assistant", "content": answer}]
        sample = RolloutSample(messages=messages, label=label)
        result = await self._backend.grade(request, sample)
        if result.status is not RolloutStatus.SUCCESS:
            error = result.err_message or "the grader failed without a message"
            return Verdict(None, error, result.err_category is RolloutErrorCategory.TIMEOUT)
        graded = result.sample or sample
        return Verdict(None if graded.remove_sample else graded.reward)

    def problem(self, verdict: Verdict, *, deserving: bool) -> FindingKind | None:
        """Return what is wrong with a verdict on a right answer, or on one that is not."""
        if verdict.error is not None:
            return FindingKind.FAILED
        passed = verdict.reward is not None and verdict.reward >= self._settings.pass_threshold
        if passed == deserving:
            return None
        return FindingKind.REWARDED if passed else FindingKind.REFUSED

    async def again(self, finding: Finding) -> Finding | None:
        """Grade a finding again; ``None`` if it is judged rightly now."""
        verdict = await self.grade(finding.answer, finding.prompt, finding.label, finding.metadata)
        kind = self.problem(verdict, deserving=finding.deserving)
        if kind is None:
            return None
        return evolve(finding, kind=kind, reward=verdict.reward, error=verdict.error)


def _is_of_others(record: logging.LogRecord) -> bool:
    args = record.args
    return not (isinstance(args, tuple) and args and str(args[0]).startswith(_PREFIX))
