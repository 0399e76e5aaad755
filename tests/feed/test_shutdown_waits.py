"""A shutdown waits for readers of feeds, and only as long as there are any."""

from __future__ import annotations

import httpx
import trio
from feed.streaming import URL, admit_many, open_feed, transport_of
from server.faults import admission
from support import make_app, prompt


async def test_a_reader_that_leaves_is_waited_for_no_longer_than_a_poll(autojump_clock):
    app = make_app()
    async with (
        transport_of(app) as transport,
        httpx.AsyncClient(transport=transport, base_url=URL) as http,
        trio.open_nursery() as nursery,
    ):
        async with open_feed(http) as feed:
            body = admission(initial_messages=prompt(sleep=60))
            await admit_many(http, [body], feed.token)
            await trio.sleep(10)  # "running" is being written all the while
            app.shutdown_stages.skip_drain()
            nursery.start_soon(app.shutdown_stages.run)
            await trio.sleep(1)
        await app.shutdown_stages.run()
        assert trio.current_time() <= 10 + 1 + 5
