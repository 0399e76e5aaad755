"""Bodies of requests and answers, within bounds and without generators that are left open."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import suppress
from typing import cast

import httpx
import trio

__all__ = ["OneBody", "TooLargeError", "decoded", "read_pieces", "unwind"]

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


class TooLargeError(Exception):
    """A body is larger than any that is read."""


async def read_pieces(answer: httpx.Response, largest: int) -> list[bytes]:
    """Read the body of an answer as it comes.

    Raises:
        TooLargeError: It has more than *largest* bytes.
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
            raise TooLargeError
    return pieces


def decoded(answer: httpx.Response, pieces: list[bytes], largest: int) -> httpx.Response:
    """Return an answer with its body decoded.

    Raises:
        TooLargeError: It has more than *largest* bytes then.
        httpx.DecodingError: It is not encoded as its header says.
    """
    body = b"".join(pieces)
    if "Content-Encoding" not in answer.headers:
        return httpx.Response(answer.status_code, headers=answer.headers, content=body)
    encoded = httpx.Response(answer.status_code, headers=answer.headers, stream=_Pieces(body))
    plain = bytearray()
    for piece in encoded.iter_bytes():
        plain += piece
        if len(plain) > largest:
            raise TooLargeError
    del answer.headers["Content-Encoding"]
    return httpx.Response(answer.status_code, headers=answer.headers, content=bytes(plain))


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
