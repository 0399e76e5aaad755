"""Run a user's grader on the sample of a trial's agent, on the trio side."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

import trio

from rollout._logs import get_logger
from rollout.backend.failures import (
    categorize_exception,
    describe_exception,
    format_exception,
    source_of,
)
from rollout.backend.harbor.errors import GraderError
from rollout.backend.harbor.handover import Handover
from rollout.backend.harbor.plan import recorded_sample
from rollout.backend.usercode import UserCall, check_graded
from rollout.context import GraderContext
from rollout.types import RolloutSample

__all__ = ["grade"]

logger = get_logger(__name__)

_ARTIFACTS = "artifacts/logs/artifacts"
"""Where Harbor collects what is in ``/logs/artifacts`` inside the sandbox."""


async def grade(handover: Handover) -> RolloutSample:
    """Grade a trial's sample, keep it in the handover, and return it.

    A plain ``grade`` runs in a worker thread. Cancelling this interrupts an async one and
    abandons the thread of a plain one.

    Raises:
        GraderError: The grader raised, or left the sample without a reward.
    """
    plan = handover.plan
    call = UserCall(plan.request.id, "grader")
    recorded = await recorded_sample(plan)
    sample = await trio.to_thread.run_sync(handover.read_sample, recorded, abandon_on_cancel=True)
    inner = GraderContext(
        label=plan.request.label,
        sample=sample,
        project_path=None if plan.task.folder is None else str(plan.task.folder),
        artifacts_dir=await _artifacts_dir(plan.trial_dir / _ARTIFACTS),
    )

    async def body() -> RolloutSample:
        inner.metadata = copy.deepcopy(plan.request.metadata)
        config = copy.deepcopy(handover.grader_config)
        with plan.context:
            grader = handover.grader_cls(config)
            returned = await call.invoke(grader.grade, inner)
        return check_graded(inner.sample, returned)

    async with handover.grader_slots or nullcontext():
        outcome = await call.run_in_task(body)
    if outcome.error is not None:
        secrets = plan.secrets
        logger.error(
            "rollout %s: the grader failed\n%s",
            plan.request.id,
            format_exception(outcome.error, secrets, of_user=True),
        )
        raise GraderError(
            describe_exception(outcome.error, secrets),
            categorize_exception(outcome.error),
            source_of(outcome.error, plan.context.chat_completions_url),
        )
    graded: RolloutSample = outcome.value
    handover.graded = graded
    return graded


async def _artifacts_dir(folder: Path) -> Path | None:
    def make() -> Path | None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("the grader has no folder for artifacts: %s", error)
            return None
        return folder

    return await trio.to_thread.run_sync(make, abandon_on_cancel=True)
