"""Connections to model endpoints, which a server process shares.

Theory of operation: the TLS context and the connection pool of an HTTP client cost tens of
milliseconds, the client around them some microseconds. So there is one
context per process, and one set of pools per `share_connections`, which closes them at its end.
Outside of such a block nothing would close a pool, so a connection ends with its response.

On the asyncio side of a bridge, pools belong to a loop and are shared by all rollouts. They are
kept by an asynchronous generator: a loop closes its generators once its tasks have ended, so the
end of the bridge closes the pools when nobody uses them any more.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import httpx
import trio
from attrs import define, field

from rollout._http import SpreadTransport, library_of, limits_of_pools, proxy_for, tls_context

__all__ = [
    "Connections",
    "current_connections",
    "fastest_library",
    "loop_connections",
    "share_connections",
    "timeouts",
]

_CONNECT_TIMEOUT_SEC = 30.0

_tls = cache(tls_context)
_shared: ContextVar[Connections | None] = ContextVar("model_connections", default=None)


@define(eq=False)
class Connections:
    """Unbounded pools of connections, one set for each library, scheme and proxy.

    Attributes:
        kept: Whether a connection outlives its response.
    """

    kept: bool
    _pools: dict[tuple[Any, str, str | None], SpreadTransport] = field(factory=dict)
    _of_hosts: dict[tuple[Any, str, str], SpreadTransport] = field(factory=dict)
    _transports: dict[str, httpx.AsyncBaseTransport] = field(factory=dict)

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request over a pool of the library that it was made with, httpx or httpx2."""
        url = request.url
        if self._transports and url.host in self._transports:
            return await self._transports[url.host].handle_async_request(request)
        place = library_of(request), url.scheme, url.host
        pools = self._of_hosts.get(place)
        if pools is None:
            pools = self.pools(url.scheme, proxy_for(str(url)), library=place[0])
            self._of_hosts[place] = pools
        return await pools.handle_async_request(request)

    def answer_for(self, host: str, transport: httpx.AsyncBaseTransport) -> None:
        """Hand requests to a host to a transport instead of the network, over plain HTTP."""
        self._transports[host] = transport

    def pools(self, scheme: str, proxy: str | None, *, library: Any) -> SpreadTransport:
        """Return the pools of a library for a scheme and a proxy, ``None`` for none."""
        found = self._pools.get((library, scheme, proxy))
        if found is None:
            # A transport of its own asks the environment for nothing.
            verify, limits = _tls(f"{scheme}:"), limits_of_pools(kept=self.kept)
            found = self._pools[library, scheme, proxy] = SpreadTransport(
                lambda: library.AsyncHTTPTransport(verify=verify, limits=limits, proxy=proxy)
            )
        return found

    @property
    def in_flight(self) -> list[int]:
        """How many requests each pool has in flight."""
        return [count for pools in self._pools.values() for count in pools.in_flight]

    async def close_pools(self) -> None:
        """Close every pool, on trio or asyncio. Connections of later requests are not kept."""
        self.kept = False
        left = list(self._pools.values())
        self._pools.clear()
        self._of_hosts.clear()
        for pools in left:
            await pools.aclose()

    async def aclose(self) -> None:
        """Close every pool, on trio, whatever is cancelled."""
        with trio.CancelScope(shield=True):
            await self.close_pools()
        await trio.lowlevel.checkpoint()


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
    """Return the connections of `share_connections`, else some that end with their responses."""
    return _shared.get() or Connections(kept=False)


@cache
def fastest_library() -> Any:
    """Return httpx2 where it is installed, since its pools cost less, or httpx."""
    try:
        return importlib.import_module("httpx2")
    except ModuleNotFoundError:
        return httpx


def timeouts(timeout_sec: float | None, library: Any) -> Any:
    """Return how long a call may wait: for each part of its answer, never for the pool.

    Args:
        timeout_sec: For each part of its answer, in seconds.
        library: Whose ``Timeout`` it is, httpx or httpx2.
    """
    connect = _CONNECT_TIMEOUT_SEC
    if timeout_sec is not None:
        connect = min(timeout_sec, connect)
    return library.Timeout(timeout_sec, connect=connect, pool=None)


_of_loops: dict[asyncio.AbstractEventLoop, tuple[Connections, AsyncGenerator[None, None]]] = {}


async def loop_connections() -> Connections:
    """Return the connections of the running asyncio loop, which are closed with it."""
    loop = asyncio.get_running_loop()
    found = _of_loops.get(loop)
    if found is None:
        connections = Connections(kept=True)
        keeper = _until_closed(loop, connections)
        found = _of_loops[loop] = connections, keeper
        await anext(keeper)
    return found[0]


async def _until_closed(
    loop: asyncio.AbstractEventLoop, connections: Connections
) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        del _of_loops[loop]
        await connections.close_pools()
