"""Our client and our server over real sockets, with a proxy between them that cuts answers off."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import trio
from attrs import define
from support import CHAT_URL, Script, local_backend, make_app, prompt, served

from rollout import get_rollout_context
from rollout.client import RolloutClient
from rollout.types import RolloutInitRequest

RUNS: Counter[str] = Counter()


class Counted(Script):
    """Counts the runs of each rollout."""

    async def run(self, ctx: Any) -> Any:
        RUNS[get_rollout_context().rollout_id] += 1
        return await super().run(ctx)


@define
class Cutter:
    """Forwards connections, and cuts off some answers to admissions: before or within them.

    Attributes:
        port: Where the server listens.
        draw: Decides which answers.
        share: How many of them.
        cut: How many it has cut off.
    """

    port: int
    draw: random.Random
    share: float
    cut: int = 0

    async def serve(self, client: trio.SocketStream) -> None:
        server = await trio.open_tcp_stream("127.0.0.1", self.port)
        doomed = [False]
        async with client, server, trio.open_nursery() as nursery:
            nursery.start_soon(self.forward, client, server, doomed)
            await self.answer(server, client, doomed)
            nursery.cancel_scope.cancel()

    async def forward(self, client: Any, server: Any, doomed: list[bool]) -> None:
        try:
            async for data in client:
                if data.startswith((b"POST /rollout ", b"POST /rollouts ")):
                    doomed[0] = self.draw.random() < self.share
                await server.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    async def answer(self, server: Any, client: Any, doomed: list[bool]) -> None:
        try:
            async for data in server:
                if doomed[0]:
                    self.cut += 1
                    await client.send_all(data[: self.draw.randrange(len(data))])
                    return
                await client.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return


@asynccontextmanager
async def cut(url: str, *, share: float):
    """A proxy before the server; yields it, and its URL."""
    cutter = Cutter(urlsplit(url).port or 0, random.Random(7), share)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, cutter.serve, 0, host="127.0.0.1"))
        yield cutter, f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("feed", [True, False])
async def test_every_rollout_runs_once_though_answers_to_admissions_are_cut_off(feed):
    RUNS.clear()
    requests = [
        RolloutInitRequest(
            rollout_id=f"r{n}",
            initial_messages=prompt(sleep=0.001 * (n % 20)),
            chat_completions_url=CHAT_URL,
            label="42",
        )
        for n in range(30)
    ]
    app = make_app(local_backend(Counted, max_concurrent=None))
    async with served(app) as url, cut(url, share=0.4) as (cutter, through):
        async with RolloutClient(url=through, feed=feed) as client:
            async with client.run_rollouts(requests, max_in_flight=25) as finished:
                statuses = {
                    ended.request.rollout_id: ended.result.status async for ended in finished
                }
    assert statuses == dict.fromkeys((request.rollout_id for request in requests), "success")
    assert Counter(statuses.keys()) == RUNS
    assert cutter.cut
