"""Connections that cannot harm the server that they belong to.

Hypercorn's trio worker runs all connections in one nursery and lets some errors of its
protocols out: bytes after a WebSocket handshake, an HTTP/2 path beyond ASCII and other things
that anybody can send, without a key, would end the whole server with all of its rollouts. It
also shields every write, so that a peer which reads nothing would keep a server from ever
stopping. Here a connection fails alone, writes are bounded, and HTTP/1.1 is all that is
spoken on plain connections: an offer to upgrade is ignored, as the standard allows.

Hypercorn has no setting for the class of its connections, so `guard_connections` replaces it
for the process. Other applications on the same worker are only better off with it.
"""

from __future__ import annotations

import math
from typing import Any

import h11
import hypercorn.trio.run
import trio
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import EventWrapper

from rollout._logs import get_logger

__all__ = ["GuardedConnection", "guard_connections"]

logger = get_logger(__name__)

_STALL_SEC = 60.0
"""How long a peer may take nothing of an answer before its connection is given up."""

_PIECE = 256 * 1024


class _PlainHttp(H11Protocol):
    """HTTP/1.1 without upgrades, and with the head of a response in one write with its body."""

    _held = b""

    async def _send_h11_event(self, event: Any) -> None:
        try:
            data = self.connection.send(event)
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
            return
        self._held += data or b""
        if isinstance(event, h11.Response) or not self._held:
            return
        data, self._held = self._held, b""
        await self.send(RawData(data=data))

    async def _check_protocol(self, event: h11.Request) -> None:
        """Stay with HTTP/1.1, whatever the peer offers."""

    async def _create_stream(self, request: h11.Request) -> None:
        kept = [item for item in request.headers.raw_items() if item[0].lower() != b"upgrade"]
        await super()._create_stream(
            h11.Request(
                method=request.method,
                target=request.target,
                headers=kept,
                http_version=request.http_version,
            )
        )


class _Stop(EventWrapper):
    """Hypercorn's event for the end of a server; once set, no write takes long any more.

    Attributes:
        writes: The writes that are under way.
        clocks: The idle clocks of the open connections.
        give_up_at: When the last of them is given up (trio time).
    """

    def __init__(self, grace_sec: float) -> None:
        super().__init__()
        self.writes: dict[trio.CancelScope, None] = {}
        self.clocks: dict[_IdleClock, None] = {}
        self.give_up_at = math.inf
        self._grace_sec = grace_sec

    async def set(self) -> None:
        """Take the end."""
        await super().set()
        self.give_up_at = trio.current_time() + self._grace_sec
        for scope in self.writes:
            scope.deadline = min(scope.deadline, self.give_up_at)
        for clock in self.clocks:
            clock.server_stops()


class _IdleClock:
    """Says how long a connection may wait for its next request.

    It has the face of Hypercorn's idle task, which is a new task for every request; this is
    the deadline of the read that waits anyway.
    """

    def __init__(self, keep_alive_sec: float) -> None:
        self.scope = trio.CancelScope()
        self.idle = False
        self._keep_alive_sec = keep_alive_sec
        self._stopping = False
        self._until = math.inf

    def waiting(self) -> trio.CancelScope:
        """Return the scope for one read."""
        self.scope = trio.CancelScope()
        self._apply()
        return self.scope

    async def restart(self, task_group: Any, action: Any) -> None:
        """Take that the connection is idle from now on."""
        del task_group, action
        self.idle = True
        self._until = trio.current_time() + self._keep_alive_sec
        self._apply()

    async def stop(self) -> None:
        """Take that a request is under way."""
        self.idle = False
        self._apply()

    def server_stops(self) -> None:
        """Take that idle connections are closed at once from now on."""
        self._stopping = True
        self._apply()

    def _apply(self) -> None:
        if not self.idle:
            self.scope.deadline = math.inf
        elif self._stopping:
            self.scope.deadline = -math.inf
        else:
            self.scope.deadline = self._until


class GuardedConnection(TCPServer):
    """One connection; what goes wrong on it stays there."""

    async def run(self) -> None:
        """Serve the connection to its end. Only a cancellation comes out of here."""
        stop = self._stop  # before anything waits for the event that it replaces
        clock = _IdleClock(self.config.keep_alive_timeout)
        self.idle_task = clock  # type: ignore[assignment]  # it has the same two methods
        self._clock = clock
        stop.clocks[clock] = None
        if stop.is_set():
            clock.server_stops()
        try:
            await super().run()
        except Exception as error:  # noqa: BLE001 - the reason for this class
            _log(error)
        except BaseExceptionGroup as group:
            _, real = group.split(trio.Cancelled)
            if real is None or not isinstance(real, ExceptionGroup):
                raise
            _log(real)
            await trio.lowlevel.checkpoint()  # raises the cancellation that was in the group
        finally:
            stop.clocks.pop(clock, None)

    async def _read_data(self) -> None:
        wrapper = self.protocol
        if isinstance(wrapper.protocol, H11Protocol):
            wrapper.protocol = _PlainHttp(
                wrapper.app,
                wrapper.config,
                wrapper.context,
                wrapper.task_group,
                wrapper.state,
                wrapper.ssl,
                wrapper.client,
                wrapper.server,
                wrapper.send,
            )
        while True:
            data = b""
            with self._clock.waiting() as scope:
                try:
                    data = bytes(await self.stream.receive_some(MAX_RECV))
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    break
            if scope.cancelled_caught:
                await self._initiate_server_close()
                return
            await self.protocol.handle(RawData(data))
            if not data:
                break
        await self.protocol.handle(Closed())

    async def protocol_send(self, event: Event) -> None:
        """Take what a protocol has to say; a write to a peer that reads nothing ends."""
        if not isinstance(event, RawData):
            await super().protocol_send(event)
        elif not await self._write(event.data):
            await self.protocol.handle(Closed())

    async def _write(self, data: bytes) -> bool:
        """Write *data*; ``False`` when the connection is lost or the peer takes nothing.

        A half written answer is worth nothing, so a cancelled handler writes on, but never
        longer than the server allows once it stops.
        """
        written = False
        stop = self._stop
        async with self.send_lock:
            with trio.CancelScope(shield=True) as scope:
                stop.writes[scope] = None
                try:
                    written = await self._write_pieces(data, scope)
                finally:
                    del stop.writes[scope]
            if not written:
                await trio.aclose_forcefully(self.stream)
        return written

    async def _write_pieces(self, data: bytes, scope: trio.CancelScope) -> bool:
        view = memoryview(data)
        try:
            for start in range(0, len(view), _PIECE):
                scope.deadline = min(trio.current_time() + _STALL_SEC, self._stop.give_up_at)
                await self.stream.send_all(view[start : start + _PIECE])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    @property
    def _stop(self) -> _Stop:
        """Return the event of this connection's server that says that it stops."""
        stop = self.context.terminated
        if not isinstance(stop, _Stop):
            stop = _Stop(self.config.graceful_timeout)
            vars(self.context)["terminated"] = stop
        return stop


def _log(error: BaseException) -> None:
    # The text of the error may quote what the peer sent, which may be a key.
    logger.warning("a connection failed: %s", ", ".join(sorted(_kinds(error))))


def _kinds(error: BaseException) -> set[str]:
    if isinstance(error, BaseExceptionGroup):
        return {kind for inner in error.exceptions for kind in _kinds(inner)}
    return {type(error).__name__}


def guard_connections() -> None:
    """Make Hypercorn's trio worker use `GuardedConnection` from now on."""
    worker: Any = hypercorn.trio.run
    worker.TCPServer = GuardedConnection
