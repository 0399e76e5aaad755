"""HTTP/1.1 connections of a server: their limit, timeouts and errors.

Theory of operation: one task serves a connection, request after request. While the application
handles one, its calls of ``receive`` read from the peer: the body first, and then nothing but
the end of the connection, which the application takes as a reason to stop. So nothing else has
to read, and what goes wrong on a connection stays there. HTTP/1.1 is all that is spoken: an
offer to upgrade is ignored, as the standard allows.

A connection gets `HEAD_SEC` for the head of its next request until a request on it has carried
the server's key, and the keep-alive time from then on. When as many are open as may be, a new
one takes the place of the one that has waited longest without ever showing the key; with none
of those left, it waits until another one ends. So whoever has no key cannot keep others out.
"""

from __future__ import annotations

# The server asks for this codec at its first request, when there may be no descriptor left.
import encodings.idna  # noqa: F401
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from email.utils import formatdate
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import h11
import trio

from rollout._logs import get_logger
from rollout.codec import dump_json
from rollout.server.authentication import Authorized

__all__ = [
    "HEAD_SEC",
    "Connection",
    "Connections",
    "LimitedListener",
    "connection_limit",
]

logger = get_logger(__name__)

Application = Callable[[Any, Any, Any], Awaitable[None]]

HEAD_SEC = 10.0
"""How long a connection without the key may take for the head of a request, TLS included."""

_LONGEST_HEAD = 128 * 1024

_STALL_SEC = 60.0
"""How long a peer may take nothing of an answer before its connection is given up."""

_LINGER_SEC = 2.0
"""How long a peer may still send after the server's last word. What is left unread when a
connection is closed resets it, and the peer would lose that word."""

_READ_BYTES = 64 * 1024
_PIECE = 256 * 1024

MOST_DESCRIPTORS = 65_536
"""How far the limit of open files is raised. Some programs close every possible descriptor when
they start, so children should not inherit a limit of a billion."""


def connection_limit() -> int:
    """Raise the soft limit of open files; return how many connections may be open.

    A quarter is left to the code of users: models, sandboxes, files.
    """
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return MOST_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    bounded = [each for each in (hard, MOST_DESCRIPTORS) if each != resource.RLIM_INFINITY]
    if soft != resource.RLIM_INFINITY and soft < min(bounded):
        with suppress(ValueError, OSError):  # macOS has a lower limit that it does not report
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(bounded), hard))
            soft = min(bounded)
    return min(each for each in (soft, *bounded) if each != resource.RLIM_INFINITY) * 3 // 4


class Connections:
    """The open connections of one server.

    Args:
        limit: How many may be open at a time.
        keep_alive_sec: How long one that has shown the key may wait for its next request.
        grace_sec: How long a write may still take once the server stops.

    Attributes:
        stopping: Whether the server stops.
        give_up_at: When the last writes are given up (trio time).
    """

    def __init__(self, *, limit: int, keep_alive_sec: float, grace_sec: float) -> None:
        self.keep_alive_sec = keep_alive_sec
        self.stopping = False
        self.give_up_at = math.inf
        self._limit = limit
        self._grace_sec = grace_sec
        self._open: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}
        self._room = trio.Event()

    def opened(self, connection: Connection) -> None:
        """Count a new connection."""
        self._open.add(connection)
        self._strangers[connection] = None

    def recognized(self, connection: Connection) -> None:
        """Note that a request on a connection has carried the key."""
        connection.known = True
        self._strangers.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        """Count a connection no longer."""
        self._open.discard(connection)
        self._strangers.pop(connection, None)
        self._room.set()
        self._room = trio.Event()

    async def make_room(self) -> None:
        """Return once there is room for another connection."""
        await trio.lowlevel.checkpoint()
        while len(self._open) >= self._limit:
            if self._strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.hang_up()
            await self._room.wait()

    def stop(self) -> None:
        """Close idle connections at once from now on, and bound all writes."""
        self.stopping = True
        self.give_up_at = trio.current_time() + self._grace_sec
        for connection in self._open:
            connection.stop()


class Connection:
    """One connection; its errors do not reach other connections.

    Args:
        app: The ASGI application.
        authorized: Says whether the headers of a request carry the server's key.
        connections: All connections of the server.
        stream: The connection to the peer.

    Attributes:
        http: The state of HTTP on it.
        known: Whether a request on it has carried the key.
    """

    def __init__(
        self,
        app: Application,
        authorized: Authorized,
        connections: Connections,
        stream: trio.SocketStream | trio.SSLStream[trio.SocketStream],
    ) -> None:
        self.app = app
        self.stream = stream
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=_LONGEST_HEAD)
        self.known = False
        self._authorized = authorized
        self._connections = connections
        self._scope = trio.CancelScope()
        self._idle = trio.CancelScope()
        self._write_scope = trio.CancelScope()
        self._sending = trio.Lock()
        self._gone = False
        connections.opened(self)

    async def run(self) -> None:
        """Serve the connection until it ends; raises nothing but a cancellation."""
        try:
            with self._scope:
                await self._serve()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the peer is gone
        except Exception as error:  # noqa: BLE001 - it must not reach the other connections
            _log(error)
        except BaseExceptionGroup as group:
            _, real = group.split(trio.Cancelled)
            if real is None or not isinstance(real, ExceptionGroup):
                raise
            _log(real)
            await trio.lowlevel.checkpoint()  # raises the cancellation that was in the group
        finally:
            self._connections.closed(self)
            await trio.aclose_forcefully(self.stream)

    def hang_up(self) -> None:
        """End the connection, whatever is under way; a write is completed."""
        self._scope.cancel()

    def stop(self) -> None:
        """Accept no further request, and end writes with the server's grace period."""
        self._idle.cancel()
        self._write_scope.deadline = min(self._write_scope.deadline, self._connections.give_up_at)

    async def _serve(self) -> None:
        transport = self.stream
        if isinstance(transport, trio.SSLStream):
            with self._idle_for(HEAD_SEC) as handshake:
                await transport.do_handshake()
            if handshake.cancelled_caught:
                return
            transport = transport.transport_stream
        scope = {
            "type": "http",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "scheme": "http" if transport is self.stream else "https",
            "root_path": "",
            "client": _host_and_port(transport.socket.getpeername()),
            "server": _host_and_port(transport.socket.getsockname()),
            "extensions": {},
        }
        while (request := await self._next_request()) is not None:
            await _Exchange(self, request).run(scope)
            if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
                break
            self.http.start_next_cycle()
        if self.http.our_state is not h11.IDLE and not self._gone:
            await self._linger(transport)

    def _idle_for(self, sec: float) -> trio.CancelScope:
        """Return the cancel scope of a wait between requests."""
        self._idle = trio.CancelScope(deadline=trio.current_time() + sec)
        if self._connections.stopping:
            self._idle.cancel()
        return self._idle

    async def _next_request(self) -> h11.Request | None:
        """Read the head of a request; ``None`` if none comes, or not in time."""
        with self._idle_for(self._connections.keep_alive_sec if self.known else HEAD_SEC):
            while True:
                try:
                    event = self.http.next_event()
                except h11.RemoteProtocolError as error:
                    await self.refuse(error.error_status_hint, str(error))
                    return None
                if isinstance(event, h11.Request):
                    return event
                if event is not h11.NEED_DATA:
                    return None
                await self.read()
        return None

    async def _linger(self, transport: trio.SocketStream) -> None:
        """Close the sending side, and give the peer a moment to read the answer."""
        with self._idle_for(_LINGER_SEC):
            async with self._sending:
                await transport.send_eof()
            while await self.stream.receive_some(_READ_BYTES):
                pass

    # --- for the exchanges --------------------------------------------------------------------

    def recognize(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Check the key of a request; with it, the connection counts as known."""
        if not self._authorized(headers):
            return False
        self._connections.recognized(self)
        return True

    async def read(self) -> bool:
        """Read what the peer sends next into the parser; ``False`` at its end."""
        data = bytes(await self.stream.receive_some(_READ_BYTES))
        self.http.receive_data(data)
        self._gone = not data
        return bool(data)

    def encoded(self, event: Any) -> bytes:
        """Encode an event; empty after a protocol error of the peer."""
        try:
            return self.http.send(event) or b""
        except h11.LocalProtocolError:
            if self.http.their_state is not h11.ERROR:
                raise
            return b""

    def encoded_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Encode the head of a response."""
        date = (b"date", _date(int(time.time())))
        return self.encoded(h11.Response(status_code=status, headers=[*headers, date]))

    async def refuse(self, status: int, detail: str) -> None:
        """Send an error unless a response has been started; the connection ends with it."""
        if self.http.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            return
        content = dump_json({"detail": detail})
        data = self.encoded_head(
            status,
            [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(content)).encode()),
                (b"connection", b"close"),
            ],
        )
        with suppress(h11.LocalProtocolError):  # an answer to HEAD has no body
            data += self.encoded(h11.Data(data=content)) + self.encoded(h11.EndOfMessage())
        await self.write(data)

    async def write(self, data: bytes) -> None:
        """Write *data*; hang up if the connection is lost or the peer stops reading.

        A half written answer is worth nothing, so a cancelled handler writes on, but never
        longer than the server allows once it stops.
        """
        written = False
        if self._sending.locked():
            await self._sending.acquire()
        else:
            self._sending.acquire_nowait()  # without a step of the loop
        try:
            with trio.CancelScope(shield=True) as self._write_scope:
                written = await self._write_pieces(data)
            if not written:
                self._gone = True
                self.hang_up()
                await trio.aclose_forcefully(self.stream)
        finally:
            self._sending.release()

    async def _write_pieces(self, data: bytes) -> bool:
        view = memoryview(data)
        try:
            for start in range(0, len(view), _PIECE):
                self._write_scope.deadline = min(
                    trio.current_time() + _STALL_SEC, self._connections.give_up_at
                )
                await self.stream.send_all(view[start : start + _PIECE])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True


class _Exchange:
    """One request and its answer, between a connection and the application."""

    def __init__(self, connection: Connection, request: h11.Request) -> None:
        self._connection = connection
        self._http = connection.http
        self._request = request
        self._headers = list(request.headers)
        self._may_continue = False
        self._end_told = False
        self._ended = False
        self._unsuited: h11.RemoteProtocolError | None = None
        self._without_body = request.method == b"HEAD"
        self._head = b""

    async def run(self, basis: dict[str, Any]) -> None:
        """Call the application; *basis* holds the keys that all scopes of the connection share."""
        connection, request = self._connection, self._request
        if _is_ambiguous(request):
            await connection.refuse(400, "the length of the body is ambiguous")
            return
        self._may_continue = connection.recognize(self._headers)
        path, _, query = request.target.partition(b"?")
        scope = basis | {
            "http_version": request.http_version.decode("ascii"),
            "method": request.method.decode("ascii").upper(),
            "path": unquote(path.decode("ascii")) if b"%" in path else path.decode("ascii"),
            "raw_path": path,
            "query_string": query,
            "headers": self._headers,
            "state": {},
        }
        try:
            await connection.app(scope, self._receive, self._send)
        except Exception:
            logger.exception("the application failed")
        if self._unsuited is not None:
            await connection.refuse(self._unsuited.error_status_hint, str(self._unsuited))
        if not self._ended:
            await connection.refuse(500, "internal server error")
        with suppress(h11.RemoteProtocolError):
            while self._http.their_state is h11.SEND_BODY:  # what came of the body with its head
                if self._http.next_event() is h11.NEED_DATA:
                    break

    async def _receive(self) -> dict[str, Any]:
        """The ASGI ``receive``: the next part of the body, then the disconnect."""
        try:
            if not self._end_told:
                return await self._next_part()
            while len(self._http.trailing_data[0]) <= _READ_BYTES and await self._connection.read():
                pass
            if len(self._http.trailing_data[0]) > _READ_BYTES:
                await trio.sleep_forever()  # further requests wait until this one is answered
        except h11.RemoteProtocolError as error:
            self._unsuited = error
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self._ended = True
        return {"type": "http.disconnect"}

    async def _next_part(self) -> dict[str, Any]:
        data = b""
        while not data:
            if self._http.they_are_waiting_for_100_continue:
                if not self._may_continue:
                    break  # it is not asked for, so it does not come
                proceed = h11.InformationalResponse(status_code=100, headers=[])
                await self._connection.write(self._connection.encoded(proceed))
            event = self._http.next_event()
            if isinstance(event, h11.Data):
                data = bytes(event.data)
            elif event is h11.NEED_DATA:
                await self._connection.read()
            else:
                break
        self._end_told = not data
        return {"type": "http.request", "body": data, "more_body": bool(data)}

    async def _send(self, message: dict[str, Any]) -> None:
        """The ASGI ``send``: the head is written with the first part of the body."""
        connection = self._connection
        await trio.lowlevel.checkpoint_if_cancelled()
        if message["type"] == "http.response.start":
            headers = [(bytes(name), bytes(value)) for name, value in message["headers"]]
            if self._http.they_are_waiting_for_100_continue:
                headers.append((b"connection", b"close"))
            self._without_body = self._without_body or message["status"] in {204, 304}
            self._head = connection.encoded_head(message["status"], headers)
        elif message["type"] == "http.response.body":
            data, self._head = self._head, b""
            if message.get("body") and not self._without_body:
                data += connection.encoded(h11.Data(data=bytes(message["body"])))
            if not message.get("more_body", False):
                data += connection.encoded(h11.EndOfMessage())
            if data:
                await connection.write(data)


def _is_ambiguous(request: h11.Request) -> bool:
    """Whether another server may see another end of the body: with two lengths, or HTTP/1.0."""
    names = {name for name, _ in request.headers}
    return b"transfer-encoding" in names and (
        b"content-length" in names or request.http_version < b"1.1"
    )


@lru_cache(maxsize=1)
def _date(now: int) -> bytes:
    return formatdate(now, usegmt=True).encode("ascii")


def _host_and_port(address: Any) -> tuple[str, int] | None:
    return address[:2] if isinstance(address, tuple) else None


def _log(error: BaseException) -> None:
    # The text of the error may quote what the peer sent, which may be a key.
    logger.warning("a connection failed: %s", ", ".join(sorted(_kinds(error))))


def _kinds(error: BaseException) -> set[str]:
    if isinstance(error, BaseExceptionGroup):
        return {kind for inner in error.exceptions for kind in _kinds(inner)}
    return {type(error).__name__}


class LimitedListener(trio.abc.Listener[trio.SocketStream]):
    """A listener that accepts a connection when the limit leaves room for it."""

    def __init__(self, listener: trio.SocketListener, connections: Connections) -> None:
        self._listener = listener
        self._connections = connections

    async def accept(self) -> trio.SocketStream:
        """Accept a connection, once there is room for it."""
        stream = await self._listener.accept()
        try:
            await self._connections.make_room()
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return stream

    async def aclose(self) -> None:
        """Stop listening."""
        await self._listener.aclose()
