"""One rollout as a trial: plan it, run it on the bridge, put in order what it left, decide."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio
from attrs import define, field

from rollout._logs import get_logger
from rollout._tasks import sole_error
from rollout.backend.executions import Execution, Phase, failure
from rollout.backend.failures import (
    categorize_exception,
    describe_exception,
    format_exception,
)
from rollout.backend.harbor.grading.verifier import grading_problem, with_placeholder_tests
from rollout.backend.harbor.result.facts import TrialFacts, facts_of
from rollout.backend.harbor.result.outcomes import STORAGE_ERRORS, outcome_of
from rollout.backend.harbor.result.settle import Settled, handed_back, save_outcome, settle
from rollout.backend.harbor.tasks.source import fetch_task
from rollout.backend.harbor.trial.configuration import trial_config
from rollout.backend.harbor.trial.handover import Handover
from rollout.backend.harbor.trial.limits import StopWatch
from rollout.backend.harbor.trial.network import check_chat_url
from rollout.backend.harbor.trial.plan import TrialPlan, trial_name
from rollout.backend.harbor.trial.run import TrialRun
from rollout.backend.harbor.trial.workspaces import make_workspace, prune_kept, remove_workspace
from rollout.backend.saving import settle_end
from rollout.context import RolloutContext
from rollout.errors import BackendConfigurationError, BridgeError, InvalidFieldError
from rollout.types import (
    ExecutionOutcome,
    ExecutionRequest,
    ExecutionResult,
    RolloutErrorCategory,
    RolloutSample,
    RolloutStatus,
)

if TYPE_CHECKING:
    from rollout.backend.harbor.backend import HarborBackend

__all__ = ["TrialExecution"]

logger = get_logger(__name__)

_AGENT_TIMEOUT = "AgentTimeoutError"

_SETTLE_SEC = 60.0
"""For how long what a trial left may take to be read, cleaned and moved."""


@define(eq=False)
class TrialExecution:
    """The execution of one rollout, which has a slot.

    Attributes:
        backend: The backend.
        request: What the caller asked for.
        execution: Its entry in the backend's table.
        context: Its context.
        phase: The agent's phase, with its deadline.
        run_of: The trial on the bridge, and its events.
        plan: The trial's plan, once there is one.
        handover: What agent and verifier share with it, once the trial is about to run.
        error: What kept the trial from running to its end.
        late: How it ended if its agent's time was over before its agent could begin.
    """

    backend: HarborBackend
    request: ExecutionRequest
    execution: Execution
    context: RolloutContext
    phase: Phase
    run_of: TrialRun = field(init=False)
    plan: TrialPlan | None = field(default=None, init=False)
    handover: Handover | None = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    late: ExecutionResult | None = field(default=None, init=False)
    _workspace: Path | None = field(default=None, init=False)
    _before_agent: trio.CancelScope = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._before_agent = trio.CancelScope(deadline=self.phase.deadline)
        self.run_of = TrialRun(
            context=self.context,
            set_status=self._set_status,
            on_agent_start=self._leave_the_rest_to_the_agent,
        )

    def _leave_the_rest_to_the_agent(self) -> None:
        self._before_agent.deadline = math.inf

    def _set_status(self, status: RolloutStatus) -> None:
        now = trio.current_time()
        self.execution.status = status
        if status is RolloutStatus.RUNNING:
            self.execution.agent_at.since = now
        elif status is RolloutStatus.GRADING:
            self.execution.agent_at.until = self.execution.grader_at.since = now

    async def run(self) -> ExecutionOutcome:
        """Run the rollout to its end.

        Cancelling this cancels the trial, waits for its cleanup, and puts in order what it
        left, before the cancellation goes on.
        """
        try:
            with trio.CancelScope() as scope:
                self.execution.enter(scope)
                try:
                    await self._trial()
                except trio.Cancelled:
                    raise
                except BaseException as error:  # noqa: BLE001 - code of agents raises anything
                    self.error = sole_error(error)
                    if isinstance(self.error, BridgeError):
                        self.backend.problem = str(self.error)
            self.execution.leave()
        except BaseException:
            await self._finish(cancelled=True)
            raise
        return await self._finish(cancelled=self.execution.cancelled and self.late is None)

    async def never_run(self, ended: ExecutionResult) -> ExecutionOutcome:
        """End a rollout that got no slot: keep a note of it, whatever is cancelled."""
        outcome = ExecutionOutcome(workflow=ended)
        with trio.CancelScope(shield=True):
            await self._save(outcome, self._unsettled())
        return outcome

    async def _trial(self) -> None:
        """Run the trial. Until its agent starts, the agent's deadline is that of everything."""
        try:
            with self._before_agent:
                await self._plan_and_run()
        finally:
            if self._before_agent.cancel_called:
                self._note_late()

    def _note_late(self) -> None:
        ended = self.phase.interruption(self.execution, trio.current_time())
        if ended is None or ended.status is not RolloutStatus.FAILURE:
            return  # a cancel request was earlier
        if self.run_of.progress.environment_started:
            ended.err_message = f"{ended.err_message}, while {self.run_of.progress.phase}"
        self.late = ended

    async def _plan_and_run(self) -> None:
        backend, name = self.backend, trial_name(self.request.id)
        self._workspace = await backend.in_thread(make_workspace, backend.trials_dir, name)
        plan = self.plan = await self._make_plan(self._workspace, name)
        config = await backend.in_thread(trial_config, backend, plan)
        self.handover = Handover(
            plan=plan,
            read_sample=partial(handed_back, plan, backend.agent),
            grader_cls=backend.grader_cls,
            grader_config=backend.grader_config,
            grader_slots=backend.grader_slots,
        )
        self.run_of.stop = StopWatch(name, backend.stop_timeout_sec)
        left = self.phase.deadline - trio.current_time()
        with self.handover:
            await backend.bridge.run(
                self.run_of.run,
                config,
                backend.bridge.call_trio_soon,
                None if math.isinf(left) else left,
            )

    async def _make_plan(self, workspace: Path, name: str) -> TrialPlan:
        """Resolve and fetch the task, and check what can be checked before a sandbox starts.

        Raises:
            InvalidFieldError: The request lacks or has what cannot work.
            BackendConfigurationError: The task could not be prewarmed.
        """
        backend, request = self.backend, self.request
        task = await backend.in_thread(backend.tasks.resolve, request, workspace)
        reason = backend.unfit_tasks.get(task.name)
        if reason is not None:
            raise BackendConfigurationError(f"task {task.name} could not be prewarmed: {reason}")
        task = await backend.bridge.run(fetch_task, task, workspace)
        problem = grading_problem(request, task, backend.grader_cls)
        if problem is not None:
            raise InvalidFieldError("grade", f"is true, but {problem}")
        task = await backend.in_thread(with_placeholder_tests, task, workspace)
        plan = TrialPlan(
            request=request,
            context=self.context,
            workspace=workspace,
            name=name,
            task=task,
            model=(request.metadata or {}).get("harbor_model", backend.model),
            agent_timeout_sec=None
            if request.agent_timeout_sec is None
            else max(self.phase.deadline - trio.current_time(), 0.0),
            grader_timeout_sec=request.grader_timeout_sec,
            more_secrets=tuple(backend.secrets),
        )
        check_chat_url(plan, agent_on_host=backend.agent.on_host, environment=backend.environment)
        return plan

    async def _finish(self, *, cancelled: bool) -> ExecutionOutcome:
        """Put in order what the trial left, decide, and save; bounded, whatever is cancelled."""
        settled = self._unsettled()
        with trio.CancelScope(shield=True):
            settled = await self._settle(cancelled=cancelled)
        outcome = self._cancelled(settled) if cancelled else self._outcome(settled)
        with trio.CancelScope(shield=True):
            await self._save(outcome, settled)
        return outcome

    async def _save(self, outcome: ExecutionOutcome, settled: Settled) -> None:
        now = trio.current_time()
        for span in (self.execution.agent_at, self.execution.grader_at):
            if span.since is not None and span.until is None:
                span.until = now
        await save_outcome(
            self.backend.store,
            self.request,
            outcome,
            settled,
            end=await settle_end(self.context, outcome),
            phase=self.execution.status,
            timings=self.execution.timings(now),
            secrets=tuple(self._secrets()),
        )

    def _secrets(self) -> list[str | None]:
        return [*self.context.secrets, *self.backend.secrets]

    async def _settle(self, *, cancelled: bool) -> Settled:
        facts = self._facts()
        settled = self._unsettled()
        if self.run_of.stop is not None:
            self.backend.stops.note(self.run_of.stop)
        if self._workspace is not None:
            with trio.move_on_after(_SETTLE_SEC) as scope:
                await trio.to_thread.run_sync(
                    self._settle_in_thread,
                    settled,
                    self._workspace,
                    facts or TrialFacts(),
                    cancelled,
                    abandon_on_cancel=True,
                    limiter=self.backend.threads,
                )
            if scope.cancelled_caught:
                settled = attrs.evolve(settled)  # the thread goes on with the other one
                what = f"{settled.step} took longer than {_SETTLE_SEC:g} s and goes on"
                settled.note("unsettled", what)
                logger.error(
                    "rollout %s: what its trial left in %s: %s",
                    self.request.id,
                    self._workspace,
                    what,
                )
        settled.facts = facts
        return settled

    def _facts(self) -> TrialFacts | None:
        result = self.run_of.result
        if result is None:
            return None
        try:
            return facts_of(result)
        except Exception as error:  # noqa: BLE001 - an object of Harbor's, in whatever version
            self.error = self.error or error
            return None

    def _settle_in_thread(
        self, settled: Settled, workspace: Path, facts: TrialFacts, cancelled: bool
    ) -> None:
        try:
            settle(
                settled,
                self.plan,
                workspace,
                facts,
                agent=self.backend.agent,
                store=self.backend.store,
                keep_failed=self.backend.keep_failed_trials and not cancelled and not self.late,
                environment=self.backend.environment,
                error=self.error,
                stop=self.run_of.stop,
            )
            if "kept_in" in settled.diagnostics.get("harbor", {}):
                prune_kept(self.backend.trials_dir, self.backend.max_kept_trials)
        except Exception as error:  # noqa: BLE001 - a rollout does not fail for its files
            self._log(f"{settled.step} failed, so what its trial left is removed", error)
            settled.note("unsettled", f"{settled.step} failed ({type(error).__name__})")
            # Nobody knows whether it is free of the key.
            remove_workspace(self.request.id, workspace)

    def _unsettled(self) -> Settled:
        """Return what is known of a rollout without what its trial left."""
        prompt = [dict(message) for message in self.request.prompt]
        return Settled(sample=RolloutSample(messages=prompt, label=self.request.label))

    def _cancelled(self, settled: Settled) -> ExecutionOutcome:
        progress = self.run_of.progress
        ended = ExecutionResult(
            status=RolloutStatus.CANCELLED, err_message=f"cancelled while {progress.phase}"
        )
        if not progress.verifying:
            return ExecutionOutcome(workflow=ended)
        ended.sample = settled.sample
        agent = ExecutionResult(status=RolloutStatus.SUCCESS, sample=settled.sample)
        return ExecutionOutcome(workflow=agent, grader=ended)

    def _outcome(self, settled: Settled) -> ExecutionOutcome:
        if self.late is not None:
            return ExecutionOutcome(workflow=self.late)
        error = self.error
        if error is None and settled.facts is None:
            error = RuntimeError("the trial ended without a result")
        if error is not None or settled.facts is None:
            assert error is not None  # noqa: S101 - see above
            text = describe_exception(error, self._secrets())
            if isinstance(error, InvalidFieldError):
                logger.warning("rollout %s: its trial cannot run: %s", self.request.id, text)
            else:
                self._log("its trial could not run", error)
            return ExecutionOutcome(workflow=failure(text, _category(error)))
        return outcome_of(
            self._with_our_deadline(settled.facts),
            settled.sample,
            grade=self.request.grade,
            secrets=self._secrets(),
            graded=None if self.handover is None else self.handover.graded,
        )

    def _with_our_deadline(self, facts: TrialFacts) -> TrialFacts:
        """Say whose time was over: Harbor, which counts otherwise, names another number."""
        time, first = self.run_of.agent_time, facts.errors[:1]
        if time is None or not time.is_over or not first or first[0].type != _AGENT_TIMEOUT:
            return facts
        text = f"agent exceeded its deadline of {self.phase.limit:g} s, counted from admission"
        return attrs.evolve(facts, errors=(attrs.evolve(first[0], message=text), *facts.errors[1:]))

    def _log(self, what: str, error: BaseException) -> None:
        text = format_exception(error, self._secrets())
        logger.error("rollout %s: %s\n%s", self.request.id, what, text)


def _category(error: BaseException) -> Any:
    if isinstance(error, BackendConfigurationError | BridgeError):
        return RolloutErrorCategory.INTERNAL_ERROR
    if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
        return RolloutErrorCategory.INTERNAL_ERROR
    return categorize_exception(error)
