"""Contexts: the arguments of users' code while a rollout runs.

Theory of operation: a `RolloutContext` stands for the rollout as a whole. The server enters
one around each execution, so that a context variable carries it to everything that the
execution calls: the backend, the workflow, integrations, worker threads. Workflow and grader
get small contexts of their own with what concerns their phase.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import trio
from attrs import define, field

from rollout._redaction import environment_secrets, public_url, url_secrets
from rollout.errors import InvalidFieldError, SampleSourceError
from rollout.types import (
    MODEL_ENDPOINT,
    MODEL_KEY,
    AgentWorkflowConfig,
    ExecutionOutcome,
    RolloutResultResponse,
    RolloutSample,
    RolloutStatus,
)

__all__ = [
    "AgentWorkflowContext",
    "GraderContext",
    "RolloutContext",
    "RolloutProgress",
    "SampleSource",
    "get_rollout_context",
]

TConfig = TypeVar("TConfig", bound=AgentWorkflowConfig)


class SampleSource(ABC):
    """Makes the sample of a rollout from whatever an agent keeps.

    An integration registers one with `RolloutContext.set_sample_source`; the backend asks it
    once the workflow has returned ``None``. A rollout has exactly one sample, so it takes one
    source.
    """

    @property
    def unanswered(self) -> bool:
        """Whether calls of the model were made, and its endpoint has answered none of them."""
        return False

    endpoint_failed: bool = False
    """Whether the model's endpoint failed at the call that ended last, where that is known."""

    key_refused: bool = False
    """Whether that failure was a refusal of the key."""

    limit_reached: str | None = None
    """The limit for which the gateway refused a call, if it did."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing yet that a sample could be made of."""
        return False

    @abstractmethod
    async def get_sample(self) -> RolloutSample:
        """Return the sample as it stands."""

    async def get_preview(self, max_messages: int) -> RolloutSample | None:  # noqa: ARG002
        """Return a copy of the last messages, for those who watch the rollout run.

        Somebody may ask for it once a second, so it should return within one, and must not change
        the sample. ``None``, as by default, shows nothing. The extra field
        ``_preview_truncated`` says whether there are messages before these.
        """
        await trio.lowlevel.checkpoint()
        return None


class RolloutProgress(Protocol):
    """Receives the reports of a context; the server provides it."""

    def report_status(self, status: RolloutStatus) -> None:
        """Record a status; one that does not lead forward is ignored."""

    def report_agent_started(self, at: datetime | None = None) -> None:
        """Record that the agent starts, now or at a time; only the first call counts."""

    @property
    def start_pending(self) -> bool:
        """Whether the agent may not start yet."""
        ...

    async def wait_start_kept(self) -> None:
        """Wait until it may."""

    @property
    def agent_started_at(self) -> datetime | None:
        """When the agent started; ``None`` before that."""

    def settle(self, outcome: ExecutionOutcome) -> RolloutResultResponse:
        """Decide how the rollout ends, unless that is decided already."""
        ...


# Each task, and each worker thread, works on its own copy of the tuple, so that any number of
# them can enter the same context.
_entered: ContextVar[tuple[RolloutContext, ...]] = ContextVar("rollout_context", default=())


def get_rollout_context() -> RolloutContext | None:
    """Return the context of the rollout that runs here, ``None`` outside of one."""
    entered = _entered.get()
    return entered[-1] if entered else None


CHAT_COMPLETIONS_URL_ENV = "OSMOSIS_CHAT_COMPLETIONS_URL"
API_KEY_ENV = "OSMOSIS_API_KEY"
ROLLOUT_ID_ENV = "OSMOSIS_ROLLOUT_ID"


@define
class RolloutContext:
    """One rollout, for the code that runs inside it.

    Used as a context manager it becomes what `get_rollout_context` returns. One that is made
    without an endpoint, in a program of one's own, takes endpoint, key and id from the variables
    ``OSMOSIS_CHAT_COMPLETIONS_URL``, ``OSMOSIS_API_KEY`` and ``OSMOSIS_ROLLOUT_ID``, as in the
    official package; the key of the environment never goes to an endpoint of a request.

    Attributes:
        chat_completions_url: The OpenAI-compatible endpoint of the policy; `repr` shows neither
            user, password nor query.
        api_key: The key for it, ``None`` if it needs none; hidden from `repr`.
        rollout_id: The rollout's id.
        sample_source: Where the sample comes from when the workflow returns ``None``.
        progress: Where to report to; ``None`` outside of a server.
        info: Notes of the rollout's own code; they are kept in its trajectory and never travel.
        gateway_source: Where the model gateway records, if the endpoint is one; the sample comes
            from there if there is no other source.
        preview_enabled: Whether the conversation may be watched while the rollout runs.
    """

    chat_completions_url: str = field(default="", repr=public_url)
    api_key: str | None = field(default=None, repr=False)
    rollout_id: str = ""
    sample_source: SampleSource | None = None
    progress: RolloutProgress | None = field(default=None, repr=False)
    info: dict[str, Any] = field(factory=dict, repr=False, kw_only=True)
    gateway_source: SampleSource | None = field(default=None, repr=False, kw_only=True)
    preview_enabled: bool = field(default=True, repr=False, kw_only=True)
    _started_at: datetime | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if not self.chat_completions_url and CHAT_COMPLETIONS_URL_ENV in os.environ:
            self.chat_completions_url = os.environ[CHAT_COMPLETIONS_URL_ENV]
            self.api_key = self.api_key or os.environ.get(API_KEY_ENV)
            self.rollout_id = self.rollout_id or os.environ.get(ROLLOUT_ID_ENV, "")

    @property
    def agent_started_at(self) -> datetime | None:
        """When the agent started (wall clock, UTC), as the server publishes it."""
        return self._started_at if self.progress is None else self.progress.agent_started_at

    @property
    def secrets(self) -> list[str | None]:
        """Secrets that nobody may repeat: the key, and those in the URL and the environment."""
        return [self.api_key, *url_secrets(self.chat_completions_url), *environment_secrets()]

    def __enter__(self) -> Self:
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _entered.set(_entered.get()[:-1])

    def set_sample_source(self, source: SampleSource) -> None:
        """Register where the sample comes from.

        Raises:
            SampleSourceError: There is one already; a rollout has one sample.
        """
        if self.sample_source is not None:
            raise SampleSourceError(
                "this rollout has a sample source already; a rollout has one sample, so build "
                "one agent or session for each"
            )
        self.sample_source = source

    @property
    def source(self) -> SampleSource | None:
        """The registered sample source, or the gateway's if calls came there."""
        gateway = self.gateway_source
        if self.sample_source is None and gateway is not None and not gateway.empty:
            return gateway
        return self.sample_source

    async def get_sample(self) -> RolloutSample | None:
        """Return the sample of `source`, ``None`` without one."""
        source = self.source
        if source is None:
            await trio.lowlevel.checkpoint()
            return None
        return await source.get_sample()

    def report_status(self, status: RolloutStatus) -> None:
        """Report a phase. Statuses only move forward.

        It counts at once in the event loop, and a moment later from any other thread.
        """
        if self.progress is not None:
            self.progress.report_status(status)

    async def set_status(self, status: RolloutStatus) -> None:
        """Report a phase, then let others run. The report stands even if this is cancelled."""
        self.report_status(status)
        if trio.lowlevel.in_trio_run():  # code of an asyncio framework may await it too
            await trio.lowlevel.checkpoint()

    def mark_agent_started(self, at: datetime | None = None) -> None:
        """Record that the agent starts; the first call wins.

        For backends with `ExecutionBackend.reports_agent_start`. A queued rollout becomes
        running with it. It counts at once in the event loop, and a moment later from any other
        thread.

        Args:
            at: When it started, for an agent that runs elsewhere; now by default.

        Raises:
            InvalidFieldError: The time has no time zone.
        """
        if at is not None and at.utcoffset() is None:
            raise InvalidFieldError("at", "must be a datetime with a time zone", kind="type_error")
        if self.progress is not None:
            self.progress.report_agent_started(at)
        elif self._started_at is None:
            self._started_at = at or datetime.now(UTC)

    @property
    def start_pending(self) -> bool:
        """Whether the agent may not start yet; see `wait_start_kept`."""
        return self.progress is not None and self.progress.start_pending

    async def wait_start_kept(self) -> None:
        """Wait until the agent, whose start was reported in the event loop, may start.

        That is when its start is durable, where the server has a state, and confirmed, where
        the caller has asked for that (`RolloutInitRequest.confirm_start`). An agent must not do
        anything before. Cancelling this leaves the report as it is.
        """
        if self.progress is not None:
            await self.progress.wait_start_kept()
        await trio.lowlevel.checkpoint()

    def explain(self, outcome: ExecutionOutcome) -> None:
        """Say of a failed agent what the gateway saw: a limit, or that the endpoint failed last."""
        source, agent = self.gateway_source, outcome.workflow
        if source is None or agent.status is not RolloutStatus.FAILURE:
            return
        if source.endpoint_failed and agent.err_source is None:
            agent.err_source = MODEL_KEY if source.key_refused else MODEL_ENDPOINT
        said = f"the rollout has reached its limit of {source.limit_reached}"
        if source.limit_reached is not None and said not in (agent.err_message or ""):
            agent.err_message = f"{agent.err_message}; {said}" if agent.err_message else said

    def settle(self, outcome: ExecutionOutcome) -> RolloutResultResponse:
        """Decide how the rollout ends, before its files are written; from the event loop.

        For backends that keep files of a rollout, which are to say what is published. An end
        that came before *outcome* stays, such as that of its polling lease.

        Returns:
            How the rollout ends: its status, error and start time.
        """
        self.explain(outcome)
        if self.progress is not None:
            return self.progress.settle(outcome)
        result = outcome.result
        return RolloutResultResponse(
            rollout_id=self.rollout_id,
            status=result.status,
            err_message=result.err_message,
            err_category=result.err_category,
            err_source=result.err_source,
            agent_started_at=self._started_at,
        )


class _ArtifactsDir:
    """The property `artifacts_dir`, whose folder is made at the first access."""

    __slots__ = ()
    _artifacts_dir: Path | Callable[[], Path | None] | None

    @property
    def artifacts_dir(self) -> Path | None:
        """A folder for files of this rollout, which are kept; made at the first access.

        ``None`` if the backend keeps none, or cannot. See `rollout.artifacts`.
        """
        folder = self._artifacts_dir
        if callable(folder):
            folder = self.artifacts_dir = folder()
        return folder

    @artifacts_dir.setter
    def artifacts_dir(self, folder: Path | None) -> None:
        self._artifacts_dir = folder  # type: ignore[misc] # a slot of the subclasses


@define
class GraderContext(_ArtifactsDir):
    """The argument of `Grader.grade`.

    Attributes:
        label: The request's label.
        sample: The one sample of the rollout.
        project_path: Where the project's files are, if the backend has any.
        metadata: A copy of the request's metadata, with what the workflow changed in it.
        artifacts_dir: A folder for files of this rollout, which are kept, made at the first
            access; ``None`` if the backend keeps none, or cannot. See `rollout.artifacts`.
    """

    label: str | None = None
    sample: RolloutSample | None = None
    project_path: str | None = None
    metadata: dict[str, Any] | None = None
    _artifacts_dir: Path | Callable[[], Path | None] | None = field(
        default=None, repr=False, alias="artifacts_dir"
    )

    def set_reward(self, reward: float) -> None:
        """Give the sample its reward.

        Raises:
            InvalidFieldError: There is no sample, or the reward is not a finite number.
        """
        if self.sample is None:
            raise InvalidFieldError("sample", "is missing, so it cannot get a reward")
        self.sample.reward = reward


@define
class AgentWorkflowContext(_ArtifactsDir, Generic[TConfig]):
    """The argument of `AgentWorkflow.run`; all of it belongs to this rollout alone.

    Attributes:
        prompt: A copy of the initial messages.
        config: A copy of the workflow's config.
        metadata: A copy of the request's metadata; the grader gets it with all changes.
        artifacts_dir: A folder for files of this rollout, which are kept, made at the first
            access; ``None`` if the backend keeps none, or cannot. See `rollout.artifacts`.
    """

    prompt: list[dict[str, Any]]
    config: TConfig | None = None
    metadata: dict[str, Any] | None = None
    _artifacts_dir: Path | Callable[[], Path | None] | None = field(
        default=None, repr=False, alias="artifacts_dir"
    )
