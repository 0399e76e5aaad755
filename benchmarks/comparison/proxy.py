"""A TCP proxy that counts: connections, bytes each way, and HTTP/1.1 requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import trio
from attrs import asdict, define

_MARK = b" HTTP/1.1\r\n"
"""The end of a request line. The jobs send no body that has it in it."""


@define
class Counts:
    """What has passed through."""

    connections: int = 0
    requests: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@asynccontextmanager
async def counting_proxy(url: str) -> AsyncGenerator[tuple[str, Counts], None]:
    """Stand in front of the server at *url* for the length of the block."""
    target = urlsplit(url)
    assert target.hostname is not None
    assert target.port is not None
    host, port = target.hostname, target.port
    counts = Counts()

    async def forward(client: trio.SocketStream) -> None:
        counts.connections += 1
        async with await trio.open_tcp_stream(host, port) as server, trio.open_nursery() as both:
            both.start_soon(_copy_up, client, server, counts)
            both.start_soon(_copy_down, server, client, counts)

    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, forward, 0, host="127.0.0.1", backlog=1024)
        listeners = await nursery.start(serve)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", counts
        nursery.cancel_scope.cancel()


async def _copy_up(source: trio.SocketStream, sink: trio.SocketStream, counts: Counts) -> None:
    rest = b""

    def count(data: bytes | bytearray) -> None:
        nonlocal rest
        counts.bytes_up += len(data)
        seen = rest + data
        counts.requests += seen.count(_MARK)
        rest = seen[-len(_MARK) + 1 :]

    await _copy(source, sink, count)


async def _copy_down(source: trio.SocketStream, sink: trio.SocketStream, counts: Counts) -> None:
    def count(data: bytes | bytearray) -> None:
        counts.bytes_down += len(data)

    await _copy(source, sink, count)


async def _copy(
    source: trio.SocketStream, sink: trio.SocketStream, count: Callable[[bytes | bytearray], None]
) -> None:
    """Pass on what comes, and the end of it, also where one side ends in the middle."""
    try:
        async for data in source:
            count(data)
            await sink.send_all(data)
        await sink.send_eof()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        await sink.aclose()
