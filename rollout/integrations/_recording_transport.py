"""The transport that records calls of a model on trio; see `_watched_calls`.

The bytes pass through unchanged, but for two events of a stream. It says what it cost only if
asked to: the transport asks, and takes out the one event that its caller has not asked for. And
the mark at its end is taken out, since some versions of the SDK stop reading there: generators
that are left before they have ended are garbage for trio to complain about.
"""

from __future__ import annotations

import httpx
import trio

from rollout.integrations._connections import Connections, current_connections
from rollout.integrations._recorder import ConversationRecorder
from rollout.integrations._watched_calls import Endpoint, ReadAlong, Reading, WatchingTransport

__all__ = ["RecordingTransport"]


class RecordingTransport(WatchingTransport):
    """Sends requests over shared connections and records what they say.

    Args:
        endpoint: Where the policy is. The key goes nowhere else.
        recorder: What to tell, ``None`` to record nothing.
        conversation: The name of the conversations that the calls belong to.
        stream_usage: Whether to ask for the usage of streams.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        recorder: ConversationRecorder | None,
        *,
        conversation: str,
        stream_usage: bool = True,
    ) -> None:
        super().__init__(
            endpoint,
            recorder,
            conversation=conversation,
            clock=trio.current_time,
            ask_usage=stream_usage,
            hide=True,
        )
        self._connections: Connections = current_connections()
        self._owned = not self._connections.kept

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request over a shared connection."""
        return await self._connections.send(request)

    def read_along(self, stream: httpx.AsyncByteStream, reading: Reading) -> ReadAlong:
        """Return a body that is closed even where its reader is cancelled."""
        return _ReadAlong(stream, reading)

    async def aclose(self) -> None:
        """Close connections of its own; shared ones stay open."""
        if self._owned:
            await self._connections.aclose()
        else:
            await trio.lowlevel.checkpoint()


class _ReadAlong(ReadAlong):
    async def aclose(self) -> None:
        try:
            if self.leave():
                with trio.move_on_after(self.rest_sec):
                    await self.read_rest()
        finally:
            self.reading.close()
            with trio.CancelScope(shield=True):
                await self._unwind()
                await self.close_stream()

    async def _unwind(self) -> None:
        """End the generators that the bytes come through.

        They are in each other, and only the outermost can be closed from here; trio complains
        about the others. A cancellation goes through them all.
        """
        with trio.CancelScope(shield=True) as scope:
            scope.cancel()
            await self.read_rest()
