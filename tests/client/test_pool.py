"""Connections: enough of them for any number of polls, and none that is lost."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx
import pytest
import trio
import trio.testing
from client.fakes import admitted, healthy, result, run, start
from client.sockets import RawRequest, id_of, raw_server
from support import CHAT_URL, fresh_id, local_backend, make_app, prompt, served

from rollout import AgentWorkflow
from rollout.client import RolloutClient
from rollout.server.runner import KEEP_ALIVE_SEC
from rollout.types import RolloutStatus


class Gate:
    """Holds polls until it is opened, and knows how many it holds."""

    def __init__(self, awaited: int = 0) -> None:
        self.held = 0
        self.awaited = awaited
        self.full = trio.Event()
        self.opened = trio.Event()

    async def __call__(self, request: RawRequest) -> None:
        if request.path == "/health":
            await request.answer(healthy())
        elif request.path == "/rollout":
            await request.answer(admitted(id_of(request)))
        else:
            self.held += 1
            if self.held >= self.awaited:
                self.full.set()
            try:
                await self._wait_or_hang_up(request)
            finally:
                self.held -= 1

    async def _wait_or_hang_up(self, request: RawRequest) -> None:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                if await request.stream.receive_some() == b"":
                    nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await self.opened.wait()
            nursery.cancel_scope.cancel()
        if self.opened.is_set():
            await request.answer(result("success", id_of(request)))
        else:
            await request.stream.aclose()


@asynccontextmanager
async def small_pool(url, *, connections=2, pool_timeout=5.0):
    limits = httpx.Limits(max_connections=connections)
    timeout = httpx.Timeout(10, pool=pool_timeout)
    async with (
        httpx.AsyncClient(limits=limits, timeout=timeout) as http,
        RolloutClient(url=url, http_client=http) as client,
    ):
        yield client


async def test_more_than_a_hundred_polls_in_flight_at_once():
    gate = Gate(awaited=110)
    async with raw_server(gate) as server, RolloutClient(url=server.url) as client:
        handles = [await start(client, f"r{n}") for n in range(110)]
        await gate.full.wait()  # all of them, at the same time
        assert gate.held == 110
        assert (await client.health())["status"] == "ok"
        gate.opened.set()
        assert {(await handle).status for handle in handles} == {RolloutStatus.SUCCESS}


async def test_more_than_a_hundred_rollouts_at_once_on_the_real_server():
    count, everybody = 105, trio.Event()
    arrived = []

    class Rendezvous(AgentWorkflow):
        async def run(self, ctx):
            arrived.append(ctx)
            if len(arrived) == count:
                everybody.set()
            await everybody.wait()
            return [*ctx.prompt, {"role": "assistant", "content": "42"}]

    app = make_app(local_backend(Rendezvous, max_concurrent=None))
    async with served(app) as url, RolloutClient(url=url, feed=False) as client:
        handles = [
            await client.run_rollout_async(prompt(), CHAT_URL, fresh_id(), label="42")
            for _ in range(count)
        ]
        rewards = {(await handle).sample.reward for handle in handles}
    assert rewards == {1.0}


def test_an_idle_connection_is_dropped_before_a_server_drops_it():
    for url in ("http://127.0.0.1:8000", "http://rollouts.example"):
        pool = RolloutClient(url=url).http_client._transport._make_pool()._pool
        assert pool._keepalive_expiry < min(5, KEEP_ALIVE_SEC)


async def test_cancelled_polls_give_their_connections_back():
    gate = Gate(awaited=2)
    async with raw_server(gate) as server, small_pool(server.url) as client:
        for round_ in range(5):
            gate.full = trio.Event()
            handles = [await start(client, f"{round_}-{n}") for n in range(2)]
            await gate.full.wait()
            for handle in handles:
                assert handle.cancel() is True
        # Both connections of the pool are needed for this, and both are there.
        gate.full = trio.Event()
        last = [await start(client, f"last-{n}") for n in range(2)]
        await gate.full.wait()
        gate.opened.set()
        assert {(await handle).status for handle in last} == {RolloutStatus.SUCCESS}


async def test_cancelled_polls_that_wait_for_a_connection_leave_none_behind():
    gate = Gate(awaited=2)
    async with raw_server(gate) as server, small_pool(server.url, pool_timeout=30) as client:
        # Admitted while connections are free; then two polls hold them and four wait.
        handles = []
        async with trio.open_nursery() as nursery:

            async def begin(rollout_id):
                handles.append(await start(client, rollout_id))

            for n in range(2):
                nursery.start_soon(begin, f"r{n}")
        await gate.full.wait()
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(client.health)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        gate.opened.set()
        assert {(await handle).status for handle in handles} == {RolloutStatus.SUCCESS}
        for n in range(3):
            assert (await run(client, f"after-{n}")).status is RolloutStatus.SUCCESS


@pytest.mark.parametrize("closing", [False, True], ids=["kept", "closed"])
async def test_waiters_cancelled_in_the_moment_a_connection_comes_free(closing):
    """The other waiters still get one."""

    async def handle(request: RawRequest) -> None:
        await request.answer(healthy(), close=closing)

    async with raw_server(handle) as server, small_pool(server.url, connections=1) as client:

        async def ask(scopes):
            with trio.CancelScope() as scope:
                scopes.append(scope)
                await client.health()
                for other in scopes[: len(scopes) // 2]:
                    other.cancel()

        for _ in range(10):
            scopes = []
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(ask, scopes)
        assert (await client.health())["status"] == "ok"
