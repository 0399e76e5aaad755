"""Read request bodies: bounded, and to their end even when they are refused.

An answer that goes out while the peer is still sending stalls: most clients read nothing
before they have written everything. So a refused body is read on and thrown away, up to a
bound of size and time; past the bound the connection is closed after the answer.
"""

from __future__ import annotations

import trio
from quart.wrappers import Response
from quart_trio.wrappers import TrioRequest
from quart_trio.wrappers.request import TrioBody
from werkzeug.exceptions import RequestEntityTooLarge

__all__ = ["BoundedBody", "RolloutRequest", "drain"]

_DRAIN_SEC = 10.0
_DRAIN_FACTOR = 4


class BoundedBody(TrioBody):
    """A request body that keeps at most its maximum, and knows when it has really ended."""

    def __init__(self, expected_content_length: int | None, max_content_length: int | None) -> None:
        super().__init__(expected_content_length, max_content_length)
        self.received = 0
        self.ended = trio.Event()
        self._progress = trio.Event()

    def append(self, data: bytes) -> None:
        """Take a piece; once there is too much, keep nothing."""
        self.received += len(data)
        self._progress.set()
        self._progress = trio.Event()
        limit = self._max_content_length
        if self._must_raise is None and limit is not None and self.received > limit:
            self._must_raise = RequestEntityTooLarge()
            self._complete.set()
            self._has_data.set()
        if self._must_raise is not None:
            self._data.clear()
            return
        super().append(data)

    def set_complete(self) -> None:
        """Take the end of the body."""
        super().set_complete()
        self.ended.set()
        self._progress.set()

    async def drain(self, limit: int) -> bool:
        """Read on until the end, and throw away; ``False`` when *limit* bytes came first."""
        while not self.ended.is_set() and self.received <= limit:
            self._data.clear()
            await self._progress.wait()
        await trio.lowlevel.checkpoint()
        return self.ended.is_set()


class RolloutRequest(TrioRequest):
    """A request with a bounded body."""

    body_class = BoundedBody


async def drain(request: RolloutRequest, response: Response) -> Response:
    """See to it that *response* can be read by a peer that still sends its body."""
    body = request.body
    if not isinstance(body, BoundedBody) or body.ended.is_set():
        await trio.lowlevel.checkpoint()
        return response
    ended = False
    limit = (request.max_content_length or 0) * _DRAIN_FACTOR
    with trio.move_on_after(_DRAIN_SEC):
        ended = await body.drain(limit)
    if not ended and request.http_version.startswith("1"):
        response.headers["Connection"] = "close"
    return response
