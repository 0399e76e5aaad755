"""Admission: 429 and its waits, the deadline, and what is never tried again."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
import trio
from client.fakes import (
    FakeServer,
    admitted,
    after,
    bare_client,
    client_of,
    refused,
    run,
    silence,
    start,
)

from rollout.client import RolloutAdmissionTimeoutError, RolloutProtocolError
from rollout.errors import InvalidFieldError
from rollout.types import RolloutStatus


@pytest.mark.parametrize(
    ("header", "delay"),
    [
        ("7", 7.0),
        ("0", 0.05),
        ("0.2", 0.2),
        ("-3", 0.05),
        ("3600", 60.0),
        ("9" * 400, 60.0),
        ("inf", 1.0),
        ("nan", 1.0),
        ("soon", 1.0),
        ("", 1.0),
        ("5, 5", 1.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.05),
        ("Fri, 06 Nov 2099 08:49:37 GMT", 60.0),
        (None, 1.0),
    ],
)
async def test_a_busy_server_is_asked_again_after_its_retry_after(autojump_clock, header, delay):
    busy = refused(429) if header is None else refused(429, Retry_After=header)
    server = FakeServer(admissions=[busy, busy, admitted()])
    result = await run(bare_client(server))
    assert result.status is RolloutStatus.SUCCESS
    assert server.times("/rollout") == pytest.approx([0.0, delay, 2 * delay])


async def test_callers_that_were_put_off_together_do_not_come_back_together(autojump_clock, draws):
    draws[:] = [0.0, 0.5, 1.0]
    server = FakeServer(admissions=[refused(429, Retry_After="4")] * 3 + [admitted()])
    client = bare_client(server)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(run, client)
    assert server.times("/rollout") == pytest.approx([0, 0, 0, 4, 5, 6])


async def test_a_server_that_only_answers_429_is_spoken_of_now_and_then(autojump_clock, caplog):
    server = FakeServer(admissions=[refused(429, Retry_After="5")])
    async with client_of(server, admission_timeout_sec=95) as client:
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(give_up, client, f"r{number}")
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [text.split(" has waited ")[1].split(" for ")[0] for text in warnings] == [
        "30 s",
        "60 s",
        "90 s",
    ]
    assert all(text.startswith("rollout r") and "HTTP 429" in text for text in warnings)
    assert all(text.endswith(" admission_timeout_sec bounds the wait") for text in warnings)


async def give_up(client, rollout_id):
    with pytest.raises(RolloutAdmissionTimeoutError):
        await run(client, rollout_id)


async def test_a_date_in_retry_after_is_waited_for(autojump_clock):
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    server = FakeServer(admissions=[refused(429, Retry_After=date), admitted()])
    await run(bare_client(server))
    _, again = server.times("/rollout")
    # The date has whole seconds, and the wall clock runs while the simulated one stands.
    assert 0.05 < again <= 30


async def test_every_attempt_sends_the_same_admission(autojump_clock):
    server = FakeServer(admissions=[refused(429), refused(429), admitted()])
    await run(bare_client(server), label="42", metadata={"k": [1]}, agent_timeout_sec=3)
    bodies = {call.body for call in server.calls if call.path == "/rollout"}
    (body,) = bodies
    fields = json.loads(body)
    assert len(fields.pop("admission_key")) == 32
    assert fields == {
        "rollout_id": "r",
        "initial_messages": [{"role": "user", "content": "What is 6 * 7?"}],
        "chat_completions_url": "http://chat/v1",
        "llm_api_key": None,
        "label": "42",
        "metadata": {"k": [1]},
        "extra_fields": None,
        "grade": True,
        "agent_timeout_sec": 3,
        "grader_timeout_sec": None,
        "run": None,
        "confirm_start": False,
        "limits": None,
    }


async def test_a_deadline_during_the_wait_sends_nothing_more(autojump_clock):
    server = FakeServer(admissions=[refused(429, Retry_After="4")])
    with pytest.raises(RolloutAdmissionTimeoutError) as caught:
        await run(bare_client(server, admission_timeout_sec=10))
    assert trio.current_time() == 10
    assert server.times("/rollout") == [0, 4, 8]
    assert "may have succeeded" not in str(caught.value)
    assert isinstance(caught.value, TimeoutError)


async def test_a_deadline_at_the_end_of_the_wait_sends_nothing_more(autojump_clock):
    server = FakeServer(admissions=[refused(429, Retry_After="5")])
    with pytest.raises(RolloutAdmissionTimeoutError) as caught:
        await run(bare_client(server, admission_timeout_sec=10))
    assert server.times("/rollout") == [0, 5]
    assert "may have succeeded" not in str(caught.value)


async def test_a_deadline_during_a_request_says_that_it_may_have_succeeded(autojump_clock):
    server = FakeServer(admissions=[refused(429, Retry_After="4"), silence])
    with pytest.raises(RolloutAdmissionTimeoutError, match="may have succeeded"):
        await run(bare_client(server, admission_timeout_sec=10))
    assert trio.current_time() == 10
    assert [call.path for call in server.calls] == ["/rollout", "/rollout"]  # no cancel request


@pytest.mark.parametrize("timeout", [0, -1, -1e300])
async def test_a_deadline_that_has_passed_sends_nothing_at_all(autojump_clock, timeout):
    server = FakeServer()
    with pytest.raises(RolloutAdmissionTimeoutError) as caught:
        await run(bare_client(server, admission_timeout_sec=timeout))
    assert server.calls == []
    assert "may have succeeded" not in str(caught.value)


async def test_the_deadline_does_not_limit_what_follows(autojump_clock):
    server = FakeServer(
        polls=[after(25, httpx.Response(200, json={"rollout_id": "r", "status": "success"}))]
    )
    result = await run(bare_client(server, admission_timeout_sec=1))
    assert result.status is RolloutStatus.SUCCESS
    assert trio.current_time() == 25


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("slow"),
        httpx.ReadError("reset"),
        httpx.ReadTimeout("slow"),
        httpx.WriteError("reset"),
        httpx.WriteTimeout("slow"),
        httpx.PoolTimeout("full"),
        httpx.RemoteProtocolError("closed"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_admission_is_never_replayed_after_a_transport_error(autojump_clock, error):
    server = FakeServer(admissions=[refused(429), error, admitted()])
    with pytest.raises(type(error)) as caught:
        await run(bare_client(server))
    assert caught.value is error
    assert server.times("/rollout") == [0, 1]


@pytest.mark.parametrize(
    "status", [200, 201, 204, 302, 400, 401, 403, 408, 409, 422, 500, 502, 503]
)
async def test_everything_but_202_and_429_raises_at_once(autojump_clock, status):
    server = FakeServer(admissions=[refused(status, "so it is", Retry_After="1"), admitted()])
    with pytest.raises(RolloutProtocolError, match=f"POST /rollout answered {status}") as caught:
        await run(bare_client(server))
    assert caught.value.status_code == status
    assert "so it is" in str(caught.value)
    assert len(server.times("/rollout")) == 1


async def test_a_rollout_that_breaks_a_rule_is_not_sent(autojump_clock):
    server = FakeServer()
    async with client_of(server) as client:
        with pytest.raises(InvalidFieldError, match="rollout_id"):
            await start(client, "a/b")
        with pytest.raises(InvalidFieldError, match="metadata has no JSON form"):
            await start(client, metadata={"when": datetime.now(UTC)})
        with pytest.raises(InvalidFieldError, match="agent_timeout_sec"):
            await run(client, agent_timeout_sec=float("nan"))
    assert server.calls == []
