"""A trio function that asyncio code waits for.

Theory of operation: the asyncio side holds a future, the trio side a cancel scope. A
cancellation of the asyncio task cancels the scope, and the task goes on waiting until the trio
function has ended: it is a child of its caller. What it ends with goes to the future; no
`trio.Cancelled` does, since that would mean nothing over there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any, Generic, TypeVar

import outcome
import trio

from rollout._logs import get_logger
from rollout.errors import BridgeError
from rollout.integrations._bridge_call import name_of

__all__ = ["Callback"]

logger = get_logger("rollout.integrations.asyncio_bridge")

T = TypeVar("T")


class Callback(Generic[T]):
    """One call from the loop into trio."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        token: trio.lowlevel.TrioToken,
        fn: Callable[..., Awaitable[T]],
        args: tuple[Any, ...],
        on_finished: Callable[[Callback[Any]], None],
    ) -> None:
        self._loop = loop
        self._token = token
        self._fn = fn
        self._args = args
        self._on_finished = on_finished
        self._name = f"asyncio:{name_of(fn)}"
        self._context = copy_context()
        self._scope = trio.CancelScope()
        self._future: asyncio.Future[outcome.Outcome[T]] = loop.create_future()

    # --- in the loop's thread -------------------------------------------------------------

    async def call(self, start: Callable[[Callback[Any]], None]) -> T:
        """Have the function started in trio and wait for it, through cancellations."""
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
        self._context.run(lambda: nursery.start_soon(self._run, name=self._name))

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
                    "%s failed after its loop had ended", self._name, exc_info=result.error
                )
