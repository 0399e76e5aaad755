"""Requests and responses between the ASGI server and the application.

An answer that goes out while the peer is still sending stalls: most clients read nothing
before they have written everything. So a refused body is read on and thrown away, up to a
bound of size and time, or until the peer stops sending (it may be waiting for the answer);
past the bound the connection is closed after the answer.

Quart's own body object is left out: it differs from release to release, and none of them
knows the real end of a body that was too large.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import trio
from quart.wrappers import Response
from quart.wrappers.response import ResponseBody
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout

from rollout._threads import BODIES, run_off_loop
from rollout.codec import TOO_MANY, parse_json
from rollout.errors import FieldProblem, InvalidBodyError

__all__ = [
    "MAX_BODY_VALUES",
    "EndlessBody",
    "IncomingBody",
    "RolloutHTTPConnection",
    "RolloutRequest",
    "drain",
    "route_path",
]

_DRAIN_SEC = 10.0
_DRAIN_IDLE_SEC = 1.0
_DRAIN_FACTOR = 4

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
        ended: Set once the peer has sent all of it.
        too_large: Whether it exceeds the limit, by its own declaration or in fact.
    """

    def __init__(self, *, limit: int | None, declared: int | None) -> None:
        self.limit = limit
        self.received = 0
        self.ended = trio.Event()
        self.too_large = limit is not None and (declared or 0) > limit
        self._data = bytearray()
        self._progress = trio.Event()

    def feed(self, data: bytes) -> None:
        """Add a received piece; a body that is too large is dropped."""
        self.received += len(data)
        if self.limit is not None and self.received > self.limit:
            self.too_large = True
        if self.too_large:
            self._data.clear()
        else:
            self._data += data
        self._notify()

    def finish(self) -> None:
        """Mark the body as complete."""
        self.ended.set()
        self._notify()

    def _notify(self) -> None:
        self._progress.set()
        self._progress = trio.Event()

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
            while not self.too_large and not self.ended.is_set():
                await self._progress.wait()
        if self.too_large:
            raise RequestEntityTooLarge(f"the body exceeds {self.limit} bytes")
        if not self.ended.is_set():
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
        if self.ended.is_set():
            await trio.lowlevel.checkpoint()
            return True
        limit = (self.limit or 0) * _DRAIN_FACTOR
        with trio.move_on_after(_DRAIN_SEC), trio.CancelScope() as pause:
            while not self.ended.is_set() and self.received <= limit:
                self._data.clear()
                pause.deadline = trio.current_time() + _DRAIN_IDLE_SEC
                await self._progress.wait()
        await trio.lowlevel.checkpoint()
        return self.ended.is_set()


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


class EndlessBody(ResponseBody):
    """A response body without an end of its own; a disconnect ends it."""


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
                request.incoming.feed(message.get("body", b""))
                if not message.get("more_body", False):
                    request.incoming.finish()
            elif message["type"] == "http.disconnect":
                nursery.cancel_scope.cancel()
                return

    async def _send_response(self, send: Any, response: Any) -> None:
        async def send_event(event: Any) -> None:
            if event.get("body"):
                await _send_body(send, event["body"])
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


async def _send_body(send: Any, data: bytes) -> None:
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
    if raw is not None and unquote(raw) == path:  # else a middleware has changed the path
        try:
            if raw.lower().startswith(("http://", "https://")):
                raw = urlsplit(raw).path
            path = unquote_to_bytes(raw).decode("utf-8")
        except ValueError:
            return "/"
    return path if path.startswith("/") and not path.startswith("//") else "/"
