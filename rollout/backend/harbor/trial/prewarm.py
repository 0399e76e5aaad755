"""Start the environments of the known tasks before the first rollout.

Each is a trial that ends before its agent runs: Harbor builds or pulls the image, starts the
environment, waits for its health check, and with mode ``full`` installs the agent. What fails
then would have failed every rollout of that task.
"""

from __future__ import annotations

import os
import re
from typing import Any, Literal, get_args

import trio
from attrs import define, field, frozen

from rollout._logs import get_logger
from rollout._redaction import redact
from rollout._tasks import sole_error
from rollout.backend.failures import describe_exception
from rollout.backend.harbor.grading.verifier import with_placeholder_tests
from rollout.backend.harbor.handover import Handover
from rollout.backend.harbor.limits import EnvironmentWatch
from rollout.backend.harbor.plan import ResolvedTask, TrialPlan, trial_name
from rollout.backend.harbor.result.facts import TrialError, facts_of
from rollout.backend.harbor.settings import HarborSettings
from rollout.backend.harbor.tasks.files import has_healthcheck
from rollout.backend.harbor.tasks.images import with_images
from rollout.backend.harbor.tasks.source import fetch_task
from rollout.backend.harbor.trial.configuration import trial_config
from rollout.backend.harbor.trial.runtime import Runtime
from rollout.backend.harbor.workspaces import make_workspace, remove_workspace
from rollout.context import RolloutContext
from rollout.errors import BackendConfigurationError
from rollout.types import ExecutionRequest

__all__ = ["PrewarmMode", "PrewarmReport", "prewarm_tasks"]

logger = get_logger(__name__)

PrewarmMode = Literal["auto", "full", "healthcheck", "off"]

_FEW = 4
"""So many tasks, or fewer, mode ``auto`` prewarms all of."""

_MOST_AT_A_TIME = 16
_SYSTEMIC = 3
"""After so many failures for one reason, and no success, the others are not tried."""

_LONGEST_REASON = 2000
_NOWHERE = "http://127.0.0.1/v1"
_MODEL = "openai/prewarm"
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")


@frozen(kw_only=True)
class PrewarmReport:
    """The report of `HarborBackend.prewarm`.

    Attributes:
        tried: The names of the tasks whose environments were started.
        failed: Why, by name, for those that failed.
        skipped: The names of the tasks that were left out, since they are known to work.
        seconds: How long it took.
    """

    tried: list[str] = field(factory=list)
    failed: dict[str, str] = field(factory=dict)
    skipped: list[str] = field(factory=list)
    seconds: float = 0.0


async def prewarm_tasks(
    settings: HarborSettings, runtime: Runtime, mode: PrewarmMode, max_concurrent: int | None
) -> PrewarmReport:
    """Start the environments of known tasks; see `HarborBackend.prewarm`.

    Each within the times that its task sets. Everything that was started is stopped, and its
    folders are removed, also by cancelling.

    Args:
        settings: The backend's settings.
        runtime: Of the backend, which is running.
        mode: Which tasks, and how far.
        max_concurrent: How many at a time; ``None`` for no limit but 16.

    Raises:
        BackendConfigurationError: Everything that was tried failed, or the first few for one
            reason; or the mode is unknown, or the backend is not running.
    """
    if mode not in get_args(PrewarmMode):
        raise BackendConfigurationError(
            f"the mode of prewarm is one of {', '.join(get_args(PrewarmMode))}, not {mode!r}"
        )
    started = trio.current_time()
    if mode == "off":
        await trio.lowlevel.checkpoint()
        return PrewarmReport()
    _ = runtime.bridge  # raises without one
    tasks = await trio.to_thread.run_sync(settings.tasks.known)
    skipped: list[str] = []
    if mode == "auto":
        skipped = await trio.to_thread.run_sync(_known_to_work, settings, tasks)
        tasks = [task for task in tasks if task.name not in skipped]
    full = mode == "full" or (mode == "auto" and len(tasks) <= _FEW)
    run = _Prewarm(settings, runtime, full, trusting=mode == "auto")
    slots = trio.CapacityLimiter(min(max_concurrent or _MOST_AT_A_TIME, _MOST_AT_A_TIME))
    async with trio.open_nursery() as nursery:
        for task in tasks if full else tasks[:1]:
            nursery.start_soon(run.try_task, task, slots, nursery.cancel_scope)
    if run.failed and (run.hopeless or len(run.failed) == len(run.tried)):
        name, reason = next(iter(run.failed.items()))
        many = len(run.failed)
        which = f"task {name}" if many == 1 else f"{many} tasks, such as {name}"
        raise BackendConfigurationError(f"no environment can be started ({which}): {reason}")
    for name, reason in run.failed.items():
        logger.warning("task %s cannot be prewarmed, so its rollouts will fail: %s", name, reason)
    return PrewarmReport(
        tried=sorted(run.tried),
        failed=dict(sorted(run.failed.items())),
        skipped=skipped,
        seconds=trio.current_time() - started,
    )


def _known_to_work(settings: HarborSettings, tasks: list[ResolvedTask]) -> list[str]:
    """Return the names of the tasks whose environments need not be started. Blocking."""
    return [
        task.name
        for task in tasks
        if settings.is_verified(task.name) and not has_healthcheck(task.source["path"])
    ]


@define(eq=False)
class _Prewarm:
    """One prewarm.

    Attributes:
        full: Whether agents are set up, too.
        trusting: Whether a task that is known to work has its environment started alone.
        tried: The tasks that came to an end.
        failed: Why, for those that failed.
        kinds: Their reasons without what differs from task to task.
        hopeless: Whether the first few failed for one reason.
    """

    settings: HarborSettings
    runtime: Runtime
    full: bool
    trusting: bool = False
    tried: list[str] = field(factory=list)
    failed: dict[str, str] = field(factory=dict)
    kinds: set[str] = field(factory=set)
    hopeless: bool = False

    async def try_task(
        self, task: ResolvedTask, slots: trio.CapacityLimiter, everything: trio.CancelScope
    ) -> None:
        """Start one task's environment, stop it, and record the result."""
        async with slots:
            reason = await self._reason(task)
        self.tried.append(task.name)
        if reason is None:
            return
        self.failed[task.name] = reason
        self.kinds.add(re.sub(r"[0-9a-f]{6,}|\d+", "#", reason.replace(task.name, "<task>")))
        alone = len(self.failed) == len(self.tried)
        if alone and len(self.failed) >= _SYSTEMIC and len(self.kinds) == 1:
            self.hopeless = True
            everything.cancel()

    async def _reason(self, task: ResolvedTask) -> str | None:
        """Start one task's environment and stop it; return the reason of a failure."""
        name = trial_name(f"prewarm-{task.name}")
        # Of the environment and of this process: a provider's message may show them.
        secrets = [
            *self.settings.environment.secrets,
            *(value for key, value in os.environ.items() if _SECRET_NAME.search(key.upper())),
        ]
        try:
            error = await self._trial(task, name)
        except trio.Cancelled:
            raise
        except (Exception, SystemExit) as caught:  # noqa: BLE001 - Harbor exits without docker
            text = describe_exception(sole_error(caught), secrets)
        else:
            if error is None:
                return None
            text = error.message.strip() or error.type
            text = text if error.type in text else f"{error.type}: {text}"
        return redact(text, secrets).replace(name, "<trial>")[:_LONGEST_REASON]

    async def _trial(self, task: ResolvedTask, name: str) -> TrialError | None:
        settings, runtime = self.settings, self.runtime
        context = RolloutContext(chat_completions_url=_NOWHERE, rollout_id=name)
        workspace = await trio.to_thread.run_sync(make_workspace, settings.trials_dir, name)
        try:
            with context:
                fetched = await runtime.bridge.run(fetch_task, task, workspace)
                if settings.grader_cls is not None:
                    fetched = await trio.to_thread.run_sync(
                        with_placeholder_tests, fetched, workspace
                    )
                fetched = await trio.to_thread.run_sync(
                    with_images, fetched, workspace, settings.images
                )
                plan = TrialPlan(
                    request=ExecutionRequest(
                        id=name, prompt=[{"role": "user", "content": "prewarm"}], grade=False
                    ),
                    context=context,
                    workspace=workspace,
                    name=name,
                    task=fetched,
                    model=settings.model or _MODEL,
                )
                with Handover(plan=plan, read_sample=lambda _: None):
                    config = await trio.to_thread.run_sync(self._config, plan)
                    watch = EnvironmentWatch(name, settings.stop_timeout_sec)
                    try:
                        return await runtime.bridge.run(_run, config, watch)
                    finally:
                        runtime.note_stop(watch)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(remove_workspace, name, workspace)

    def _config(self, plan: TrialPlan) -> Any:
        """Return the configuration of a trial that ends before its agent runs."""
        from harbor.models.trial.config import AgentConfig  # noqa: PLC0415 - an extra

        config = trial_config(self.settings, plan)
        changes: dict[str, Any] = {
            "install_only": True,
            "verifier": config.verifier.model_copy(update={"disable": True}),
        }
        known = self.trusting and self.settings.is_verified(plan.task.name)
        if not self.full or known:
            changes["agent"] = AgentConfig(name="nop")
        return config.model_copy(update=changes)


async def _run(config: Any, watch: EnvironmentWatch) -> TrialError | None:
    """Run a trial, behind the bridge; return the error that it recorded first."""
    from harbor.trial.trial import Trial  # noqa: PLC0415 - an extra

    trial = await Trial.create(config)
    watch.watch(trial.agent_environment)
    errors = facts_of(await trial.run()).errors
    return errors[0] if errors else None
