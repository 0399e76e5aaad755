"""The feed and time: heartbeats, renewals, expiry, readers that do not read."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager

import httpx
import pytest
import trio
import trio.testing
from feed.streaming import URL, admit_many, claim, open_feed, transport_of
from server.faults import admission, admit, poll
from support import local_backend, make_app, prompt

from rollout.types import POLLING_LEASE_HEADER

LEASE = POLLING_LEASE_HEADER
TIMES = {"result_wait_timeout_sec": 10, "polling_lease_timeout_sec": 40}


@asynccontextmanager
async def http_of(app, room=0):
    async with (
        transport_of(app, room) as transport,
        httpx.AsyncClient(transport=transport, base_url=URL) as http,
    ):
        yield http


async def renew(http, feed):
    answer = await http.post("/rollouts/renew", json={"feed": feed.token})
    assert answer.status_code == 200
    return answer.json()["renewed"]


async def test_a_silent_feed_has_a_heartbeat_as_often_as_a_poll_is_answered(autojump_clock):
    async with http_of(make_app(**TIMES)) as http, open_feed(http) as feed:
        for at in (10, 20, 30):
            assert await feed.line() is None
            assert trio.current_time() == at


async def test_changes_that_are_no_news_hold_no_heartbeat_back(autojump_clock):
    app = make_app(**TIMES)
    async with http_of(app) as http:
        rollout_id, lease = await admit(http, initial_messages=prompt(sleep=100))
        async with open_feed(http, claim(rollout_id, lease[LEASE], "grading")) as feed:
            (entry,) = app.feeds.find(feed.token).entries.values()
            async with trio.open_nursery() as nursery:

                async def notify():
                    while True:
                        await trio.sleep(4)
                        entry.notify()

                assert (await feed.line())["status"] == "running"  # the agent has started
                nursery.start_soon(notify)
                for at in (10, 20):
                    assert await feed.line() is None
                    assert trio.current_time() == at
                nursery.cancel_scope.cancel()


async def test_streaming_renews_nothing_and_the_expiry_is_told(autojump_clock):
    app = make_app(**TIMES)
    async with http_of(app) as http, open_feed(http) as feed:
        await admit_many(http, [admission(initial_messages=prompt(sleep=1000))], feed.token)
        assert (await feed.result())["status"] == "running"
        end = await feed.result()
        assert trio.current_time() == 40
        assert (end["status"], end["err_category"]) == ("failure", "lease_expired")
        assert await renew(http, feed) == 0


async def test_a_renewal_renews_all_that_is_attached_and_nothing_else(autojump_clock):
    app = make_app(local_backend(max_concurrent=None), **TIMES)
    async with http_of(app) as http, open_feed(http) as feed:
        slow = prompt(sleep=90)
        mine = [admission(initial_messages=slow) for _ in range(3)]
        await admit_many(http, mine, feed.token)
        others = [await admit(http, initial_messages=slow) for _ in range(2)]
        for _ in range(3):
            assert (await feed.result())["status"] == "running"
        await trio.sleep(30)
        assert await renew(http, feed) == 3
        await trio.sleep(30)
        assert await renew(http, feed) == 3
        for other, lease in others:
            assert (await poll(http, other, lease))["err_category"] == "lease_expired"
        ends = []
        while ends.count("success") < 3:
            ends.append((await feed.result())["status"])
        assert set(ends) <= {"grading", "success"}
        assert trio.current_time() == 90


@pytest.mark.parametrize("last", ["batch", "feed", "renewal"])
async def test_leases_of_one_request_end_together(autojump_clock, last):
    app = make_app(local_backend(max_concurrent=2), **TIMES)
    began: set[str] = set()

    def observe(what, entry):
        if what in {"admitted", "lease-renewed"}:
            autojump_clock.jump(0.001)  # a request takes time
        elif what == "agent-started":
            began.add(entry.rollout_id)

    app.registry.hooks.observers.append(observe)
    bodies = [admission(initial_messages=prompt(sleep=1000)) for _ in range(6)]
    async with http_of(app, math.inf) as http, open_feed(http) as feed:
        outcomes = (await admit_many(http, bodies, feed.token))["outcomes"]
        held = [outcome["admission"] for outcome in outcomes]
        claims = [claim(one["rollout_id"], one["polling_lease_token"]) for one in held]
        await trio.sleep(5)
        if last == "renewal":
            await renew(http, feed)
        if last == "feed":
            async with open_feed(http, *claims):
                pass
        await trio.sleep(100)
    assert len(began) == 2


async def test_a_reader_that_does_not_read_costs_no_memory_and_gets_what_counts(autojump_clock):
    app = make_app(
        local_backend(max_concurrent=None),
        result_wait_timeout_sec=1000,
        polling_lease_timeout_sec=4000,
    )
    async with http_of(app) as http, open_feed(http) as feed:
        bodies = [admission(initial_messages=prompt(sleep=5 + n % 3)) for n in range(2000)]
        stuck = [admission(initial_messages=prompt(sleep=500))]
        await admit_many(http, [*bodies, *stuck], feed.token)
        own = app.feeds.find(feed.token)
        for _ in range(10):
            await trio.sleep(1)
            assert len(own._marked) <= len(own.entries) <= 2001
        # What was being written said "running"; what came in between is left out.
        lines = []
        while sum(line["status"] == "success" for line in lines) < 2000:
            lines.append(await feed.result())
        assert {line["status"] for line in lines} == {"running", "success"}
        assert trio.current_time() == 10


async def test_a_state_that_changes_while_it_is_written_is_told_next(autojump_clock):
    app = make_app(**TIMES)
    async with http_of(app) as http, open_feed(http) as feed:
        await admit_many(http, [admission(initial_messages=prompt(sleep=5))], feed.token)
        await trio.sleep(6)  # "running" is still being written, and it has ended meanwhile
        assert [(await feed.result())["status"] for _ in range(2)] == ["running", "success"]


async def test_a_poll_that_gets_the_result_while_a_state_is_written_takes_nothing(autojump_clock):
    app = make_app(**TIMES)
    async with http_of(app) as http, open_feed(http) as feed:
        body = admission(initial_messages=prompt(sleep=5))
        answer = await admit_many(http, [body], feed.token)
        token = answer["outcomes"][0]["admission"]["polling_lease_token"]
        await trio.sleep(6)
        assert (await poll(http, body["rollout_id"], {LEASE: token}))["status"] == "success"
        assert [(await feed.result())["status"] for _ in range(2)] == ["running", "success"]


async def test_what_was_written_on_a_feed_that_lost_it_counts_for_nothing(autojump_clock):
    app = make_app(**TIMES)
    async with http_of(app) as http, open_feed(http) as first:
        body = admission(initial_messages=prompt(sleep=20))
        answer = await admit_many(http, [body], first.token)
        token = answer["outcomes"][0]["admission"]["polling_lease_token"]
        await trio.testing.wait_all_tasks_blocked()  # "running" is being written on the first
        async with open_feed(http, claim(body["rollout_id"], token)) as second:
            assert (await first.result())["status"] == "running"
            assert await first.result() == {"taken_over": [body["rollout_id"]]}
            assert (await second.result())["status"] == "running"
            assert [(await second.result())["status"] for _ in range(2)] == ["grading", "success"]


async def test_an_id_that_is_used_again_while_the_old_result_is_unread(autojump_clock):
    app = make_app(result_retention_sec=1, **TIMES)
    async with http_of(app) as http, open_feed(http) as feed:
        body = admission()
        await admit_many(http, [body], feed.token)
        await trio.sleep(5)
        again = await admit_many(http, [{**body, "label": "43"}], feed.token)
        assert again["outcomes"][0]["status_code"] == 202
        rewards = []
        while not rewards or rewards[-1] != 0.0:
            line = await feed.result()
            if line["status"] == "success":
                rewards.append(line["sample"]["reward"])
        assert rewards == [0.0]
        await trio.testing.wait_all_tasks_blocked()
        assert app.feeds.find(feed.token).entries == {}


async def test_a_feed_says_what_is_left_before_it_ends(autojump_clock):
    app = make_app(local_backend(max_concurrent=None), **TIMES)
    async with http_of(app) as http, open_feed(http) as feed:
        bodies = [admission(initial_messages=prompt(sleep=5)) for _ in range(50)]
        await admit_many(http, bodies, feed.token)
        await trio.sleep(6)
        app.registry.release_polls()
        lines = await feed.rest()
        assert sum(line["status"] == "success" for line in lines) == 50
        answer = await http.post("/rollouts/feed", json={"leases": []})
        assert answer.status_code == 503
