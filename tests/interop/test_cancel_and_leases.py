"""Cancel requests, local cancellation, and polling leases, both ways round."""

from __future__ import annotations

import pytest
from interop.sides import Failed
from interop.test_rollouts import until_queued
from support import fresh_id

SHORT_LEASE = {"result_wait_timeout_sec": 0.2, "polling_lease_timeout_sec": 0.6}


async def test_a_rollout_cancelled_while_it_runs_ends_after_its_cleanup(pair):
    server, client = await pair.connect()
    rollout_id, work, cleanup = fresh_id(), fresh_id("gate"), fresh_id("gate")
    script = {"hold": work, "cleanup": cleanup}
    handle = await client.start(rollout_id=rollout_id, label="42", script=script)
    await server.reached(work)
    for _ in range(2):  # asking again is fine
        assert await client.cancel(rollout_id) == {rollout_id: "cancelled_running"}
    await server.reached(cleanup)
    assert not (await handle.look())["done"]
    await server.release(cleanup)
    result = await handle.completion()
    assert result["status"] == "cancelled"
    assert result["sample"] is None
    assert await handle.running() == await handle.grading() == "cancelled"
    assert await client.cancel(rollout_id) == {rollout_id: "not_found"}


async def test_a_rollout_cancelled_while_it_is_graded_ends_cancelled(pair):
    server, client = await pair.connect()
    rollout_id, gate = fresh_id(), fresh_id("gate")
    metadata = {"grader": {"hold": gate}}
    handle = await client.start(rollout_id=rollout_id, label="42", metadata=metadata)
    await server.reached(gate)
    assert await client.cancel(rollout_id) == {rollout_id: "cancelled_running"}
    assert (await handle.completion())["status"] == "cancelled"


async def test_a_rollout_cancelled_in_the_queue_never_runs(pair):
    server, client = await pair.connect(max_concurrent=1)
    rollout_id, first, second = fresh_id(), fresh_id("gate"), fresh_id("gate")
    runs = await client.start(rollout_id=fresh_id(), label="42", script={"hold": first})
    await server.reached(first)
    waits = await client.start(rollout_id=rollout_id, label="42", script={"hold": second})
    await until_queued(client, 1)
    # The official server calls a rollout running as soon as it is admitted.
    queued = "cancelled_queued" if pair.our_server else "cancelled_running"
    assert await client.cancel(rollout_id) == {rollout_id: queued}
    result = await waits.completion()
    assert result["status"] == "cancelled"
    assert result.get("agent_started_at") is None
    await until_queued(client, 0)
    await server.release(first)
    assert (await runs.completion())["status"] == "success"


async def test_an_unknown_id_is_not_found(pair):
    _, client = await pair.connect()
    rollout_id = fresh_id()
    assert await client.cancel(rollout_id) == {rollout_id: "not_found"}


async def test_stopping_a_handle_leaves_the_rollout_alone(pair):
    server, client = await pair.connect()
    rollout_id, gate = fresh_id(), fresh_id("gate")
    handle = await client.start(rollout_id=rollout_id, label="42", script={"hold": gate})
    await server.reached(gate)
    assert await handle.stop()
    with pytest.raises(Failed) as stopped:
        await handle.completion()
    assert stopped.value.kinds & {"CancelledError", "RolloutHandleCancelled"}
    assert (await handle.look())["done"]
    assert not await handle.stop()
    assert await client.cancel(rollout_id) == {rollout_id: "cancelled_running"}


async def test_a_rollout_that_nobody_polls_ends_with_its_lease(pair):
    server = await pair.server(server=SHORT_LEASE)
    rollout_id, work, cleanup, polls = (fresh_id("lease") for _ in range(4))
    client = await pair.client(server.url, poll_gate=polls)
    script = {"hold": work, "cleanup": cleanup}
    handle = await client.start(rollout_id=rollout_id, label="42", script=script)
    await server.reached(work)
    await server.reached(cleanup)  # the lease has ended, and the workflow is asked to stop
    await client.let_polls_pass(polls)
    result = await handle.completion()  # published before the cleanup is over
    assert result["status"] == "failure"
    assert result["err_category"] == "lease_expired"
    assert result["sample"] is None
    assert (await client.health())["lifecycle"]["active_rollouts"] == 1
    assert await client.cancel(rollout_id) == {rollout_id: "not_found"}
    with pytest.raises(Failed) as refused:
        await client.run(rollout_id=rollout_id, label="42")
    assert refused.value.status_code == 409
    await server.release(cleanup)
    health = await client.wait_idle(timeout_sec=30, poll_interval_sec=0.05)
    assert health["lifecycle"]["active_rollouts"] == 0
    assert await client.cancel(rollout_id) == {rollout_id: "not_found"}


async def test_a_rollout_that_is_polled_outlives_any_number_of_leases(pair):
    times = {"result_wait_timeout_sec": 0.4, "polling_lease_timeout_sec": 2.0}
    server, client = await pair.connect(server=times)
    gate = fresh_id("gate")
    handle = await client.start(rollout_id=fresh_id(), label="42", script={"hold": gate})
    answers = await client.answered("result", count=8)  # 0.4 s each: longer than a lease
    assert {answer["body"]["status"] for answer in answers} <= {"queued", "running"}
    await server.release(gate)
    assert (await handle.completion())["status"] == "success"
