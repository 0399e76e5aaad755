"""The result feed of a server, over real HTTP."""

from __future__ import annotations

import json
import threading

import pytest
import trio
from feed.streaming import admit_many, claim, open_feed
from server.faults import (
    API_KEY,
    admission,
    admit,
    assert_refused,
    assert_serves,
    poll,
    raw,
    request_bytes,
    result_path,
    served_http,
)
from support import connected, fresh_id, local_backend, make_app, prompt

from rollout._threads import is_large
from rollout.server.admission import admit_batch
from rollout.server.feed import MAX_CLAIMS
from rollout.server.results import encode
from rollout.types import POLLING_LEASE_HEADER

TERMINAL = {"success", "failure", "cancelled"}
LEASE = POLLING_LEASE_HEADER


def ids_and_tokens(answer):
    return [
        (item["admission"]["rollout_id"], item["admission"]["polling_lease_token"])
        for item in answer["outcomes"]
    ]


async def test_the_first_line_says_hello():
    async with served_http(make_app(result_wait_timeout_sec=7)) as http, open_feed(http) as feed:
        assert feed.hello["refused"] == []
        assert feed.hello["heartbeat_sec"] == 7
        assert len(feed.hello["feed"]) >= 43


async def test_it_tells_what_was_not_seen_and_then_every_change():
    async with served_http(make_app()) as http:
        rollout_id, lease = await admit(http, initial_messages=prompt(sleep=0.2))
        await poll(http, rollout_id, lease)
        async with open_feed(http, claim(rollout_id, lease[LEASE])) as feed:
            first = await feed.result()
            assert (first["rollout_id"], first["status"]) == (rollout_id, "running")
            statuses = [(await feed.result())["status"] for _ in range(2)]
            assert statuses == ["grading", "success"]
        async with open_feed(http, claim(rollout_id, lease[LEASE], "running")) as feed:
            assert (await feed.result())["sample"]["reward"] == 1.0


async def test_wrong_claims_are_refused_and_harm_no_other():
    async with served_http(make_app()) as http:
        mine, lease = await admit(http, initial_messages=prompt(sleep=60))
        other, other_lease = await admit(http, initial_messages=prompt(sleep=60))
        claims = [
            claim("nobody", lease[LEASE]),
            claim(other, lease[LEASE]),
            claim(other, ""),
            claim(other, "\udcff\ud800"),
            claim("\ud800", "x"),
            claim(mine, lease[LEASE]),
        ]
        async with open_feed(http, *claims) as feed:
            assert feed.hello["refused"] == [c["rollout_id"] for c in claims[:-1]]
            assert (await feed.result())["rollout_id"] == mine
        assert (await poll(http, other, other_lease))["status"] == "running"


async def test_many_rollouts_reach_their_ends_in_order():
    app = make_app(local_backend(max_concurrent=64))
    async with served_http(app) as http, open_feed(http) as feed:
        bodies = [admission(initial_messages=prompt(sleep=0.001 * (n % 7))) for n in range(300)]
        answer = await admit_many(http, bodies, feed.token)
        assert answer["attached"] is True
        ranks = {"queued": 0, "running": 1, "grading": 2, "success": 3}
        seen = {body["rollout_id"]: 0 for body in bodies}
        left = set(seen)
        while left:
            result = await feed.result()
            rank = ranks[result["status"]]
            assert rank > seen[result["rollout_id"]] or rank == 1  # the agent's start
            seen[result["rollout_id"]] = rank
            if rank == 3:
                assert result["sample"]["reward"] == 1.0
                left.remove(result["rollout_id"])
        while (await http.post("/rollouts/renew", json={"feed": feed.token})).json()["renewed"]:
            pass  # the last line is here before its server knows that it has gone


async def test_a_poll_on_the_side_takes_nothing_from_the_feed():
    async with served_http(make_app()) as http:
        rollout_id, lease = await admit(http, initial_messages=prompt(sleep=0.3))
        async with open_feed(http, claim(rollout_id, lease[LEASE])) as feed:
            assert (await feed.result())["status"] == "running"
            # As the official client polls, without a word on what it has seen.
            statuses = []
            while not statuses or statuses[-1] not in TERMINAL:
                answer = await http.get(result_path(rollout_id), headers=lease)
                statuses.append(answer.json()["status"])
            assert [(await feed.result())["status"] for _ in range(2)] == ["grading", "success"]


async def test_the_later_of_two_feeds_takes_over_and_the_earlier_one_is_told():
    app = make_app()
    async with served_http(app) as http:
        rollout_id, lease = await admit(http, initial_messages=prompt(sleep=60))
        mine = claim(rollout_id, lease[LEASE])
        async with open_feed(http, mine) as first:
            assert (await first.result())["status"] == "running"
            async with open_feed(http, mine) as second:
                assert await first.result() == {"taken_over": [rollout_id]}
                assert (await second.result())["status"] == "running"
                renewed = await http.post("/rollouts/renew", json={"feed": first.token})
                assert renewed.json() == {"renewed": 0}
                renewed = await http.post("/rollouts/renew", json={"feed": second.token})
                assert renewed.json() == {"renewed": 1}
                await http.post("/rollout/cancel", json={"ids": [rollout_id]})
                assert (await second.result())["status"] == "cancelled"


async def test_a_disconnect_closes_the_feed_and_leaves_the_rollouts_alone():
    app = make_app()
    async with served_http(app) as http:
        rollout_id, lease = await admit(http, initial_messages=prompt(sleep=1))
        async with open_feed(http, claim(rollout_id, lease[LEASE])) as feed:
            token = feed.token
        while (unknown := await http.post("/rollouts/renew", json={"feed": token})).is_success:
            pass  # until the server has noticed
        assert app.feeds.find(token) is None
        assert assert_refused(unknown, 404) == "unknown feed"
        answer = await admit_many(http, [admission()], token)
        assert answer["attached"] is False
        async with open_feed(
            http, claim(rollout_id, lease[LEASE], "running;agent-started")
        ) as feed:
            assert [(await feed.result())["status"] for _ in range(2)] == ["grading", "success"]


@pytest.mark.parametrize("path", ["/rollouts", "/rollouts/feed", "/rollouts/renew"])
async def test_without_the_key_nothing_is_read(path):
    async with served_http(make_app(api_key=API_KEY)) as http:
        for header in ({}, {"Authorization": f"Bearer {API_KEY}x"}):
            answer = await http.post(path, content=b"{", headers=header)
            assert_refused(answer, 401)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        # Refused although the body never comes in full.
        data = request_bytes("POST", path, b"{", length=1000)
        status, _ = await raw(http.base_url, data)
        assert status == 401
        right = {"Authorization": f"Bearer {API_KEY}"}
        assert_refused(await http.post(path, content=b"{", headers=right), 422)


@pytest.mark.parametrize("path", ["/rollouts", "/rollouts/feed", "/rollouts/renew"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"NaN",
        b"[]",
        b"{}",
        b"null",
        b'"x"',
        b'{"leases": {}}',
        b"[" * 2000,
        b'{"leases": 1, "rollouts": 1, "feed": 1}',
        b'{"feed": ""}',
    ],
    ids=range(12),
)
async def test_malformed_bodies_name_the_fields(path, content):
    async with served_http(make_app()) as http:
        answer = await http.post(path, content=content)
        for problem in assert_refused(answer, 422):
            assert problem["loc"][0] == "body"
        wrong_kind = await http.post(
            path, content=b'{"leases": []}', headers={"Content-Type": "text/plain"}
        )
        assert_refused(wrong_kind, 422)
        await assert_serves(http)


@pytest.mark.parametrize(
    ("lease", "place"),
    [
        (1, "leases.1"),
        ({}, "leases.1"),
        ({"rollout_id": "a"}, "leases.1"),
        ({"rollout_id": 1, "polling_lease_token": "a"}, "leases.1"),
        ({"rollout_id": "a", "polling_lease_token": "a", "seen": 1}, "leases.1.seen"),
    ],
)
async def test_a_malformed_claim_is_named(lease, place):
    async with served_http(make_app()) as http:
        body = {"leases": [claim("a", "b"), lease]}
        answer = await http.post("/rollouts/feed", json=body)
        assert [problem["loc"] for problem in assert_refused(answer, 422)] == [["body", place]]


@pytest.mark.parametrize("path", ["/rollouts", "/rollouts/feed", "/rollouts/renew"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS"])
async def test_other_methods_are_refused(path, method):
    async with served_http(make_app()) as http:
        answer = await http.request(method, path)
        assert_refused(answer, 405)
        assert answer.headers["Allow"] == "POST"


@pytest.mark.parametrize("path", ["/rollouts", "/rollouts/feed", "/rollouts/renew"])
async def test_head_has_no_body_and_the_connection_stays_usable(path):
    async with served_http(make_app()) as http, connected(str(http.base_url)) as stream:
        await stream.send_all(request_bytes("HEAD", path))
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await stream.receive_some()
        assert head.startswith(b"HTTP/1.1 405")
        await stream.send_all(request_bytes("GET", "/health"))
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/rollouts", "/rollouts/feed", "/rollouts/renew"])
async def test_a_body_that_is_too_large_is_drained_and_refused(path):
    async with served_http(make_app(max_request_bytes=1000)) as http:
        answer = await http.post(path, content=b" " * 2000)
        assert assert_refused(answer, 413) == "the body exceeds 1000 bytes"
        await assert_serves(http)


async def test_a_feed_ends_when_its_server_stops_and_the_results_come_first():
    app = make_app()
    async with trio.open_nursery() as nursery:
        async with served_http(app) as http:
            rollout_id, lease = await admit(http, initial_messages=prompt(sleep=60))
            async with open_feed(http, claim(rollout_id, lease[LEASE])) as feed:
                assert (await feed.result())["status"] == "running"
                app.shutdown_stages.skip_drain()
                nursery.start_soon(app.shutdown_stages.run)
                assert [line["status"] for line in await feed.rest()] == ["cancelled"]
            late = await http.post("/rollouts/feed", json={"leases": []})
            assert_refused(late, 503)
            answer = await http.post("/rollouts", json={"rollouts": [admission()]})
            assert answer.json()["outcomes"][0]["status_code"] == 503


async def test_a_result_is_told_again_until_its_retention_is_over():
    async with served_http(make_app()) as http:
        rollout_id, lease = await admit(http)
        for _ in range(3):
            async with open_feed(http, claim(rollout_id, lease[LEASE], "success")) as feed:
                assert (await feed.result())["status"] == "success"
    async with served_http(make_app(result_retention_sec=0)) as http:
        rollout_id, lease = await admit(http)
        while (await http.get("/health")).json()["lifecycle"]["active_rollouts"]:
            pass
        async with open_feed(http, claim(rollout_id, lease[LEASE])) as feed:
            assert feed.hello["refused"] == [rollout_id]


async def test_a_batch_has_an_outcome_for_each_in_order():
    app = make_app(local_backend(max_concurrent=1, max_queue_depth=1))
    async with served_http(app) as http:
        twice = fresh_id()
        slow = prompt(sleep=60)
        bodies = [
            admission(rollout_id=twice, initial_messages=slow),
            admission(rollout_id=twice),
            admission(rollout_id="a/b"),
            {"rollout_id": 1},
            7,
            admission(grade=1),
            admission(initial_messages=slow),
            admission(),
        ]
        answer = await admit_many(http, bodies)
        assert answer["attached"] is False
        codes = [outcome["status_code"] for outcome in answer["outcomes"]]
        assert codes == [202, 409, 422, 422, 422, 422, 202, 429]
        assert answer["outcomes"][7]["retry_after_sec"] in range(5, 9)
        assert [p["loc"] for p in answer["outcomes"][5]["detail"]] == [["body", "grade"]]
        singles = [
            (await http.post("/rollout", content=json.dumps(bodies[n]))).json()["detail"]
            for n in (1, 2, 3, 7)
        ]
        assert singles == [answer["outcomes"][n]["detail"] for n in (1, 2, 3, 7)]


async def test_a_batch_says_that_the_backend_fails(monkeypatch):
    backend = local_backend()
    monkeypatch.setattr(backend, "reserve", None)  # calling it raises
    async with served_http(make_app(backend)) as http:
        (outcome,) = (await admit_many(http, [admission()]))["outcomes"]
    assert outcome.pop("retry_after_sec") in range(5, 9)
    detail = "the execution backend failed to take the rollout"
    assert outcome == {"status_code": 503, "detail": detail}


async def test_a_batch_is_bounded():
    async with served_http(make_app()) as http:
        answer = await http.post("/rollouts", json={"rollouts": [0] * 4097})
        assert [p["loc"] for p in assert_refused(answer, 422)] == [["body", "rollouts"]]
        assert (await admit_many(http, []))["outcomes"] == []
        assert len((await admit_many(http, [0] * 4096))["outcomes"]) == 4096


@pytest.mark.parametrize("token", ["unknown", "t\\u00f6k\\u00e9n", "\\udcff\\ud800"])
async def test_a_token_that_no_open_feed_has(token):
    async with served_http(make_app()) as http:
        answer = await http.post("/rollouts/renew", content=f'{{"feed": "{token}"}}')
        assert_refused(answer, 404)


async def test_the_claims_of_a_feed_are_bounded():
    async with served_http(make_app()) as http:
        body = {"leases": [0] * (MAX_CLAIMS + 1)}
        answer = await http.post("/rollouts/feed", json=body)
        assert [problem["loc"] for problem in assert_refused(answer, 422)] == [["body", "leases"]]


async def test_others_run_during_a_large_batch_and_its_feed_may_close_meanwhile(autojump_clock):
    app = make_app()
    async with app.serving(), trio.open_nursery() as nursery:
        feed, token, _ = app.feeds.open([])

        async def close_feed() -> None:
            while not app.registry.active_ids:
                await trio.lowlevel.checkpoint()
            assert len(app.registry.active_ids) < 300
            app.feeds.forget(feed, token)

        nursery.start_soon(close_feed)
        rollouts = [admission(initial_messages=prompt(sleep=60)) for _ in range(300)]
        outcomes = await admit_batch(app.registry, rollouts, feed)
        assert [outcome["status_code"] for outcome in outcomes] == [202] * 300
        assert feed.entries == {}
        assert not any(entry.feed for entry in app.registry._entries.values())
        app.registry.cancel(all_=True)


async def test_a_large_result_is_encoded_in_a_thread_and_comes_whole(monkeypatch):
    threads = []

    def encode_here(result):
        if is_large(result.sample):
            threads.append(threading.current_thread() is not threading.main_thread())
        return encode(result)

    monkeypatch.setattr("rollout.server.entry.encode", encode_here)
    answer = "\U0001f600x" * 100_000
    async with served_http(make_app()) as http, open_feed(http) as feed:
        bodies = [
            admission(initial_messages=prompt(sleep=0.01, answer=answer), label=answer),
            admission(),
        ]
        tokens = dict(ids_and_tokens(await admit_many(http, bodies, feed.token)))
        for _ in bodies:
            while (told := await feed.result())["status"] not in TERMINAL:
                pass
            rollout_id = told["rollout_id"]
            assert told == await poll(http, rollout_id, {LEASE: tokens[rollout_id]})
            assert (told["status"], told["sample"]["reward"]) == ("success", 1.0)
    assert threads == [True]
