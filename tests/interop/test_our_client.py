"""What our client does with answers of the official server that ours would not give."""

from __future__ import annotations

import signal

import pytest
from interop.sides import Failed, Pair
from support import fresh_id


@pytest.fixture
async def ours_to_official(ours, official) -> Pair:
    return Pair(ours, official)


async def test_a_result_without_the_start_of_the_agent_has_none(ours_to_official):
    _, client = await ours_to_official.connect()
    result = await client.run(rollout_id=fresh_id(), label="42")
    assert result["agent_started_at"] is None
    (*_, last) = await client.answered("result")
    assert "agent_started_at" not in last["body"]


@pytest.mark.parametrize("text", ["50%", "%2Fetc", "a?b=c", "a#b", ";x", "a%20b"])
async def test_an_id_with_characters_of_urls_is_escaped(ours_to_official, text):
    _, client = await ours_to_official.connect()
    rollout_id = fresh_id(text)
    assert (await client.run(rollout_id=rollout_id, label="42"))["rollout_id"] == rollout_id


async def test_the_header_of_what_was_seen_is_ignored(ours_to_official):
    server, client = await ours_to_official.connect()
    gate = fresh_id("gate")
    handle = await client.start(rollout_id=fresh_id(), label="42", script={"hold": gate})
    answers = await client.answered("result", count=3)
    assert {answer["status_code"] for answer in answers} == {200}
    assert (await handle.look())["status"] == "running"
    await server.release(gate)
    assert (await handle.completion())["sample"]["reward"] == 1.0


async def test_many_rollouts_are_cancelled_by_prefix_and_all_together(ours_to_official):
    server, client = await ours_to_official.connect(max_concurrent=6)
    batch, other = fresh_id("batch"), fresh_id("other")
    ids = [f"{batch}-{number}" for number in range(3)] + [
        f"{other}-{number}" for number in range(2)
    ]
    gates = {rollout_id: fresh_id("gate") for rollout_id in ids}
    handles = {
        rollout_id: await client.start(rollout_id=rollout_id, label="42", script={"hold": gate})
        for rollout_id, gate in gates.items()
    }
    for gate in gates.values():
        await server.reached(gate)
    cancelled = dict.fromkeys(ids[:3], "cancelled_running")
    assert await client.cancel_many(prefix=batch) == cancelled
    for rollout_id in ids[:3]:
        assert (await handles[rollout_id].completion())["status"] == "cancelled"
    dispositions = await client.cancel_many(all=True)
    assert [dispositions[rollout_id] for rollout_id in ids] == ["not_found"] * 3 + [
        "cancelled_running"
    ] * 2
    for rollout_id in ids[3:]:
        assert (await handles[rollout_id].completion())["status"] == "cancelled"


async def test_a_server_that_stops_listening_ends_the_polls_with_an_error(ours_to_official):
    async with ours_to_official.launched() as (process, url):
        client = await ours_to_official.client(url)
        handle = await client.start(rollout_id=fresh_id(), label="42", script={"hold": "never"})
        assert await handle.running() == "running"
        process.send_signal(signal.SIGTERM)  # it answers the poll under way, and no other
        with pytest.raises(Failed) as lost:
            await handle.completion()
    assert "TransportError" in lost.value.kinds
