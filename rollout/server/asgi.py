"""Requests and responses between the ASGI server and the application.

Theory of operation: a request to one of the server's own routes is a `Call`. Its handler returns
an `Answer`, and nothing else stands between the ASGI server and the handler. What an application
adds is handled by Quart, behind a `RolloutHTTPConnection`.

An answer that goes out while the peer is still sending stalls: most clients read nothing
before they have written everything. So a refused body is read on and thrown away, up to a
bound of size and time, or until the peer stops sending (it may be waiting for the answer);
past the bound the connection is closed after the answer.

Quart's own body object is left out: it differs from release to release, and none of them
knows the real end of a body that was too large.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import trio
from attrs import field, frozen
from quart.wrappers import Response
from quart.wrappers.response import ResponseBody
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout

from rollout._tasks import background_tasks
from rollout._threads import BODIES, run_off_loop
from rollout.codec import TOO_MANY, parse_json
from rollout.errors import FieldProblem, InvalidBodyError

__all__ = [
    "MAX_BODY_VALUES",
    "Answer",
    "Call",
    "EndlessBody",
    "IncomingBody",
    "RolloutHTTPConnection",
    "RolloutRequest",
    "Send",
    "drain",
    "route_path",
    "serve_call",
]

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_DRAIN_SEC = 10.0
_DRAIN_IDLE_SEC = 1.0
_DRAIN_FACTOR = 4

_LENGTH = re.compile("[0-9]{1,19}")

_SEND_SEC = 60.0
"""How long a response may take to go out once its handler is cancelled or its peer is gone."""

_LARGE_BYTES = 64 * 1024
"""Larger bodies are decoded in a thread; up to here it takes a few milliseconds."""

MAX_BODY_VALUES = 256 * 1024
"""How many JSON values a body may hold, counting those in arrays and objects.

Their number, not their size, is what later steps cost: checks, copies, garbage collection."""


class IncomingBody:
    """The body of one request while it is received.

    Attributes:
        limit: How many bytes are kept; of a larger body, none.
        received: How many bytes came in so far.
        ended: Whether the peer has sent all of it.
        too_large: Whether it exceeds the limit, by its own declaration or in fact.
    """

    def __init__(self, *, limit: int | None, declared: int | None) -> None:
        self.limit = limit
        self.received = 0
        self.ended = False
        self.too_large = limit is not None and (declared or 0) > limit
        self._data = bytearray()
        self._progress = trio.Event()

    def feed(self, message: Any) -> None:
        """Add what an ``http.request`` message brings; a body that is too large is dropped."""
        data = message.get("body", b"")
        self.received += len(data)
        if self.limit is not None and self.received > self.limit:
            self.too_large = True
        if self.too_large:
            self._data.clear()
        else:
            self._data += data
        self.ended = not message.get("more_body", False)
        self._progress.set()

    async def next_message(self) -> None:
        """Wait until another task has fed the next message."""
        self._progress = trio.Event()
        await self._progress.wait()

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[None, None]:
        """Have a disconnect cancel the block, as the task that feeds this does anyway."""
        yield

    async def read(self, timeout_sec: float | None) -> bytes:
        """Return the whole body.

        Raises:
            RequestEntityTooLarge: It exceeds the limit; the description says which.
            RequestTimeout: It took longer than *timeout_sec*.
        """
        with trio.CancelScope() as scope:
            if timeout_sec is not None:
                scope.deadline = trio.current_time() + timeout_sec
            await trio.lowlevel.checkpoint()
            while not self.too_large and not self.ended:
                await self.next_message()
        if self.too_large:
            raise RequestEntityTooLarge(f"the body exceeds {self.limit} bytes")
        if not self.ended:
            raise RequestTimeout
        return bytes(self._data)

    async def read_json(self, kind: str, timeout_sec: float | None) -> Any:
        """Read the whole body and parse it.

        Args:
            kind: The media type that it is sent as, without parameters; empty for none.
            timeout_sec: How long the body may take.

        Raises:
            InvalidBodyError: It is not declared as JSON, or is not valid JSON.
            RequestEntityTooLarge: It exceeds the limit, or holds more than `MAX_BODY_VALUES`.
            RequestTimeout: It took too long.
        """
        if kind and kind != "application/json" and not kind.endswith("+json"):
            await trio.lowlevel.checkpoint()
            raise InvalidBodyError(
                [FieldProblem((), "the body must be sent as application/json", "content_type")]
            )
        data = await self.read(timeout_sec)
        parse = partial(parse_json, data, max_values=MAX_BODY_VALUES)
        try:
            if len(data) <= _LARGE_BYTES:
                return parse()
            return await run_off_loop(parse, BODIES)
        except InvalidBodyError as error:
            if error.problems[0].type == TOO_MANY:
                raise RequestEntityTooLarge(error.problems[0].msg) from None
            raise

    async def drain(self) -> bool:
        """Read and discard the rest; ``False`` if a bound or a pause came before the end."""
        if not self.ended:
            await self._discard()
        await trio.lowlevel.checkpoint()
        return self.ended

    async def _discard(self) -> None:
        limit = (self.limit or 0) * _DRAIN_FACTOR
        with trio.move_on_after(_DRAIN_SEC), trio.CancelScope() as pause:
            while not self.ended and self.received <= limit:
                self._data.clear()
                pause.deadline = trio.current_time() + _DRAIN_IDLE_SEC
                await self.next_message()


class _PulledBody(IncomingBody):
    """A body that is received by whoever reads it; a disconnect cancels *scope*."""

    def __init__(
        self, receive: Receive, scope: trio.CancelScope, *, limit: int | None, declared: int | None
    ) -> None:
        super().__init__(limit=limit, declared=declared)
        self._receive = receive
        self._scope = scope

    async def next_message(self) -> None:
        """Receive the next message."""
        message = await self._receive()
        if message["type"] == "http.request":
            self.feed(message)
        elif message["type"] == "http.disconnect":
            self._scope.cancel()
            await trio.lowlevel.checkpoint()

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[None, None]:
        """Have a disconnect cancel the block, and what is around it."""
        async with background_tasks(self._watch):
            yield

    async def _watch(self) -> None:
        while True:
            await self.next_message()


class EndlessBody(ResponseBody):
    """A response body without an end of its own; a disconnect ends it."""


@frozen
class Answer:
    """The answer to a `Call`.

    Attributes:
        kind: The media type of the body.
        headers: Further headers.
    """

    body: bytes | EndlessBody
    status: int = 200
    kind: str = "application/json"
    headers: dict[str, str] = field(factory=dict)

    @property
    def streams(self) -> bool:
        """Whether `stream` sends it, and not `send`."""
        return isinstance(self.body, EndlessBody)

    def response(self) -> Response:
        """Return it as Quart has it."""
        response = Response(self.body, self.status, mimetype=self.kind)
        response.headers.update(self.headers)
        return response

    async def send(self, send: Send, *, close: bool) -> None:
        """Send a body of bytes, with its head; *close* asks the peer to close the connection."""
        assert isinstance(self.body, bytes)  # noqa: S101 - the other kind has an owner
        await send(self._start(close=close, length=len(self.body)))
        last = self.body
        if len(last) > _LARGE_BYTES:
            await _send_pieces(send, last)
            last = b""
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def stream(self, send: Send, body: IncomingBody) -> None:
        """Send a body without end; *body* is that of the request."""
        assert isinstance(self.body, EndlessBody)  # noqa: S101
        await send(self._start(close=False))
        async with body.watched(), self.body as pieces:
            async for piece in pieces:
                await _send_pieces(send, piece)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _start(self, *, close: bool, length: int | None = None) -> dict[str, Any]:
        headers = [(b"content-type", self.kind.encode())]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        headers += [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        if close:
            headers.append((b"connection", b"close"))
        return {"type": "http.response.start", "status": self.status, "headers": headers}


class Call:
    """A request to one of the server's own routes.

    Attributes:
        scope: Its ASGI scope.
        body: Its body.
    """

    def __init__(self, scope: Any, body: IncomingBody, body_timeout_sec: float | None) -> None:
        self.scope = scope
        self.body = body
        self._body_timeout_sec = body_timeout_sec

    def header(self, name: bytes) -> str | None:
        """Return a header by its name in lower case; of several, the first."""
        return _header(self.scope, name)

    @property
    def peer(self) -> str:
        """The address of who sent it."""
        return str((self.scope.get("client") or ["<local>"])[0])

    async def read_json(self) -> Any:
        """Read the whole body and parse it; raises what `IncomingBody.read_json` raises."""
        kind = (self.header(b"content-type") or "").partition(";")[0].strip().lower()
        return await self.body.read_json(kind, self._body_timeout_sec)

    async def run(self, handler: Handler, refuse: Refuse, send: Send) -> None:
        """Call the handler and send its answer, or what *refuse* makes of its error."""
        try:
            answer = await handler(self)
        except Exception as error:  # noqa: BLE001 - the answer says which
            answer = refuse(error, self.scope)
        ended = await self.body.drain()  # a step of the loop, in which admitted rollouts begin
        if answer.streams:
            await answer.stream(send, self.body)
        else:
            close = not ended and self.scope["http_version"].startswith("1")
            await answer.send(send, close=close)


Handler = Callable[[Call], Awaitable[Answer]]
Refuse = Callable[[Exception, Any], Answer]


async def serve_call(
    scope: Any,
    receive: Receive,
    send: Send,
    *,
    handler: Handler,
    refuse: Refuse,
    limit: int | None,
    body_timeout_sec: float | None,
) -> None:
    """Serve a request without Quart; a disconnect before its answer cancels the handler.

    Args:
        scope: The ASGI scope.
        receive: The ASGI ``receive``.
        send: The ASGI ``send``.
        handler: Answers the call.
        refuse: Returns the answer for an error of the handler.
        limit: How many bytes the body may have.
        body_timeout_sec: How long it may take.
    """
    length = _header(scope, b"content-length")
    declared = int(length) if length and _LENGTH.fullmatch(length) else None
    with trio.CancelScope() as connected:
        body = _PulledBody(receive, connected, limit=limit, declared=declared)
        if length is None and scope["http_version"] == "1.1":
            body.ended = _header(scope, b"transfer-encoding") is None
        try:
            await Call(scope, body, body_timeout_sec).run(handler, refuse, send)
        except OSError:  # the peer is gone, as other ASGI servers say it
            await trio.lowlevel.checkpoint()


def _header(scope: Any, name: bytes) -> str | None:
    for given, value in scope["headers"]:
        if given == name:
            return bytes(value).decode("latin-1")
    return None


class RolloutRequest(TrioRequest):
    """A request whose body is an `IncomingBody`."""

    def __init__(self, *args: Any, max_content_length: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, max_content_length=max_content_length, **kwargs)
        self.incoming = IncomingBody(limit=max_content_length, declared=self.content_length)

    async def get_data(  # type: ignore[override]  # the overloads differ between releases
        self,
        cache: bool = True,  # noqa: ARG002 - part of Quart's signature
        as_text: bool = False,
        parse_form_data: bool = False,  # noqa: ARG002
    ) -> bytes | str:
        """Return the body.

        Raises:
            RequestEntityTooLarge: It exceeds ``MAX_CONTENT_LENGTH``.
            RequestTimeout: It took longer than ``BODY_TIMEOUT``.
        """
        data = await self.incoming.read(self.body_timeout)
        return data.decode() if as_text else data


async def drain(request: RolloutRequest, response: Response) -> Response:
    """Make sure that a peer which still sends its body can read *response*."""
    ended = await request.incoming.drain()
    if not ended and request.http_version.startswith("1"):
        response.headers["Connection"] = "close"
    return response


class RolloutHTTPConnection(TrioASGIHTTPConnection):
    """An HTTP request that reads into an `IncomingBody` and completes its response.

    The ASGI server reports a disconnect as soon as the response is complete, while the last
    call to ``send`` is still putting the connection back to its idle state. Quart-Trio takes
    that report as a reason to cancel the handler, `send` included, and the connection would
    then never time out and hold up a shutdown. So a whole response is sent in a shield, and of
    an `EndlessBody` the last message.
    """

    async def handle_messages(  # type: ignore[override]  # as in Quart-Trio
        self, nursery: trio.Nursery, request: Any, receive: Any
    ) -> None:
        """Receive the body; a disconnect cancels the handler."""
        while True:
            message = await receive()
            if message["type"] == "http.request":
                request.incoming.feed(message)
            elif message["type"] == "http.disconnect":
                nursery.cancel_scope.cancel()
                return

    async def _send_response(self, send: Any, response: Any) -> None:
        async def send_event(event: Any) -> None:
            if event.get("body"):
                await _send_pieces(send, event["body"])
            elif event.get("more_body") is False:
                with trio.move_on_after(_SEND_SEC, shield=True):
                    await send(event)
            else:
                await send(event)

        if isinstance(response.response, EndlessBody):
            await super()._send_response(send_event, response)
        else:
            with trio.move_on_after(_SEND_SEC, shield=True):
                await super()._send_response(send_event, response)


async def _send_pieces(send: Send, data: bytes) -> None:
    """Send a part of a response in pieces of bounded size.

    The ASGI server copies each piece, and lets others run between two of them.
    """
    view = memoryview(data)
    for start in range(0, len(data), _LARGE_BYTES):
        piece = bytes(view[start : start + _LARGE_BYTES])
        await send({"type": "http.response.body", "body": piece, "more_body": True})


def route_path(path: str, raw_path: bytes | None) -> str:
    """Return the path for routing; ``/``, which has no route, if the target is not a plain path.

    Routers skip leading slashes and put a replacement character where a path is not UTF-8.
    Here every resource has one name, so no rollout is polled by a path that only resembles
    its id.

    Args:
        path: The percent-decoded path of the ASGI scope.
        raw_path: The path as it was sent, if the ASGI server gives it.
    """
    raw = None if raw_path is None else raw_path.decode("latin-1")
    plain = raw == path and path.startswith("/") and path.isascii() and "%" not in path
    if raw is not None and not plain and unquote(raw) == path:
        # Where it is not, a middleware has changed the path.
        try:
            if raw.lower().startswith(("http://", "https://")):
                raw = urlsplit(raw).path
            path = unquote_to_bytes(raw).decode("utf-8")
        except ValueError:
            return "/"
    return path if path.startswith("/") and not path.startswith("//") else "/"
