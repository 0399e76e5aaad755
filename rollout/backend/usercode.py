"""Calls of user code, async or plain, and their outcomes.

An async function runs where it is called; a plain one runs in a worker thread, since it may
block. Nothing but trio's own cancellation comes out of here as an exception: user code may
raise `SystemExit`, exception groups with `trio.Cancelled` inside, or swallow a cancellation,
and none of this may reach the nursery that all rollouts share.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio
from attrs import define, field

from rollout._logs import get_logger
from rollout._tasks import sole_error
from rollout.backend.alarms import await_with_alarms
from rollout.errors import InvalidFieldError
from rollout.types import RolloutSample

__all__ = ["Outcome", "UserCall", "check_graded", "checked_sample"]

logger = get_logger(__name__)

# Slots bound how much runs at a time, so the threads need no bound of their own.
_unbounded = trio.CapacityLimiter(math.inf)


@define
class Outcome:
    """How a call of user code ended.

    Attributes:
        value: What it returned.
        error: What it raised, ``None`` if it returned.
        interrupted: Whether its cancel scope ended it.
        ended: When control came back (trio time).
    """

    value: Any = None
    error: BaseException | None = None
    interrupted: bool = False
    ended: float = math.nan


@define(eq=False)
class UserCall:
    """One call of user code, interruptible by its deadline and by `cancel`.

    Attributes:
        rollout_id: Which rollout the code runs for. The watchdog reads it off the stack.
        phase: ``workflow`` or ``grader``.
        deadline: When the call is interrupted (trio time).
    """

    rollout_id: str
    phase: str
    deadline: float = math.inf
    _scope: trio.CancelScope = field(factory=trio.CancelScope)
    _left: _ThreadCall | None = None
    _failure: BaseException | None = None
    _over: bool = False

    def cancel(self) -> None:
        """Interrupt the call, now or as soon as it starts."""
        self._scope.cancel()

    async def run(self, body: Callable[[], Awaitable[Any]]) -> Outcome:
        """Await *body*, and the thread of a plain function until the deadline at the latest.

        A plain function that is interrupted runs on in its thread, which cannot be stopped. One
        that a cancel request interrupts is awaited; at the deadline this returns in any case,
        and `when_ended` says when the thread has ended. Cancellation from outside abandons it.
        """
        outcome = Outcome()
        self._scope.deadline = self.deadline
        try:
            with self._scope:
                await trio.lowlevel.checkpoint_if_cancelled()
                outcome = await self._capture(body)
        except RuntimeError as error:
            # Nothing but trio itself raises here: the code has left a cancel scope of its own
            # open, and trio has closed it.
            outcome = Outcome(error=error)
        self._over = True
        if self._failure is not None:
            outcome = Outcome(error=self._failure)
        else:
            outcome.interrupted = self._scope.cancelled_caught
        if self._left is not None:
            with trio.CancelScope(deadline=self.deadline) as waiting:
                await self._left.ended.wait()
            if waiting.cancelled_caught:
                logger.warning(
                    "rollout %s: its %s, a plain function, goes on past its deadline and keeps its "
                    "slot until it returns",
                    self.rollout_id,
                    self.phase,
                )
        outcome.ended = trio.current_time()
        return outcome

    @property
    def runs_on(self) -> bool:
        """Whether `run` left a thread behind that has not ended."""
        return self._left is not None and not self._left.ended.is_set()

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call *callback* when the thread that `run` left behind ends; now, if it left none."""
        if self._left is None or self._left.ended.is_set():
            callback()
        else:
            self._left.on_end.append(callback)

    async def run_in_task(self, body: Callable[[], Awaitable[Any]]) -> Outcome:
        """Do as `run` does, in a task of its own.

        Code that leaves a nursery or a cancel scope open makes trio end its task with an
        error. That must not be the task of the rollout, which other rollouts depend on.
        """
        outcome: Outcome | None = None

        async def task() -> None:
            nonlocal outcome
            outcome = await self.run(body)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(task, name=f"{self.phase} of rollout {self.rollout_id}")
        except BaseExceptionGroup as group:
            rest = _without_cancelled(group)
            if rest is None:
                raise
            outcome = Outcome(error=sole_error(rest), ended=trio.current_time())
        if outcome is None:
            error = RuntimeError("the code cancelled a scope that is not its own")
            outcome = Outcome(error=error, ended=trio.current_time())
        return outcome

    async def invoke(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a user's function within `run`: async in place, plain in a worker thread."""
        if inspect.iscoroutinefunction(function):
            value = function(*args)
        else:
            value = await self._run_in_thread(partial(function, *args))
        if inspect.iscoroutine(value):
            return await await_with_alarms(value, self._fail)
        return await value if inspect.isawaitable(value) else value

    def _fail(self, error: BaseException) -> None:
        """End the call with an error that its code has raised out of turn."""
        if self._over:
            logger.error(
                "rollout %s: a signal handler of its %s raised after the end: %s",
                self.rollout_id,
                self.phase,
                type(error).__name__,
            )
            return
        self._failure = error
        self._scope.cancel()

    async def _capture(self, body: Callable[[], Awaitable[Any]]) -> Outcome:
        try:
            return Outcome(value=await body())
        except trio.Cancelled:
            if trio.current_effective_deadline() == -math.inf:
                raise
            return Outcome(error=RuntimeError("trio.Cancelled was raised outside of its scope"))
        except BaseExceptionGroup as group:
            rest = _without_cancelled(group)
            if rest is None and trio.current_effective_deadline() == -math.inf:
                raise
            return Outcome(error=rest or group)
        except BaseException as error:  # noqa: BLE001 - SystemExit of a workflow ends it alone
            return Outcome(error=error)

    async def _run_in_thread(self, function: Callable[[], Any]) -> Any:
        call = _ThreadCall(function)
        # Past this check nothing can cancel before the thread has started, so the event of a
        # thread that is left behind is going to be set.
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            await trio.to_thread.run_sync(call.run, abandon_on_cancel=True, limiter=_unbounded)
        except trio.Cancelled:
            call.abandon()
            self._left = call
            raise
        return call.value


class _ThreadCall:
    """A plain function in a worker thread, and what it returned.

    Attributes:
        value: What it returned. Trio would take a bare coroutine for a mistake.
        ended: Set once it has returned or raised.
        on_end: Called then, on the loop.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.value: Any = None
        self.ended = trio.Event()
        self.on_end: list[Callable[[], object]] = []
        self._function = function
        self._abandoned = False
        self._token = trio.lowlevel.current_trio_token()

    def run(self) -> None:
        """Call the function; runs in the thread."""
        try:
            self.value = self._function()
        finally:
            try:
                self._token.run_sync_soon(self._finish)
            except trio.RunFinishedError:
                self._drop()  # the thread was abandoned, and has outlived the loop

    def abandon(self) -> None:
        """Discard the value; called from the loop."""
        self._abandoned = True
        if self.ended.is_set():
            self._drop()

    def _finish(self) -> None:
        self.ended.set()
        if self._abandoned:
            self._drop()
        for callback in self.on_end:
            callback()

    def _drop(self) -> None:
        if inspect.iscoroutine(self.value):
            self.value.close()  # it has not begun, so this runs nothing; it prevents a warning


def _without_cancelled(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """Return what is left of a group, ``None`` if it held nothing but cancellations."""
    try:
        return group.split(trio.Cancelled)[1]
    except Exception:  # noqa: BLE001 - too deep, or a subclass that cannot be split
        return group


def checked_sample(value: Any) -> RolloutSample | None:
    """Return a sample that user code made, if it is one.

    Raises:
        TypeError: It is something else.
    """
    if value is None or isinstance(value, RolloutSample):
        return value
    raise TypeError(f"the sample must be a RolloutSample, not {type(value).__name__}")


def check_graded(value: Any, returned: Any) -> RolloutSample:
    """Return a sample that a grader has graded.

    Args:
        value: The sample.
        returned: What the grader returned.

    Raises:
        TypeError: It is not a `RolloutSample`.
        InvalidFieldError: The sample is missing, or has no reward.
    """
    sample = checked_sample(value)
    if sample is None:
        raise InvalidFieldError(
            "sample",
            "is missing: the workflow returned no messages and registered no sample source, "
            "so there is nothing to grade",
        )
    if sample.reward is None and not sample.remove_sample:
        hint = "" if returned is None else " (a value that grade() returns is ignored)"
        raise InvalidFieldError("reward", f"was not set by the grader: call set_reward{hint}")
    return sample
