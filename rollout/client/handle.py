"""The handle of an admitted rollout.

Theory of operation: a task of the client's nursery polls, and reports to the handle what it
learned. Each subscriber of the statuses has a memory channel of its own, buffered for every
status there can be; statuses only move forward, so sending never blocks the poller. The end,
whether result, error or cancellation, is kept in the handle and given to every awaiter.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Self

import trio
from attrs import define, field

from rollout._tasks import copy_error
from rollout.client.polling import Poller
from rollout.errors import RolloutHandleCancelled
from rollout.rules import is_terminal, reached
from rollout.types import RolloutResultResponse, RolloutStatus

__all__ = ["RolloutHandle", "StatusStream"]

_EVERY_STATUS = len(RolloutStatus)


class StatusStream:
    """The statuses of one rollout, from the current one to the terminal one.

    An async iterator, and an async context manager that unsubscribes at the end of the block.
    After the terminal status it stops; if polling failed or the handle was cancelled, it
    raises what awaiting the handle raises.
    """

    def __init__(
        self, handle: RolloutHandle, channel: trio.MemoryReceiveChannel[RolloutStatus]
    ) -> None:
        self._handle = handle
        self._channel = channel

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RolloutStatus:
        try:
            return await self._channel.receive()
        except trio.EndOfChannel:
            failure = self._handle._failure_to_raise()  # noqa: SLF001 - the two are one concept
        except trio.ClosedResourceError:
            failure = None
        self._channel.close()
        if failure is not None:
            raise failure
        raise StopAsyncIteration

    def close(self) -> None:
        """Unsubscribe; doing it twice is fine."""
        self._channel.close()

    async def aclose(self) -> None:
        """Unsubscribe, with a checkpoint."""
        await self._channel.aclose()

    async def __aenter__(self) -> Self:
        await trio.lowlevel.checkpoint()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def __del__(self) -> None:
        # Leaving a loop early is fine, so the channel must not warn about it.
        self._channel.close()


@define(eq=False, repr=False, slots=False)
class RolloutHandle:
    """An admitted rollout that its client polls in the background. Await it for the result.

    Made by `RolloutClient.run_rollout_async`. Any number of tasks may await it, any number of
    times, before and after its end.

    Attributes:
        rollout_id: The rollout's id.
        status: The latest status observed.
        latest_result: The latest result response, ``None`` before the first poll.
    """

    rollout_id: str
    status: RolloutStatus = RolloutStatus.QUEUED
    latest_result: RolloutResultResponse | None = None
    _result: RolloutResultResponse | None = field(default=None, init=False)
    _failure: Exception | None = field(default=None, init=False)
    _traceback: TracebackType | None = field(default=None, init=False)
    _failure_seen: bool = field(default=False, init=False)
    _finished: trio.Event = field(factory=trio.Event, init=False)
    _scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _subscribers: list[trio.MemorySendChannel[RolloutStatus]] = field(factory=list, init=False)

    def __repr__(self) -> str:
        return f"<RolloutHandle {self.rollout_id!r} {self.status}, {self._state()}>"

    def _state(self) -> str:
        if self._result is not None:
            return "done"
        if self._failure is None:
            return "polling"
        if isinstance(self._failure, RolloutHandleCancelled):
            return "cancelled"
        return f"failed: {type(self._failure).__name__}"

    def __await__(self) -> Generator[Any, Any, RolloutResultResponse]:
        return self.wait_for_completion().__await__()

    async def wait_for_completion(self) -> RolloutResultResponse:
        """Return the terminal result; the same as awaiting the handle.

        Raises:
            RolloutHandleCancelled: The handle was cancelled, by `cancel` or by its client.
            RolloutProtocolError: The server answered a poll outside of the protocol.
            RolloutPollTimeoutError: An answer trickled in past the end of the lease.
            httpx.TransportError: Polling failed.

        Cancelling this wait leaves the handle polling.
        """
        await self._finished.wait()
        failure = self._failure_to_raise()
        if failure is not None:
            raise failure
        assert self._result is not None  # noqa: S101 - a finished handle has one or the other
        return self._result

    async def wait_for_running(self) -> RolloutStatus:
        """Return the status once the rollout runs, is past that, or has ended.

        Raises what `wait_for_completion` raises if polling ends before.
        """
        return await self._wait_for(RolloutStatus.RUNNING)

    async def wait_for_grading(self) -> RolloutStatus:
        """Return the status once the rollout is being graded, or has ended.

        A rollout that is not graded, or that fails before, ends without having been there, and
        a poll may miss a short phase: check what is returned.

        Raises what `wait_for_completion` raises if polling ends before.
        """
        return await self._wait_for(RolloutStatus.GRADING)

    async def _wait_for(self, milestone: RolloutStatus) -> RolloutStatus:
        async with self.statuses() as statuses:
            async for _ in statuses:
                if reached(self.status, milestone):
                    break
        return self.status

    def statuses(self) -> StatusStream:
        """Subscribe to the statuses, from the current one to the terminal one.

        Each call makes a stream of its own; none of them slows down the polling::

            async for status in handle.statuses():
                print(status)
        """
        send, receive = trio.open_memory_channel[RolloutStatus](_EVERY_STATUS)
        send.send_nowait(self.status)
        if self.done():
            send.close()
        else:
            self._subscribers.append(send)
        return StatusStream(self, receive)

    def done(self) -> bool:
        """Whether polling is over: by a result, an error or a cancellation."""
        return self._finished.is_set()

    def cancel(self) -> bool:
        """Stop polling, without a word to the server; return whether it was still polling.

        The rollout itself runs on until it ends or its lease does. To stop it, use
        `RolloutClient.cancel_rollout` and keep the handle polling.
        """
        if self.done():
            return False
        self._scope.cancel()
        self._end(failure=RolloutHandleCancelled(f"the handle of {self.rollout_id} was cancelled"))
        return True

    # --- for the client -----------------------------------------------------------------------

    @property
    def _unseen_failure(self) -> Exception | None:
        """The error that no awaiter has raised yet."""
        if self._failure_seen or isinstance(self._failure, RolloutHandleCancelled):
            return None
        return self._failure

    async def _poll(
        self, poll: Callable[[Poller], Awaitable[RolloutResultResponse]], poller: Poller
    ) -> None:
        """Poll to the end. Never raises anything but the cancellation of its nursery."""
        result: RolloutResultResponse | None = None
        failure: Exception = RolloutHandleCancelled(
            f"the client of {self.rollout_id} was closed while it was polling"
        )
        try:
            with self._scope:
                result = await poll(poller)
        except Exception as error:  # noqa: BLE001 - whatever it is, the awaiters get it
            failure = error
        finally:
            if not self.done():
                self._end(result=result, failure=failure)

    def _observe(self, result: RolloutResultResponse) -> None:
        if self.done():
            return
        self.latest_result = result
        if result.status is self.status:
            return
        self.status = result.status
        for channel in self._subscribers[:]:
            try:
                channel.send_nowait(result.status)
            except trio.BrokenResourceError:  # that subscriber has left
                channel.close()
                self._subscribers.remove(channel)

    def _end(
        self,
        *,
        result: RolloutResultResponse | None = None,
        failure: Exception | None = None,
    ) -> None:
        if result is not None and is_terminal(result.status):
            self._result = result
        else:
            self._failure = failure
            self._traceback = failure.__traceback__ if failure is not None else None
        for channel in self._subscribers:
            channel.close()
        self._subscribers.clear()
        self._finished.set()

    def _failure_to_raise(self) -> Exception | None:
        """Return a copy of the error that ended the polling, for one more awaiter to raise."""
        if self._failure is None:
            return None
        self._failure_seen = True
        return copy_error(self._failure).with_traceback(self._traceback)
