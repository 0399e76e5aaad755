"""Bodies of requests and answers, within bounds and without generators that are left open."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import suppress
from typing import cast

import httpx
import trio

from rollout.errors import RolloutProtocolError

__all__ = ["OneBody", "read_body", "unwind"]

_PIECE = 1024
"""Compressed data is decoded in pieces of this size, which may be a thousand times as large."""


class OneBody(httpx.AsyncByteStream):
    """A request body in one piece, to be sent any number of times.

    That of httpx is an async generator, which stays open when sending it is cancelled.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _Once(self._content)


class _Once:
    def __init__(self, content: bytes) -> None:
        self._left = [content]

    def __aiter__(self) -> _Once:
        return self

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop()


async def read_body(answer: httpx.Response, route: str, *, largest: int) -> httpx.Response:
    """Read the body of an answer as it comes, and decode it.

    Args:
        answer: The answer, its body not read yet.
        route: What was asked, for the error.
        largest: How many bytes it may have, as it comes and decoded.

    Raises:
        RolloutProtocolError: It has more, or it is not encoded as its header says.
        httpx.TransportError: It broke off.
    """
    pieces: list[bytes] = []
    size = 0
    # An async generator, whatever httpx declares; left open it would warn.
    data = cast("AsyncGenerator[bytes, None]", answer.aiter_raw())
    async for piece in data:
        pieces.append(piece)
        size += len(piece)
        if size > largest:
            await unwind(data)
            raise _refusal(answer, route, largest)
    return _decoded(answer, b"".join(pieces), route, largest)


def _decoded(answer: httpx.Response, body: bytes, route: str, largest: int) -> httpx.Response:
    # Not by what httpx reads with, whose generators stay open where decoding fails.
    if "Content-Encoding" in answer.headers:
        encoded = httpx.Response(answer.status_code, headers=answer.headers, stream=_Pieces(body))
        plain = bytearray()
        try:
            for piece in encoded.iter_bytes():
                plain += piece
                if len(plain) > largest:
                    raise _refusal(answer, route, largest)
        except httpx.DecodingError:
            raise _refusal(answer, route) from None
        del answer.headers["Content-Encoding"]
        body = bytes(plain)
    return httpx.Response(answer.status_code, headers=answer.headers, content=body)


def _refusal(
    answer: httpx.Response, route: str, largest: int | None = None
) -> RolloutProtocolError:
    what = "that is not encoded as its header says"
    if largest is not None:
        what = f"of more than {largest >> 20} MiB"
    return RolloutProtocolError(
        f"{route} answered with a body {what}", status_code=answer.status_code
    )


class _Pieces(httpx.SyncByteStream):
    def __init__(self, body: bytes) -> None:
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._body), _PIECE):
            yield self._body[start : start + _PIECE]


async def unwind(data: AsyncGenerator[bytes, None]) -> None:
    """End a chain of generators, in whatever state it is.

    Closing the outermost one leaves those inside of it open, which are httpx's; an exception
    that comes from the innermost ends them all.
    """
    with trio.CancelScope() as scope, suppress(httpx.HTTPError, httpx.StreamError):
        scope.cancel()
        async for _ in data:
            pass
