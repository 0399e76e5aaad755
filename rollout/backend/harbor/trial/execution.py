"""Execute one rollout as a trial: plan it, run it on the bridge, finish it, decide."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

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
from rollout.backend.harbor.grading.verifier import check_gradable, with_placeholder_tests
from rollout.backend.harbor.handover import Handover
from rollout.backend.harbor.limits import EnvironmentWatch
from rollout.backend.harbor.plan import TrialPlan, recorded_sample, trial_name
from rollout.backend.harbor.result.facts import TrialFacts, facts_of
from rollout.backend.harbor.result.outcomes import STORAGE_ERRORS, outcome_of
from rollout.backend.harbor.result.settle import Settled, agent_sample, settle
from rollout.backend.harbor.settings import HarborSettings
from rollout.backend.harbor.tasks.images import with_images
from rollout.backend.harbor.tasks.source import fetch_task
from rollout.backend.harbor.trial.configuration import trial_config
from rollout.backend.harbor.trial.network import chat_url_inside, check_chat_url
from rollout.backend.harbor.trial.run import TrialRun
from rollout.backend.harbor.trial.runtime import Runtime
from rollout.backend.harbor.workspaces import (
    make_workspace,
    prune_kept,
    remove_workspace,
)
from rollout.backend.saving import RolloutFiles, leaves_files, settle_end
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

__all__ = ["TrialExecution"]

logger = get_logger(__name__)

_AGENT_TIMEOUT = "AgentTimeoutError"

_SETTLE_SEC = 60.0
"""For how long what a trial left may take to be read, cleaned and moved."""


@define(eq=False)
class TrialExecution:
    """The execution of one rollout that has a slot.

    Attributes:
        settings: The backend's settings.
        runtime: What it shares with other executions.
        request: What the caller asked for.
        execution: Its entry in the backend's table.
        context: Its context.
        phase: The agent's phase, with its deadline.
        trial: The trial on the bridge, and its events.
        plan: The trial's plan, once there is one.
        handover: What agent and verifier share with it, once the trial is about to run.
        error: What kept the trial from running to its end.
        late: How it ended if its agent's time was over before its agent could begin.
    """

    settings: HarborSettings
    runtime: Runtime
    request: ExecutionRequest
    execution: Execution
    context: RolloutContext
    phase: Phase
    trial: TrialRun = field(init=False)
    plan: TrialPlan | None = field(default=None, init=False)
    handover: Handover | None = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    late: ExecutionResult | None = field(default=None, init=False)
    _name: str = field(init=False)
    _workspace: Path | None = field(default=None, init=False)
    _before_agent: trio.CancelScope = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._name = trial_name(self.request.id)
        self._before_agent = trio.CancelScope(deadline=self.phase.deadline)
        self.trial = TrialRun(
            context=self.context,
            set_status=self._set_status,
            watch=EnvironmentWatch(self._name, self.settings.stop_timeout_sec),
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
                        self.runtime.problem = str(self.error)
            self.execution.leave()
        except BaseException:
            await self._finish(cancelled=True)
            raise
        return await self._finish(cancelled=self.execution.cancelled and self.late is None)

    async def never_run(self, ended: ExecutionResult) -> ExecutionOutcome:
        """End a rollout that got no slot, and save a note of it, also when cancelled."""
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
        if "ENVIRONMENT_START" in self.trial.events:
            ended.err_message = f"{ended.err_message}, while {self.trial.phase}"
        self.late = ended

    async def _plan_and_run(self) -> None:
        settings, runtime = self.settings, self.runtime
        self._workspace = await runtime.in_thread(make_workspace, settings.trials_dir, self._name)
        plan = self.plan = await self._make_plan(self._workspace)
        config = await runtime.in_thread(trial_config, settings, plan)
        self.handover = Handover(
            plan=plan,
            read_sample=partial(agent_sample, plan, settings.agent),
            grader_cls=settings.grader_cls,
            grader_config=settings.grader_config,
            grader_slots=runtime.grader_slots,
            raised=self.trial.watch.raised,
        )
        bridge = runtime.bridge
        left = self.phase.deadline - trio.current_time()
        agent_sec = None if math.isinf(left) else left
        with self.handover:
            await bridge.run(
                self.trial.run, config, bridge.call_trio_soon, agent_sec, runtime.queue
            )

    async def _make_plan(self, workspace: Path) -> TrialPlan:
        """Resolve and fetch the task, and check what can be checked before a sandbox starts.

        Raises:
            InvalidFieldError: The request lacks or has what cannot work.
            BackendConfigurationError: The task could not be prewarmed.
        """
        settings, runtime, request = self.settings, self.runtime, self.request
        task = await runtime.in_thread(settings.tasks.resolve, request, workspace)
        reason = runtime.unfit_tasks.get(task.name)
        if reason is not None:
            raise BackendConfigurationError(f"task {task.name} could not be prewarmed: {reason}")
        task = await runtime.bridge.run(fetch_task, task, workspace)
        check_gradable(request, task, settings.grader_cls)
        task = await runtime.in_thread(with_placeholder_tests, task, workspace)
        task = await runtime.in_thread(with_images, task, workspace, settings.images)
        plan = TrialPlan(
            request=request,
            context=self.context,
            workspace=workspace,
            name=self._name,
            task=task,
            model=(request.metadata or {}).get("harbor_model", settings.model),
            agent_timeout_sec=None
            if request.agent_timeout_sec is None
            else max(self.phase.deadline - trio.current_time(), 0.0),
            grader_timeout_sec=request.grader_timeout_sec,
            url_inside=None
            if settings.agent.on_host
            else chat_url_inside(self.context.chat_completions_url, settings.environment),
            more_secrets=settings.secrets,
        )
        check_chat_url(plan, agent_on_host=settings.agent.on_host, environment=settings.environment)
        return plan

    async def _finish(self, *, cancelled: bool) -> ExecutionOutcome:
        """Finish the trial, decide, and save, in bounded time, also when cancelled."""
        settled = self._unsettled()
        with trio.CancelScope(shield=True):
            settled = await self._settle(cancelled=cancelled)
        outcome = self._cancelled(settled) if cancelled else self._outcome(settled)
        with trio.CancelScope(shield=True):
            await self._save(outcome, settled)
        return outcome

    async def _save(self, outcome: ExecutionOutcome, settled: Settled) -> None:
        """Write the trajectory and the note on how it went; see `ArtifactStore.save`."""
        now = trio.current_time()
        for span in (self.execution.agent_at, self.execution.grader_at):
            if span.since is not None and span.until is None:
                span.until = now
        if not leaves_files(self.context, outcome):
            return
        files = RolloutFiles(
            request=self.request,
            outcome=outcome,
            phase=self.execution.status,
            end=await settle_end(self.context, outcome),
            timings=self.execution.timings(now),
            secrets=tuple(self._secrets()),
            document=settled.document,
            diagnostics=settled.diagnostics,
        )
        await self.settings.store.save(self.request.id, files.contents, in_thread=files.large)

    def _secrets(self) -> list[str | None]:
        return [*self.context.secrets, *self.settings.secrets]

    async def _settle(self, *, cancelled: bool) -> Settled:
        facts = self._facts()
        settled = self._unsettled()
        self.runtime.note_stop(self.trial.watch)
        if self._workspace is not None:
            recorded = None if self.plan is None else await recorded_sample(self.plan)
            with trio.move_on_after(_SETTLE_SEC) as scope:
                await trio.to_thread.run_sync(
                    self._settle_in_thread,
                    settled,
                    self._workspace,
                    facts or TrialFacts(),
                    cancelled,
                    recorded,
                    abandon_on_cancel=True,
                    limiter=self.runtime.threads,
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
        if self.trial.result is None:
            return None
        try:
            return facts_of(self.trial.result, self.trial.watch.raised)
        except Exception as error:  # noqa: BLE001 - an object of Harbor's, in whatever version
            self.error = self.error or error
            return None

    def _settle_in_thread(
        self,
        settled: Settled,
        workspace: Path,
        facts: TrialFacts,
        cancelled: bool,
        recorded: RolloutSample | None,
    ) -> None:
        settings = self.settings
        if self.plan is None:
            settled.sample = None
            remove_workspace(self.request.id, workspace)
            return
        try:
            settle(
                settled,
                self.plan,
                facts,
                settings,
                self.trial.watch,
                keep_failed=settings.keep_failed_trials and not cancelled and not self.late,
                recorded=recorded,
                graded=self._graded(),
                error=self.error,
            )
            if "kept_in" in settled.diagnostics.get("harbor", {}):
                prune_kept(settings.trials_dir, settings.max_kept_trials)
        except Exception as error:  # noqa: BLE001 - a rollout does not fail for its files
            self._log(f"{settled.step} failed, so what its trial left is removed", error)
            settled.note("unsettled", f"{settled.step} failed ({type(error).__name__})")
            # Nobody knows whether it is free of the key.
            remove_workspace(self.request.id, workspace)

    def _graded(self) -> RolloutSample | None:
        return None if self.handover is None else self.handover.graded

    def _unsettled(self) -> Settled:
        """Return the prompt as the sample, for a rollout whose trial left nothing."""
        prompt = [dict(message) for message in self.request.prompt]
        return Settled(sample=RolloutSample(messages=prompt, label=self.request.label))

    def _cancelled(self, settled: Settled) -> ExecutionOutcome:
        ended = ExecutionResult(
            status=RolloutStatus.CANCELLED, err_message=f"cancelled while {self.trial.phase}"
        )
        if not self.trial.verifying:
            return ExecutionOutcome(workflow=ended)
        ended.sample = settled.sample
        agent = ExecutionResult(status=RolloutStatus.SUCCESS, sample=settled.sample)
        return ExecutionOutcome(workflow=agent, grader=ended)

    def _outcome(self, settled: Settled) -> ExecutionOutcome:
        if self.late is not None:
            return ExecutionOutcome(workflow=self.late)
        if self.error is None and settled.facts is not None:
            return outcome_of(
                self._with_our_deadline(settled.facts),
                settled.sample,
                grade=self.request.grade,
                secrets=self._secrets(),
                graded=self._graded(),
                missing=settled.missing,
            )
        error = self.error or RuntimeError("the trial ended without a result")
        text = describe_exception(error, self._secrets())
        if isinstance(error, InvalidFieldError):
            logger.warning("rollout %s: its trial cannot run: %s", self.request.id, text)
        else:
            self._log("its trial could not run", error)
        return ExecutionOutcome(workflow=failure(text, _category(error)))

    def _with_our_deadline(self, facts: TrialFacts) -> TrialFacts:
        """Name the rollout's own deadline in a timeout; Harbor counts otherwise."""
        time, first = self.trial.agent_time, facts.errors[:1]
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
