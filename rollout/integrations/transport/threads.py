"""Lets synchronous code in a worker thread call a model over the connections of the trio side.

Theory of operation: a plain workflow runs in a worker thread and blocks there. What it sends is
sent by a task on the trio side, over the transport that async workflows have, so connections are
shared and calls are recorded in the same way; the thread waits for it. Nothing can interrupt a
thread, so it looks up every now and then whether its rollout has been cancelled. If so, it has the
task cancelled, waits for its end and raises `trio.Cancelled`, which ends the plain function too.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Generic, TypeVar, TypeVarTuple, Unpack, cast

import httpx
import outcome
import trio

from rollout.errors import IntegrationError

__all__ = ["ThreadTransport", "TrioSide"]

T = TypeVar("T")
PosArgs = TypeVarTuple("PosArgs")

_LOOK_SEC = 0.1
"""How long a cancellation may go unnoticed."""

_NOT_HERE = (
    "a synchronous client is for worker threads of trio: plain workflows and graders run in one, "
    "trio.to_thread.run_sync starts one. In async code, where it would block every other rollout, "
    "use rollout_client"
)


class TrioSide:
    """The trio run that a worker thread belongs to.

    Raises:
        IntegrationError: This is no thread of trio's.
    """

    def __init__(self) -> None:
        try:
            self._token = trio.from_thread.run_sync(trio.lowlevel.current_trio_token)
        except RuntimeError as error:
            raise IntegrationError(_NOT_HERE) from error

    def run(self, fn: Callable[[Unpack[PosArgs]], Awaitable[T]], *args: *PosArgs) -> T:
        """Run an async function on the trio side and wait for what it returns.

        Raises:
            trio.Cancelled: The thread's caller has been cancelled; the function has ended.
            trio.RunFinishedError: The trio side has ended.
        """
        _look()
        call = self._start(fn, args)
        cancelled: trio.Cancelled | None = None
        while not call.over.wait(None if cancelled else _LOOK_SEC):
            try:
                _look()
            except trio.Cancelled as error:
                cancelled = error
                self._token.run_sync_soon(call.cancel)
        try:
            # What was done in spite of a cancellation counts, or nobody would close a response.
            if cancelled is not None and isinstance(call.result, outcome.Error):
                raise cancelled
            return call.result.unwrap()
        finally:
            del call, cancelled

    def finish(self, fn: Callable[[], Awaitable[object]]) -> None:
        """Run an async function that tidies up, cancelled or not; nothing if it is too late."""
        with suppress(trio.RunFinishedError):
            call = self._start(fn, ())
            call.over.wait()
            call.result.unwrap()

    def _start(self, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> _Call[T]:
        if trio.lowlevel.in_trio_run():
            raise IntegrationError(_NOT_HERE)  # or it would wait for itself
        call = _Call(fn, args)
        self._token.run_sync_soon(call.start)
        return call


def _look() -> None:
    """Raise `trio.Cancelled` if the caller of this thread has been cancelled."""
    with suppress(RuntimeError):  # a thread that the user has started knows of no cancellation
        trio.from_thread.check_cancelled()


class _Call(Generic[T]):
    """A function that runs on the trio side.

    Attributes:
        result: What it ended with.
        over: Set, for the thread, once it has ended.
    """

    result: outcome.Outcome[T]

    def __init__(self, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> None:
        self.over = threading.Event()
        self._fn = fn
        self._args = args
        self._scope = trio.CancelScope()
        self._context = copy_context()

    def start(self) -> None:
        """Start it as a system task: its nursery would be its caller's, who is not on this side."""
        try:
            trio.lowlevel.spawn_system_task(self._run, context=self._context)
        except RuntimeError:  # the trio run is at its end and starts no more tasks
            self.result = outcome.Error(trio.RunFinishedError())
            self.over.set()

    def cancel(self) -> None:
        """Cancel it."""
        self._scope.cancel()

    async def _run(self) -> None:
        # Its cancellation goes to the thread too, which is the one that waits for it.
        with self._scope:
            self.result = await outcome.acapture(self._fn, *self._args)
        self.over.set()


class ThreadTransport(httpx.BaseTransport):
    """Has a transport of the trio side send the requests of a thread.

    Args:
        transport: The transport.
        trio_side: Where it is.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, trio_side: TrioSide) -> None:
        self._transport = transport
        self._trio_side = trio_side

    def __repr__(self) -> str:
        return f"<ThreadTransport over {self._transport!r}>"

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and wait for the head of its answer."""
        request.read()  # what it iterates over belongs to this thread
        response = self._trio_side.run(self._transport.handle_async_request, request)
        stream = cast("httpx.AsyncByteStream", response.stream)
        return httpx.Response(
            response.status_code,
            headers=response.headers,
            stream=_Body(stream, self._trio_side),
            extensions=response.extensions,
        )

    def close(self) -> None:
        """Close the transport."""
        self._trio_side.finish(self._transport.aclose)


async def _next(pieces: AsyncIterator[bytes]) -> bytes | None:
    return await anext(pieces, None)


class _Body(httpx.SyncByteStream):
    """The body of an answer, read from the trio side piece by piece."""

    def __init__(self, stream: httpx.AsyncByteStream, trio_side: TrioSide) -> None:
        self._stream = stream
        self._pieces = aiter(stream)
        self._trio_side = trio_side
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            chunk = self._trio_side.run(_next, self._pieces)
        except BaseException:
            self.close()
            raise
        if chunk is None:
            raise StopIteration
        return chunk

    def close(self) -> None:
        """Close the answer, also where the thread is to end."""
        if not self._closed:
            self._closed = True
            self._trio_side.finish(self._stream.aclose)
