"""A raw HTTP/1.1 server on a loopback socket, for faults that need a wire."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import httpx
import trio
from attrs import define, field


@define(eq=False)
class RawRequest:
    """One request, the connection it came on, and the server that it came to."""

    server: RawServer
    stream: trio.SocketStream
    connection: int
    method: str
    path: str
    body: bytes

    async def answer(self, response: httpx.Response, *, close: bool = False) -> None:
        """Send a response; close the connection afterwards without a word, if asked to."""
        await self.stream.send_all(encode(response))
        if close:
            await self.stream.aclose()


Handler = Callable[[RawRequest], Awaitable[None]]


@define(eq=False)
class RawServer:
    """Calls its handler for every request; counts connections."""

    handler: Handler
    url: str = ""
    connections: int = 0
    requests: list[str] = field(factory=list)

    async def _serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        number = self.connections
        try:
            async with stream:
                buffer = b""
                while True:
                    while b"\r\n\r\n" not in buffer:
                        data = await stream.receive_some()
                        if not data:
                            return
                        buffer += data
                    head, buffer = buffer.split(b"\r\n\r\n", 1)
                    lines = head.decode("latin-1").split("\r\n")
                    method, path, _ = lines[0].split(" ")
                    length = next(
                        (
                            int(v)
                            for k, v in (line.split(": ", 1) for line in lines[1:])
                            if k.lower() == "content-length"
                        ),
                        0,
                    )
                    while len(buffer) < length:
                        buffer += await stream.receive_some()
                    body, buffer = buffer[:length], buffer[length:]
                    self.requests.append(f"{method} {path}")
                    await self.handler(RawRequest(self, stream, number, method, path, body))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return  # the peer has gone, or the handler has closed the connection


@asynccontextmanager
async def raw_server(handler: Handler) -> AsyncGenerator[RawServer, None]:
    """Serve on a free loopback port for the length of the block."""
    server = RawServer(handler)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, server._serve, 0, host="127.0.0.1"))
        server.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        yield server
        nursery.cancel_scope.cancel()


def encode(response: httpx.Response) -> bytes:
    """Write a response as it goes over the wire."""
    lines = [
        f"HTTP/1.1 {response.status_code} X",
        *(f"{k}: {v}" for k, v in response.headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + response.content


def id_of(request: RawRequest) -> str:
    """The rollout that an admission or a poll is about."""
    if request.method == "POST":
        return str(json.loads(request.body)["rollout_id"])
    return request.path.split("/")[2]
