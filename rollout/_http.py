"""Shared parts of HTTP clients: connection pools, proxies and TLS contexts.

The work of an httpx pool for each request grows with the requests that it has in flight, so a
thousand long polls in one pool cost a million steps. With `SpreadTransport` a pool takes a few
dozen, and the next one is made when all are full. The first pools are filled first, so that
connections are used again when the load goes down.

httpx2 carries httpx on under another name. Its pools do less work for each request, though still
more for a full pool, and its classes have the same methods. So code that handles requests and
responses works with either library; only exceptions and the base classes of streams have to be
those of the library whose client made the request, which `library_of` tells.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
from attrs import define

from rollout.errors import InvalidFieldError

__all__ = [
    "SpreadTransport",
    "is_loopback",
    "is_loopback_host",
    "library_of",
    "limits_of_pools",
    "proxy_for",
    "stream_class",
    "tls_context",
]

S = TypeVar("S")

_stream_classes: dict[tuple[type, type], type] = {}

REQUESTS_PER_POOL = 32

_KEPT_CONNECTIONS = 32
"""In each pool. httpcore counts all of them for each, so many of them cost much."""

_KEEP_ALIVE_EXPIRY_SEC = 4.0
"""Below the five seconds after which common servers close an idle connection."""

_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that name trusted certificates; the first that is set counts."""
_KEY_LOG = "SSLKEYLOGFILE"

_LOOPBACK_NAMES = frozenset(
    {
        "localhost",
        "localhost.localdomain",
        "localhost4",
        "localhost6",
        "localhost6.localdomain6",
        "ip6-localhost",
        "ip6-loopback",
    }
)


def library_of(message: httpx.Request | httpx.Response) -> Any:
    """Return the module that a request or a response is of: httpx or httpx2."""
    return sys.modules[type(message).__module__.partition(".")[0]]


def stream_class(kind: type[S], base: type) -> type[S]:
    """Return a class as a subclass of a library's stream, which the library's clients insist on.

    Args:
        kind: A class of streams.
        base: ``AsyncByteStream`` or ``SyncByteStream`` of httpx or httpx2.
    """
    made = _stream_classes.get((kind, base))
    if made is None:
        made = kind if issubclass(kind, base) else type(kind.__name__, (kind, base), {})
        _stream_classes[kind, base] = made
    return cast("type[S]", made)


def limits_of_pools(*, kept: bool = True) -> httpx.Limits:
    """Return the limits for a pool: no bound on its connections, since those beyond it starve.

    Args:
        kept: Whether a connection outlives its response.
    """
    return httpx.Limits(
        max_connections=None,
        max_keepalive_connections=_KEPT_CONNECTIONS if kept else 0,
        keepalive_expiry=_KEEP_ALIVE_EXPIRY_SEC,
    )


@define(eq=False)
class _Pool:
    transport: httpx.AsyncBaseTransport
    in_flight: int = 0


class _CountedStream(httpx.AsyncByteStream):
    """The body of a response; its request is in flight until it is closed."""

    def __init__(self, stream: httpx.AsyncByteStream, pool: _Pool) -> None:
        self._stream = stream
        self._pool: _Pool | None = pool

    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._stream)

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            if self._pool is not None:
                self._pool.in_flight -= 1
                self._pool = None


class SpreadTransport(httpx.AsyncBaseTransport):
    """An httpx transport over as many pools as it takes.

    Args:
        make_pool: Makes one pool.
    """

    def __init__(self, make_pool: Callable[[], httpx.AsyncBaseTransport]) -> None:
        self._make_pool = make_pool
        self._pools: list[_Pool] = []

    @property
    def in_flight(self) -> list[int]:
        """How many requests each pool has in flight."""
        return [pool.in_flight for pool in self._pools]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request through the first pool that has room."""
        pool = self._pool_with_room()
        pool.in_flight += 1
        handed_over = False
        try:
            response = await pool.transport.handle_async_request(request)
            stream, base = response.stream, library_of(response).AsyncByteStream
            if isinstance(stream, base) and not response.is_stream_consumed:
                counted = stream_class(_CountedStream, base)
                response.stream = counted(cast("httpx.AsyncByteStream", stream), pool)
                handed_over = True
            return response
        finally:
            if not handed_over:
                pool.in_flight -= 1

    def _pool_with_room(self) -> _Pool:
        for pool in self._pools:
            if pool.in_flight < REQUESTS_PER_POOL:
                return pool
        self._pools.append(_Pool(self._make_pool()))
        return self._pools[-1]

    async def aclose(self) -> None:
        """Close every pool."""
        for pool in self._pools:
            await pool.transport.aclose()


def is_loopback(url: str) -> bool:
    """Whether a URL leads to this machine itself."""
    return is_loopback_host(_host(url))


def is_loopback_host(host: str) -> bool:
    """Whether a host means the machine that says it: by its name or its number alone.

    The address of all interfaces, ``0.0.0.0`` or ``::``, counts: it is for listening, and whoever
    connects to it reaches itself.
    """
    name = host.strip("[]").rstrip(".").lower()
    if name in _LOOPBACK_NAMES or name.endswith(".localhost"):
        return True
    address = _address(name)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address is not None and (address.is_loopback or address.is_unspecified)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        pass
    try:
        # Older ways to write one, as 127.1 or 0x7f000001, which resolvers still take.
        return ipaddress.IPv4Address(socket.inet_aton(name))
    except (OSError, ValueError):
        return None


def proxy_for(url: str) -> str | None:
    """Return the proxy that the environment names for a URL, ``None`` if the way is direct."""
    if is_loopback(url):
        return None
    proxies = getproxies()
    proxy = proxies.get(urlsplit(url).scheme) or proxies.get("all")
    return None if not proxy or proxy_bypass(_host(url)) else proxy


def _host(url: str) -> str:
    return (urlsplit(url).hostname or "").rstrip(".")


def tls_context(url: httpx.URL | str) -> ssl.SSLContext:
    """Return a TLS context for the server at a URL; for plain http, one that trusts nobody.

    Raises:
        InvalidFieldError: A file that the environment names cannot be used.
    """
    if httpx.URL(url).scheme == "http":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        if error.filename is not None and error.filename == os.environ.get(_KEY_LOG):
            reason = f"names a file that cannot be written: {error.strerror}"
            raise InvalidFieldError(_KEY_LOG, reason) from error
        named = next((name for name in _CERTIFICATES if os.environ.get(name)), "the system")
        raise InvalidFieldError(
            named, f"names certificates that cannot be read: {error}"
        ) from error
