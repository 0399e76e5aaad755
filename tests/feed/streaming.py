"""Streamed answers in process, for tests on a MockClock: httpx's own ASGI transport has none."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import httpx
import trio
from attrs import define, field

from rollout.client import RolloutClient
from rollout.client.wire import Wire
from rollout.server import RolloutServer

URL = "http://rollouts.test"


@define(eq=False)
class _Exchange(httpx.AsyncByteStream):
    """One request to an application, and its answer as it comes."""

    body: bytes
    room: float
    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(factory=list)
    started: trio.Event = field(factory=trio.Event)
    gone: trio.Event = field(factory=trio.Event)
    broken: bool = False
    failure: BaseException | None = None
    _asked: bool = False
    _into: Any = None
    _out: Any = None

    def __attrs_post_init__(self) -> None:
        self._into, self._out = trio.open_memory_channel[bytes](self.room)

    async def run(self, app: Any, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            self.failure = error
        finally:
            self._into.close()
            self.started.set()

    async def _receive(self) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
            self.started.set()
            await trio.lowlevel.checkpoint()
            return
        try:
            if message.get("body"):
                await self._into.send(message["body"])
            else:
                await trio.lowlevel.checkpoint()
        except trio.BrokenResourceError:
            await trio.lowlevel.checkpoint()
        if not message.get("more_body"):
            self._into.close()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._out:
            yield data
        if self.broken:
            raise httpx.ReadError("cut")

    async def aclose(self) -> None:
        self.gone.set()
        await self._out.aclose()


@define(eq=False)
class StreamingTransport(httpx.AsyncBaseTransport):
    """Calls an application in a nursery.

    Attributes:
        room: How many pieces of an answer fit between the application and its caller.
        requests: What was asked, as ``POST /path``.
        down: What every request fails with, if anything.
        hold: Answers that are no streams wait for it.
    """

    app: Any
    nursery: trio.Nursery
    room: float = 0
    requests: list[str] = field(factory=list)
    down: Exception | None = None
    hold: trio.Event | None = None
    _streams: list[_Exchange] = field(factory=list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = b"".join([data async for data in request.stream])  # type: ignore[union-attr]
        await trio.lowlevel.checkpoint()
        path = request.url.path
        self.requests.append(f"{request.method} {path}")
        if self.down is not None:
            raise self.down
        exchange = _Exchange(body, self.room)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(k.lower(), v) for k, v in request.headers.raw],
            "scheme": request.url.scheme,
            "path": path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "server": (request.url.host, 80),
            "client": ("127.0.0.1", 1),
            "root_path": "",
        }
        self.nursery.start_soon(exchange.run, self.app, scope)
        try:
            await exchange.started.wait()
        except BaseException:
            exchange.gone.set()
            raise
        if exchange.failure is not None:
            raise exchange.failure
        if path.endswith(("/feed", "/live")):
            self._streams.append(exchange)
        elif self.hold is not None:
            await self.hold.wait()
        return httpx.Response(exchange.status, headers=exchange.headers, stream=exchange)

    def break_streams(self) -> None:
        """Break every feed, at both ends."""
        for exchange in self._streams:
            exchange.broken = True
            exchange.gone.set()
        self._streams.clear()

    def count(self, route: str) -> int:
        """How many requests there were for ``METHOD /path``."""
        return self.requests.count(route)


@asynccontextmanager
async def transport_of(
    app: RolloutServer, room: float = 0
) -> AsyncGenerator[StreamingTransport, None]:
    """Serve an application in process for the length of the block."""
    async with app.serving(), trio.open_nursery() as nursery:
        yield StreamingTransport(app.asgi_app, nursery, room)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def in_process(
    app: RolloutServer, **options: Any
) -> AsyncGenerator[tuple[RolloutClient, StreamingTransport], None]:
    """An entered client of an application in process, and its transport."""
    async with (
        transport_of(app) as transport,
        httpx.AsyncClient(transport=transport) as http,
        RolloutClient(url=URL, http_client=http, **options) as client,
    ):
        yield client, transport


@define(eq=False)
class OpenFeed:
    """A feed that a test reads line by line."""

    _data: Any
    hello: dict[str, Any] = field(factory=dict)
    _buffer: bytes = b""

    async def line(self) -> Any:
        """The next line; ``None`` for a heartbeat."""
        while b"\n" not in self._buffer:
            self._buffer += await anext(self._data)
        text, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(text) if text else None

    async def result(self) -> dict[str, Any]:
        """The next line that is no heartbeat."""
        with trio.fail_after(1000):
            while (value := await self.line()) is None:
                pass
        assert isinstance(value, dict)
        return value

    async def rest(self) -> list[Any]:
        """What is left up to the end of the feed, without heartbeats."""
        lines = []
        while True:
            try:
                line = await self.line()
            except StopAsyncIteration:
                assert self._buffer == b""
                return lines
            if line is not None:
                lines.append(line)

    @property
    def token(self) -> str:
        return str(self.hello["feed"])

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        return await self.result()


def claim(rollout_id: str, token: str, seen: str | None = None) -> dict[str, str]:
    """What a feed is asked for."""
    body = {"rollout_id": rollout_id, "polling_lease_token": token}
    return body if seen is None else {**body, "seen": seen}


@asynccontextmanager
async def open_feed(
    http: httpx.AsyncClient, *claims: dict[str, str]
) -> AsyncGenerator[OpenFeed, None]:
    """Open a feed over HTTP, or in process."""
    wire = Wire(str(http.base_url).rstrip("/"), http)
    body = json.dumps({"leases": list(claims)}).encode()
    async with wire.stream("/rollouts/feed", body, read_timeout_sec=60) as answer:
        assert answer.status_code == 200
        feed = OpenFeed(answer.data)
        feed.hello = await feed.line()
        yield feed


async def admit_many(
    http: httpx.AsyncClient, rollouts: list[Any], feed: str | None = None
) -> dict[str, Any]:
    """Ask for many admissions; returns the answer."""
    body = {"rollouts": rollouts, **({} if feed is None else {"feed": feed})}
    answer = await http.post("/rollouts", json=body)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value
