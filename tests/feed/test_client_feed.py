"""The client's feed against a scripted server, on a MockClock."""

from __future__ import annotations

import json

import httpx
import pytest
import trio
import trio.testing
from feed.scripted import (
    BATCH,
    FEED,
    RENEW,
    SINGLE,
    ScriptedServer,
    Streamed,
    assert_empty,
    broken,
    client_of,
    hello,
    json_answer,
    line,
    run,
    start,
    stream,
)

from rollout.client import RolloutClientClosedError, RolloutProtocolError
from rollout.client.answers import Admitted
from rollout.client.feed import Expectation, Followed, ResultFeed
from rollout.client.polling import Poller
from rollout.rules.retry import FailureKind
from rollout.types import RolloutInitResponse, RolloutResultResponse, RolloutStatus

DONE = json_answer(200, line("success"))


async def test_the_first_admission_goes_alone_and_the_feed_follows(autojump_clock):
    server = ScriptedServer(feeds=[stream(hello(), 5, line("running"), 5, line("success"))])
    async with client_of(server) as client:
        handle = await start(client)
        assert [status async for status in handle.statuses()] == ["queued", "running", "success"]
        assert trio.current_time() == 10
    assert [called for _, called, _ in server.calls] == [SINGLE, FEED]
    lease = {"rollout_id": "r", "polling_lease_token": "lease-of-r-1", "seen": "queued"}
    assert server.bodies(FEED) == [{"leases": [lease]}]


def test_an_early_line_counts_if_the_feed_that_the_rollout_is_attached_to_said_it():
    running, success = (
        RolloutResultResponse(rollout_id="r", status=RolloutStatus(status))
        for status in ("running", "success")
    )
    expectation = Expectation("r")
    expectation.record(running, None)
    assert expectation.early_result() is None
    expectation.feed = "f"
    expectation.record(running, "f")
    assert expectation.early_result() is running
    expectation.record(success, "f")
    expectation.record(running, "f")
    assert expectation.early_result() is success
    expectation.record(running, "g")
    assert expectation.early_result() is None
    expectation.feed = "g"
    assert expectation.early_result() is running


def test_an_admission_that_is_over_is_expected_no_longer_and_another_of_its_id_still_is():
    feed = ResultFeed(None)
    first, second = feed.expect("r"), feed.expect("r")
    feed.forget(first)
    feed.forget(first)
    assert feed._expected == {"r": [second]}
    feed.forget(second)
    feed.forget(second)
    assert feed._expected == {}


def test_a_feed_may_be_tried_while_a_full_request_fits_into_the_lease():
    admission = RolloutInitResponse(
        rollout_id="r",
        status=RolloutStatus.QUEUED,
        polling_lease_token="t",
        result_wait_timeout_sec=30,
        polling_lease_timeout_sec=120,
    )
    followed = Followed(Poller(None, Admitted(admission, 0.0), print))
    assert followed.may_try(1000.0)  # nothing has failed yet
    assert followed.delay_after(FailureKind.TRANSPORT, 0.0) == 0.1
    assert [followed.may_try(now) for now in (79.5, 80.0)] == [True, False]
    for sent_at, deadline in ((-1.0, 120.0), (10.0, 130.0), (5.0, 130.0)):
        followed.renewed(sent_at)
        assert followed.poller.lease_deadline == deadline


@pytest.mark.parametrize("extensions", [[], ["something-else"]])
async def test_a_server_that_offers_nothing_gets_the_routes_of_the_protocol(
    extensions, autojump_clock
):
    server = ScriptedServer(polls=[DONE], extensions=extensions)
    async with client_of(server) as client:
        for _ in range(3):
            assert (await run(client)).status is RolloutStatus.SUCCESS
    assert [called for _, called, _ in server.calls] == [SINGLE, "GET /rollout/r/result"] * 3


def said(caplog):
    """What the client's feed has logged."""
    records = caplog.records
    return [each.getMessage() for each in records if each.name == "rollout.client.feed"]


async def never(_):
    await trio.sleep_forever()


NOT_A_FEED = "its first line is not that of a feed"
LATE = "no first line came"


@pytest.mark.parametrize(
    ("feed", "at", "why"),
    [
        (json_answer(404, {"detail": "not found"}), 0, "POST /rollouts/feed answered 404"),
        (json_answer(405, {"detail": "no"}), 0, "POST /rollouts/feed answered 405"),
        (json_answer(401, {"detail": "no"}), 0, "POST /rollouts/feed answered 401"),
        (json_answer(500, {"detail": "no"}), 0, "POST /rollouts/feed answered 500"),
        (httpx.Response(302, headers={"Location": "/"}), 0, "POST /rollouts/feed answered 302"),
        (json_answer(200, hello()), 0, "it was not streamed"),
        (httpx.Response(200, text="<html>"), 0, "it was not streamed"),
        (stream(b"<html>\n", ...), 0, NOT_A_FEED),
        (stream(b"[1]\n", ...), 0, NOT_A_FEED),
        (stream({"feed": 1, "refused": []}, ...), 0, NOT_A_FEED),
        (stream({"feed": "x"}, ...), 0, NOT_A_FEED),
        (stream(hello(), b"junk\n", ...), 0, "a line is not a JSON object"),
        (stream(hello(), {"rollout_id": "r", "status": "-"}, ...), 0, "a line is not a result"),
        (stream(hello(), line("unknown"), ...), 0, "a line has status 'unknown'"),
        (RuntimeError("a transport of the user's own"), 0, None),
        (never, 10, LATE),
        (stream(...), 10, LATE),
    ],
    ids=range(17),
)
async def test_where_no_feed_comes_through_there_are_polls(feed, at, why, autojump_clock, caplog):
    caplog.set_level("INFO", "rollout.client.feed")
    server = ScriptedServer(feeds=[feed], polls=[DONE])
    async with client_of(server) as client:
        assert (await run(client)).status is RolloutStatus.SUCCESS
        assert trio.current_time() == at
        assert (await run(client)).status is RolloutStatus.SUCCESS
    assert len(server.times(FEED)) == 1
    assert all("feed" not in body for body in server.bodies(BATCH))
    if why is None:
        assert said(caplog) == ["the result feed failed; polling instead"]
    else:
        assert said(caplog) == [f"the result feed does not come through ({why}); polling instead"]


async def test_a_line_may_come_in_pieces(autojump_clock):
    pieces = [b'{"rollout_id": "r", ', 1, b'"status": ', 1, b'"success"}\n', ...]
    server = ScriptedServer(feeds=[stream(hello(), *pieces)])
    async with client_of(server) as client:
        assert (await run(client)).status is RolloutStatus.SUCCESS
        assert trio.current_time() == 2
    assert server.polled == []


async def test_a_line_without_end_is_not_kept(autojump_clock, caplog, monkeypatch):
    caplog.set_level("INFO", "rollout.client.feed")
    monkeypatch.setattr("rollout.client.feed._LONGEST_LINE", 1000)
    longest = b" " * 1000
    feed = stream(hello(), longest, 1, b"\n", longest, 1, b" ", ...)
    server = ScriptedServer(feeds=[feed], polls=[DONE])
    async with client_of(server) as client:
        assert (await run(client)).status is RolloutStatus.SUCCESS
        assert trio.current_time() == 2
    reason = "a line is too long"
    assert said(caplog) == [f"the result feed does not come through ({reason}); polling instead"]


async def test_a_gateway_that_holds_the_feed_back_costs_no_lease(autojump_clock):
    server = ScriptedServer(feeds=[never], polls=[DONE], wait=2, lease=5)
    async with client_of(server) as client:
        await run(client)
        assert trio.current_time() == 2.5


async def test_a_broken_feed_is_resumed_and_says_what_was_seen(autojump_clock):
    server = ScriptedServer(
        feeds=[
            stream(
                hello("1"), 1, line("running", agent_started_at="2026-01-31T12:00:00Z"), broken()
            ),
            stream(hello("2"), 1, line("grading"), broken()),
            broken(),
            stream(hello("3"), line("running"), line("success")),
        ]
    )
    async with client_of(server) as client:
        handle = await start(client)
        statuses = [status async for status in handle.statuses()]
        assert statuses == ["queued", "running", "grading", "success"]
        assert (await handle).agent_started_at is not None
    seen = [body["leases"][0]["seen"] for body in server.bodies(FEED)]
    grading = "grading;agent-started"
    assert seen == ["queued", "running;agent-started", grading, grading]
    assert server.times(FEED) == pytest.approx([0, 1.1, 2.2, 2.7])
    assert not server.polled


@pytest.mark.parametrize("end", [(), (broken(),), (b"\n", broken())], ids=["end", "break", "beat"])
async def test_a_feed_that_ends_at_once_is_given_up(end, autojump_clock, caplog):
    caplog.set_level("INFO", "rollout.client.feed")
    polls = [DONE, json_answer(200, line("success", "s"))]
    server = ScriptedServer(feeds=[stream(hello(), *end)], polls=polls)
    async with client_of(server) as client:
        assert (await run(client)).status is RolloutStatus.SUCCESS
        assert trio.current_time() == pytest.approx(0.5)
        assert (await run(client, "s")).status is RolloutStatus.SUCCESS
    assert len(server.times(FEED)) == 6
    assert server.polled == ["r", "s"]
    assert said(caplog)[-1] == "each result feed ends as soon as it is open; polling instead"


@pytest.mark.parametrize("life", [[line("running")], [1]], ids=["news", "a second"])
async def test_a_feed_that_brings_results_or_stays_open_for_a_while_may_end_often(
    life, autojump_clock
):
    feeds = [stream(hello(), *life, broken()) for _ in range(20)]
    server = ScriptedServer(feeds=[*feeds, stream(hello(), line("success"), ...)])
    async with client_of(server) as client:
        assert (await run(client)).status is RolloutStatus.SUCCESS
    assert len(server.times(FEED)) == 21
    assert server.polled == []


@pytest.mark.parametrize("life", [line("running"), 1], ids=["news", "a second"])
async def test_feeds_that_end_at_once_do_not_add_up(life, autojump_clock):
    short = [stream(hello(), broken()) for _ in range(5)]
    feeds = [*short, stream(hello(), life, broken()), *short]
    server = ScriptedServer(feeds=[*feeds, stream(hello(), line("success"), ...)])
    async with client_of(server) as client:
        assert (await run(client)).status is RolloutStatus.SUCCESS
    assert len(server.times(FEED)) == 12
    assert server.polled == []


async def test_retries_run_out_and_each_gets_an_error_of_its_own(autojump_clock):
    server = ScriptedServer(feeds=[broken()])
    errors = []

    async def one(client, rollout_id):
        with pytest.raises(httpx.RemoteProtocolError) as caught:
            await run(client, rollout_id)
        errors.append(caught.value)

    async with client_of(server) as client, trio.open_nursery() as nursery:
        for rollout_id in "abc":
            nursery.start_soon(one, client, rollout_id)
    assert len({id(error) for error in errors}) == 3
    assert server.times(FEED)[:3] == pytest.approx([0, 0.1, 0.6])


async def test_a_feed_that_has_worked_and_does_not_open_again_in_time(autojump_clock):
    server = ScriptedServer(feeds=[stream(hello(), 1, broken()), never], wait=2, lease=14)
    async with client_of(server) as client:
        with pytest.raises(httpx.ReadTimeout) as caught:
            await run(client)
    assert str(caught.value) == "the feed did not open in time"
    assert server.times(FEED) == pytest.approx([0, 1.1])
    assert server.polled == []


async def test_a_feed_is_read_as_patiently_as_a_poll(autojump_clock):
    waits = []

    class Noting(ScriptedServer):
        async def handle_async_request(self, request):
            if request.url.path == "/rollouts/feed":
                waits.append(request.extensions["timeout"]["read"])
            return await super().handle_async_request(request)

    async with client_of(Noting(feeds=[stream(hello(), line("success"))], wait=7)) as client:
        await run(client)
    assert waits == [17]  # the longest wait of a poll, and the time that an answer may take


async def test_an_error_keeps_its_cause(autojump_clock):
    error = httpx.ConnectTimeout("slow")
    error.__cause__ = OSError("reset by peer")
    server = ScriptedServer(feeds=[stream(hello(), 1, error)])
    async with client_of(server) as client:
        with pytest.raises(httpx.ConnectTimeout) as caught:
            await run(client)
    assert caught.value.__cause__ is error.__cause__


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_gateway_that_refuses_the_feed_alone_costs_no_rollout(
    status, autojump_clock, caplog
):
    caplog.set_level("INFO", "rollout.client.feed")
    server = ScriptedServer(feeds=[json_answer(status, {})], polls=[DONE])
    async with client_of(server) as client:
        for _ in range(2):
            assert (await run(client)).status is RolloutStatus.SUCCESS
    assert server.times(FEED) == pytest.approx([0, 0.25, 0.75, 1.75])
    assert server.polled == ["r", "r"]
    refusal = f"POST /rollouts/feed answered {status}"
    assert said(caplog)[-1] == f"a gateway refuses the result feed ({refusal}); polling instead"


async def test_a_gateways_refusal_is_the_error_of_a_lease_that_allows_no_second_attempt(
    autojump_clock,
):
    server = ScriptedServer(feeds=[json_answer(502, {})], lease=40.2)
    async with client_of(server) as client:
        with pytest.raises(RolloutProtocolError) as caught:
            await run(client)
    assert str(caught.value).endswith("POST /rollouts/feed answered 502")
    assert caught.value.status_code == 502


async def test_a_feed_that_has_worked_is_tried_again_after_a_gateway_refused_it(autojump_clock):
    refusals = [json_answer(502, {}) for _ in range(4)]
    working = stream(hello("2"), line("success", "s"), ...)
    server = ScriptedServer(feeds=[stream(hello(), 1, broken()), *refusals, working], polls=[DONE])
    async with client_of(server) as client:
        assert (await run(client)).status is RolloutStatus.SUCCESS
        assert (await run(client, "s")).status is RolloutStatus.SUCCESS
    assert server.polled == ["r"]


async def test_a_feed_is_opened_again_after_the_earliest_of_the_backoffs(autojump_clock):
    news = stream(hello("2"), line("success", "a"), line("success", "b"), ...)
    server = ScriptedServer(
        feeds=[stream(hello(), 1, broken()), broken(), broken(), news], extensions=["result-feed"]
    )
    async with client_of(server) as client, trio.open_nursery() as nursery:
        nursery.start_soon(run, client, "a")
        await trio.sleep(1.05)
        nursery.start_soon(run, client, "b")
    # At 1.2 the first backoff of b is over. That attempt fails, and counts for b alone.
    assert server.times(FEED) == pytest.approx([0, 1.1, 1.2, 1.6])


async def test_clients_of_a_server_that_is_away_do_not_come_back_together(autojump_clock, draws):
    draws[:] = [0.0, 0.4, 1.0]
    servers = [ScriptedServer(feeds=[broken(), stream(hello(), line("success"))]) for _ in draws]
    async with trio.open_nursery() as nursery:
        for server in servers:
            nursery.start_soon(run_once, server)
    ends = sorted(server.times(FEED)[1] for server in servers)
    assert ends == pytest.approx([0.05, 0.08, 0.1])


async def run_once(server):
    async with client_of(server) as client:
        await run(client)


@pytest.mark.parametrize(
    ("failure", "level"),
    [(KeyError("a bug"), "ERROR"), (broken(), "WARNING")],
    ids=["bug", "weather"],
)
async def test_a_bug_is_logged_with_its_traceback_and_weather_is_not(
    failure, level, autojump_clock, caplog
):
    server = ScriptedServer(feeds=[failure, stream(hello(), line("success"))], polls=[DONE])
    async with client_of(server) as client:
        assert (await run(client)).status is RolloutStatus.SUCCESS
    (record,) = [record for record in caplog.records if record.name == "rollout.client.feed"]
    assert record.levelname == level
    assert bool(record.exc_info) == (level == "ERROR")
    if level == "WARNING":
        message = "opening the result feed again in 0.10 s after RemoteProtocolError"
        assert record.getMessage() == message


async def test_a_retry_starts_only_within_the_rollouts_own_lease(autojump_clock):
    server = ScriptedServer(
        leases={"short": 41},
        feeds=[stream(hello(), 2, broken()), stream(hello(), line("success", "long"), ...)],
    )
    async with client_of(server) as client, trio.open_nursery() as nursery:

        async def short():
            with pytest.raises(httpx.RemoteProtocolError):
                await run(client, "short")
            assert trio.current_time() == 2  # 2 + 0.1 + 40 is past its lease

        nursery.start_soon(short)
        assert (await run(client, "long")).status is RolloutStatus.SUCCESS
    assert [claim["rollout_id"] for claim in server.bodies(FEED)[-1]["leases"]] == ["long"]


async def test_a_feed_is_opened_for_those_that_come_after_one_was_given_up(autojump_clock):
    server = ScriptedServer(
        leases={"short": 41},
        feeds=[stream(hello(), 2, broken()), stream(hello("2"), line("success", "next"), ...)],
    )
    async with client_of(server) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await run(client, "short")
        assert (await run(client, "next")).status is RolloutStatus.SUCCESS
    assert server.times(FEED) == [0, 2]


async def test_a_process_that_slept_through_a_lease_sends_nothing_for_it(autojump_clock):
    server = ScriptedServer(feeds=[stream(hello(), 1, broken())])
    async with client_of(server) as client, trio.open_nursery() as nursery:

        async def stand_still():
            await trio.sleep(1.05)  # the feed is to be opened again at 1.1
            autojump_clock.jump(200)

        nursery.start_soon(stand_still)
        with pytest.raises(httpx.RemoteProtocolError):
            await run(client)
    assert server.times(FEED) == [0]
    assert server.polled == []


async def test_a_server_that_restarts_leaves_each_with_an_error_of_its_own(autojump_clock):
    server = ScriptedServer(feeds=[stream(hello(), 1, broken()), stream(hello("2", "a", "b"), ...)])
    async with client_of(server) as client, trio.open_nursery() as nursery:

        async def one(rollout_id):
            with pytest.raises(
                RolloutProtocolError, match=f"/rollout/{rollout_id}/result"
            ) as caught:
                await run(client, rollout_id)
            assert caught.value.status_code == 404

        nursery.start_soon(one, "a")
        nursery.start_soon(one, "b")
    assert sorted(server.polled) == ["a", "b"]


async def test_the_others_stay_on_the_feed_that_does_not_know_one(autojump_clock):
    server = ScriptedServer(
        feeds=[
            stream(hello(), 1, broken()),
            stream(hello("2", "a"), 40, line("success", "b"), ...),
        ],
        polls=[json_answer(200, line("success", "a"))],
    )
    async with client_of(server) as client, trio.open_nursery() as nursery:
        nursery.start_soon(run, client, "a")
        nursery.start_soon(run, client, "b")
    assert server.polled == ["a"]
    assert (len(server.times(FEED)), len(server.times(RENEW))) == (2, 1)


@pytest.mark.parametrize(
    "renewal",
    [
        json_answer(404, {"detail": "unknown feed"}),
        json_answer(500, {}),
        httpx.Response(200, text="<html>"),
        httpx.ConnectTimeout("no"),
        httpx.PoolTimeout("no"),
        broken(),
        never,
    ],
    ids=range(7),
)
async def test_a_renewal_that_fails_is_made_good_by_a_new_feed(renewal, autojump_clock):
    server = ScriptedServer(
        feeds=[stream(hello(), ...), stream(hello("2"), line("success"))], renewals=[renewal]
    )
    async with client_of(server) as client:
        assert (await run(client)).status is RolloutStatus.SUCCESS
    assert server.times(RENEW) == [30]
    late = 10 if renewal is never else 0
    assert server.times(FEED) == pytest.approx([0, 30.1 + late])
    assert not server.polled


@pytest.mark.parametrize(
    ("renewal", "said"),
    [
        (httpx.ConnectTimeout("no"), "failed: ConnectTimeout"),
        (json_answer(500, {}), "answered 500"),
    ],
)
async def test_a_renewal_that_failed_last_is_the_error(renewal, said, autojump_clock):
    server = ScriptedServer(feeds=[stream(hello(), ...)], renewals=[renewal], lease=70)
    async with client_of(server) as client:
        with pytest.raises(httpx.RemoteProtocolError) as caught:
            await run(client)
    assert str(caught.value) == f"POST /rollouts/renew {said}"
    assert server.times(FEED) == [0]


async def test_leases_are_renewed_as_often_as_by_polls_also_of_those_that_come_later(
    autojump_clock,
):
    server = ScriptedServer(
        wait=2,
        lease=5,
        feeds=[
            stream(
                hello(), 1, line("success", "a"), 8, line("running", "b"), 6, line("success", "b")
            )
        ],
    )
    async with client_of(server) as client:
        await run(client, "a")
        await trio.sleep(7)
        await run(client, "b")
        assert trio.current_time() == 15
    assert server.times(RENEW) == [2, 4, 6, 8, 10, 12, 14]
    assert len(server.times(FEED)) == 1


async def test_a_feed_that_nobody_needs_ends_and_the_next_rollout_waits_for_none(autojump_clock):
    server = ScriptedServer(
        feeds=[stream(hello(), line("success", "a"), ...), stream(hello("2"), line("success", "b"))]
    )
    async with client_of(server) as client:
        await run(client, "a")
        await trio.sleep(100)
        assert max(server.times(RENEW), default=0) <= 60
        await run(client, "b")
        assert trio.current_time() == 100
    assert server.bodies(BATCH)[0].get("feed") is None


async def test_a_feed_that_is_used_now_and_then_stays_open(autojump_clock):
    news = 1, line("success", "a"), 20, line("success", "b"), 20, line("success", "c")
    server = ScriptedServer(feeds=[stream(hello(), *news, ...)])
    async with client_of(server) as client:
        for rollout_id, at in (("a", 0), ("b", 20), ("c", 40)):
            await trio.sleep_until(at)
            await run(client, rollout_id)
            assert trio.current_time() == at + 1
    assert server.times(FEED) == [0]
    assert server.polled == []


async def test_one_that_is_cancelled_while_the_feed_opens_is_renewed_no_longer(autojump_clock):
    async def slow(_):
        await trio.sleep(5)
        return httpx.Response(200, stream=Streamed([hello(), ...]))

    server = ScriptedServer(
        feeds=[stream(hello(), 1, broken()), slow, stream(hello("3"), 9, line("success", "b"))]
    )
    async with client_of(server) as client:
        a, b = await start(client, "a"), await start(client, "b")
        await trio.sleep(3)
        assert a.cancel()
        assert (await b).status is RolloutStatus.SUCCESS
    claims = [[c["rollout_id"] for c in body["leases"]] for body in server.bodies(FEED)]
    assert claims[1:] == [["a", "b"], ["b"]]
    assert server.times(FEED)[2] == pytest.approx(6.1 + 30)
    assert server.times(RENEW) == []


async def test_a_cancelled_handle_sends_nothing_and_is_renewed_no_longer(autojump_clock):
    server = ScriptedServer(
        feeds=[
            stream(hello(), ...),
            stream(hello("3"), 50, line("success", "b")),
        ]
    )
    async with client_of(server) as client:
        a = await start(client, "a")
        b = await start(client, "b")
        await trio.sleep(10)
        before = len(server.calls)
        assert a.cancel()
        await trio.sleep(10)
        assert len(server.calls) == before
        assert (await b).status is RolloutStatus.SUCCESS
    claims = [[c["rollout_id"] for c in body["leases"]] for body in server.bodies(FEED)]
    assert claims[-1] == ["b"]
    assert all(at > server.times(FEED)[-1] for at in server.times(RENEW))


async def test_a_batch_that_names_a_feed_which_broke_meanwhile(autojump_clock):
    async def slow(body):
        await trio.sleep(5)
        return server.admitted(body)

    server = ScriptedServer(
        feeds=[
            stream(hello("1"), 2, broken()),
            stream(hello("2"), ...),
            stream(hello("3"), line("success", "b"), line("success", "a")),
        ],
        batches=[slow],
    )
    async with client_of(server) as client, trio.open_nursery() as nursery:
        nursery.start_soon(run, client, "a")
        await trio.sleep(1)
        assert (await run(client, "b")).status is RolloutStatus.SUCCESS
    assert server.bodies(BATCH)[0]["feed"] == "1"
    assert [c["rollout_id"] for c in server.bodies(FEED)[-1]["leases"]] == ["a", "b"]


async def test_a_result_that_comes_before_the_answer_to_its_admission(autojump_clock):
    async def slow(body):
        await trio.sleep(5)
        return server.admitted(body)

    server = ScriptedServer(
        feeds=[
            stream(hello(), 2, line("running", "b"), line("success", "b"), 50, line("success", "a"))
        ],
        batches=[slow],
    )
    async with client_of(server) as client, trio.open_nursery() as nursery:
        nursery.start_soon(run, client, "a")
        await trio.sleep(1)
        handle = await start(client, "b")
        assert (await handle).status is RolloutStatus.SUCCESS
        assert trio.current_time() == 6


async def test_two_that_ask_for_the_same_id(autojump_clock):
    refusal = {"status_code": 409, "detail": "active"}

    async def one_of_two(body):
        await trio.sleep(5)
        answer = server.outcomes(body)
        answer["outcomes"][1:] = [refusal] * (len(body["rollouts"]) - 1)
        return json_answer(200, answer)

    server = ScriptedServer(
        feeds=[stream(hello(), 3, line("success", "b"), 50, line("success", "a"))],
        batches=[one_of_two],
    )
    ends = []

    async def one(client):
        try:
            ends.append((await run(client, "b")).status)
        except RolloutProtocolError as error:
            ends.append(error.status_code)

    async with client_of(server) as client, trio.open_nursery() as nursery:
        nursery.start_soon(run, client, "a")
        await trio.sleep(1)
        nursery.start_soon(one, client)
        nursery.start_soon(one, client)
    assert sorted(map(str, ends)) == ["409", "success"]


async def test_an_id_that_a_restarted_server_takes_anew(autojump_clock):
    server = ScriptedServer(
        feeds=[
            stream(hello(), ...),
            stream(hello("2"), ...),
            stream(hello("3"), 1, line("success")),
        ]
    )
    async with client_of(server) as client:
        old = await start(client)
        await trio.sleep(1)
        new = await start(client)
        with pytest.raises(RolloutProtocolError) as caught:
            await old
        assert caught.value.status_code == 404
        new.cancel()


async def test_a_rollout_that_another_feed_took_over_is_polled(autojump_clock):
    server = ScriptedServer(
        feeds=[
            stream(hello(), 1, {"taken_over": ["r", "x", 1]}, {"news": "of later versions"}, ...)
        ],
        polls=[DONE],
    )
    async with client_of(server) as client:
        assert (await run(client)).status is RolloutStatus.SUCCESS
        assert trio.current_time() == 1
    assert server.polled == ["r"]


async def test_the_others_stay_on_the_feed_when_one_is_taken_over(autojump_clock):
    notices = {"taken_over": ["a", "unknown", 1, []]}, {"taken_over": 1}, {}
    server = ScriptedServer(
        feeds=[stream(hello(), 1, *notices, 40, line("success", "b"), ...)],
        polls=[json_answer(200, line("success", "a"))],
    )
    async with client_of(server) as client, trio.open_nursery() as nursery:
        nursery.start_soon(run, client, "b")
        await trio.testing.wait_all_tasks_blocked()
        await run(client, "a")
    assert server.polled == ["a"]
    assert server.times(FEED) == [0]
    assert server.times(RENEW) == [30]
    assert server.bodies(RENEW) == [{"feed": "feed-1"}]


@pytest.mark.parametrize("seconds", [0, 0.5, 1, 1.05, 1.5, 4, 4.5, 7, 35, 41])
async def test_a_caller_that_is_cancelled_leaves_nothing_behind(seconds, autojump_clock):
    async def slow(body):
        await trio.sleep(3)
        return server.admitted(body)

    server = ScriptedServer(
        feeds=[stream(hello("1"), 1, broken()), json_answer(502, {}), stream(hello("2"), ...)],
        batches=[slow],
    )
    async with client_of(server) as client:
        extensions = client._extensions
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, client, "a")
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(run, client, "b")
            nursery.start_soon(run, client, "c")
            await trio.sleep(seconds)
            nursery.cancel_scope.cancel()
        await trio.sleep(200)
        assert_empty(extensions)
        assert extensions._feed.token is None  # the feed went, and their leases with it
        last = max(server.times(FEED))
        assert max(server.times(RENEW), default=0) <= seconds + 30
        assert last <= seconds + 31


@pytest.mark.parametrize("seconds", [0, 0.5, 1, 1.05, 2, 4.5, 35])
async def test_a_client_that_is_cancelled_closes_everything(seconds, autojump_clock):
    opened = []

    async def feed(_):
        opened.append(
            Streamed([hello(str(len(opened))), 1, broken()] if not opened else [hello(), ...])
        )
        await trio.lowlevel.checkpoint()
        return httpx.Response(200, stream=opened[-1])

    server = ScriptedServer(feeds=[feed])
    with trio.move_on_after(seconds) as scope:
        async with client_of(server) as client, trio.open_nursery() as nursery:
            for n in range(5):
                nursery.start_soon(run, client, f"r{n}")
    assert scope.cancelled_caught
    assert all(streamed.closed for streamed in opened)


async def test_a_client_that_is_closed_inside_of_its_block(autojump_clock):
    server = ScriptedServer()
    async with client_of(server) as client:
        handle = await start(client)
        await trio.sleep(1)
        await client.aclose()
        await client.http_client.aclose()
        await trio.sleep(100)
        assert handle.done()


async def test_an_http_client_that_is_closed_under_the_feed(autojump_clock, caplog):
    caplog.set_level("DEBUG", "rollout.client.feed")
    async with client_of(ScriptedServer(feeds=[stream(hello(), 1, broken())])) as client:
        handle = await start(client)
        await trio.sleep(1.05)
        await client.http_client.aclose()
        with pytest.raises(RolloutClientClosedError):
            await handle
    assert said(caplog)[-1] == "the result feed ends: the HTTP client was closed"


async def test_no_secret_shows(autojump_clock, log_lines):
    server = ScriptedServer(feeds=[stream(hello("the-feed-token"), 1, broken())])
    async with client_of(server) as client:
        handle = await start(client, llm_api_key="the-llm-key")
        other = await start(client, "s", llm_api_key="the-llm-key")
        await trio.sleep(0.5)
        extensions = client._extensions
        feed, batcher = extensions._feed, extensions._batcher
        (followed, *_) = feed._followed.values()
        shown = "".join(map(repr, (handle, other, extensions, feed, batcher, followed, client)))
        handle.cancel()
        server.feeds[:] = [broken()]
        with pytest.raises(httpx.RemoteProtocolError) as caught:
            await other
    shown += "\n".join(log_lines) + repr(caught.value)
    for secret in ("the-feed-token", "the-llm-key", "lease-of-"):
        assert secret not in shown
    assert json.dumps("the-feed-token") not in shown


async def test_a_handle_that_is_cancelled_at_once_is_not_followed_at_all(autojump_clock):
    for _ in range(20):  # the order of tasks is drawn
        server = ScriptedServer()
        async with client_of(server) as client:
            (await start(client)).cancel()
            await trio.sleep(100)
        assert [called for _, called, _ in server.calls] == [SINGLE]
