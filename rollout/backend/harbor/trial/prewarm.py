"""Start the environments of the known tasks before anybody waits for them.

Each is a trial that ends before its agent runs: Harbor builds or pulls the image, starts the
environment, waits for its health check, and with mode ``full`` installs the agent. What fails
then would have failed every rollout of that task.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import trio
from attrs import define, field, frozen

from rollout._logs import get_logger
from rollout._redaction import redact
from rollout._tasks import sole_error
from rollout.backend.failures import describe_exception
from rollout.backend.harbor.grading.verifier import with_placeholder_tests
from rollout.backend.harbor.result.facts import TrialError, facts_of
from rollout.backend.harbor.tasks.source import fetch_task
from rollout.backend.harbor.trial.configuration import trial_config
from rollout.backend.harbor.trial.handover import Handover
from rollout.backend.harbor.trial.limits import StopWatch
from rollout.backend.harbor.trial.plan import ResolvedTask, TrialPlan, trial_name
from rollout.backend.harbor.trial.workspaces import make_workspace, remove_workspace
from rollout.context import RolloutContext
from rollout.errors import BackendConfigurationError
from rollout.types import ExecutionRequest

if TYPE_CHECKING:
    from rollout.backend.harbor.backend import HarborBackend

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
    """What `HarborBackend.prewarm` did.

    Attributes:
        tried: The names of the tasks whose environments were started.
        failed: Why, by name, for those that failed.
        seconds: How long it took.
    """

    tried: list[str] = field(factory=list)
    failed: dict[str, str] = field(factory=dict)
    seconds: float = 0.0


async def prewarm_tasks(backend: HarborBackend, mode: PrewarmMode) -> PrewarmReport:
    """Start the environments of known tasks; see `HarborBackend.prewarm`.

    As many at a time as the backend runs trials, each within the times that its task sets.
    Everything that was started is stopped, and its folders are removed, also by cancelling.

    Args:
        backend: The backend, which is running.
        mode: Which tasks, and how far.

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
    _ = backend.bridge  # raises without one
    tasks = await trio.to_thread.run_sync(backend.tasks.known)
    full = mode == "full" or (mode == "auto" and len(tasks) <= _FEW)
    run = _Prewarm(backend, full)
    await run.run(tasks if full else tasks[:1])
    run.refuse_systemic()
    for name, reason in run.failed.items():
        logger.warning("task %s cannot be prewarmed, so its rollouts will fail: %s", name, reason)
    return PrewarmReport(
        tried=sorted(run.tried),
        failed=dict(sorted(run.failed.items())),
        seconds=trio.current_time() - started,
    )


@define(eq=False)
class _Prewarm:
    """One prewarm.

    Attributes:
        full: Whether agents are set up, too.
        tried: The tasks that came to an end.
        failed: Why, for those that failed.
        kinds: Their reasons without what differs from task to task.
    """

    backend: HarborBackend
    full: bool
    tried: list[str] = field(factory=list)
    failed: dict[str, str] = field(factory=dict)
    kinds: list[str] = field(factory=list)
    hopeless: bool = False

    async def run(self, tasks: list[ResolvedTask]) -> None:
        slots = trio.CapacityLimiter(self._slots())
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(self._try, task, slots, nursery.cancel_scope)

    def _slots(self) -> int:
        total = self.backend.slots.limiter.total_tokens
        return int(min(total, _MOST_AT_A_TIME)) if total < math.inf else _MOST_AT_A_TIME

    def refuse_systemic(self) -> None:
        """Raise if the fault lies with all tasks."""
        if not self.failed or not (self.hopeless or len(self.failed) == len(self.tried)):
            return
        name, reason = next(iter(self.failed.items()))
        many = len(self.failed)
        which = f"task {name}" if many == 1 else f"{many} tasks, such as {name}"
        raise BackendConfigurationError(f"no environment can be started ({which}): {reason}")

    async def _try(
        self, task: ResolvedTask, slots: trio.CapacityLimiter, everything: trio.CancelScope
    ) -> None:
        async with slots:
            reason = await self._reason(task)
        self.tried.append(task.name)
        if reason is None:
            return
        self.failed[task.name] = reason
        self.kinds.append(_kind(reason, task.name))
        alone = len(self.failed) == len(self.tried)
        if alone and len(self.kinds) >= _SYSTEMIC and len(set(self.kinds)) == 1:
            self.hopeless = True
            everything.cancel()

    async def _reason(self, task: ResolvedTask) -> str | None:
        """Start one task's environment and stop it; say why that failed, if it did."""
        name = trial_name(f"prewarm-{task.name}")
        error: TrialError | BaseException | None
        try:
            error = await self._trial(task, name)
        except trio.Cancelled:
            raise
        except (Exception, SystemExit) as caught:  # noqa: BLE001 - Harbor exits without docker
            error = sole_error(caught)
        if error is None:
            return None
        secrets = list(_secrets(self.backend, os.environ))
        if isinstance(error, TrialError):
            text = error.message.strip() or error.type
            text = text if error.type in text else f"{error.type}: {text}"
        else:
            text = describe_exception(error, secrets)
        return redact(text, secrets).replace(name, "<trial>")[:_LONGEST_REASON]

    async def _trial(self, task: ResolvedTask, name: str) -> TrialError | None:
        backend = self.backend
        context = RolloutContext(chat_completions_url=_NOWHERE, rollout_id=name)
        workspace = await trio.to_thread.run_sync(make_workspace, backend.trials_dir, name)
        try:
            with context:
                fetched = await backend.bridge.run(fetch_task, task, workspace)
                if backend.grader_cls is not None:
                    fetched = await trio.to_thread.run_sync(
                        with_placeholder_tests, fetched, workspace
                    )
                plan = TrialPlan(
                    request=ExecutionRequest(
                        id=name, prompt=[{"role": "user", "content": "prewarm"}], grade=False
                    ),
                    context=context,
                    workspace=workspace,
                    name=name,
                    task=fetched,
                    model=backend.model or _MODEL,
                )
                with Handover(plan=plan, read_sample=lambda: None):
                    config = await trio.to_thread.run_sync(self._config, plan)
                    stop = StopWatch(name, backend.stop_timeout_sec)
                    try:
                        return await backend.bridge.run(_run, config, stop)
                    finally:
                        backend.stops.note(stop)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(remove_workspace, name, workspace)

    def _config(self, plan: TrialPlan) -> Any:
        """Make a trial that ends before its agent runs."""
        from harbor.models.trial.config import AgentConfig  # noqa: PLC0415 - an extra

        config = trial_config(self.backend, plan)
        changes: dict[str, Any] = {
            "install_only": True,
            "verifier": config.verifier.model_copy(update={"disable": True}),
        }
        if not self.full:
            changes["agent"] = AgentConfig(name="nop")
        return config.model_copy(update=changes)


async def _run(config: Any, stop: StopWatch) -> TrialError | None:
    """Run a trial, behind the bridge; return the error that it recorded first."""
    from harbor.trial.trial import Trial  # noqa: PLC0415 - an extra

    trial = await Trial.create(config)
    stop.watch(trial.agent_environment)
    errors = facts_of(await trial.run()).errors
    return errors[0] if errors else None


def _secrets(backend: HarborBackend, environ: Mapping[str, str]) -> Iterator[str]:
    """What may stand in the message of a provider, and in no log."""
    yield from backend.environment.secrets
    for name, value in environ.items():
        if _SECRET_NAME.search(name.upper()):
            yield value


def _kind(reason: str, task: str) -> str:
    return re.sub(r"[0-9a-f]{6,}|\d+", "#", reason.replace(task, "<task>"))
