"""A transport for synchronous code in a worker thread, over the connections of the trio side.

Theory of operation: a plain workflow runs in a worker thread and blocks there. Its requests are
sent by a task on the trio side, over the transport that async workflows have, so connections are
shared and calls are recorded in the same way; the thread waits for it. Nothing can interrupt a
thread, so it checks every now and then whether its rollout has been cancelled. If so, it cancels
the task, waits for its end and raises `trio.Cancelled`, which ends the plain function too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar, TypeVarTuple, Unpack, cast

import httpx
import outcome
import trio
from attrs import define, field

from rollout._http import library_of, stream_class
from rollout.errors import IntegrationError

__all__ = ["ThreadTransport", "TrioSide"]

T = TypeVar("T")
PosArgs = TypeVarTuple("PosArgs")

_CHECK_SEC = 0.1
"""How long a cancellation may go unnoticed."""

_NOT_HERE = (
    "a synchronous client is for worker threads of trio: plain workflows and graders run in one, "
    "trio.to_thread.run_sync starts one. In async code, where it would block every other rollout, "
    "use rollout_client"
)


class TrioSide:
    """The trio run that a worker thread belongs to.

    Raises:
        IntegrationError: This is not a thread of trio's.
    """

    def __init__(self) -> None:
        try:
            self._token = trio.from_thread.run_sync(trio.lowlevel.current_trio_token)
        except RuntimeError as error:
            raise IntegrationError(_NOT_HERE) from error

    def run(self, fn: Callable[[Unpack[PosArgs]], Awaitable[T]], *args: *PosArgs) -> T:
        """Run an async function on the trio side and return its result.

        Raises:
            trio.Cancelled: The thread's caller has been cancelled; the function has ended.
            trio.RunFinishedError: The trio side has ended.
        """
        _check_cancelled()
        scope, ended = self._start(fn, args)
        cancelled: trio.Cancelled | None = None
        while True:
            try:
                result = ended.result(None if cancelled else _CHECK_SEC)
                break
            except TimeoutError:
                try:
                    _check_cancelled()
                except trio.Cancelled as error:
                    cancelled = error
                    self._token.run_sync_soon(scope.cancel)
        try:
            # A result in spite of a cancellation counts, or nobody would close a response.
            if cancelled is not None and isinstance(result, outcome.Error):
                raise cancelled
            return result.unwrap()
        finally:
            del result, ended, cancelled

    def finish(self, fn: Callable[[], Awaitable[object]]) -> None:
        """Run an async function that tidies up, cancelled or not; nothing if it is too late."""
        with suppress(trio.RunFinishedError):
            _, ended = self._start(fn, ())
            ended.result().unwrap()

    def _start(
        self, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]
    ) -> tuple[trio.CancelScope, Future[outcome.Outcome[T]]]:
        """Start a function as a system task, as this thread's caller has no nursery there."""
        if trio.lowlevel.in_trio_run():
            raise IntegrationError(_NOT_HERE)  # or it would wait for itself
        scope, context = trio.CancelScope(), copy_context()
        ended: Future[outcome.Outcome[T]] = Future()

        async def main() -> None:
            # Its cancellation goes to the thread too, which is the one that waits for it.
            with scope:
                ended.set_result(await outcome.acapture(fn, *args))

        def start() -> None:
            try:
                trio.lowlevel.spawn_system_task(main, context=context)
            except RuntimeError:  # the trio run is at its end and starts no more tasks
                ended.set_result(outcome.Error(trio.RunFinishedError()))

        self._token.run_sync_soon(start)
        return scope, ended


def _check_cancelled() -> None:
    """Raise `trio.Cancelled` if the caller of this thread has been cancelled."""
    with suppress(RuntimeError):  # a thread that the user has started knows of no cancellation
        trio.from_thread.check_cancelled()


@define(eq=False)
class ThreadTransport(httpx.BaseTransport):
    """Sends the requests of a thread over a transport of the trio side.

    Attributes:
        transport: The transport.
        trio_side: The trio run that it belongs to.
    """

    transport: httpx.AsyncBaseTransport
    trio_side: TrioSide = field(repr=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and wait for the head of its answer."""
        request.read()  # what it iterates over belongs to this thread
        response = self.trio_side.run(self.transport.handle_async_request, request)
        stream = cast("httpx.AsyncByteStream", response.stream)
        library = library_of(request)
        answer: httpx.Response = library.Response(
            response.status_code,
            headers=response.headers,
            stream=stream_class(_Body, library.SyncByteStream)(stream, self.trio_side),
            extensions=response.extensions,
        )
        return answer

    def close(self) -> None:
        """Close the transport."""
        self.trio_side.finish(self.transport.aclose)


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
