"""Calls between trio and an asyncio loop in another thread, in both directions.

Theory of operation: a `Call` runs a coroutine function on the loop for trio. It is touched by two
threads, each of which owns its half. The trio thread starts it, asks for its cancellation and reads
its outcome; the loop's thread makes the task, cancels it and reports that it is done. They meet in
two queues that keep their order: ``loop.call_soon_threadsafe`` one way, ``TrioToken.run_sync_soon``
the other. So a cancellation never overtakes its start, and whatever the task sent to trio arrives
before its end does.

A `Callback` runs a trio function for asyncio code. The asyncio side holds a future, the trio side
a cancel scope. A cancellation of the asyncio task cancels the scope, and the task goes on waiting
until the trio function has ended: it is a child of its caller. What it ends with goes to the
future; no `trio.Cancelled` does, since that would mean nothing over there.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from typing import Any, Generic, TypeVar

import outcome
import trio
from attrs import define, field

from rollout._logs import get_logger
from rollout.errors import BridgeCancelledError, BridgeError

__all__ = ["Call", "Callback", "name_of", "refuse_coroutine", "without_cancellation"]

logger = get_logger("rollout.integrations.asyncio_bridge")

T = TypeVar("T")


def name_of(fn: Callable[..., object]) -> str:
    """Return the name of a function for logs. Never its arguments: they may be secrets."""
    inner = getattr(fn, "func", fn)  # a partial has no name of its own
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def refuse_coroutine(fn: object) -> None:
    """Refuse a coroutine object where a function is asked for."""
    if inspect.iscoroutine(fn):
        fn.close()
        raise TypeError(
            f"pass the function and its arguments apart, run(fn, arg), not the coroutine "
            f"{fn.__qualname__}: it must be made on the other side"
        )


def without_cancellation(error: BaseException) -> BaseException | None:
    """Return an error without asyncio's cancellations, ``None`` if nothing else is in it."""
    if isinstance(error, asyncio.CancelledError):
        return None
    if isinstance(error, BaseExceptionGroup):
        return error.split(asyncio.CancelledError)[1]
    return error


@define(eq=False, repr=False)
class Call(Generic[T]):
    """A coroutine function that runs as one task of the loop, as its trio side sees it.

    Attributes:
        grace_sec: After this many seconds a cancelled task is cancelled again.
        abandon_after_sec: `end` stops waiting after this many seconds; ``None`` for never.
        finished: Set, on the trio side, once the task is done or lost.
        abandoned: Nobody waits for it any more.
    """

    _loop: asyncio.AbstractEventLoop
    _token: trio.lowlevel.TrioToken
    _fn: Callable[..., Awaitable[T]]
    _args: tuple[Any, ...]
    _on_finished: Callable[[Call[Any]], None]
    grace_sec: float = field(kw_only=True)
    abandon_after_sec: float | None = field(kw_only=True)
    finished: trio.Event = field(factory=trio.Event, init=False)
    abandoned: bool = field(default=False, init=False)
    _context: Context = field(factory=copy_context, init=False)
    _outcome: outcome.Outcome[T] | None = field(default=None, init=False)
    _cancelled_at: float | None = field(default=None, init=False)  # the last time
    # The loop's half.
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _result: outcome.Outcome[T] | None = field(default=None, init=False)
    _cancel_delivered: bool = field(default=False, init=False)

    def __repr__(self) -> str:
        state = "finished" if self.finished.is_set() else "running"
        return f"<Call {self.name} {state}>"

    @property
    def name(self) -> str:
        """Its name in logs."""
        return name_of(self._fn)

    # --- in the loop's thread -------------------------------------------------------------

    def _begin(self) -> None:
        # Not by loop.create_task: a task factory of the user's could start the coroutine at
        # once or hand back something that is no task.
        self._task = asyncio.Task(
            self._main(), loop=self._loop, name=f"bridge:{self.name}", context=self._context
        )
        self._task.add_done_callback(self._on_done)

    async def _main(self) -> None:
        # Nothing gets out of here: SystemExit and KeyboardInterrupt out of a task would end
        # the loop, and any other error would count as never retrieved.
        try:
            awaitable = self._fn(*self._args)
            if not inspect.isawaitable(awaitable):
                raise TypeError(f"{self.name} returned {type(awaitable).__name__}, no awaitable")  # noqa: TRY301
            self._result = outcome.Value(await awaitable)
        except BaseException as error:  # noqa: BLE001 - it goes to the caller
            self._result = outcome.Error(error)

    def _on_done(self, _task: asyncio.Task[None]) -> None:
        result, self._result = self._result, None
        if result is None:  # cancelled before its first step
            result = outcome.Error(asyncio.CancelledError())
        self._token.run_sync_soon(self.finish, result)

    def _cancel_task(self) -> None:
        # A task that is done keeps its result, even if trio has not heard of it yet.
        if self._task is not None and not self._task.done():
            self._cancel_delivered = True
            self._task.cancel()

    # --- in the trio thread ---------------------------------------------------------------

    def start(self) -> None:
        """Start it. Raises `BridgeError` if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._begin)
        except RuntimeError as error:
            raise BridgeError("the bridge's event loop has ended") from error

    def cancel(self) -> None:
        """Cancel the task, once more if it was cancelled before."""
        if not self.finished.is_set():
            self.post(self._cancel_task)

    def press(self) -> float:
        """Cancel the task, but at most once in each grace period.

        Its caller and the end of the bridge may both want it to end; neither interrupts the cleanup
        that the other one has set off.

        Returns:
            The time from which it may be cancelled again.
        """
        now = trio.current_time()
        if self._cancelled_at is None:
            self._cancelled_at = now
            self.cancel()
        elif now >= self._cancelled_at + self.grace_sec and not self.finished.is_set():
            logger.warning(
                "%s has not ended %s s after a cancellation; it is cancelled again",
                self.name,
                self.grace_sec,
            )
            self._cancelled_at = now
            self.cancel()
        return self._cancelled_at + self.grace_sec

    def finish(self, result: outcome.Outcome[T]) -> None:
        """Take the outcome; only the first one counts."""
        if not self.finished.is_set():
            self._outcome = result
            self.finished.set()
            self._on_finished(self)
        else:
            self.abandoned = True
        if self.abandoned and isinstance(result, outcome.Error):
            error = without_cancellation(result.error)
            if error is not None:
                logger.error("%s, which was abandoned, failed", self.name, exc_info=error)

    async def end(self) -> None:
        """Cancel the task and wait until it is done, however this is cancelled."""
        deadline = math.inf
        if self.abandon_after_sec is not None:
            deadline = trio.current_time() + self.abandon_after_sec
        while not self.finished.is_set():
            due = self.press()
            with trio.CancelScope(shield=True, deadline=min(due, deadline)):
                await self.finished.wait()
            if trio.current_time() >= deadline and not self.finished.is_set():
                self.abandoned = True
                self._cancelled_at = None  # it has had its time: the bridge's end need not wait
                logger.warning(
                    "%s has not ended %s s after its cancellation and is abandoned: its task "
                    "runs on until the bridge closes",
                    self.name,
                    self.abandon_after_sec,
                )
                break

    async def result(self) -> T:
        """Wait for the outcome and return or raise it; cancel the task if this is cancelled."""
        try:
            await self.finished.wait()
        except trio.Cancelled:
            await self.end()
            if self._ended_by_cancellation():
                raise
        return self.take()

    def _ended_by_cancellation(self) -> bool:
        if self._outcome is None:  # abandoned
            return True
        if not self._cancel_delivered:
            return False
        # A task that swallowed its cancellation was cancelled all the same.
        return not isinstance(self._outcome, outcome.Error) or (
            without_cancellation(self._outcome.error) is None
        )

    def take(self) -> T:
        """Return or raise the outcome of a finished call. It is handed out once."""
        if self._outcome is None:
            raise BridgeError(f"the outcome of {self.name} was taken already")
        result, self._outcome = self._outcome, None  # or error and frame would be a cycle
        if isinstance(result, outcome.Error):
            error = self._translate(result.error)
            try:
                raise error
            finally:
                del error, result
        return result.unwrap()

    def take_error(self, *, cancellation: bool) -> None:
        """Raise the error of the call, if it failed and nobody has taken the outcome.

        Args:
            cancellation: Whether a cancellation by trio or by the bridge counts as a failure.
        """
        result = self._outcome
        if isinstance(result, outcome.Error) and (
            cancellation
            or not self._cancel_delivered
            or without_cancellation(result.error) is not None
        ):
            self.take()

    def _translate(self, error: BaseException) -> BaseException:
        if self._cancel_delivered:
            error = without_cancellation(error) or asyncio.CancelledError()
        if not isinstance(error, asyncio.CancelledError):
            return error
        plain: BridgeError
        if self._cancel_delivered:
            plain = BridgeError(f"the bridge was closed while {self.name} was running")
        else:
            plain = BridgeCancelledError(
                f"{self.name} ended with asyncio.CancelledError, though trio had not cancelled "
                "it: something on the asyncio side did"
            )
        plain.__cause__ = error
        return plain

    def post(self, fn: Callable[[], object]) -> None:
        """Call a function in the loop, if it still runs."""
        try:
            self._loop.call_soon_threadsafe(fn)
        except RuntimeError:
            # The loop is closed; the end of its thread, which is on its way, finishes this.
            logger.debug("%s cannot be reached: its loop is closed", self.name)


@define(eq=False)
class Callback(Generic[T]):
    """A trio function that asyncio code waits for."""

    _loop: asyncio.AbstractEventLoop
    _token: trio.lowlevel.TrioToken
    _fn: Callable[..., Awaitable[T]]
    _args: tuple[Any, ...]
    _on_finished: Callable[[Callback[Any]], None]
    _context: Context = field(factory=copy_context, init=False)
    _scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _future: asyncio.Future[outcome.Outcome[T]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._future = self._loop.create_future()

    # --- in the loop's thread -------------------------------------------------------------

    async def call(self, start: Callable[[Callback[Any]], None]) -> T:
        """Start the function in trio and wait for it, through cancellations."""
        try:
            self._token.run_sync_soon(start, self)
        except trio.RunFinishedError as error:
            raise BridgeError("the trio side of the bridge has ended") from error
        cancelled: asyncio.CancelledError | None = None
        while not self._future.done():
            try:
                await asyncio.wait([self._future])
            except asyncio.CancelledError as error:
                cancelled = cancelled or error
                self._token.run_sync_soon(self.cancel)
        result = self._future.result()
        try:
            if isinstance(result, outcome.Error):
                raise result.error
            if cancelled is not None:
                raise cancelled
            return result.unwrap()
        finally:
            del result, cancelled

    def _resolve(self, result: outcome.Outcome[T]) -> None:
        self._future.set_result(result)

    # --- in the trio thread ---------------------------------------------------------------

    def start(self, nursery: trio.Nursery) -> None:
        """Run the function as a task of the nursery, with its caller's context variables."""
        self._context.run(
            lambda: nursery.start_soon(self._run, name=f"asyncio:{name_of(self._fn)}")
        )

    def cancel(self) -> None:
        """Cancel the function."""
        self._scope.cancel()

    def refuse(self, error: BridgeError) -> None:
        """Answer with an error, since nothing can be started any more."""
        self._answer(outcome.Error(error))

    async def _run(self) -> None:
        # What stays if the scope catches trio's cancellation: it ends here.
        result: outcome.Outcome[T] = outcome.Error(asyncio.CancelledError())
        try:
            with self._scope:
                result = outcome.Value(await self._fn(*self._args))
        except BaseException as error:  # noqa: BLE001 - it goes to the asyncio side
            result = outcome.Error(error)
        self._on_finished(self)
        self._answer(result)
        del result  # an error's traceback leads to this frame

    def _answer(self, result: outcome.Outcome[T]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._resolve, result)
        except RuntimeError:  # the loop is closed, and its caller with it
            if isinstance(result, outcome.Error):
                logger.error(  # noqa: TRY400 - the error that counts is the function's
                    "%s failed after its loop had ended", name_of(self._fn), exc_info=result.error
                )
