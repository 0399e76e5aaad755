"""Admissions that are sent again after a lost answer, where the server knows their keys."""

from __future__ import annotations

import json
from itertools import pairwise

import httpx
import pytest
import trio
from client.fakes import (
    FakeServer,
    admitted,
    after,
    bare_client,
    client_of,
    healthy,
    refused,
    result,
    run,
    silence,
    start,
)

from rollout.client import RolloutAdmissionTimeoutError, RolloutProtocolError
from rollout.types import DURABLE_RESULTS, EXTENSIONS, RolloutInitRequest, RolloutStatus

LOST = [
    httpx.RemoteProtocolError("x"),
    httpx.ReadError("x"),
    httpx.WriteError("x"),
    httpx.ReadTimeout("x"),
    httpx.WriteTimeout("x"),
]
NEVER_SENT = [httpx.ConnectError("x"), httpx.ConnectTimeout("x")]
NOT_FOR_A_RETRY = [httpx.PoolTimeout("x"), httpx.UnsupportedProtocol("x"), ValueError("x")]
GATEWAY = [refused(502), refused(503, None), refused(503, "closing"), refused(504)]
OFFERED = {"extensions": [*EXTENSIONS], "lease": 100.0}


def offers(**more):
    return healthy(extensions=[*EXTENSIONS], polling_lease_timeout_sec=100, **more)


def kind(answer):
    """A name for a test's parameter."""
    return str(getattr(answer, "status_code", type(answer).__name__))


def knowing(*admissions, **scripts):
    """A server that has admitted one rollout, so that the client knows what it offers."""
    return FakeServer(admissions=[admitted(**OFFERED), *admissions], **scripts)


async def run_second(server, **options):
    """Run a rollout after the first one; returns when its requests for admission came."""
    async with client_of(server, feed=False, **options) as client:
        await run(client)
        started = trio.current_time()
        try:
            await run(client)
        finally:
            times = [at - started for at in server.times("/rollout")[1:]]
    return times


@pytest.mark.parametrize("failure", [*LOST, *NEVER_SENT, *GATEWAY], ids=kind)
async def test_an_admission_without_an_answer_is_sent_again(failure, autojump_clock):
    server = knowing(failure, failure, admitted(**OFFERED))
    first, second, third = await run_second(server)
    assert first == 0
    assert 0.125 <= second <= 0.25
    assert 0.25 <= third - second <= 0.5
    bodies = {call.body for call in server.calls[1:] if call.path == "/rollout"}
    assert len(bodies) == 1


@pytest.mark.parametrize("failure", [*NOT_FOR_A_RETRY, refused(500), refused(409)], ids=kind)
async def test_other_failures_raise_at_once(failure, autojump_clock):
    server = knowing(failure, admitted(**OFFERED))
    expected = type(failure) if isinstance(failure, Exception) else RolloutProtocolError
    with pytest.raises(expected):
        await run_second(server)
    assert len(server.times("/rollout")) == 2


async def test_every_rollout_has_a_key_of_its_own(autojump_clock):
    server = FakeServer()
    async with client_of(server) as client:
        for _ in range(3):
            await run(client)
        requests = [
            RolloutInitRequest(
                rollout_id="r", initial_messages=[], chat_completions_url="http://chat/v1", **key
            )
            for key in ({}, {}, {"admission_key": "mine"})
        ]
        async with client.run_rollouts(requests, max_in_flight=1) as finished:
            assert len([ended async for ended in finished]) == 3
    keys = [
        json.loads(call.body)["admission_key"] for call in server.calls if call.path == "/rollout"
    ]
    assert len(set(keys)) == 6
    assert keys[-1] == "mine"
    assert [request.admission_key for request in requests] == [None, None, "mine"]


@pytest.mark.parametrize("failure", [*LOST, refused(502), refused(503, None)], ids=kind)
async def test_the_health_says_what_a_server_offers_if_the_first_answer_is_lost(
    failure, autojump_clock
):
    server = FakeServer(admissions=[failure, admitted(**OFFERED)], healths=[offers()])
    assert (await run(bare_client(server))).status is RolloutStatus.SUCCESS
    paths = [call.path for call in server.calls]
    assert paths == ["/rollout", "/health", "/rollout", "/rollout/r/result"]


@pytest.mark.parametrize(
    "health",
    [
        healthy(),
        healthy(extensions=["batch-admission"], polling_lease_timeout_sec=100),
        healthy(extensions=[*EXTENSIONS]),
        healthy(extensions=[*EXTENSIONS], polling_lease_timeout_sec="100"),
        healthy(extensions="admission-keys", polling_lease_timeout_sec=100),
        httpx.Response(200, json=[]),
        httpx.Response(200, content=b"<html>"),
        refused(404),
        refused(401),
        refused(500),
        httpx.UnsupportedProtocol("x"),
    ],
)
async def test_a_server_that_does_not_offer_it_gets_no_second_request(health, autojump_clock):
    lost = httpx.RemoteProtocolError("lost")
    server = FakeServer(admissions=[lost, admitted()], healths=[health])
    client = bare_client(server)
    for _ in range(2):
        with pytest.raises(httpx.RemoteProtocolError):
            await run(client)
        server.admissions.insert(0, lost)
    assert trio.current_time() == 0
    assert [call.path for call in server.calls] == ["/rollout", "/health", "/rollout"]


async def test_a_server_that_says_nothing_is_not_asked_for_long(autojump_clock):
    lost = httpx.RemoteProtocolError("lost")
    for health in (silence, lost, refused(503)):
        server = FakeServer(admissions=[lost], healths=[health])
        started = trio.current_time()
        with pytest.raises(httpx.RemoteProtocolError) as caught:
            await run(bare_client(server))
        assert caught.value is lost
        assert trio.current_time() - started == 10
        assert len(server.times("/rollout")) == 1


async def test_a_server_that_says_nothing_holds_up_many_no_longer_than_one(autojump_clock):
    async def fail():
        with pytest.raises(httpx.ReadError):
            await run(client)

    client = bare_client(FakeServer(admissions=[httpx.ReadError("lost")], healths=[silence]))
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(fail)
    assert trio.current_time() == 10


async def test_a_server_that_comes_back_in_time_says_what_it_offers(autojump_clock):
    down = httpx.ConnectError("down")
    server = FakeServer(
        admissions=[httpx.ReadError("killed"), down, admitted(**OFFERED)],
        healths=[down, down, down, offers()],
    )
    assert (await run(bare_client(server))).status is RolloutStatus.SUCCESS
    assert len(server.times("/health")) == 4


async def test_many_that_lost_their_answers_ask_for_the_health_once(autojump_clock):
    async def lose(_):
        await trio.sleep(1)
        raise httpx.ReadError("lost")

    server = FakeServer(admissions=[lose] * 50 + [admitted(**OFFERED)], healths=[offers()])
    client = bare_client(server)
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(run, client)
    assert len(server.times("/health")) == 1
    assert len(server.times("/rollout")) == 100


@pytest.mark.parametrize("failure", [*NEVER_SENT, refused(503, "closing")], ids=kind)
async def test_nothing_is_asked_of_an_unknown_server_that_took_nothing(failure, autojump_clock):
    server = FakeServer(admissions=[failure], healths=[offers()])
    with pytest.raises(type(failure) if isinstance(failure, Exception) else RolloutProtocolError):
        await run(bare_client(server))
    assert len(server.calls) == 1


@pytest.mark.parametrize("failure", [LOST[0], NEVER_SENT[0], refused(503, "closing")], ids=kind)
async def test_nothing_is_sent_once_the_lease_of_the_first_request_is_over(failure, autojump_clock):
    server = knowing(failure)
    with pytest.raises(type(failure) if isinstance(failure, Exception) else RolloutProtocolError):
        await run_second(server)
    times = [at - server.times("/rollout")[1] for at in server.times("/rollout")[1:]]
    assert 91 < times[-1] < 100
    assert all(later - earlier <= 8 for earlier, later in pairwise(times))
    assert len(times) < 30


async def test_an_attempt_is_cut_off_when_that_lease_is_over(autojump_clock):
    server = knowing(httpx.ReadError("lost"), silence)
    with pytest.raises(httpx.ReadError, match="lost"):
        await run_second(server)
    assert trio.current_time() == 100


async def test_room_that_is_waited_for_starts_the_time_anew(autojump_clock):
    lost = after(60, httpx.ReadError("lost"))
    full = refused(429, Retry_After="60")
    server = knowing(lost, full, lost, full, lost, admitted(**OFFERED))
    assert len(await run_second(server)) == 6


async def test_the_time_of_the_caller_bounds_it(autojump_clock):
    lost = httpx.ReadError("lost")
    with pytest.raises(RolloutAdmissionTimeoutError, match="may have succeeded") as caught:
        await run_second(knowing(lost), admission_timeout_sec=20)
    assert caught.value.__cause__ is lost
    assert trio.current_time() == 20


@pytest.mark.parametrize(
    ("answers", "admitted_as"),
    [
        ([LOST[0]], "unknown"),
        ([NEVER_SENT[0]], "no"),
        ([refused(503, "closing")], "no"),
        ([refused(504)], "unknown"),
        ([LOST[0], NEVER_SENT[0]], "unknown"),
        ([LOST[0], refused(401)], "unknown"),
        ([LOST[0], refused(409)], "no"),
        ([LOST[0], refused(503, "closing")], "unknown"),
        ([LOST[0], refused(429), NEVER_SENT[0]], "no"),
        ([refused(409)], "no"),
    ],
    ids=lambda value: "-".join(map(kind, value)) if isinstance(value, list) else value,
)
async def test_what_is_known_of_an_admission_that_failed(answers, admitted_as, autojump_clock):
    server = knowing(*answers)
    request = RolloutInitRequest(
        rollout_id="r", initial_messages=[], chat_completions_url="http://chat/v1"
    )
    async with client_of(server, feed=False) as client:
        await run(client)
        async with client.run_rollouts([request], max_in_flight=1) as finished:
            ended = await finished.receive()
    assert ended.admitted == admitted_as


async def test_polls_of_durable_results_wait_for_a_server_that_restarts(autojump_clock):
    down = httpx.ConnectError("down")
    for extensions, polls in (([*EXTENSIONS], 3), ([*EXTENSIONS, DURABLE_RESULTS], 17)):
        admission = admitted(extensions=extensions, wait=5, lease=100)
        server = FakeServer(admissions=[admission], polls=[down])
        started = trio.current_time()
        with pytest.raises(httpx.ConnectError):
            await run(bare_client(server))
        assert len(server.poll_calls) == polls
        assert trio.current_time() - started <= 100
    server = FakeServer(admissions=[admission], polls=[after(10, down), silence])
    started = trio.current_time()
    with pytest.raises(httpx.ConnectError):
        await run(bare_client(server))
    assert trio.current_time() - started == pytest.approx(110)  # the second one is cut off
    server = FakeServer(admissions=[admission], polls=[*[down] * 10, result("success")])
    assert (await run(bare_client(server))).status is RolloutStatus.SUCCESS


async def test_a_restart_is_waited_for_though_the_lease_that_is_known_has_ended(autojump_clock):
    lost, down = httpx.RemoteProtocolError("killed"), httpx.ConnectError("down")
    server = FakeServer(
        admissions=[admitted(extensions=[*EXTENSIONS, DURABLE_RESULTS], wait=20, lease=31)],
        polls=[after(20, result("running")), after(19, lost), *[down] * 6, result("success")],
    )
    assert (await run(bare_client(server))).status is RolloutStatus.SUCCESS
    assert trio.current_time() > 39 + 20


async def test_a_handle_is_given_for_an_admission_that_was_sent_again(autojump_clock):
    server = knowing(httpx.ReadError("lost"), admitted(**OFFERED))
    async with client_of(server, feed=False) as client:
        await run(client)
        handle = await start(client)
        assert (await handle).status is RolloutStatus.SUCCESS


async def test_the_error_is_that_of_the_request_that_may_have_arrived(autojump_clock):
    server = knowing(httpx.ReadError("lost"), httpx.ConnectError("down"))
    with pytest.raises(httpx.ReadError, match="lost"):
        await run_second(server)
    assert len(server.times("/rollout")) > 10


async def test_a_gateway_that_is_busy_does_not_start_the_time_anew(autojump_clock):
    full = httpx.Response(429, json={}, headers={"Retry-After": "60"})
    server = knowing(httpx.ReadError("lost"), full, full, admitted(**OFFERED))
    with pytest.raises(httpx.ReadError, match="lost"):
        await run_second(server)
    assert trio.current_time() < 100
