"""Connections to model endpoints, which a server process shares.

Theory of operation: what is expensive about an HTTP client is its TLS context and its pool of
connections, tens of milliseconds; the client around them costs some microseconds. So there is one
context per process, and one set of pools per `share_connections`, which closes them at its end.
Where nobody has opened such a block nobody would close a pool either: there, a connection ends
with its response.

What a pool of httpx does for each request takes time in proportion to the requests that it has in
flight, so each takes a few dozen and the next one is made when all are full.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import cache
from ssl import SSLContext
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
import trio
from attrs import define, field

__all__ = ["Connections", "current_connections", "share_connections", "timeouts"]

_CONNECT_TIMEOUT_SEC = 30.0

_KEPT_CONNECTIONS = 32
_KEEP_ALIVE_EXPIRY_SEC = 4.0
"""Below the five seconds after which many servers drop an idle connection."""

_REQUESTS_PER_POOL = 32

_shared: ContextVar[Connections | None] = ContextVar("model_connections", default=None)


@cache
def _tls() -> SSLContext:
    return httpx.create_ssl_context()


@define(eq=False)
class _Pool:
    transport: httpx.AsyncHTTPTransport
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


@define(eq=False)
class Connections:
    """Pools of connections, without a bound, for each way to an endpoint.

    Attributes:
        kept: Whether a connection outlives its response.
    """

    kept: bool
    _pools: dict[str | None, list[_Pool]] = field(factory=dict)

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        proxy = _proxy_for(str(request.url))
        pool = self._pool(proxy)
        pool.in_flight += 1
        handed_over = False
        try:
            response = await pool.transport.handle_async_request(request)
            stream = cast("httpx.AsyncByteStream", response.stream)
            response.stream = _CountedStream(stream, pool)
            handed_over = True
            return response
        finally:
            if not handed_over:
                pool.in_flight -= 1

    def _pool(self, proxy: str | None) -> _Pool:
        pools = self._pools.setdefault(proxy, [])
        for pool in pools:
            if pool.in_flight < _REQUESTS_PER_POOL:
                return pool
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=_KEPT_CONNECTIONS if self.kept else 0,
            keepalive_expiry=_KEEP_ALIVE_EXPIRY_SEC,
        )
        # A transport of its own asks the environment for nothing.
        options: dict[str, Any] = {} if proxy is None else {"proxy": proxy}
        pools.append(_Pool(httpx.AsyncHTTPTransport(verify=_tls(), limits=limits, **options)))
        return pools[-1]

    async def aclose(self) -> None:
        """Close every pool. A request that comes later gets a connection that nobody keeps."""
        self.kept = False
        pools = [pool for group in self._pools.values() for pool in group]
        self._pools.clear()
        with trio.CancelScope(shield=True):
            for pool in pools:
                await pool.transport.aclose()
        await trio.lowlevel.checkpoint()


def _proxy_for(url: str) -> str | None:
    """Return the proxy that the environment names for a URL; never one to this machine itself."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    if _is_loopback(host):
        return None
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return None if not proxy or proxy_bypass(host) else proxy


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # Connecting to 0.0.0.0 or :: reaches this machine too.
    return address.is_loopback or address.is_unspecified


@asynccontextmanager
async def share_connections(app: object = None) -> AsyncGenerator[None, None]:
    """Share connections to model endpoints within the block, and close them at its end.

    For the lifespan of a rollout server, whose workflows then use them::

        app = create_rollout_server(backend=backend, lifespan=share_connections)

    Without it everything works as well, but each call opens a connection of its own.

    Args:
        app: Ignored; lifespans are called with it.
    """
    del app
    connections = Connections(kept=True)
    previous = _shared.get()
    _shared.set(connections)
    try:
        yield
    finally:
        if _shared.get() is connections:
            _shared.set(previous)
        await connections.aclose()


def current_connections() -> Connections:
    """Return what `share_connections` has opened around here, else connections that end soon."""
    return _shared.get() or Connections(kept=False)


def timeouts(timeout_sec: float | None) -> httpx.Timeout:
    """Return how long a call may wait: for each part of its answer, never for the pool."""
    connect = _CONNECT_TIMEOUT_SEC
    if timeout_sec is not None:
        connect = min(timeout_sec, connect)
    return httpx.Timeout(timeout_sec, connect=connect, pool=None)
