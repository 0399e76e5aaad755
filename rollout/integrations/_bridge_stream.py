"""An asynchronous iterable of the asyncio side, seen from trio.

Theory of operation: one call of the bridge runs the whole iteration, from the first item to
the closing of the generator, in one task; asyncio's finalizers of generators never see it.
Items travel one way, credits the other: the generator goes on only while fewer items than the
buffer holds are on their way.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar

import trio

from rollout.errors import BridgeError
from rollout.integrations._bridge_call import Call, name_of

__all__ = ["AsyncioStream"]

T = TypeVar("T")


class AsyncioStream(Generic[T]):
    """Items of an iteration on the asyncio side. `AsyncioBridge.iterate` opens one.

    Any number of tasks may iterate over it; each item goes to one of them.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        token: trio.lowlevel.TrioToken,
        fn: Callable[..., AsyncIterable[T] | Awaitable[AsyncIterable[T]]],
        args: tuple[Any, ...],
        buffer_size: int,
    ) -> None:
        self._loop = loop
        self._token = token
        self._fn = fn
        self._args = args
        self._credits = asyncio.Semaphore(buffer_size)  # of the loop's thread only
        self._send, self._receive = trio.open_memory_channel[T](buffer_size)
        self._call: Call[None]

    def __repr__(self) -> str:
        return f"<AsyncioStream {name_of(self._fn)}>"

    # --- in the loop's thread -------------------------------------------------------------

    async def pump(self) -> None:
        """Iterate, and close what was iterated over."""
        try:
            await self._pump()
        except StopAsyncIteration as error:  # it would look like the end of the items
            raise BridgeError(f"{name_of(self._fn)} raised StopAsyncIteration") from error

    async def _pump(self) -> None:
        items = self._fn(*self._args)
        if inspect.isawaitable(items):
            items = await items
        try:
            await self._credits.acquire()
            async for item in items:
                self._token.run_sync_soon(self._deliver, item)
                await self._credits.acquire()
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    # --- in the trio thread ---------------------------------------------------------------

    def _deliver(self, item: T) -> None:
        with suppress(trio.BrokenResourceError):  # the block was left: nobody takes it any more
            self._send.send_nowait(item)

    def attach(self, call: Call[None]) -> None:
        """Take the call that runs `pump`."""
        self._call = call

    def finish(self) -> None:
        """Let consumers find the end behind the last item."""
        self._send.close()

    async def close(self, *, grace_sec: float, abandon_after_sec: float | None) -> None:
        """End the iteration and raise what it failed with, if nobody has seen that."""
        self._receive.close()
        await self._call.end(grace_sec=grace_sec, abandon_after_sec=abandon_after_sec)
        self._call.take_error(cancellation=False)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            item = await self._receive.receive()
        except trio.EndOfChannel:
            self._call.take_error(cancellation=True)
            raise StopAsyncIteration from None
        if not self._call.finished.is_set():
            self._call.post(self._credits.release)
        return item
