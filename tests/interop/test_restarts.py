"""The official client and our server with a state, which is killed and started again."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from interop.sides import Failed
from support import fresh_id

LOST = "the rollout server restarted while the rollout was in flight; its agent had started"
GATEWAY_DELAYS = 6
DOWN = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"
)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"server": {"state": str(tmp_path / "state")}}


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


async def kill(process: trio.Process) -> None:
    process.kill()
    await process.wait()


async def test_a_result_that_was_there_before_is_served_on(official_to_ours, options):
    polls = fresh_id("gate")
    async with official_to_ours.launched(**options) as (process, url):
        client = await official_to_ours.client(url, poll_gate=polls)
        handle = await client.start(rollout_id=fresh_id(), label="42")
        await client.wait_idle(timeout_sec=30, poll_interval_sec=0.05)
        await kill(process)
    await client.hold_polls(polls)  # the first one is refused; that is tried again
    async with official_to_ours.launched(port=port_of(url), **options):
        await client.let_polls_pass(polls)
        result = await handle.completion()
    assert (result["status"], result["sample"]["reward"]) == ("success", 1.0)
    assert len(await client.answered("result")) == 1


async def test_what_was_in_flight_ends_with_the_start_of_its_agent(official_to_ours, options):
    polls = fresh_id("gate")
    async with official_to_ours.launched(**options) as (process, url):
        client = await official_to_ours.client(url, poll_gate=polls)
        handle = await client.start(rollout_id=fresh_id(), label="42", script={"hold": "never"})
        while (await handle.look())["status"] != "running":
            await client.hold_polls(polls)
        started = (await client.answered("result"))[-1]["body"]["agent_started_at"]
        assert started is not None
        await kill(process)
    await client.hold_polls(polls)
    async with official_to_ours.launched(port=port_of(url), **options):
        await client.let_polls_pass(polls)
        result = await handle.completion()
    assert (result["status"], result["err_category"]) == ("failure", "internal_error")
    assert result["err_message"] == LOST
    assert (await client.answered("result"))[-1]["body"]["agent_started_at"] == started


async def test_three_refused_polls_in_a_row_are_too_many(official_to_ours, options):
    async with official_to_ours.launched(**options) as (process, url):
        client = await official_to_ours.client(url)
        handle = await client.start(rollout_id=fresh_id(), label="42", script={"hold": "never"})
        assert await handle.running() == "running"
        await kill(process)
    with pytest.raises(Failed) as lost:
        await handle.completion()
    assert lost.value.kinds >= {"ConnectError", "TransportError"}


@asynccontextmanager
async def gateway(port: int) -> AsyncGenerator[tuple[str, list[int]], None]:
    """A gateway to a port, for connections one by one; it answers 503 while nobody listens there.

    Yields its URL, and how often it has answered so.
    """
    refused: list[int] = []

    async def connect(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                upstream = await trio.open_tcp_stream("127.0.0.1", port)
            except OSError:
                await stream.receive_some()
                refused.append(503)
                await stream.send_all(DOWN)
                return
            async with upstream, trio.open_nursery() as nursery:
                nursery.start_soon(pump, stream, upstream, nursery.cancel_scope)
                nursery.start_soon(pump, upstream, stream, nursery.cancel_scope)

    async def pump(
        source: trio.SocketStream, sink: trio.SocketStream, scope: trio.CancelScope
    ) -> None:
        try:
            async for data in source:
                await sink.send_all(data)
        except trio.BrokenResourceError:
            pass  # the server was killed
        scope.cancel()

    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, connect, 0, host="127.0.0.1")
        (listener,) = await nursery.start(serve)
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}", refused
        nursery.cancel_scope.cancel()


async def test_behind_a_gateway_a_restart_may_take_seconds(official_to_ours, options):
    async with official_to_ours.launched(**options) as (process, url):
        port = port_of(url)
        async with gateway(port) as (front, refused):
            client = await official_to_ours.client(front)
            running = await client.start(
                rollout_id=fresh_id(), label="42", script={"hold": "never"}
            )
            assert await running.running() == "running"
            await kill(process)
            async with official_to_ours.launched(port=port, **options):
                result = await running.completion()
    assert (result["status"], result["err_message"]) == ("failure", LOST)
    assert 1 <= len(refused) <= GATEWAY_DELAYS
