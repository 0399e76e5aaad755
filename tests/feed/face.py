"""Puts a feed in front of a fake server that knows polls only, script and all."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import trio
from attrs import define, field
from client.fakes import URL, FakeServer

from rollout.client import RolloutClient
from rollout.types import POLLING_LEASE_HEADER, SEEN_STATE_HEADER

TERMINAL = {"success", "failure", "cancelled"}


@define(eq=False)
class _Stream(httpx.AsyncByteStream):
    """One feed: polls the fake server for its claims, and writes what it gets."""

    face: FeedFace
    claims: list[dict[str, str]]
    scope: trio.CancelScope = field(factory=trio.CancelScope)

    def __attrs_post_init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Any](1000)

    _send: Any = None
    _receive: Any = None

    async def __aiter__(self) -> Any:
        yield b'{"feed": "token", "refused": [], "heartbeat_sec": 30}\n'
        async for item in self._receive:
            if isinstance(item, Exception):
                raise item
            yield json.dumps(item).encode() + b"\n"

    async def run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                for claim in self.claims:
                    nursery.start_soon(self._poll, claim)

    async def _poll(self, claim: dict[str, str]) -> None:
        headers = {
            POLLING_LEASE_HEADER: claim["polling_lease_token"],
            SEEN_STATE_HEADER: claim["seen"],
        }
        path = f"{URL}/rollout/{claim['rollout_id']}/result"
        while True:
            request = httpx.Request("GET", path, headers=headers)
            try:
                answer = await self.face.server.handle_async_request(request)
                result = await answer.aread() and answer.json()
            except Exception as error:
                self._send.send_nowait(error)
                return
            if answer.status_code != 200 or "status" not in result:
                # What is no result is for the single poll to judge.
                self.face.kept[claim["rollout_id"]] = answer
                self._send.send_nowait({"taken_over": [claim["rollout_id"]]})
                return
            self._send.send_nowait(result)
            if result["status"] in TERMINAL:
                return

    async def aclose(self) -> None:
        self.scope.cancel()
        await trio.lowlevel.checkpoint()


@define(eq=False)
class FeedFace(httpx.AsyncBaseTransport):
    """The fake server, and in front of it the feed."""

    server: FakeServer
    nursery: trio.Nursery
    kept: dict[str, httpx.Response] = field(factory=dict)
    feeds: int = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/rollouts/feed":
            await trio.lowlevel.checkpoint()
            content = b"".join([data async for data in request.stream])  # type: ignore[union-attr]
            stream = _Stream(self, json.loads(content)["leases"])
            self.nursery.start_soon(stream.run)
            self.feeds += 1
            return httpx.Response(200, stream=stream)
        if path == "/rollouts/renew":
            await trio.lowlevel.checkpoint()
            return httpx.Response(200, json={"renewed": 1})
        kept = self.kept.pop(path.split("/")[-2], None)
        if kept is not None:
            await trio.lowlevel.checkpoint()
            return httpx.Response(kept.status_code, headers=kept.headers, content=kept.content)
        answer = await self.server.handle_async_request(request)
        if path == "/rollout" and answer.status_code == 202:
            body = {**answer.json(), "extensions": ["result-feed"]}
            return httpx.Response(202, json=body)
        return answer


@asynccontextmanager
async def client_over_feed(
    server: FakeServer, **options: Any
) -> AsyncGenerator[RolloutClient, None]:
    """An entered client that follows the fake server's rollouts through a feed."""
    async with trio.open_nursery() as nursery:
        face = FeedFace(server, nursery)
        async with (
            httpx.AsyncClient(transport=face) as http,
            RolloutClient(url=URL, http_client=http, **options) as client,
        ):
            yield client
        assert face.feeds or not server.poll_calls
        nursery.cancel_scope.cancel()
