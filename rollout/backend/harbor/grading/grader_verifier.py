"""A Harbor verifier that calls a user's `Grader`, in this process, on the trio side.

Harbor makes it by import path, for tasks that have no tests of their own. Needs Harbor.
"""

from __future__ import annotations

from typing import Any

from harbor.models.verifier.result import VerifierResult
from harbor.verifier.base import BaseVerifier

from rollout.backend.harbor.errors import GraderError
from rollout.backend.harbor.grading.grader import grade
from rollout.backend.harbor.handover import current_handover
from rollout.backend.harbor.result.outcomes import REWARD
from rollout.integrations.asyncio_bridge import run_in_trio

__all__ = ["GraderVerifier"]


class GraderVerifier(BaseVerifier):  # type: ignore[misc,unused-ignore]
    """Grades with the grader of the `Handover` that the trial runs in."""

    async def verify(self) -> Any:
        """Grade, and return the reward; the graded sample stays in the handover.

        Raises:
            GraderError: The grader failed, or the agent has, so that there is nothing to grade.
        """
        handover = current_handover()
        try:
            if handover.agent_failed:
                raise GraderError("the agent failed, so the grader was not run")  # noqa: TRY301
            sample = await run_in_trio(grade, handover)
        except GraderError as error:
            handover.raised.append(error)
            raise
        # A sample that is marked as removed may do without a reward.
        return VerifierResult(rewards=None if sample.reward is None else {REWARD: sample.reward})
