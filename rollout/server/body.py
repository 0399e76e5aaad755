"""Read request bodies: bounded, and to their end even when they are refused.

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

import trio
from quart.wrappers import Response
from quart_trio.wrappers import TrioRequest
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout

from rollout._threads import BODIES, run_off_loop
from rollout.codec import TOO_MANY, parse_json
from rollout.errors import FieldProblem, InvalidBodyError

__all__ = [
    "MAX_BODY_VALUES",
    "IncomingBody",
    "RolloutRequest",
    "drain",
    "receive_into",
    "send_body",
]

_DRAIN_SEC = 10.0
_DRAIN_IDLE_SEC = 1.0
_DRAIN_FACTOR = 4

_LARGE_BYTES = 64 * 1024
"""Larger bodies are decoded in a thread; up to here it takes a few milliseconds."""

MAX_BODY_VALUES = 256 * 1024
"""How many JSON values a body may hold, counting those in arrays and objects.

Their number, not their size, is what later steps cost: checks, copies, garbage collection."""


class IncomingBody:
    """The body of one request, as it comes in.

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
        """Take a piece; once there is too much, keep nothing."""
        self.received += len(data)
        if self.limit is not None and self.received > self.limit:
            self.too_large = True
        if self.too_large:
            self._data.clear()
        else:
            self._data += data
        self._notify()

    def finish(self) -> None:
        """Take the end."""
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

    async def drain(self, limit: int) -> bool:
        """Read on and throw away; ``False`` when *limit* bytes or a pause came before the end."""
        with trio.CancelScope() as pause:
            while not self.ended.is_set() and self.received <= limit:
                self._data.clear()
                pause.deadline = trio.current_time() + _DRAIN_IDLE_SEC
                await self._progress.wait()
        await trio.lowlevel.checkpoint()
        return self.ended.is_set()

    async def drain_bounded(self) -> bool:
        """Do as `drain` within the usual bounds of size and time."""
        if self.ended.is_set():
            await trio.lowlevel.checkpoint()
            return True
        with trio.move_on_after(_DRAIN_SEC):
            await self.drain((self.limit or 0) * _DRAIN_FACTOR)
        return self.ended.is_set()


async def receive_into(body: IncomingBody, receive: Any, scope: trio.CancelScope) -> None:
    """Take what a peer sends, until it disconnects; that cancels *scope*."""
    while True:
        message = await receive()
        if message["type"] == "http.request":
            body.feed(message.get("body", b""))
            if not message.get("more_body", False):
                body.finish()
        elif message["type"] == "http.disconnect":
            scope.cancel()
            return


async def send_body(send: Any, data: bytes) -> None:
    """Send a part of a response, a large one in pieces.

    The ASGI server copies each piece, and lets others run between two of them.
    """
    view = memoryview(data)
    for start in range(0, len(data), _LARGE_BYTES):
        piece = bytes(view[start : start + _LARGE_BYTES])
        await send({"type": "http.response.body", "body": piece, "more_body": True})


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
    """See to it that *response* can be read by a peer that still sends its body."""
    ended = await request.incoming.drain_bounded()
    if not ended and request.http_version.startswith("1"):
        response.headers["Connection"] = "close"
    return response
