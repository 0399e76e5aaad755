"""Long polls spread over several connection pools."""

from __future__ import annotations

import httpx
import pytest
import trio
from support import CHAT_URL, local_backend, make_app, prompt, served

from rollout._http import REQUESTS_PER_POOL, SpreadTransport
from rollout.client import RolloutClient
from rollout.types import RolloutStatus


class Stream(httpx.AsyncByteStream):
    """A body that nobody has read yet."""

    async def __aiter__(self):
        await trio.lowlevel.checkpoint()
        yield b"done"


class Held(httpx.AsyncBaseTransport):
    """Answers when told to."""

    def __init__(self):
        self.go = trio.Event()
        self.closed = False

    async def handle_async_request(self, request):
        await self.go.wait()
        if request.url.path == "/broken":
            raise httpx.ReadError("no", request=request)
        if request.url.path == "/stream":
            return httpx.Response(200, stream=Stream(), request=request)
        return httpx.Response(200, content=b"done", request=request)

    async def aclose(self):
        await trio.lowlevel.checkpoint()
        self.closed = True


async def test_pools_are_filled_one_after_the_other_and_used_again(autojump_clock):
    made = []

    def make():
        made.append(Held())
        return made[-1]

    transport = SpreadTransport(make)
    async with httpx.AsyncClient(transport=transport) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(2 * REQUESTS_PER_POOL + 1):
                nursery.start_soon(client.get, "http://host/")
            await trio.sleep(1)
            assert transport.in_flight == [REQUESTS_PER_POOL, REQUESTS_PER_POOL, 1]
            for pool in made:
                pool.go.set()
        assert transport.in_flight == [0, 0, 0]
        await client.get("http://host/")
        assert len(made) == 3
    assert all(pool.closed for pool in made)


@pytest.mark.parametrize("path", ["/", "/broken"])
async def test_failures_and_cancellations_leak_no_place(autojump_clock, path):
    pool = Held()
    transport = SpreadTransport(lambda: pool)
    async with httpx.AsyncClient(transport=transport) as client:
        with trio.move_on_after(1):
            await client.get(f"http://host{path}")
        assert transport.in_flight == [0]
        pool.go.set()
        if path == "/broken":
            with pytest.raises(httpx.ReadError):
                await client.get(f"http://host{path}")
        else:
            await client.get(f"http://host{path}")
        assert transport.in_flight == [0]


async def test_a_response_that_is_closed_twice_gives_back_one_place(autojump_clock):
    pool = Held()
    pool.go.set()
    transport = SpreadTransport(lambda: pool)
    first, second = [
        await transport.handle_async_request(httpx.Request("GET", "http://host/stream"))
        for _ in range(2)
    ]
    assert transport.in_flight == [2]
    for _ in range(2):
        await first.stream.aclose()
    assert transport.in_flight == [1]
    await second.stream.aclose()
    assert transport.in_flight == [0]


async def test_cancelled_polls_leave_the_client_usable():
    app = make_app(local_backend(max_concurrent=None))
    async with served(app) as url, RolloutClient(url=url, feed=False) as client:
        handles = [
            await client.run_rollout_async(prompt(sleep=60), CHAT_URL, f"r{n}", label="42")
            for n in range(REQUESTS_PER_POOL + 8)
        ]
        for handle in handles:
            await handle.wait_for_running()
            handle.cancel()
        result = await client.run_rollout(prompt(), CHAT_URL, "last", label="42")
        assert result.status is RolloutStatus.SUCCESS
