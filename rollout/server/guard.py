"""A connection that cannot harm the server that it belongs to.

Hypercorn turns HTTP/1.1 into ASGI. Its own connections let some errors out (bytes after a
WebSocket handshake, an HTTP/2 path beyond ASCII), shield every write from cancellation and
hold on to a peer that is gone while another request of it waits. Here a connection fails
alone, reads and writes are bounded, and HTTP/1.1 is all that is spoken: an offer to upgrade is
ignored, as the standard allows.
"""

from __future__ import annotations

# The server asks for this codec at its first request, when there may be no descriptor left.
import encodings.idna  # noqa: F401
from dataclasses import replace
from typing import Any

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Request, Response
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import parse_socket_addr

from rollout._logs import get_logger
from rollout.codec import dump_json
from rollout.server.authentication import Authorized
from rollout.server.connections import Connections

__all__ = ["GuardedConnection"]

logger = get_logger(__name__)

_STALL_SEC = 60.0
"""How long a peer may take nothing of an answer before its connection is given up."""

_LINGER_SEC = 2.0
"""How long a peer may still send after the server's last word. What is left unread when a
connection is closed resets it, and the peer would lose that word."""

_READ_BYTES = 64 * 1024
_PIECE = 256 * 1024


class _PlainHttp(H11Protocol):
    """HTTP/1.1 without upgrades, and with the head of a response in one write with its body."""

    def __init__(self, authorized: Authorized, *args: Any) -> None:
        super().__init__(*args)
        self._authorized = authorized
        self._may_continue = False
        self._body_unasked = False
        self._paused = False
        self._closed = False
        self._held = b""

    @property
    def waiting(self) -> int:
        """How many bytes of further requests wait until the one under way is answered."""
        return len(self.connection.trailing_data[0]) if self._paused else 0

    async def handle(self, event: Event) -> None:
        """Take bytes, or the end of the connection."""
        self._closed = self._closed or isinstance(event, Closed)
        await super().handle(event)

    async def resume(self) -> None:
        """Take up what has waited for the answer to the request before it."""
        await self._handle_events()

    async def stream_send(self, event: StreamEvent) -> None:
        """Send a part of an answer."""
        if isinstance(event, Response) and self._body_unasked:
            event = replace(event, headers=[*event.headers, (b"connection", b"close")])
        await super().stream_send(event)

    async def _handle_events(self) -> None:
        connection = self.connection
        self._paused = False
        while not self._closed:
            if self._may_continue and connection.they_are_waiting_for_100_continue:
                await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))
            try:
                event: Any = connection.next_event()
            except h11.RemoteProtocolError as error:
                if connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
                    await self._refuse(error.error_status_hint, str(error))
                await self.send(Closed())
                return
            if isinstance(event, h11.Request):
                await self._start(event)
            elif event is h11.PAUSED:
                self._paused = True
                return
            elif self.stream is None:
                return
            elif isinstance(event, h11.Data):
                await self.stream.handle(Body(stream_id=STREAM_ID, data=bytes(event.data)))
            elif isinstance(event, h11.EndOfMessage):
                await self.stream.handle(EndBody(stream_id=STREAM_ID))
            else:  # NEED_DATA, or the peer has closed
                return

    async def _start(self, request: h11.Request) -> None:
        """Hand a request to the application."""
        await self.send(Updated(idle=False))
        headers = list(request.headers)
        if _is_ambiguous(request):
            await self._refuse(400, "the length of the body is ambiguous")
            await self.send(Closed())
            return
        self._may_continue = self._authorized(headers)
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=headers,
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=request.target,
                state=self.connection_state,
            )
        )
        if self.connection.they_are_waiting_for_100_continue and not self._may_continue:
            self._body_unasked = True  # it is not sent either, so nobody shall wait for it
            await self.stream.handle(EndBody(stream_id=STREAM_ID))

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

    async def _refuse(self, status: int, detail: str) -> None:
        content = dump_json({"detail": detail})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=status, headers=headers))
        await self._send_h11_event(h11.Data(data=content))
        await self._send_h11_event(h11.EndOfMessage())


def _is_ambiguous(request: h11.Request) -> bool:
    """Whether another server may see another end of the body: with two lengths, or HTTP/1.0."""
    names = {name for name, _ in request.headers}
    return b"transfer-encoding" in names and (
        b"content-length" in names or request.http_version < b"1.1"
    )


class GuardedConnection:
    """One connection; what goes wrong on it stays there."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        connections: Connections,
        authorized: Authorized,
        stream: trio.SocketStream | trio.SSLStream[trio.SocketStream],
    ) -> None:
        self.stream = stream
        self.protocol: _PlainHttp
        self._app = app
        self._config = config
        self._context = context
        self._connections = connections
        self._authorized = authorized
        self._clock = connections.opened()
        self._sending = trio.Lock()
        self._ended = False

    async def run(self) -> None:
        """Serve the connection to its end. Only a cancellation comes out of here."""
        try:
            await self._serve()
        except (OSError, trio.BrokenResourceError):
            pass  # the peer is gone
        except Exception as error:  # noqa: BLE001 - the reason for this class
            _log(error)
        except BaseExceptionGroup as group:
            _, real = group.split(trio.Cancelled)
            if real is None or not isinstance(real, ExceptionGroup):
                raise
            _log(real)
            await trio.lowlevel.checkpoint()  # raises the cancellation that was in the group
        finally:
            self._connections.closed(self._clock)
            await trio.aclose_forcefully(self.stream)

    async def _serve(self) -> None:
        ssl = isinstance(self.stream, trio.SSLStream)
        if isinstance(self.stream, trio.SSLStream):
            with self._clock.reading() as scope:
                await self.stream.do_handshake()
            if scope.cancelled_caught:
                return
            sock = self.stream.transport_stream.socket
        else:
            sock = self.stream.socket
        async with TaskGroup() as tasks:
            self.protocol = _PlainHttp(
                self._recognized,
                self._app,
                self._config,
                self._context,
                tasks,
                ConnectionState({}),
                ssl,
                parse_socket_addr(sock.family, sock.getpeername()),
                parse_socket_addr(sock.family, sock.getsockname()),
                self.protocol_send,
            )
            await self._read()

    def _recognized(self, headers: list[tuple[bytes, bytes]]) -> bool:
        if not self._authorized(headers):
            return False
        self._connections.recognized(self._clock)
        return True

    async def _read(self) -> None:
        """Read until the peer ends, or the clock does; after the last word, for nothing."""
        while True:
            data = b""
            with self._clock.reading() as scope:
                try:
                    if self.protocol.waiting > _READ_BYTES:
                        await trio.sleep_forever()  # until the clock is interrupted
                    data = bytes(await self.stream.receive_some(_READ_BYTES))
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    break
            if scope.cancelled_caught and self._clock.was_interrupted():
                await self.protocol.resume()
                continue
            if scope.cancelled_caught:
                break
            if not self._ended:
                await self.protocol.handle(RawData(data))
            if not data:
                break
        await self.protocol.handle(Closed())

    async def protocol_send(self, event: Event) -> None:
        """Handle an event of the protocol; a write to a peer that reads nothing is given up."""
        if isinstance(event, RawData):
            if not await self._write(event.data):
                await self.protocol.handle(Closed())
        elif isinstance(event, Updated):
            await trio.lowlevel.checkpoint()
            if event.idle:
                self._clock.start_idle()
                if self.protocol.waiting:
                    self._clock.interrupt()
            else:
                self._clock.stop_idle()
        else:
            await self._end()
            await self.protocol.handle(Closed())

    async def _end(self) -> None:
        """End the answer, and give the peer a moment to read it."""
        self._ended = True
        self._clock.start_idle(_LINGER_SEC)
        transport: Any = getattr(self.stream, "transport_stream", self.stream)  # below TLS, if any
        async with self._sending:
            try:
                await transport.send_eof()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await trio.aclose_forcefully(self.stream)

    async def _write(self, data: bytes) -> bool:
        """Write *data*; ``False`` when the connection is lost or the peer takes nothing.

        A half written answer is worth nothing, so a cancelled handler writes on, but never
        longer than the server allows once it stops.
        """
        written = False
        writes = self._connections.writes
        async with self._sending:
            with trio.CancelScope(shield=True) as scope:
                writes.add(scope)
                try:
                    written = await self._write_pieces(data, scope)
                finally:
                    writes.discard(scope)
            if not written:
                await trio.aclose_forcefully(self.stream)
        return written

    async def _write_pieces(self, data: bytes, scope: trio.CancelScope) -> bool:
        view = memoryview(data)
        try:
            for start in range(0, len(view), _PIECE):
                scope.deadline = min(trio.current_time() + _STALL_SEC, self._connections.give_up_at)
                await self.stream.send_all(view[start : start + _PIECE])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True


def _log(error: BaseException) -> None:
    # The text of the error may quote what the peer sent, which may be a key.
    logger.warning("a connection failed: %s", ", ".join(sorted(_kinds(error))))


def _kinds(error: BaseException) -> set[str]:
    if isinstance(error, BaseExceptionGroup):
        return {kind for inner in error.exceptions for kind in _kinds(inner)}
    return {type(error).__name__}
