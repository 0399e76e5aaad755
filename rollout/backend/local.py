"""Run workflow and grader in the server's own process.

Theory of operation: an `Execution` waits for a slot, then runs the workflow and, if asked to,
the grader, each as a `rollout.backend.usercode.UserCall` with the deadline of its phase.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import trio

from rollout._logs import get_logger
from rollout._threads import run_by_size
from rollout.artifacts import ArtifactStore
from rollout.backend.executions import Execution, Phase, SlotBackend, Slots, failure
from rollout.backend.failures import (
    categorize_exception,
    describe_exception,
    format_exception,
    source_of,
)
from rollout.backend.references import application_of, class_with, config_of
from rollout.backend.saving import leaves_files, save_files
from rollout.backend.usercode import Outcome, UserCall, check_graded, checked_sample
from rollout.context import (
    AgentWorkflowContext,
    GraderContext,
    RolloutContext,
    get_rollout_context,
)
from rollout.grader import Grader
from rollout.types import (
    MODEL_ENDPOINT,
    AgentWorkflowConfig,
    ExecutionOutcome,
    ExecutionRequest,
    ExecutionResult,
    GraderConfig,
    RolloutErrorCategory,
    RolloutSample,
    RolloutStatus,
)
from rollout.types.output import coerce_output
from rollout.workflow import AgentWorkflow

__all__ = ["DEFAULT_MAX_CONCURRENT", "LocalBackend"]

logger = get_logger(__name__)

_UNFINISHED_SEC = 2.0
"""For how long the sample source of a failed rollout may take to say what it has."""

__path__: list[str] = []
"""Lets the official package's `rollout.backend.local.backend` be imported."""

T = TypeVar("T")

DEFAULT_MAX_CONCURRENT = 4
"""How many rollouts run at a time where no workflow config says otherwise."""


class LocalBackend(SlotBackend):
    """Runs rollouts in this process, each in its own task.

    Args:
        workflow: An `AgentWorkflow` class, or ``"module:attr"`` of one.
        workflow_config: Its config, or ``"module:attr"`` of one. Its
            ``concurrency.max_concurrent`` is the number of slots: ``None`` for no limit, 4
            without a config.
        grader: A `Grader` class or ``"module:attr"``; without one no rollout can be graded.
        grader_config: Its config. Its ``concurrency`` bounds gradings on top of the slots.
        max_queue_depth: How many rollouts may wait for a slot; more are refused at admission.
            ``None`` sets no bound.
        artifact_root: Below which folder the files of rollouts are kept, see
            `rollout.artifacts.ArtifactStore`; ``False`` keeps none.

    Raises:
        BackendConfigurationError: One of these is not what it should be.

    A workflow that outlives its deadline, swallows its cancellation or blocks past it is
    reported as a timeout even if it returned something, and it keeps its slot until it ends. A
    plain function is reported at its deadline, while its thread goes on.
    """

    reports_agent_start: ClassVar[bool] = True
    isolates_user_code: ClassVar[bool] = True
    keeps_files: ClassVar[bool] = True

    def __init__(
        self,
        *,
        workflow: type[AgentWorkflow[Any]] | str,
        workflow_config: AgentWorkflowConfig | str | None = None,
        grader: type[Grader] | str | None = None,
        grader_config: GraderConfig | str | None = None,
        max_queue_depth: int | None = None,
        artifact_root: str | os.PathLike[str] | Literal[False] | None = None,
    ) -> None:
        self.workflow_cls: Any = class_with("run", workflow, "workflow")
        self.grader_cls: Any = None if grader is None else class_with("grade", grader, "grader")
        self.workflow_config = config_of(workflow_config, AgentWorkflowConfig, "workflow_config")
        self.grader_config = config_of(grader_config, GraderConfig, "grader_config")
        self.application = application_of(self.workflow_cls, self.grader_cls)
        self.artifacts = ArtifactStore(artifact_root)
        self.artifact_root = self.artifacts.root
        workflow_slots, grader_slots = (
            default if config is None else config.concurrency.max_concurrent
            for config, default in (
                (self.workflow_config, DEFAULT_MAX_CONCURRENT),
                (self.grader_config, None),
            )
        )
        super().__init__(workflow_slots, max_queue_depth)
        self._grader_slots = Slots(grader_slots)

    def health(self) -> dict[str, Any]:
        """Return the status, the counts of the slots, and what is counted of files."""
        return {**super().health(), "counts": dict(self.artifacts.counts)}

    # --- execution ----------------------------------------------------------------------------

    async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
        """Run one rollout; see `ExecutionBackend.execute`.

        Raises:
            DuplicateRolloutError: A rollout of that id is running here already.
        """
        context = get_rollout_context() or RolloutContext(rollout_id=request.id)
        with self.begun(request.id) as execution:
            try:
                outcome = await self._execute(request, execution, context)
                await self._save(request, execution, context, outcome)
            except (trio.Cancelled, BaseExceptionGroup):
                ended = ExecutionOutcome(workflow=execution.interrupted())
                await self._save(request, execution, context, ended)
                raise
        return outcome

    async def _save(
        self,
        request: ExecutionRequest,
        execution: Execution,
        context: RolloutContext,
        outcome: ExecutionOutcome,
    ) -> None:
        """Write the files of a rollout; never raises, and waits for a bounded time."""
        if not self.artifacts.keeps or not leaves_files(context, outcome):
            return
        timings = execution.timings(trio.current_time())
        await save_files(
            self.artifacts,
            request,
            context,
            outcome,
            phase=execution.status,
            timings=timings,
            unfinished=await _unfinished_sample(outcome, context),
        )

    async def _execute(
        self, request: ExecutionRequest, execution: Execution, context: RolloutContext
    ) -> ExecutionOutcome:
        problem = self._grading_problem(request)
        if problem is not None:
            await trio.lowlevel.checkpoint()
            return ExecutionOutcome(
                workflow=failure(problem, RolloutErrorCategory.VALIDATION_ERROR)
            )
        phase = Phase("workflow", request.agent_timeout_sec, execution.submitted_at)
        acquired = await self.slots.acquire(execution, phase.deadline)
        try:
            phase.queued_sec = trio.current_time() - execution.submitted_at
            ended = phase.interruption(execution, trio.current_time())
            if ended is None and not acquired:
                ended = phase.no_slot()
            if ended is not None:
                return ExecutionOutcome(workflow=ended)
            return await self._run_phases(request, execution, context, phase)
        finally:
            if acquired:
                self.slots.release(execution)

    async def _run_phases(
        self,
        request: ExecutionRequest,
        execution: Execution,
        context: RolloutContext,
        phase: Phase,
    ) -> ExecutionOutcome:
        execution.enter_phase(RolloutStatus.RUNNING, context)
        await execution.wait_start_kept(context, phase.deadline)
        workflow = await self._run_workflow(request, execution, context, phase)
        execution.agent_at.until = trio.current_time()
        if not request.grade or workflow.status is not RolloutStatus.SUCCESS:
            return ExecutionOutcome(workflow=workflow)
        execution.enter_phase(RolloutStatus.GRADING, context)
        grader = await self._grade(request, execution, context, workflow.sample)
        return ExecutionOutcome(workflow=workflow, grader=grader)

    async def grade(
        self,
        request: ExecutionRequest,
        sample: RolloutSample,
        *,
        artifacts_dir: Callable[[], Path | None] | None = None,
    ) -> ExecutionResult:
        """Run the grader alone, on a sample of earlier; nothing of it is saved.

        Args:
            request: The rollout.
            sample: What its workflow had made.
            artifacts_dir: Makes its folder of artifacts; ``None`` if nothing is kept.
        """
        problem = self._grading_problem(request)
        if problem is not None:
            await trio.lowlevel.checkpoint()
            return failure(problem, RolloutErrorCategory.VALIDATION_ERROR)
        execution = Execution(request.id, trio.current_time(), status=RolloutStatus.GRADING)
        execution.metadata = await _copied(request.metadata)
        execution.artifacts_dir = None if artifacts_dir is None else cache(artifacts_dir)
        context = RolloutContext(rollout_id=request.id)
        return await self._grade(request, execution, context, sample)

    async def _grade(
        self,
        request: ExecutionRequest,
        execution: Execution,
        context: RolloutContext,
        sample: RolloutSample | None,
    ) -> ExecutionResult:
        acquired = await self._grader_slots.acquire(execution, math.inf)
        try:
            execution.grader_at.since = trio.current_time()
            phase = Phase("grader", request.grader_timeout_sec, execution.grader_at.since)
            if not acquired and not execution.cancelled:
                grader = phase.no_slot()
                grader.sample = sample
            else:
                grader = await self._run_grader(request, execution, context, phase, sample)
            execution.grader_at.until = trio.current_time()
        finally:
            if acquired:
                self._grader_slots.release(execution)
        return grader

    def _grading_problem(self, request: ExecutionRequest) -> str | None:
        if not request.grade:
            return None
        if self.grader_cls is None:
            return (
                "the rollout cannot be graded: this server has no grader "
                "(configure one, or send grade=false)"
            )
        if request.label is None and request.metadata is None:
            return (
                "the rollout cannot be graded: the request has neither a label nor metadata "
                "(send one of them, or grade=false)"
            )
        return None

    async def _run_workflow(
        self,
        request: ExecutionRequest,
        execution: Execution,
        context: RolloutContext,
        phase: Phase,
    ) -> ExecutionResult:
        call = UserCall(execution.rollout_id, phase.name, phase.deadline)

        async def body() -> RolloutSample | None:
            config = copy.deepcopy(self.workflow_config)
            if self.artifacts.keeps:
                execution.artifacts_dir = cache(partial(self.artifacts.artifacts_dir, request.id))
            execution.metadata = await _copied(request.metadata)
            inner = AgentWorkflowContext(
                prompt=await _copied(request.prompt),
                config=config,
                metadata=execution.metadata,
                artifacts_dir=execution.artifacts_dir,
            )
            with context:
                workflow = self.workflow_cls(config)
                output = coerce_output(await call.invoke(workflow.run, inner))
                if output is None:
                    return _labelled(checked_sample(await context.get_sample()), request.label)
            context.info.update(output.info)
            if output.messages is None:
                return None
            make = partial(
                RolloutSample,
                messages=output.messages,
                label=request.label,
                metrics=dict(output.metrics),
            )
            return await run_by_size(make, output.messages)

        outcome = await execution.run(call, body)
        return (
            _blamed(phase.interruption(execution, outcome.ended), context)
            or _user_failure(outcome, phase, execution, context)
            or ExecutionResult(status=RolloutStatus.SUCCESS, sample=outcome.value)
        )

    async def _run_grader(
        self,
        request: ExecutionRequest,
        execution: Execution,
        context: RolloutContext,
        phase: Phase,
        sample: RolloutSample | None,
    ) -> ExecutionResult:
        call = UserCall(execution.rollout_id, phase.name, phase.deadline)
        inner = GraderContext(
            label=request.label,
            sample=sample,
            metadata=execution.metadata,
            artifacts_dir=execution.artifacts_dir,
        )

        async def body() -> None:
            config = copy.deepcopy(self.grader_config)
            with context:
                grader = self.grader_cls(config)
                returned = await call.invoke(grader.grade, inner)
            check_graded(inner.sample, returned)

        outcome = await execution.run(call, body)
        ended = phase.interruption(execution, outcome.ended) or _user_failure(
            outcome, phase, execution, context
        )
        if ended is not None:
            ended.sample = sample
            return ended
        return ExecutionResult(status=RolloutStatus.SUCCESS, sample=inner.sample)


async def _copied(value: T) -> T:
    return await run_by_size(partial(copy.deepcopy, value), value)


async def _unfinished_sample(
    outcome: ExecutionOutcome, context: RolloutContext
) -> RolloutSample | None:
    """Ask the sample source of a rollout without a sample for what it has; time is bounded.

    It is what the agent said before it failed, for the trajectory alone.
    """
    if outcome.result_to_save.sample is not None or context.source is None:
        return None
    deadline = trio.current_time() + _UNFINISHED_SEC
    call = UserCall(context.rollout_id, "sample source", deadline)
    got = Outcome()
    with trio.CancelScope(shield=True):
        got = await call.run_in_task(context.get_sample)
    if got.error is not None:
        logger.warning(
            "rollout %s: what its agent had said is not kept: %s",
            context.rollout_id,
            describe_exception(got.error, context.secrets),
        )
    return got.value if isinstance(got.value, RolloutSample) else None


def _blamed(ended: ExecutionResult | None, context: RolloutContext) -> ExecutionResult | None:
    """Blame the model's endpoint for a timeout if it has not answered a single call."""
    source = context.source
    if (
        ended is not None
        and ended.err_category is RolloutErrorCategory.TIMEOUT
        and source is not None
        and source.unanswered
    ):
        ended.err_source = MODEL_ENDPOINT
        ended.err_message = f"{ended.err_message}; the model's endpoint has not answered"
    return ended


def _user_failure(
    outcome: Outcome, phase: Phase, execution: Execution, context: RolloutContext
) -> ExecutionResult | None:
    """Turn what user code raised into a failure, and log it without the rollout's key."""
    if outcome.error is None:
        return None
    secrets = context.secrets
    if logger.isEnabledFor(logging.ERROR):  # a traceback takes longer than a small rollout
        logger.error(
            "rollout %s: the %s failed\n%s",
            execution.rollout_id,
            phase.name,
            format_exception(outcome.error, secrets, of_user=True),
        )
    failed = failure(
        describe_exception(outcome.error, secrets), categorize_exception(outcome.error)
    )
    failed.err_source = source_of(outcome.error, context.chat_completions_url)
    return failed


def _labelled(sample: RolloutSample | None, label: str | None) -> RolloutSample | None:
    """Give a sample out of a source the request's label, unless it has one of its own."""
    if sample is not None and sample.label is None:
        sample.label = label
    return sample
