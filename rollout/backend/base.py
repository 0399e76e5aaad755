"""The interface between a rollout server and the backend that runs its rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import trio

from rollout.types import ExecutionOutcome, ExecutionRequest

__all__ = ["ExecutionBackend", "PolicyControl"]


class PolicyControl(Protocol):
    """Pauses and resumes the model calls of rollouts."""

    def state(self) -> dict[str, Any]:
        """Return the state as far as it is known here, as JSON."""
        ...

    async def read(self) -> dict[str, Any]:
        """Return the present state."""
        ...

    async def pause(self, mode: Any, timeout_sec: float) -> dict[str, Any]:
        """Hold back all calls; return the state once none is in flight, or the time is up."""
        ...

    def resume(self, version: int | None = None) -> Any:
        """Send calls again, with a new version if one is given."""


class ExecutionBackend(ABC):
    """Runs workflows and graders for a server. Only `execute` has to be written.

    The server calls everything from its trio loop, never from a thread. What is not ``async``
    must return at once.

    Attributes:
        reports_agent_start: Set it to true if `execute` itself says when the agent starts
            (`rollout.RolloutContext.mark_agent_started`) and when a queued rollout becomes
            running. Otherwise the server takes the moment when it calls `execute` for both.
        isolates_user_code: Set it to true if `execute` runs code of others in tasks of its own,
            so that a nursery or a cancel scope that such code leaves open cannot reach the
            server. Otherwise the server makes a task for that.
        keeps_files: Set it to true if `execute` itself keeps trajectory and diagnostics of a
            rollout, or leaves that to another server. Otherwise the server keeps them, see the
            ``artifact_root`` of `rollout.server.create_rollout_server`.
        artifact_root: Below which folder it keeps the files of rollouts, as
            `rollout.artifacts.ArtifactStore` does: the server hands out the trajectories that are
            there, and ``rollout serve`` names it; ``None`` if it keeps none.
        application: What it runs, for ``GET /health``: servers with the same one can stand in
            for each other. ``None`` if it does not say.
    """

    reports_agent_start: ClassVar[bool] = False
    isolates_user_code: ClassVar[bool] = False
    keeps_files: ClassVar[bool] = False
    artifact_root: Path | None = None
    application: str | None = None

    @property
    def policy_control(self) -> PolicyControl | None:
        """What pauses the model calls of its rollouts elsewhere; ``None`` if nothing does."""
        return None

    @abstractmethod
    async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
        """Run one rollout to its end.

        The rollout's context is `rollout.get_rollout_context`. An exception becomes a failed
        rollout. Cancellation means that the server gives up on the execution; the rollout is
        then reported as cancelled.
        """

    def has_capacity(self) -> bool:
        """Whether another rollout would be taken now; a server answers 429 otherwise."""
        return True

    def reserve(self, rollout_id: str) -> bool:
        """Take a place for a rollout that is being admitted; ``False`` refuses it (429).

        Called once at admission, before `execute` has had a chance to run, so a backend that
        bounds its queue can count exactly. Each successful call is followed by exactly one
        `release`. The default asks `has_capacity`.
        """
        del rollout_id
        return self.has_capacity()

    def release(self, rollout_id: str) -> None:  # noqa: B027 - most backends count nothing
        """Give back the place that `reserve` took: the execution is over, or never began."""

    def rollout_status(self, rollout_id: str) -> dict[str, Any] | None:
        """Return ``{"status": ...}`` of a rollout that the backend knows, else ``None``."""
        del rollout_id
        return None

    def worker_of(self, rollout_id: str) -> str | None:
        """Return the name of the worker that runs a rollout, for backends that have workers."""
        del rollout_id
        return None

    def live_conversation(
        self, rollout_id: str
    ) -> AbstractAsyncContextManager[AsyncGenerator[bytes, None]] | None:
        """Return the conversation of a rollout as its worker streams it.

        For backends that have workers; ``None`` for a rollout that no worker has.
        """
        del rollout_id
        return None

    def cancel_rollouts(
        self,
        ids: Sequence[str] | None = None,
        prefix: str | None = None,
        all: bool = False,
    ) -> dict[str, str]:
        """Ask matching executions to stop, and return a disposition for each of them.

        ``cancelled_queued`` or ``cancelled_running`` says that the backend sees to it and
        that `execute` will return. For an id that is missing from the answer, or that is
        ``not_found`` without a terminal `rollout_status`, the server cancels `execute` itself.
        """
        del ids, prefix, all
        return {}

    def health(self) -> dict[str, Any]:
        """Return the backend's part of ``GET /health``, JSON types only."""
        return {"status": "ok"}

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Open the tasks, threads and connections that the backend needs while it serves.

        The server enters it before its lifespan and its first admission, and leaves it after
        `shutdown`. An error on the way in keeps the server from starting. The default owns
        nothing.
        """
        yield

    async def shutdown(self) -> None:
        """Release what the backend owns; called once, after the last execution has ended."""
        await trio.lowlevel.checkpoint()
