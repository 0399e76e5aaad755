"""A bridge from trio to asyncio: one event loop in a thread of its own.

Many agent frameworks know asyncio alone. A bridge runs them from trio without giving up what
trio is for: a cancel scope around a call cancels the asyncio task *and waits for its cleanup*,
errors and context variables cross intact, and nothing outlives the block that opened it::

    async with open_asyncio_bridge() as bridge:
        with trio.move_on_after(60):
            answer = await bridge.run(ask_the_framework, question)

The framework's tools call back with `run_in_trio`. Inside a server, open the bridge in the
lifespan and let workflows find it with `get_bridge`.

Theory of operation: `bridge.calls` has the calls in both directions, `bridge.loop` the thread.
This module owns them. The end of a bridge has one path, taken
when the block is left and when the loop ends too early: cancel the calls, then whatever tasks
are left, close generators and executor, stop the loop, join the thread. A task on the trio side
walks it, inside a shield and within a budget.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Generic, Self, TypeVar, TypeVarTuple, Unpack

import outcome
import trio
from attrs import define, field

from rollout._checks import check_number
from rollout._logs import get_logger
from rollout.errors import BridgeCancelledError, BridgeError, InvalidFieldError
from rollout.integrations.bridge.calls import Call, Callback, name_of, refuse_coroutine
from rollout.integrations.bridge.loop import LoopThread, close_executor, sweep

__all__ = [
    "AsyncioBridge",
    "AsyncioStream",
    "BridgeCancelledError",
    "BridgeError",
    "get_bridge",
    "open_asyncio_bridge",
    "run_in_trio",
]

logger = get_logger("rollout.integrations.asyncio_bridge")

T = TypeVar("T")
PosArgs = TypeVarTuple("PosArgs")

_bridges: dict[asyncio.AbstractEventLoop, AsyncioBridge] = {}
_current: ContextVar[AsyncioBridge | None] = ContextVar("asyncio_bridge", default=None)


class AsyncioBridge:
    """An asyncio event loop in a thread of its own, as trio sees it.

    `open_asyncio_bridge` makes one; all tasks of that `trio.run` may use it, at the same time.

    Attributes:
        name: The name of the loop's thread.
        grace_sec: How long a cancelled task may clean up before it is cancelled again.
        abandon_after_sec: How long a cancelled call waits for its task; ``None`` for ever.
        close_timeout_sec: How long the end of the bridge waits for tasks, in all.
    """

    def __init__(
        self,
        *,
        name: str,
        grace_sec: float,
        abandon_after_sec: float | None,
        close_timeout_sec: float,
        debug: bool | None,
    ) -> None:
        self.name = name
        self.grace_sec = grace_sec
        self.abandon_after_sec = abandon_after_sec
        self.close_timeout_sec = close_timeout_sec
        self._token = trio.lowlevel.current_trio_token()
        self._calls: set[Call[Any]] = set()
        self._running_callbacks: set[Callback[Any]] = set()
        self._callbacks: trio.Nursery | None = None
        self._why_closed: str | None = None
        self._close_wanted = trio.Event()
        self._thread_ended = trio.Event()
        self._thread = LoopThread(
            name,
            debug=debug,
            on_stopped=partial(self._report, self._break),
            on_ended=partial(self._report, self._on_thread_end),
        )
        self._loop = self._thread.loop

    def __repr__(self) -> str:
        state = self._why_closed or "open"
        return f"<AsyncioBridge {self.name}: {state}, {len(self._calls)} calls>"

    # --- calls, from trio -----------------------------------------------------------------

    async def run(self, fn: Callable[[Unpack[PosArgs]], Awaitable[T]], *args: *PosArgs) -> T:
        """Run an asyncio function as a task of the loop, and return what it returns.

        Context variables of the calling task are visible inside; what is set inside stays
        inside. Use `functools.partial` for keyword arguments.

        A cancellation of the caller cancels the task and waits until it has cleaned up. A task
        that has not ended ``grace_sec`` later is cancelled again, and so on, since asyncio
        delivers each cancellation once and code may swallow it. The caller ends as cancelled
        even if the task returned a value in spite of its cancellation; a task that had finished
        before the cancellation reached it delivers its result. With ``abandon_after_sec``, a
        task that is still there by then is left to the end of the bridge, and a warning is
        logged.

        Raises:
            BridgeError: The bridge is closed, or was closed while this ran.
            BridgeCancelledError: The function ended with `asyncio.CancelledError`, and it was
                not trio that had cancelled it.
            BaseException: The error of the function, intact, with its traceback; `SystemExit`
                and `KeyboardInterrupt` as well (the loop goes on). `StopIteration` becomes a
                `RuntimeError`, as in every coroutine.
        """
        refuse_coroutine(fn)
        await trio.lowlevel.checkpoint_if_cancelled()
        call = self._start(fn, args, self._calls.discard)
        return await call.result()

    @asynccontextmanager
    async def iterate(
        self,
        fn: Callable[[Unpack[PosArgs]], AsyncIterable[T] | Awaitable[AsyncIterable[T]]],
        *args: *PosArgs,
        buffer_size: int = 16,
    ) -> AsyncGenerator[AsyncioStream[T], None]:
        """Iterate over what an asyncio function yields, in a block that owns the iteration.

        For example::

            async with bridge.iterate(agent.stream, prompt) as events:
                async for event in events:
                    ...

        The whole iteration is one task of the loop, so a generator is closed in the task that
        ran it. Leaving the block, by ``break``, error or cancellation, cancels that task and
        waits as `run` does. An error of the iteration is raised behind its last item.

        Args:
            fn: An asynchronous generator function, or any function that returns (or
                asynchronously returns) an asynchronous iterable.
            *args: Its arguments.
            buffer_size: How many items it may be ahead of its consumers.

        Raises:
            BridgeError: The bridge is closed, or was closed during the iteration.
            InvalidFieldError: The buffer holds no item.
        """
        refuse_coroutine(fn)
        if buffer_size < 1:
            raise InvalidFieldError("buffer_size", "must be at least 1")
        await trio.lowlevel.checkpoint()
        stream: AsyncioStream[T] = AsyncioStream(self._loop, self._token, fn, args, buffer_size)

        def finish(call: Call[Any]) -> None:
            self._calls.discard(call)
            stream.finish()

        stream.attach(self._start(stream.pump, (), finish))
        try:
            yield stream
        finally:
            await stream.close()

    def _start(
        self,
        fn: Callable[..., Awaitable[T]],
        args: tuple[Any, ...],
        on_finished: Callable[[Call[Any]], None],
    ) -> Call[T]:
        if trio.lowlevel.current_trio_token() is not self._token:
            raise BridgeError("this bridge belongs to another trio.run; open one in this one")
        if self._why_closed is not None:
            raise BridgeError(self._why_closed)
        return self._start_anyway(fn, args, on_finished)

    def _start_anyway(
        self,
        fn: Callable[..., Awaitable[T]],
        args: tuple[Any, ...],
        on_finished: Callable[[Call[Any]], None],
    ) -> Call[T]:
        call = Call(
            self._loop,
            self._token,
            fn,
            args,
            on_finished,
            grace_sec=self.grace_sec,
            abandon_after_sec=self.abandon_after_sec,
        )
        call.start()
        self._calls.add(call)
        return call

    # --- callbacks, from any thread -------------------------------------------------------

    def call_trio_soon(self, fn: Callable[[Unpack[PosArgs]], object], *args: *PosArgs) -> None:
        """Schedule a call of a synchronous function in the trio thread, in order.

        For hooks: from the loop, or from any other thread. It returns at once; the function
        runs with a copy of the caller's context variables, before any call that the caller
        belongs to is seen to end. Nobody waits for it, so its errors are logged.

        Raises:
            BridgeError: The bridge is closed.
        """
        if self._thread_ended.is_set():
            raise BridgeError(self._why_closed or "the bridge is closed")
        context = copy_context()
        try:
            self._token.run_sync_soon(self._call_hook, context.run, fn, args)
        except trio.RunFinishedError as error:
            raise BridgeError("the trio side of the bridge has ended") from error

    def _call_hook(
        self, run: Callable[..., object], fn: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        try:
            run(fn, *args)
        except BaseException:  # an error here would end all of trio.run
            logger.exception("%s, called by a hook, failed", name_of(fn))

    async def _call_back(self, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
        callback = Callback(self._loop, self._token, fn, args, self._running_callbacks.discard)
        return await callback.call(self._start_callback)

    def _start_callback(self, callback: Callback[Any]) -> None:
        if self._callbacks is None:
            callback.refuse(BridgeError(self._why_closed or "the bridge is closed"))
        else:
            self._running_callbacks.add(callback)
            callback.start(self._callbacks)

    # --- from the beginning to the end ----------------------------------------------------

    async def _serve(self, task_status: trio.TaskStatus[None]) -> None:
        """Run the thread, and end it once that is wanted, whatever is cancelled around here."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                self._callbacks = nursery
                self._thread.start()
                _bridges[self._loop] = self
                task_status.started()
                await self._close_wanted.wait()
                await self._close()
                self._callbacks = None

    async def _close(self) -> None:
        if self._why_closed is None:
            self._why_closed = "the bridge is closed"
        step = "calls"
        with trio.move_on_after(self.close_timeout_sec) as budget:
            await self._end_calls()
            step = "tasks"
            while not await self._ask_loop(self.grace_sec, sweep):
                pass
            step = "asynchronous generators"
            await self._ask_loop(self.grace_sec, self._loop.shutdown_asyncgens)
            step = "worker threads"
            await self._ask_loop(math.inf, close_executor, self._thread.executor)
        if budget.cancelled_caught:
            logger.error(
                "the bridge %s has not ended %s s after its %s were cancelled, and abandons them",
                self.name,
                self.close_timeout_sec,
                step,
            )
        await self._end_thread()
        for callback in tuple(self._running_callbacks):
            callback.cancel()

    async def _end_calls(self) -> None:
        while self._calls:
            due = min(call.press() for call in self._calls)
            with trio.move_on_at(due):
                for call in tuple(self._calls):
                    await call.finished.wait()

    async def _ask_loop(
        self, patience_sec: float, fn: Callable[..., Awaitable[None]], *args: object
    ) -> bool:
        """Run a function in the loop; False if it took too long and was cancelled."""
        if self._thread_ended.is_set():
            return True
        try:
            call = self._start_anyway(fn, args, self._calls.discard)
        except BridgeError:  # the thread ends just now
            await self._thread_ended.wait()
            return True
        call.abandoned = True  # an error of it is logged
        try:
            with trio.move_on_after(patience_sec):
                await call.finished.wait()
        finally:
            call.cancel()
        return call.finished.is_set()

    async def _end_thread(self) -> None:
        if not self._thread_ended.is_set():
            self._thread.stop()
            with trio.move_on_after(min(self.grace_sec, self.close_timeout_sec)):
                await self._thread_ended.wait()
        if self._thread_ended.is_set():
            self._thread.join()  # it has nothing left to do
        else:
            logger.error(
                "the thread of the bridge %s is blocked and left behind. It is here:\n%s",
                self.name,
                self._thread.where(),
            )
        _bridges.pop(self._loop, None)
        self._lose_calls()

    def _report(self, what: Callable[[str], None], why: str) -> None:
        """Notify the trio side, if it is still there. In the loop's thread."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(what, why)

    def _break(self, why: str) -> None:
        if self._why_closed is None:
            self._why_closed = why
        self._close_wanted.set()

    def _on_thread_end(self, why: str) -> None:
        self._thread_ended.set()
        self._break(why)
        self._lose_calls()

    def _lose_calls(self) -> None:
        for call in tuple(self._calls):
            error = BridgeError(f"{self._why_closed}; {call.name} was running")
            call.finish(outcome.Error(error))


@define(eq=False, repr=False)
class AsyncioStream(Generic[T]):
    """Items of an iteration on the asyncio side. `AsyncioBridge.iterate` opens one.

    Theory of operation: one call of the bridge runs the whole iteration, from the first item to
    the closing of the generator, in one task; asyncio's finalizers of generators never see it.
    Items travel one way, credits the other: the generator goes on only while fewer items than the
    buffer holds are on their way.

    Any number of tasks may iterate over it; each item goes to one of them.
    """

    _loop: asyncio.AbstractEventLoop
    _token: trio.lowlevel.TrioToken
    _fn: Callable[..., AsyncIterable[T] | Awaitable[AsyncIterable[T]]]
    _args: tuple[Any, ...]
    _buffer_size: int
    _credits: asyncio.Semaphore = field(init=False)  # of the loop's thread only
    _send: trio.MemorySendChannel[T] = field(init=False)
    _receive: trio.MemoryReceiveChannel[T] = field(init=False)
    _call: Call[None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._credits = asyncio.Semaphore(self._buffer_size)
        self._send, self._receive = trio.open_memory_channel[T](self._buffer_size)

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
        with suppress(
            trio.BrokenResourceError
        ):  # the block was left: there are no consumers any more
            self._send.send_nowait(item)

    def attach(self, call: Call[None]) -> None:
        """Set the call that runs `pump`."""
        self._call = call

    def finish(self) -> None:
        """Mark the end of the items for consumers."""
        self._send.close()

    async def close(self) -> None:
        """End the iteration and raise its error, if no consumer has seen that."""
        self._receive.close()
        await self._call.end()
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


@asynccontextmanager
async def open_asyncio_bridge(
    *,
    name: str = "asyncio-bridge",
    grace_sec: float = 10.0,
    abandon_after_sec: float | None = None,
    close_timeout_sec: float = 30.0,
    debug: bool | None = None,
) -> AsyncGenerator[AsyncioBridge, None]:
    """Run an asyncio event loop in a thread for the length of the block.

    Inside the block, `get_bridge` returns this bridge, in this task and in the tasks that are
    started from here on. In a server, open it in the lifespan::

        @asynccontextmanager
        async def lifespan(app):
            async with open_asyncio_bridge():
                yield

    However the block is left, the bridge ends before the block does: it cancels the calls that
    still run (other tasks may be in them: they get `BridgeError`), then the tasks that their
    code has left over, again after each ``grace_sec``; it closes asynchronous generators and
    waits for the worker threads of the loop's executor. What has not ended after
    ``close_timeout_sec`` is logged and abandoned. A cancellation does not cut this short.

    All times are trio's: a `trio.testing.MockClock` governs them, and one with
    ``autojump_threshold`` jumps while the loop's thread works.

    Args:
        name: The name of the loop's thread.
        grace_sec: How long a cancelled task may clean up before it is cancelled again, in
            seconds.
        abandon_after_sec: How long a cancelled call waits for its task, in seconds; ``None``
            for as long as it takes.
        close_timeout_sec: How long the end of the bridge waits, in seconds; one more grace
            period at most goes to the thread itself.
        debug: asyncio's debug mode; ``None`` leaves it to ``PYTHONASYNCIODEBUG``.

    Raises:
        InvalidFieldError: A time is negative, or not finite where it has to be.
    """
    if grace_sec != math.inf:
        check_number("grace_sec", grace_sec, above=0)
    if abandon_after_sec != math.inf:
        check_number("abandon_after_sec", abandon_after_sec, least=0, none=True)
    check_number("close_timeout_sec", close_timeout_sec, least=0)
    bridge = AsyncioBridge(
        name=name,
        grace_sec=grace_sec,
        abandon_after_sec=abandon_after_sec,
        close_timeout_sec=close_timeout_sec,
        debug=debug,
    )
    previous = _current.get()
    body_error: BaseException | None = None
    # The nursery holds the bridge's own task alone. An error of the block goes around it, or it
    # would come out as a group.
    async with trio.open_nursery() as nursery:
        try:
            with trio.CancelScope(shield=True):
                await nursery.start(bridge._serve)  # noqa: SLF001
            _current.set(bridge)
            yield bridge
        except BaseException as error:  # noqa: BLE001 - raised below
            body_error = error
        finally:
            if _current.get() is bridge:
                _current.set(previous)
            bridge._close_wanted.set()  # noqa: SLF001
    if body_error is not None:
        try:
            raise body_error
        finally:
            del body_error


def get_bridge() -> AsyncioBridge:
    """Return the bridge that is open around here: the innermost `open_asyncio_bridge`.

    Workflows use the one that their server's lifespan has opened.

    Raises:
        BridgeError: None is open.
    """
    bridge = _current.get()
    if bridge is None:
        raise BridgeError(
            "no asyncio bridge is open here. Open one around the program, `async with "
            "open_asyncio_bridge():`, in a server in the lifespan that create_rollout_server "
            "takes, so that all workflows share it"
        )
    return bridge


async def run_in_trio(fn: Callable[[Unpack[PosArgs]], Awaitable[T]], *args: *PosArgs) -> T:
    """Run a trio function from asyncio code that runs behind a bridge, and wait for it.

    For tools and hooks that belong to the trio side: awaited in a task of the bridge's loop, it
    runs ``fn`` in a task on the trio side, with a copy of the caller's context variables.

    A cancellation of the asyncio task cancels the trio function and waits until it has ended;
    so does the end of the bridge. The caller then gets `asyncio.CancelledError`, never
    `trio.Cancelled`.

    Raises:
        BridgeError: This is not a task behind a bridge, or the bridge has ended.
        BaseException: The error of the function, intact.
    """
    refuse_coroutine(fn)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise BridgeError("run_in_trio is for asyncio code; in trio, await the function") from None
    bridge = _bridges.get(loop)
    if bridge is None:
        raise BridgeError(
            "this asyncio loop has no bridge to trio: run the code behind open_asyncio_bridge"
        )
    return await bridge._call_back(fn, args)  # noqa: SLF001
