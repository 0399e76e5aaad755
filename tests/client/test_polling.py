"""Polls that succeed: what is taken from them, what they say, and how often they are sent."""

from __future__ import annotations

from itertools import pairwise

import httpx
import pytest
import trio
import trio.testing
from client.fakes import (
    URL,
    FakeServer,
    admitted,
    after,
    bare_client,
    client_of,
    result,
    run,
    start,
    trickling,
)
from hypothesis import given
from hypothesis import strategies as st

from rollout.client import RolloutClient
from rollout.client.answers import Admitted
from rollout.client.polling import Poller
from rollout.client.wire import Wire
from rollout.rules import is_terminal, may_follow
from rollout.types import RolloutInitResponse, RolloutResultResponse, RolloutStatus

STARTED = "2026-01-02T03:04:05Z"
LATER = "2026-01-02T03:04:06Z"


async def test_polls_follow_each_other_without_a_pause_while_the_server_holds_them(autojump_clock):
    held = after(30, result("running"))
    server = FakeServer(polls=[held, held, after(3, result("success"))])
    assert (await run(bare_client(server))).status is RolloutStatus.SUCCESS
    assert server.times() == [0, 30, 60]


async def test_a_poll_may_take_ten_seconds_longer_than_the_wait(autojump_clock):
    limits = []

    async def note(request):
        limits.append(request.extensions["timeout"]["read"])
        return result("success")

    await run(bare_client(FakeServer(admissions=[admitted(wait=20)], polls=[note])))
    assert limits == [30]


@pytest.mark.parametrize("held", [14.5, 15.0])
async def test_a_poll_that_was_held_for_half_the_wait_is_followed_at_once(autojump_clock, held):
    server = FakeServer(polls=[after(held, result("queued")), result("success")])
    await run(bare_client(server))
    assert server.times() == [0, 15]


async def test_a_change_is_followed_by_the_next_poll_at_once(autojump_clock):
    server = FakeServer(
        polls=[
            result("queued", agent_started_at=STARTED),
            result("running"),
            result("grading"),
            result("success"),
        ]
    )
    await run(bare_client(server))
    assert server.times() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("wait", "gap"), [(30, 0.5), (1, 0.25), (0.2, 0.05), (0.001, 0.01), (5e-324, 0.01)]
)
async def test_a_server_that_answers_without_a_change_is_not_hammered(autojump_clock, wait, gap):
    server = FakeServer(
        admissions=[admitted(wait=wait)], polls=[*[result("queued")] * 5, result("success")]
    )
    await run(bare_client(server))
    assert server.times() == pytest.approx([gap * n for n in range(6)])


async def test_a_poll_says_what_was_seen(autojump_clock):
    server = FakeServer(
        polls=[
            after(30, result("queued")),
            result("running"),
            result("running", agent_started_at=STARTED),
            result("grading"),
            result("success"),
        ]
    )
    await run(bare_client(server))
    assert [call.seen for call in server.poll_calls] == [
        "queued",
        "queued",
        "running",
        "running;agent-started",
        "grading;agent-started",
    ]


async def test_a_retry_says_what_was_seen_too(autojump_clock):
    server = FakeServer(polls=[result("running"), httpx.ReadError(""), result("success")])
    await run(bare_client(server))
    assert [call.seen for call in server.poll_calls] == ["queued", "running", "running"]


async def test_a_status_never_goes_back(autojump_clock):
    server = FakeServer(
        polls=[
            result("grading"),
            after(30, result("running")),
            after(30, result("queued")),
            after(30, result("failure")),
        ]
    )
    async with client_of(server) as client:
        handle = await start(client)
        observed = []
        async for status in handle.statuses():
            assert handle.latest_result is None or handle.latest_result.status is handle.status
            observed.append(status)
    assert observed == ["queued", "grading", "failure"]
    assert {call.seen for call in server.poll_calls[1:]} == {"grading"}


async def test_agent_started_at_never_changes(autojump_clock):
    server = FakeServer(
        polls=[
            result("running", agent_started_at=STARTED),
            after(30, result("running")),
            after(30, result("running", agent_started_at=LATER)),
            after(30, result("success", agent_started_at=LATER)),
        ]
    )
    terminal = await run(bare_client(server))
    assert terminal.agent_started_at.isoformat() == "2026-01-02T03:04:05+00:00"


async def test_a_first_poll_without_a_change_is_the_latest_result(autojump_clock):
    server = FakeServer(polls=[after(30, result("queued")), after(30, result("success"))])
    async with client_of(server) as client:
        handle = await start(client)
        assert handle.latest_result is None
        await trio.sleep(31)
        assert handle.latest_result is not None
        assert handle.latest_result.status is RolloutStatus.QUEUED


async def test_an_answer_may_trickle_in(autojump_clock):
    server = FakeServer(polls=[trickling(result("success"), 1.0)])
    terminal = await run(bare_client(server))
    assert terminal.status is RolloutStatus.SUCCESS
    assert 10 < trio.current_time() < 120


async def test_a_rollout_id_is_one_segment_of_the_path(autojump_clock):
    rollout_id = "ä b%2F?#;..&=+~"
    server = FakeServer(admissions=[admitted(rollout_id)], polls=[result("success", rollout_id)])
    assert (await run(bare_client(server), rollout_id)).rollout_id == rollout_id
    (call,) = server.poll_calls
    assert call.path == "/rollout/%C3%A4%20b%252F%3F%23%3B..%26%3D%2B~/result"


async def test_the_url_may_have_a_path_and_a_trailing_slash(autojump_clock):
    server = FakeServer()
    seen = []

    async def note(request):
        seen.append(str(request.url))
        return result("success")

    server.polls = [note]
    async with httpx.AsyncClient(transport=server) as http:
        await run(RolloutClient(url=f"{URL}/team/a/", http_client=http))
    assert seen == [f"{URL}/team/a/rollout/r/result"]


statuses = st.sampled_from([status for status in RolloutStatus if status != "unknown"])
stamps = st.sampled_from([None, STARTED, LATER])


@given(answers=st.lists(st.tuples(statuses, stamps), max_size=12))
def test_whatever_a_server_says_observers_only_see_progress(answers):
    answers = [*answers, (RolloutStatus.SUCCESS, None)]
    server = FakeServer(polls=[result(status, agent_started_at=stamp) for status, stamp in answers])
    observed: list[RolloutResultResponse] = []

    async def main():
        admission = RolloutInitResponse(
            rollout_id="r",
            status=RolloutStatus.QUEUED,
            polling_lease_token="t",
            result_wait_timeout_sec=30,
            polling_lease_timeout_sec=120,
        )
        wire = Wire(URL, httpx.AsyncClient(transport=server))
        return await Poller(wire, Admitted(admission, 0.0), observed.append).run()

    terminal = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert terminal is observed[-1]
    assert is_terminal(terminal.status)
    pairs = list(pairwise(observed))
    assert all(new.status is old.status or may_follow(new.status, old.status) for old, new in pairs)
    stamps_seen = {item.agent_started_at for item in observed} - {None}
    assert len(stamps_seen) <= 1
    assert all(
        new.agent_started_at == old.agent_started_at or old.agent_started_at is None
        for old, new in pairs
    )
    first_terminal = next(n for n, (status, _) in enumerate(answers) if is_terminal(status))
    assert len(observed) == first_terminal + 1
