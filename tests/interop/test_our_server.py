"""What our server does beyond the official one, as the official client sees it."""

from __future__ import annotations

import signal
from datetime import UTC, datetime

import pytest
import trio
from interop.sides import Failed
from support import fresh_id

LONG_POLLS = {"result_wait_timeout_sec": 600.0, "polling_lease_timeout_sec": 1200.0}


async def test_a_rollout_that_ran_before_the_first_poll_is_reported_at_once(official_to_ours):
    server = await official_to_ours.server(server=LONG_POLLS)
    gate, polls = fresh_id("gate"), fresh_id("gate")
    client = await official_to_ours.client(server.url, poll_gate=polls)
    handle = await client.start(rollout_id=fresh_id(), label="42", script={"hold": gate})
    await server.reached(gate)
    assert await client.answered("rollout")
    await client.let_polls_pass(polls)
    assert await handle.running() == "running"  # a held poll would take ten minutes
    await server.release(gate)
    assert (await handle.completion())["status"] == "success"


async def test_every_phase_is_reported_without_waiting_out_a_poll(official_to_ours):
    server, client = await official_to_ours.connect(server=LONG_POLLS)
    work, grade = fresh_id("gate"), fresh_id("gate")
    handle = await client.start(
        rollout_id=fresh_id(),
        label="42",
        script={"hold": work},
        metadata={"grader": {"hold": grade}},
    )
    assert await handle.running() == "running"
    await server.release(work)
    assert await handle.grading() == "grading"
    await server.release(grade)
    assert (await handle.completion())["status"] == "success"


async def test_the_official_client_takes_the_start_of_the_agent_in_its_stride(official_to_ours):
    server, client = await official_to_ours.connect(max_concurrent=1)
    before = datetime.now(UTC)
    gate = fresh_id("gate")
    handle = await client.start(rollout_id=fresh_id(), label="42", script={"hold": gate})
    await server.reached(gate)
    queued_id = fresh_id()
    queued = await client.start(rollout_id=queued_id, label="42")
    await client.cancel(queued_id)
    assert (await queued.completion())["status"] == "cancelled"
    await server.release(gate)
    result = await handle.completion()
    assert result["status"] == "success"
    bodies = [answer["body"] for answer in await client.answered("result")]
    assert all("agent_started_at" in body for body in bodies)
    ran = [body for body in bodies if body["rollout_id"] == result["rollout_id"]]
    stamps = {body["agent_started_at"] for body in ran if body["status"] != "queued"}
    assert len(stamps) == 1
    stamp = datetime.fromisoformat(stamps.pop())
    assert stamp.utcoffset() == before.utcoffset()
    assert stamp.date() in {before.date(), datetime.now(UTC).date()}
    never_ran = [body for body in bodies if body["rollout_id"] == queued_id]
    assert {body["agent_started_at"] for body in never_ran} == {None}


async def test_sigterm_gives_every_polling_caller_its_result(official_to_ours):
    budget = {"drain_sec": 50.0, "cleanup_sec": 50.0}
    async with official_to_ours.launched(
        max_concurrent=None, shutdown=budget, server=LONG_POLLS
    ) as (process, url):
        client = await official_to_ours.client(url)
        finishing = [
            await client.start(rollout_id=fresh_id(), label="42", script={"hold": "shutdown"})
            for _ in range(5)
        ]
        endless = [
            await client.start(rollout_id=fresh_id(), label="42", script={"hold": "never"})
            for _ in range(5)
        ]
        for handle in [*finishing, *endless]:
            assert await handle.running() == "running"
        process.send_signal(signal.SIGTERM)
        for handle in finishing:
            result = await handle.completion()
            assert result["status"] == "success"
            assert result["sample"]["reward"] == 1.0
        with pytest.raises(Failed) as refused:
            await client.run(rollout_id=fresh_id(), label="42")
        assert refused.value.status_code == 503
        assert not (await endless[0].look())["done"]
        process.send_signal(signal.SIGTERM)  # the second one skips the rest of the drain
        for handle in endless:
            assert (await handle.completion())["status"] == "cancelled"
        with trio.fail_after(30):
            assert await process.wait() == 0
        with pytest.raises(Failed) as gone:
            await client.health()
        assert "TransportError" in gone.value.kinds
