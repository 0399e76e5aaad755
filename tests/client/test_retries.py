"""Polls that fail: what is tried again, when, and until when."""

from __future__ import annotations

import httpx
import pytest
import trio
from client.fakes import (
    TOKEN,
    FakeServer,
    admitted,
    after,
    bare_client,
    refused,
    result,
    run,
    silence,
    trickling,
)

from rollout.client import RolloutPollTimeoutError, RolloutProtocolError
from rollout.types import RolloutStatus

LOST = httpx.RemoteProtocolError("the server closed the connection")
TRANSPORT = [
    LOST,
    httpx.ReadError("reset"),
    httpx.ConnectError("refused"),
    httpx.WriteError("reset"),
    httpx.CloseError("reset"),
    httpx.ReadTimeout("slow"),
]
GATEWAY = [502, 503, 504]


def names(error):
    return type(error).__name__ if isinstance(error, Exception) else str(error)


@pytest.mark.parametrize("error", TRANSPORT, ids=names)
async def test_two_retries_after_transport_errors(autojump_clock, error):
    server = FakeServer(polls=[error, error, result("success")])
    assert (await run(bare_client(server))).status is RolloutStatus.SUCCESS
    assert server.times() == pytest.approx([0, 0.1, 0.6])
    assert {(call.path, call.token) for call in server.poll_calls} == {("/rollout/r/result", TOKEN)}


@pytest.mark.parametrize("error", TRANSPORT, ids=names)
async def test_the_third_transport_error_comes_out(autojump_clock, error):
    server = FakeServer(polls=[error])
    with pytest.raises(type(error)) as caught:
        await run(bare_client(server))
    assert caught.value is error
    assert server.times() == pytest.approx([0, 0.1, 0.6])


@pytest.mark.parametrize("status", GATEWAY)
async def test_six_retries_after_gateway_errors(autojump_clock, status):
    server = FakeServer(polls=[*[refused(status)] * 6, result("success")])
    assert (await run(bare_client(server))).status is RolloutStatus.SUCCESS
    assert server.times() == pytest.approx([0, 0.25, 0.75, 1.75, 3.75, 7.75, 15.75])


async def test_the_seventh_gateway_error_comes_out_with_the_last_status(autojump_clock):
    server = FakeServer(polls=[*[refused(502)] * 6, refused(504, "upstream is gone")])
    with pytest.raises(RolloutProtocolError, match="upstream is gone") as caught:
        await run(bare_client(server))
    assert caught.value.status_code == 504
    assert len(server.times()) == 7


async def test_a_gateway_page_needs_no_json(autojump_clock):
    page = httpx.Response(502, html="<html>bad gateway</html>")
    server = FakeServer(polls=[page, result("success")])
    assert (await run(bare_client(server))).status is RolloutStatus.SUCCESS


async def test_the_two_schedules_do_not_eat_each_other(autojump_clock):
    mixed = [LOST, refused(502), LOST, *[refused(503)] * 5]
    server = FakeServer(polls=[*mixed, result("success")])
    assert (await run(bare_client(server))).status is RolloutStatus.SUCCESS
    assert server.times() == pytest.approx([0, 0.1, 0.35, 0.85, 1.35, 2.35, 4.35, 8.35, 16.35])


async def test_a_used_up_schedule_ends_it_whatever_is_left_of_the_other(autojump_clock):
    server = FakeServer(polls=[LOST, refused(502), LOST, refused(502), LOST])
    with pytest.raises(httpx.RemoteProtocolError):
        await run(bare_client(server))
    assert len(server.times()) == 5


async def test_each_poll_has_its_own_retries(autojump_clock):
    server = FakeServer(
        polls=[LOST, LOST, after(30, result("queued")), LOST, LOST, result("success")]
    )
    assert (await run(bare_client(server))).status is RolloutStatus.SUCCESS
    assert server.times() == pytest.approx([0, 0.1, 0.6, 30.6, 30.7, 31.2])


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectTimeout("slow"),
        httpx.WriteTimeout("slow"),
        httpx.PoolTimeout("full"),
        httpx.LocalProtocolError("ours"),
        httpx.ProxyError("no"),
        httpx.UnsupportedProtocol("no"),
    ],
    ids=names,
)
async def test_other_transport_errors_are_not_retried(autojump_clock, error):
    server = FakeServer(polls=[error, result("success")])
    with pytest.raises(type(error)) as caught:
        await run(bare_client(server))
    assert caught.value is error
    assert server.times() == [0]


@pytest.mark.parametrize(
    "status", [201, 204, 302, 400, 401, 403, 404, 408, 422, 429, 500, 501, 505]
)
async def test_other_statuses_are_not_retried(autojump_clock, status):
    server = FakeServer(polls=[refused(status, "why not"), result("success")])
    with pytest.raises(RolloutProtocolError, match="why not") as caught:
        await run(bare_client(server))
    assert caught.value.status_code == status
    assert server.times() == [0]


async def test_an_invalid_body_is_not_retried(autojump_clock):
    server = FakeServer(polls=[httpx.Response(200, text="{"), result("success")])
    with pytest.raises(RolloutProtocolError) as caught:
        await run(bare_client(server))
    assert caught.value.status_code == 200
    assert server.times() == [0]


# --- the lease ------------------------------------------------------------------------------


async def test_a_retry_that_does_not_fit_before_the_end_of_the_lease_is_not_tried(autojump_clock):
    # 0.1 s of backoff and 40 s for a request do not end before 40.1 s.
    server = FakeServer(admissions=[admitted(lease=40.1)], polls=[LOST, result("success")])
    with pytest.raises(httpx.RemoteProtocolError):
        await run(bare_client(server))
    assert server.times() == [0]
    assert trio.current_time() == 0  # without waiting for the backoff


async def test_a_retry_that_just_fits_is_tried(autojump_clock):
    server = FakeServer(admissions=[admitted(lease=40.125)], polls=[LOST, result("success")])
    assert (await run(bare_client(server))).status is RolloutStatus.SUCCESS
    assert server.times() == pytest.approx([0, 0.1])


async def test_a_failed_poll_does_not_extend_the_lease(autojump_clock):
    # The lease ends at 90. The second failure comes at 49.5, too late for 0.5 s + 40 s.
    server = FakeServer(
        admissions=[admitted(lease=90)],
        polls=[after(20, LOST), after(29.4, LOST), result("success")],
    )
    with pytest.raises(httpx.RemoteProtocolError):
        await run(bare_client(server))
    assert server.times() == pytest.approx([0, 20.1])


async def test_a_valid_answer_extends_the_lease_from_when_it_was_asked_for(autojump_clock):
    # Asked for at 0 and answered at 30, it keeps the lease until 90: at 49.4 one retry fits
    # (49.4 + 0.1 + 40 < 90), at 49.95 it does not.
    for failed_at, attempts in ((49.4, 3), (49.95, 2)):
        begun = trio.current_time()
        server = FakeServer(
            admissions=[admitted(lease=90)],
            polls=[
                after(30, result("running")),
                after(failed_at - 30, LOST),
                result("success"),
            ],
        )
        if attempts == 3:
            assert (await run(bare_client(server))).status is RolloutStatus.SUCCESS
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                await run(bare_client(server))
        assert len(server.times()) == attempts
        assert server.times()[1] - begun == 30


async def test_the_first_lease_counts_from_when_admission_was_asked_for(autojump_clock):
    slow = after(5, admitted(lease=45))
    server = FakeServer(admissions=[slow], polls=[LOST, result("success")])
    with pytest.raises(httpx.RemoteProtocolError):
        await run(bare_client(server))
    assert server.times() == [5]


async def test_a_backoff_that_took_too_long_is_the_end_of_it(autojump_clock):
    # A machine that sleeps in the meantime: the retry fitted before the backoff, not after it.
    server = FakeServer(admissions=[admitted(lease=50)], polls=[LOST, result("success")])
    async with trio.open_nursery() as nursery:

        async def oversleep():
            await trio.sleep(0.05)
            autojump_clock.jump(20)

        nursery.start_soon(oversleep)
        with pytest.raises(httpx.RemoteProtocolError) as caught:
            await run(bare_client(server))
    assert caught.value is LOST
    assert server.times() == [0]


async def test_a_retry_is_cut_off_at_the_end_of_the_lease(autojump_clock):
    server = FakeServer(admissions=[admitted(lease=50)], polls=[LOST, silence])
    with pytest.raises(httpx.RemoteProtocolError) as caught:
        await run(bare_client(server))
    assert caught.value is LOST
    assert trio.current_time() == 50
    assert server.times() == pytest.approx([0, 0.1])


async def test_a_retry_that_trickles_is_cut_off_too_and_the_earlier_error_comes_out(
    autojump_clock,
):
    server = FakeServer(
        admissions=[admitted(lease=50)],
        polls=[refused(503, "try later"), trickling(result("success"), 9)],
    )
    with pytest.raises(RolloutProtocolError, match="try later") as caught:
        await run(bare_client(server))
    assert caught.value.status_code == 503
    assert trio.current_time() == 50


async def test_a_first_answer_may_trickle_in_until_its_own_lease_has_ended(autojump_clock):
    # The second poll renews the lease when it is sent, at 30.
    server = FakeServer(polls=[after(30, result("running")), trickling(result("success"), 9)])
    with pytest.raises(RolloutPollTimeoutError, match="still coming in"):
        await run(bare_client(server))
    assert trio.current_time() == 150


async def test_a_short_lease_does_not_cut_a_first_poll_below_one_full_request(autojump_clock):
    server = FakeServer(
        admissions=[admitted(wait=1, lease=2)], polls=[after(10.5, result("success"))]
    )
    assert (await run(bare_client(server))).status is RolloutStatus.SUCCESS


async def test_retries_say_why_without_secrets(autojump_clock, caplog):
    server = FakeServer(polls=[LOST, refused(502), result("success")])
    await run(bare_client(server, api_key="s3cret-key"), llm_api_key="llm-s3cret")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("rollout")]
    assert len(lines) == 2
    assert lines[0] == (
        "rollout r: polling again in 0.10 s after RemoteProtocolError (failed attempt 1)"
    )
    assert "HTTP 502" in lines[1]
    assert not any(word in caplog.text for word in ("s3cret", TOKEN))
