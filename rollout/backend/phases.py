"""One rollout in a backend: where it stands, its phases, and who ended them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

from rollout.backend.usercode import Outcome, UserCall
from rollout.types import ExecutionResult, RolloutErrorCategory, RolloutStatus

__all__ = ["Execution", "Phase", "Span", "acquire", "failure"]

_NOTEWORTHY_QUEUE_SEC = 0.1

_PLACES = {
    RolloutStatus.QUEUED: "it waited for a slot",
    RolloutStatus.RUNNING: "its workflow ran",
    RolloutStatus.GRADING: "its grader ran",
}


@define
class Span:
    """A span of trio time; ``None`` for an end that has not come."""

    since: float | None = None
    until: float | None = None

    def length(self, now: float) -> float | None:
        """Return its length in seconds, until now if it goes on; ``None`` before it begins."""
        if self.since is None:
            return None
        return (now if self.until is None else self.until) - self.since


@define(eq=False)
class Execution:
    """One rollout in this backend.

    Attributes:
        status: Where it stands; `queued` until it has a slot.
        submitted_at: When it was admitted (trio time); the agent's deadline counts from here.
        cancelled_at: When somebody asked for it to stop.
        call: The call of user code that is under way.
        queue_scope: The wait for a slot that is under way.
        artifacts_dir: Where its artifacts go, if anywhere.
        agent_at: When its workflow had a slot, and when that was over (trio time).
        grader_at: The same of its grader.
    """

    rollout_id: str
    submitted_at: float
    status: RolloutStatus = RolloutStatus.QUEUED
    started: bool = False
    cancelled_at: float = math.inf
    call: UserCall | None = None
    queue_scope: trio.CancelScope = field(factory=trio.CancelScope)
    artifacts_dir: Path | None = None
    agent_at: Span = field(factory=Span)
    grader_at: Span = field(factory=Span)

    async def run(self, call: UserCall, body: Callable[[], Awaitable[Any]]) -> Outcome:
        """Run a call of user code so that `cancel` interrupts it."""
        self.call = call
        if self.cancelled_at < math.inf:
            call.cancel()
        try:
            return await call.run_in_task(body)
        finally:
            self.call = None

    def cancel(self) -> str:
        """Ask it to stop, and return the disposition; asking again changes nothing."""
        if self.cancelled_at == math.inf:
            self.cancelled_at = trio.current_time()
            self.queue_scope.cancel()
            if self.call is not None:
                self.call.cancel()
        if self.status is RolloutStatus.QUEUED:
            return "cancelled_queued"
        return "cancelled_running"

    def interrupted(self) -> ExecutionResult:
        """Return the result of an execution that is ended from outside, here and now."""
        return ExecutionResult(
            status=RolloutStatus.CANCELLED,
            err_message=f"cancelled while {_PLACES[self.status]}",
        )

    def timings(self, now: float) -> dict[str, float | None]:
        """Return the seconds that it took so far: in the queue, in each phase, in all."""
        queued = self.agent_at.since if self.agent_at.since is not None else now
        return {
            "queue_sec": queued - self.submitted_at,
            "agent_sec": self.agent_at.length(now),
            "grader_sec": self.grader_at.length(now),
            "total_sec": now - self.submitted_at,
        }


class Phase:
    """One phase of an execution, and the rule that says who ended it.

    Attributes:
        name: ``workflow`` or ``grader``, for messages.
        limit: The time that the request gives it, in seconds, or ``None``.
        deadline: When that time is over (trio time).
        queued_sec: How much of it went by in the queue.
    """

    def __init__(self, name: str, limit: float | None, since: float) -> None:
        self.name = name
        self.limit = limit
        self.deadline = math.inf if limit is None else since + limit
        self.queued_sec = 0.0

    def interruption(self, execution: Execution, now: float) -> ExecutionResult | None:
        """Say whether the phase was ended from outside: by deadline or cancel, the earlier."""
        if now >= self.deadline and self.deadline <= execution.cancelled_at:
            text = f"{self.name} exceeded its deadline of {self.limit:g} s"
            if self.queued_sec >= _NOTEWORTHY_QUEUE_SEC:
                text += f" ({self.queued_sec:.1f} s of it in the queue)"
            return failure(text, RolloutErrorCategory.TIMEOUT)
        if execution.cancelled_at < math.inf:
            return execution.interrupted()
        return None


async def acquire(slots: trio.CapacityLimiter, execution: Execution, deadline: float) -> bool:
    """Wait for a slot; ``False`` when the deadline or a cancel request came first."""
    acquired = False
    execution.queue_scope.deadline = deadline
    with execution.queue_scope:
        await slots.acquire_on_behalf_of(execution)
        acquired = True
    execution.queue_scope = trio.CancelScope()
    if execution.cancelled_at < math.inf:
        execution.queue_scope.cancel()
    return acquired


def failure(message: str, category: RolloutErrorCategory) -> ExecutionResult:
    """Return a failed result."""
    return ExecutionResult(status=RolloutStatus.FAILURE, err_message=message, err_category=category)
