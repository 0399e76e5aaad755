"""HTTP as the client uses it: base URL, credentials, connections, and bodies within bounds."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import suppress
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import httpx
import trio

from rollout._http import SpreadTransport, limits_of_pools, proxy_for, tls_context
from rollout._threads import BODIES, run_off_loop
from rollout.errors import InvalidFieldError, RolloutProtocolError

__all__ = [
    "LARGE_BODY",
    "BearerAuth",
    "OneBody",
    "check_url",
    "own_http_client",
    "read_body",
    "secrets_of",
    "unwind",
]

_CONNECT_TIMEOUT_SEC = 10.0
_REQUEST_TIMEOUT_SEC = 60.0
_PIECE = 1024
"""Compressed data is decoded in pieces of this size, which may be a thousand times as large."""

LARGE_BODY = 64 * 1024
"""Larger compressed bodies are decoded in a thread."""


def check_url(url: str) -> tuple[str, httpx.BasicAuth | None]:
    """Split a base URL into URL, without trailing slash, and credentials.

    Kept in the URL, a password would stand in every line that logs a request.

    Raises:
        InvalidFieldError: It is not an ``http`` or ``https`` URL with a host, or has a query.
    """
    if not isinstance(url, str):
        raise InvalidFieldError("url", "must be a string", kind="type_error")
    try:
        parsed = httpx.URL(url)
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except (ValueError, httpx.InvalidURL):
        # Without the reason, which may quote a part of a password.
        raise InvalidFieldError("url", "cannot be read as a URL") from None
    if parsed.scheme not in {"http", "https"} or not host or not parsed.host:
        raise InvalidFieldError("url", "must be an http:// or https:// URL with a host")
    if any(character.isspace() for character in parts.netloc):
        raise InvalidFieldError("url", "has white space in its host")
    if "?" in url or "#" in url:
        raise InvalidFieldError("url", "must have no query and no fragment")
    if not parsed.userinfo:
        return url.rstrip("/"), None
    plain = str(parsed.copy_with(userinfo=b"")).rstrip("/")
    return plain, httpx.BasicAuth(parsed.username, parsed.password)


def own_http_client(url: str, *, unix_path: str | None = None) -> httpx.AsyncClient:
    """Make an HTTP client for long polls.

    As many connections as there are polls, since a capped pool starves the rollouts beyond
    the cap; no waiting for the pool; idle connections are dropped before a server drops them;
    and no proxy from the environment stands between this process and its own machine.

    Args:
        url: The base URL of the server.
        unix_path: The path of the socket that it listens on, if not that of the URL.

    Raises:
        InvalidFieldError: The certificates that the environment names cannot be read.
    """
    limits = limits_of_pools()
    context = tls_context(url)
    transport: httpx.AsyncBaseTransport | None = None
    if unix_path is not None or proxy_for(url) is None:
        # With a transport of its own httpx asks the environment for nothing.
        transport = SpreadTransport(
            lambda: httpx.AsyncHTTPTransport(verify=context, limits=limits, uds=unix_path)
        )
    return httpx.AsyncClient(
        transport=transport,
        verify=context,
        limits=limits,
        timeout=httpx.Timeout(_REQUEST_TIMEOUT_SEC, connect=_CONNECT_TIMEOUT_SEC, pool=None),
        follow_redirects=False,
    )


class BearerAuth(httpx.Auth):
    """Sends the API key, whatever authentication the user's own HTTP client is set to."""

    def __init__(self, api_key: str) -> None:
        self._header = f"Bearer {api_key}"

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Put the key in place of any other authorization."""
        request.headers["Authorization"] = self._header
        yield request


def secrets_of(credentials: httpx.BasicAuth | None) -> list[str]:
    """Return the forms of credentials that a server may repeat: the password, and both encoded."""
    if credentials is None:
        return []
    request = next(credentials.auth_flow(httpx.Request("GET", "http://localhost")))
    encoded = request.headers["Authorization"].removeprefix("Basic ")
    password = base64.b64decode(encoded).decode("utf-8", "replace").partition(":")[2]
    return [encoded, password]


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
    decode = partial(_decoded, answer, b"".join(pieces), route, largest)
    if size > LARGE_BODY and "Content-Encoding" in answer.headers:
        return await run_off_loop(decode, BODIES)
    return decode()


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
