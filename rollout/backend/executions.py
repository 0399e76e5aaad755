"""Backends with a bounded number of slots: queue, cancellation, deadlines.

Theory of operation: an `Execution` stands for a rollout from its admission to its end, and a
`SlotBackend` counts them to know how many more fit. A cancel request marks the execution and
interrupts whatever it waits for or runs at the moment; `execute` then comes to its end by
itself, so that the slot is given back by the same code on every path.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import trio
from attrs import define, field

from rollout._checks import backend_settings, check_whole
from rollout.backend.base import ExecutionBackend
from rollout.backend.usercode import Outcome, UserCall
from rollout.context import RolloutContext
from rollout.errors import DuplicateRolloutError
from rollout.types import ExecutionResult, RolloutErrorCategory, RolloutStatus

__all__ = ["Execution", "Phase", "SlotBackend", "Slots", "Span", "failure", "matching"]

_NOTEWORTHY_QUEUE_SEC = 0.1

_GIVE_UP_SEC = 60.0
"""For how long to wait while threads past their deadlines hold all slots."""

_PLACES = {
    RolloutStatus.QUEUED: "it waited for a slot",
    RolloutStatus.RUNNING: "its agent ran",
    RolloutStatus.GRADING: "its grader ran",
}


class Cancellable(Protocol):
    """Something that an execution waits for and can cancel, such as a `trio.CancelScope`."""

    def cancel(self) -> None:
        """Interrupt it; asking twice changes nothing."""


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
    """One rollout in a backend.

    Attributes:
        rollout_id: Its id.
        submitted_at: When it was admitted (trio time); the agent's deadline counts from here.
        status: Its phase; `queued` until it has a slot.
        started: Whether `execute` was called.
        cancelled_at: When somebody asked for it to stop (trio time).
        current: What a cancel request interrupts.
        metadata: The copy of the request's metadata that its workflow and its grader get.
        artifacts_dir: Makes the folder for its artifacts, once; ``None`` if nothing is kept.
        agent_at: When its agent had a slot, and when that was over (trio time).
        grader_at: The same of its grader.
    """

    rollout_id: str
    submitted_at: float
    status: RolloutStatus = RolloutStatus.QUEUED
    started: bool = False
    cancelled_at: float = math.inf
    current: Cancellable | None = None
    metadata: dict[str, Any] | None = None
    artifacts_dir: Callable[[], Path | None] | None = None
    agent_at: Span = field(factory=Span)
    grader_at: Span = field(factory=Span)
    _last_call: UserCall | None = None

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked for it to stop."""
        return self.cancelled_at < math.inf

    def enter(self, current: Cancellable) -> None:
        """Make *current* the target of cancel requests; cancel it at once if there was one."""
        self.current = current
        if self.cancelled:
            current.cancel()

    def leave(self) -> None:
        """Leave cancel requests without a target."""
        self.current = None

    def cancel(self) -> str:
        """Ask it to stop; return the disposition."""
        if not self.cancelled:
            self.cancelled_at = trio.current_time()
            if self.current is not None:
                self.current.cancel()
        if self.status is RolloutStatus.QUEUED:
            return "cancelled_queued"
        return "cancelled_running"

    async def run(self, call: UserCall, body: Callable[[], Awaitable[Any]]) -> Outcome:
        """Run a call of user code so that `cancel` interrupts it."""
        self.enter(call)
        try:
            outcome = await call.run_in_task(body)
        finally:
            self.leave()
        self._last_call = call
        return outcome

    @property
    def runs_on(self) -> bool:
        """Whether a thread of its user code goes on past its deadline."""
        return self._last_call is not None and self._last_call.runs_on

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call *callback* when no thread of its user code runs any more; now, if none does."""
        if self._last_call is None:
            callback()
        else:
            self._last_call.when_ended(callback)

    def enter_phase(self, status: RolloutStatus, context: RolloutContext) -> None:
        """Go to `running` or `grading`, and report it.

        The published status may be ahead: a lease may have ended the rollout before.
        """
        self.status = status
        if status is RolloutStatus.RUNNING:
            self.agent_at.since = trio.current_time()
            context.mark_agent_started()
        else:
            context.report_status(status)

    async def wait_start_kept(self, context: RolloutContext, deadline: float) -> None:
        """Wait until the agent may start, but not past a deadline or a cancel request."""
        if context.start_pending:
            with trio.CancelScope(deadline=deadline) as scope:
                self.enter(scope)
                await context.wait_start_kept()
            self.leave()

    def interrupted(self) -> ExecutionResult:
        """Return the result of an execution that is cancelled now."""
        return ExecutionResult(
            status=RolloutStatus.CANCELLED, err_message=f"cancelled while {_PLACES[self.status]}"
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


class Slots:
    """Concurrency slots; a slot is held until the last thread of its execution has ended.

    Args:
        total: How many there are; ``None`` for no limit.

    Attributes:
        limiter: Who has one.
    """

    def __init__(self, total: int | None) -> None:
        self.limiter = trio.CapacityLimiter(total or math.inf)
        self._held_by_threads = 0
        self._give_up_at = math.inf
        self._waiting: dict[trio.CancelScope, float] = {}

    async def acquire(self, execution: Execution, deadline: float) -> bool:
        """Wait for a slot, which `release` gives back; ``False`` when something else came first.

        That is the deadline, a cancel request, or a minute in which threads past their deadlines
        held all slots. A slot that is free is taken at once, and others get their turn when it is
        used.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not execution.cancelled and trio.current_time() < deadline:
            try:
                self.limiter.acquire_on_behalf_of_nowait(execution)
            except trio.WouldBlock:
                pass  # there is a queue
            else:
                return True
        acquired = False
        with trio.CancelScope(deadline=min(deadline, self._give_up_at)) as scope:
            self._waiting[scope] = deadline
            execution.enter(scope)
            try:
                await self.limiter.acquire_on_behalf_of(execution)
            finally:
                del self._waiting[scope]
            acquired = True
        execution.leave()
        return acquired

    def release(self, execution: Execution) -> None:
        """Give a slot back, once no thread of the execution runs any more."""
        if execution.runs_on:
            self._count_threads(1)
            execution.when_ended(lambda: self._count_threads(-1))
        execution.when_ended(partial(self.limiter.release_on_behalf_of, execution))

    def _count_threads(self, more: int) -> None:
        self._held_by_threads += more
        all_held = self._held_by_threads >= self.limiter.total_tokens
        self._give_up_at = trio.current_time() + _GIVE_UP_SEC if all_held else math.inf
        for scope, deadline in self._waiting.items():
            scope.deadline = min(deadline, self._give_up_at)


class Phase:
    """The deadline of one phase of an execution, and the rule that says who ended it.

    Attributes:
        name: ``workflow``, ``agent`` or ``grader``, for messages.
        limit: The time that the request gives it, in seconds, or ``None``.
        deadline: When that time is over (trio time).
        queued_sec: How much of it went by in the queue.
    """

    def __init__(self, name: str, limit: float | None, since: float) -> None:
        self.name = name
        self.limit = limit
        self.deadline = math.inf if limit is None else since + limit
        self.queued_sec = 0.0

    def no_slot(self) -> ExecutionResult:
        """Return the result of an execution that got no slot though it had the time."""
        return failure(
            f"no slot for the {self.name}: plain functions that went on past their deadlines hold "
            "all of them; restart the server",
            RolloutErrorCategory.INTERNAL_ERROR,
        )

    def timeout(self) -> ExecutionResult:
        """Return the result of an execution that its deadline has ended."""
        text = f"{self.name} exceeded its deadline of {self.limit:g} s"
        if self.queued_sec >= _NOTEWORTHY_QUEUE_SEC:
            text += f" ({self.queued_sec:.1f} s of it in the queue)"
        return failure(text, RolloutErrorCategory.TIMEOUT)

    def interruption(self, execution: Execution, now: float) -> ExecutionResult | None:
        """Return the result if the deadline or a cancel request, the earlier one, has ended it.

        Args:
            execution: The execution.
            now: When it ended (trio time).
        """
        if now >= self.deadline and self.deadline <= execution.cancelled_at:
            return self.timeout()
        return execution.interrupted() if execution.cancelled else None


def failure(message: str, category: RolloutErrorCategory) -> ExecutionResult:
    """Make a failed result."""
    return ExecutionResult(status=RolloutStatus.FAILURE, err_message=message, err_category=category)


def matching(
    known: Iterable[str],
    ids: Sequence[str] | None,
    prefix: str | None,
    all_: bool,
) -> Sequence[str]:
    """Return the ids that a cancel request is about: those that it names, or some of the known."""
    if ids is not None:
        return ids
    return [name for name in known if all_ or (prefix is not None and name.startswith(prefix))]


class SlotBackend(ExecutionBackend):
    """A backend that runs a bounded number of rollouts at a time and queues the others.

    Args:
        max_concurrent: How many run at a time; ``None`` for no limit.
        max_queue_depth: How many may wait for a slot; ``None`` for no bound.

    Raises:
        BackendConfigurationError: A number is not a whole number from 1 up.

    Attributes:
        max_concurrent: How many run at a time; ``None`` for no limit.
        max_queue_depth: How many may wait for a slot; ``None`` for no bound.
        slots: What an execution acquires before it runs.
        executions: Those that were admitted and have not ended, by the ids of their rollouts.
    """

    def __init__(self, max_concurrent: int | None, max_queue_depth: int | None) -> None:
        with backend_settings():
            check_whole("max_concurrent", max_concurrent, none=True)
            check_whole("max_queue_depth", max_queue_depth, none=True)
        self.max_concurrent = max_concurrent
        self.max_queue_depth = max_queue_depth
        self.slots = Slots(max_concurrent)
        self.executions: dict[str, Execution] = {}

    def has_capacity(self) -> bool:
        """Whether a slot or a place in the queue is free, counting all that were admitted."""
        if self.max_concurrent is None or self.max_queue_depth is None:
            return True
        return len(self.executions) < self.max_concurrent + self.max_queue_depth

    def reserve(self, rollout_id: str) -> bool:
        """Count a rollout from its admission on; see `ExecutionBackend.reserve`."""
        if rollout_id in self.executions or not self.has_capacity():
            return False
        self.executions[rollout_id] = Execution(rollout_id, trio.current_time())
        return True

    def release(self, rollout_id: str) -> None:
        """Forget a rollout once its threads have ended; see `ExecutionBackend.release`."""
        execution = self.executions.get(rollout_id)
        if execution is not None:
            execution.when_ended(partial(self.executions.pop, rollout_id, None))

    @contextmanager
    def begun(self, rollout_id: str) -> Generator[Execution, None, None]:
        """Start the execution of a rollout; one that was not reserved is released at the end.

        Raises:
            DuplicateRolloutError: It is running already.
        """
        reserved = rollout_id in self.executions
        if not reserved:
            self.executions[rollout_id] = Execution(rollout_id, trio.current_time())
        execution = self.executions[rollout_id]
        if execution.started:
            raise DuplicateRolloutError(f"rollout {rollout_id} is running already")
        execution.started = True
        try:
            yield execution
        finally:
            if not reserved:
                self.release(rollout_id)

    def rollout_status(self, rollout_id: str) -> dict[str, Any] | None:
        """Return the status of a rollout that has been admitted and has not ended."""
        execution = self.executions.get(rollout_id)
        return None if execution is None else {"status": execution.status}

    def cancel_rollouts(
        self,
        ids: Sequence[str] | None = None,
        prefix: str | None = None,
        all: bool = False,
    ) -> dict[str, str]:
        """Interrupt matching rollouts; asking twice changes nothing."""
        ids = matching(self.executions, ids, prefix, all)
        found = {rollout_id: self.executions.get(rollout_id) for rollout_id in ids}
        return {
            rollout_id: "not_found" if execution is None else execution.cancel()
            for rollout_id, execution in found.items()
        }

    def health(self) -> dict[str, Any]:
        """Return the status and the counts of the slots."""
        statuses = [execution.status for execution in self.executions.values()]
        queued = statuses.count(RolloutStatus.QUEUED)
        return {
            "status": "ok",
            "concurrency": {
                "max_concurrent": self.max_concurrent,
                "queued": queued,
                "running": len(statuses) - queued,
            },
            "max_queue_depth": self.max_queue_depth,
        }

    async def shutdown(self) -> None:
        """Interrupt what still runs."""
        self.cancel_rollouts(all=True)
        await trio.lowlevel.checkpoint()
