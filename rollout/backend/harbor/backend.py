"""Run rollouts as Harbor trials, each in a sandbox of its own.

Theory of operation: the backend owns one asyncio loop in a thread (a bridge), in which all of
Harbor runs. An execution waits for a slot, prepares its task in a thread, and runs its trial
on the bridge; Harbor's events come back to the trio thread as statuses. When the trial has
ended, by itself or by a cancellation that waited for its cleanup, what it left is read, freed
of the rollout's key, and moved to the rollout's artifact folder; then the result is decided.
"""

from __future__ import annotations

import math
import os
import stat
import tempfile
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import trio

from rollout._checks import backend_settings, check_flag, check_number, check_whole
from rollout._files.claims import sweep_claimed
from rollout._moved import moved_names
from rollout.artifacts import ArtifactStore
from rollout.backend.executions import Execution, Phase, SlotBackend
from rollout.backend.harbor.agents import agent_spec
from rollout.backend.harbor.agents.workflow import PREFIX as AGENT_PREFIX
from rollout.backend.harbor.environment import NAMESPACE, EnvironmentSpec, secrets_in
from rollout.backend.harbor.settings import HarborSettings
from rollout.backend.harbor.tasks.images import load_bindings
from rollout.backend.harbor.tasks.source import TaskMode, TaskSource
from rollout.backend.harbor.trial.execution import TrialExecution
from rollout.backend.harbor.trial.logs import harbor_logs
from rollout.backend.harbor.trial.prewarm import PrewarmMode, PrewarmReport, prewarm_tasks
from rollout.backend.harbor.trial.runtime import Runtime
from rollout.backend.harbor.trial.submission import adopt_queue
from rollout.backend.harbor.validation import require_harbor
from rollout.backend.harbor.workspaces import NAMES, prune_kept
from rollout.backend.references import application_of, class_with, config_of
from rollout.context import RolloutContext, get_rollout_context
from rollout.errors import BackendConfigurationError, InvalidFieldError
from rollout.grader import Grader
from rollout.integrations.asyncio_bridge import AsyncioBridge, open_asyncio_bridge
from rollout.sandbox import remove_abandoned
from rollout.types import (
    AgentWorkflowConfig,
    ExecutionOutcome,
    ExecutionRequest,
    GraderConfig,
)
from rollout.workflow import AgentWorkflow

__all__ = ["HarborBackend"]

if not TYPE_CHECKING:
    __getattr__ = moved_names(__name__)

DEFAULT_MAX_CONCURRENT = 4

_CLOSE_SEC = 45.0
"""For how long the loop may take to end; less than a server gives to its backend's shutdown."""


class HarborBackend(SlotBackend):
    """Runs each rollout as a trial of Harbor (extra ``harbor``, Python 3.12 or newer).

    Args:
        agent: The name of one of Harbor's own agents (``terminus-2``, ``mini-swe-agent``,
            ``opencode``, ``oracle``), or an `AgentWorkflow` class or ``"module:Class"``, which
            is packaged and run inside the sandbox.
        agent_config: Its config, or ``"module:attr"`` of one. Its
            ``concurrency.max_concurrent`` is the number of trials at a time: ``None`` for no
            limit, 4 without a config.
        agent_options: Keyword arguments for one of Harbor's own agents.
        bundle: A wheel with the workflow that `agent` names as ``"module:Class"``. It goes into
            the sandbox as it is; nothing of it is imported here.
        code_dir: A folder with that workflow, which goes in whole; likewise.
        model: The model's name for one of Harbor's own agents, as in ``openai/policy``; a
            rollout's ``metadata["harbor_model"]`` goes before it.
        grader: ``None`` has the task's own tests grade. A `Grader` class or
            ``"module:attr"`` grades where a task has no ``tests/test.sh``.
        grader_config: Its config, or ``"module:attr"`` of one.
        tasks_dir: The task of mode ``template``, or the folder of tasks of mode ``dataset``.
        task_mode: See `docs/harbor.md`: ``template`` writes the prompt into a copy of one
            task; ``dataset`` takes the task that ``metadata["harbor_task_id"]`` names.
        allow_any_path: Let ``metadata["harbor_task"]`` name any folder of this machine, not
            only those below `tasks_dir`.
        allow_local_git: Let it name a git repository of this machine.
        image_bindings: Published images of the tasks, which are then not built: a mapping from
            each task's name to its image, or to its images by environment, as in
            ``{"tests-apart": {"environment": .., "verifier.environment": ..}}``; or the path of
            a JSON file with one, or with a manifest of source images.
        environment: Where trials run: one of Harbor's types, ``namespace`` for
            `rollout.backend.harbor.namespace.NamespaceEnvironment`, or a mapping with the
            fields of Harbor's ``EnvironmentConfig``.
        orchestrator: A ``harbor.trial.queue.TrialQueue`` of this backend alone that trials go
            through, with its hooks and retries. Its ``n_concurrent`` bounds the trials at a time,
            in place of the default 4. Its hooks are called on Harbor's event loop.
        agent_setup_timeout_sec: For how long the setup of an agent may take, in seconds; ``None``
            leaves that to Harbor.
        verified_tasks: Names of tasks that are known to work, or ``True`` for all: `prewarm` with
            the mode ``auto`` leaves them out, but for the environment of those with a health check.
        max_queue_depth: How many rollouts may wait; more are refused at admission.
        artifact_root: Where artifacts, logs and trajectories go; see `LocalBackend`.
        trials_dir: Where trials work; by default a folder of this user among the temporary files.
        keep_failed_trials: Leave the folder of a failed trial in place, freed of the key.
        max_kept_trials: How many of those stay in `trials_dir`; the oldest go first. ``None`` for
            no bound.
        cancel_grace_sec: For how long a cancelled trial may clean up before its cleanup is
            cancelled too, in seconds.
        stop_timeout_sec: For how long the stop of an environment may take before it is given up,
            in seconds.

    Raises:
        BackendConfigurationError: One of these is not what it should be, or Harbor is missing.

    Cancelling `execute` cancels the trial and waits for its cleanup; its folder is cleaned
    and removed on that way too.
    """

    reports_agent_start: ClassVar[bool] = True
    isolates_user_code: ClassVar[bool] = True
    keeps_files: ClassVar[bool] = True

    def __init__(
        self,
        *,
        agent: type[AgentWorkflow[Any]] | str,
        agent_config: AgentWorkflowConfig | str | None = None,
        agent_options: Mapping[str, Any] | None = None,
        bundle: str | os.PathLike[str] | None = None,
        code_dir: str | os.PathLike[str] | None = None,
        model: str | None = None,
        grader: type[Grader] | str | None = None,
        grader_config: GraderConfig | str | None = None,
        tasks_dir: str | os.PathLike[str] | None = None,
        task_mode: TaskMode | Literal["template", "dataset"] = TaskMode.TEMPLATE,
        allow_any_path: bool = False,
        allow_local_git: bool = False,
        image_bindings: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        environment: Any = None,
        orchestrator: Any = None,
        agent_setup_timeout_sec: float | None = None,
        verified_tasks: Iterable[str] | bool = False,
        max_queue_depth: int | None = None,
        artifact_root: str | os.PathLike[str] | Literal[False] | None = None,
        trials_dir: str | os.PathLike[str] | None = None,
        keep_failed_trials: bool = True,
        max_kept_trials: int | None = 100,
        cancel_grace_sec: float = 20.0,
        stop_timeout_sec: float = 300.0,
    ) -> None:
        require_harbor()
        with backend_settings():
            check_flag("keep_failed_trials", keep_failed_trials)
            check_whole("max_kept_trials", max_kept_trials, none=True)
            check_number("cancel_grace_sec", cancel_grace_sec, above=0)
            check_number("stop_timeout_sec", stop_timeout_sec, above=0)
            check_number("agent_setup_timeout_sec", agent_setup_timeout_sec, above=0, none=True)
            verified = _verified_tasks(verified_tasks)
        # A name in a user's own bundle is for the sandbox, and not imported here.
        is_inside = isinstance(agent_config, str) and (bundle is not None or code_dir is not None)
        workflow_config = config_of(
            None if is_inside else agent_config, AgentWorkflowConfig, "agent_config"
        )
        grading_config = config_of(grader_config, GraderConfig, "grader_config")
        where = EnvironmentSpec(environment)
        self.settings = HarborSettings(
            agent=agent_spec(agent, agent_config, agent_options, bundle=bundle, code_dir=code_dir),
            environment=where,
            tasks=TaskSource(
                tasks_dir,
                task_mode,
                allow_any_path=allow_any_path,
                allow_local_git=allow_local_git,
            ),
            store=ArtifactStore(artifact_root),
            trials_dir=_default_dir() if trials_dir is None else Path(trials_dir).absolute(),
            model=model,
            grader_cls=None if grader is None else class_with("grade", grader, "grader"),
            grader_config=grading_config,
            secrets=(*where.secrets, *secrets_in(dict(agent_options or {}))),
            keep_failed_trials=keep_failed_trials,
            max_kept_trials=max_kept_trials,
            stop_timeout_sec=stop_timeout_sec,
            agent_setup_timeout_sec=agent_setup_timeout_sec,
            images=load_bindings(image_bindings),
            verified_tasks=verified,
        )
        self.application = application_of(self.settings.agent.name, self.settings.grader_cls)
        self.artifact_root = self.settings.store.root
        self.cancel_grace_sec = cancel_grace_sec
        trials, gradings = (
            default if config is None else config.concurrency.max_concurrent
            for config, default in (
                (workflow_config, DEFAULT_MAX_CONCURRENT),
                (grading_config, None),
            )
        )
        if orchestrator is not None:
            most = adopt_queue(orchestrator)
            trials = most if workflow_config is None else min(trials or most, most)
        super().__init__(trials, max_queue_depth)
        self.runtime = Runtime(trio.CapacityLimiter(gradings or math.inf), queue=orchestrator)

    def health(self) -> dict[str, Any]:
        """Return the status, the slots' counts, and what runs where.

        The status is ``failed`` if the loop that trials run on is gone, which only the end of
        the server fixes; ``problem`` says why. ``unstopped`` has the names of trials whose
        environment has not stopped, and may still be there.
        """
        problem = self.runtime.problem
        return {
            **super().health(),
            **({} if problem is None else {"status": "failed", "problem": problem}),
            "agent": self.settings.agent.name,
            "environment": self.settings.environment.name,
            "unfit_tasks": len(self.runtime.unfit_tasks),
            "unstopped": self.runtime.unstopped(),
            "counts": dict(self.settings.store.counts),
        }

    # --- life ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Own the asyncio loop that trials run on; see `ExecutionBackend.running`.

        Raises:
            BackendConfigurationError: The agent cannot be packaged, the environment is not
                there, or the folder for trials cannot be used.
        """
        settings, runtime = self.settings, self.runtime
        if runtime.open_bridge is not None:
            raise BackendConfigurationError("this backend is running already")
        await runtime.in_thread(_check_dir, settings.trials_dir)
        await runtime.in_thread(_tidy_up, settings)
        await runtime.in_thread(settings.agent.prepare)
        await runtime.in_thread(settings.environment.prepare)
        with harbor_logs():
            async with open_asyncio_bridge(
                name="harbor", grace_sec=self.cancel_grace_sec, close_timeout_sec=_CLOSE_SEC
            ) as bridge:
                runtime.open_bridge, runtime.problem = bridge, None
                try:
                    yield
                finally:
                    runtime.open_bridge = None

    async def prewarm(self, mode: PrewarmMode = "auto") -> PrewarmReport:
        """Start the environments of the known tasks once, before the first rollout.

        Args:
            mode: ``full`` for all of them, the agent's setup included; ``healthcheck`` for
                the environment of one; ``auto`` for all if they are few, else for one;
                ``off`` for none.

        Returns:
            What was tried and what failed. A task that failed alone is marked: its rollouts
            fail at once, with the reason.

        Raises:
            BackendConfigurationError: Everything that was tried failed, or `running` is not
                entered.

        Cancelling this stops the environments that it started.
        """
        report = await prewarm_tasks(self.settings, self.runtime, mode, self.max_concurrent)
        self.runtime.unfit_tasks = dict(report.failed)
        return report

    def prewarm_lifespan(self, mode: PrewarmMode = "auto") -> Any:
        """Return a lifespan for `create_rollout_server` that calls `prewarm` before serving."""

        @asynccontextmanager
        async def lifespan(_: Any) -> AsyncGenerator[None, None]:
            await self.prewarm(mode)
            yield

        return lifespan

    @property
    def bridge(self) -> AsyncioBridge:
        """The loop that trials run on.

        Raises:
            BackendConfigurationError: `running` is not entered; a server does that.
        """
        return self.runtime.bridge

    # --- execution ----------------------------------------------------------------------------

    async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
        """Run one rollout as a trial; see `ExecutionBackend.execute`.

        Raises:
            DuplicateRolloutError: A rollout of that id is running here already.
            BackendConfigurationError: `running` is not entered.
        """
        await trio.lowlevel.checkpoint()
        _ = self.runtime.bridge  # raises without one
        with self.begun(request.id) as execution:
            return await self._execute(request, execution)

    async def _execute(self, request: ExecutionRequest, execution: Execution) -> ExecutionOutcome:
        phase = Phase("agent", request.agent_timeout_sec, execution.submitted_at)
        context = get_rollout_context() or RolloutContext(rollout_id=request.id)
        trial = TrialExecution(self.settings, self.runtime, request, execution, context, phase)
        try:
            acquired = await self.slots.acquire(execution, phase.deadline)
        except trio.Cancelled:
            await trial.never_run(execution.interrupted())
            raise
        try:
            now = trio.current_time()
            phase.queued_sec = now - execution.submitted_at
            ended = phase.interruption(execution, now)
            return await (trial.run() if ended is None else trial.never_run(ended))
        finally:
            if acquired:
                self.slots.release(execution)


def _verified_tasks(value: Any) -> frozenset[str] | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, Iterable) and not isinstance(value, str):
        names = list(value)
        if all(isinstance(name, str) for name in names):
            return frozenset(names)
    raise InvalidFieldError("verified_tasks", "must be names of tasks, or True or False")


def _tidy_up(settings: HarborSettings) -> None:
    """Remove what a server that was killed has left, and what is kept of old trials. Blocking."""
    sweep_claimed(settings.trials_dir, NAMES)
    if settings.environment.name == NAMESPACE:
        folder = settings.environment.kwargs.get("folder") or tempfile.gettempdir()
        remove_abandoned(Path(folder))
    sweep_claimed(Path(tempfile.gettempdir()), f"{AGENT_PREFIX}.*")
    prune_kept(settings.trials_dir, settings.max_kept_trials)


def _default_dir() -> Path:
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    return Path(tempfile.gettempdir()).absolute() / f"rollout-trials-{user}"


def _check_dir(folder: Path) -> None:
    """Make the folder for trials, and check that no other user can replace what is in it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat() if folder == _default_dir() else folder.stat()
    except OSError as error:
        raise BackendConfigurationError(
            f"trials_dir cannot be used: {error.strerror}: {folder}"
        ) from error
    if folder == _default_dir() and hasattr(os, "geteuid"):
        foreign = info.st_uid != os.geteuid() or not stat.S_ISDIR(info.st_mode)
        if foreign or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BackendConfigurationError(
                f"others can write to {folder}: remove it, or choose another trials_dir"
            )
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise BackendConfigurationError(f"trials_dir is not writable: {folder}")
