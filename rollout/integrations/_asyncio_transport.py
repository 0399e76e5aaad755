"""Connections to model endpoints on the asyncio side, and the transport that records calls there.

Theory of operation: what `_connections` and `_recording_transport` are for trio, in the loop of a
bridge. Clients belong to a loop, so each loop has pools of its own, shared by all rollouts; the
clients around them are made per rollout and cost microseconds. The pools of a loop are kept by an
asynchronous generator: a loop closes its generators once its tasks have ended, so the end of the
bridge closes the pools when nobody uses them any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress

import httpx
from attrs import define, field

from rollout.integrations._connections import Connections
from rollout.integrations._recorder import ConversationRecorder
from rollout.integrations._watched_calls import Endpoint, ReadAlong, Reading, WatchingTransport

__all__ = ["AsyncioTransport"]


@define(eq=False)
class _LoopConnections(Connections):
    """The pools of one loop."""

    _keeper: AsyncGenerator[None, None] | None = field(default=None, init=False)

    async def keep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop close the pools at its end."""
        self._keeper = self._until_closed(loop)
        await anext(self._keeper)

    async def _until_closed(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            _of_loops.pop(loop, None)
            await self.aclose()

    async def aclose(self) -> None:
        """Close every pool."""
        await self.close_ways()


_of_loops: dict[asyncio.AbstractEventLoop, _LoopConnections] = {}


async def _connections() -> Connections:
    """Return the connections of the running loop."""
    loop = asyncio.get_running_loop()
    found = _of_loops.get(loop)
    if found is None:
        found = _of_loops[loop] = _LoopConnections(kept=True)
        await found.keep(loop)
    return found


class AsyncioTransport(WatchingTransport):
    """Sends requests over the connections of the running loop and records what they say.

    The usage of streams is asked for, and every byte is handed on: the frameworks read the event
    that comes with it.

    Args:
        endpoint: Where the policy is. The key goes nowhere else.
        recorder: What to tell, ``None`` to record nothing.
        conversation: The name of the conversations that the calls belong to.
    """

    def __init__(
        self, endpoint: Endpoint, recorder: ConversationRecorder | None, *, conversation: str
    ) -> None:
        super().__init__(
            endpoint,
            recorder,
            conversation=conversation,
            clock=time.monotonic,
            ask_usage=True,
            hide=False,
        )

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request over a connection of the running loop."""
        connections = await _connections()
        return await connections.send(request)

    def read_along(self, stream: httpx.AsyncByteStream, reading: Reading) -> ReadAlong:
        """Return a body that is read to its end where little is left of it."""
        return _ReadAlong(stream, reading)


class _ReadAlong(ReadAlong):
    async def aclose(self) -> None:
        try:
            if self.leave():
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.rest_sec):
                        await self.read_rest()
        finally:
            self.reading.close()
            await self.close_stream()
