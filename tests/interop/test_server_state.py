"""Authentication, health, waiting for idle servers and their restarts, both ways round."""

from __future__ import annotations

import pytest
import trio
from interop.sides import Failed
from support import fresh_id

KEY = "s3cret-key"


async def test_the_right_key_opens_every_route(pair):
    server = await pair.server(server={"api_key": KEY})
    client = await pair.client(server.url, api_key=KEY)
    gate, rollout_id = fresh_id("gate"), fresh_id()
    result = await client.run(rollout_id=fresh_id(), label="42")
    assert result["sample"]["reward"] == 1.0
    handle = await client.start(rollout_id=rollout_id, label="42", script={"hold": gate})
    await server.reached(gate)
    assert await client.cancel(rollout_id) == {rollout_id: "cancelled_running"}
    assert (await handle.completion())["status"] == "cancelled"
    assert (await client.health())["status"] == "ok"
    await client.wait_idle(timeout_sec=30, poll_interval_sec=0.05)


@pytest.mark.parametrize("key", [None, "wrong", KEY + "x", KEY[:-1], KEY.upper()])
async def test_a_missing_or_wrong_key_opens_none(pair, key):
    server = await pair.server(server={"api_key": KEY})
    client = await pair.client(server.url, api_key=key)
    calls = {
        "run": lambda: client.run(rollout_id=fresh_id(), label="42"),
        "start": lambda: client.start(rollout_id=fresh_id(), label="42"),
        "cancel": lambda: client.cancel(fresh_id()),
        "health": client.health,
        "wait_idle": lambda: client.wait_idle(timeout_sec=30, poll_interval_sec=0.05),
    }
    for name, call in calls.items():
        with pytest.raises(Failed) as refused:
            await call()
        assert refused.value.status_code == 401, name
        assert "RolloutProtocolError" in refused.value.kinds, name
        assert KEY not in str(refused.value), name


async def test_a_server_without_a_key_takes_any(pair):
    server = await pair.server()
    client = await pair.client(server.url, api_key=KEY)
    assert (await client.run(rollout_id=fresh_id(), label="42"))["status"] == "success"


async def test_a_blank_key_is_refused_by_the_client(pair):
    server = await pair.server()
    for blank in ("", "  "):
        with pytest.raises(Failed) as refused:
            await pair.client(server.url, api_key=blank)
        assert "ValueError" in refused.value.kinds


async def test_health_shows_backend_and_lifecycle(pair):
    server, client = await pair.connect(max_concurrent=3)
    idle = await client.health()
    assert idle["status"] == "ok"
    assert idle["lifecycle"] == {"accepting_rollouts": True, "active_rollouts": 0}
    assert idle["concurrency"] == {"max_concurrent": 3, "queued": 0, "running": 0}
    gate = fresh_id("gate")
    handle = await client.start(rollout_id=fresh_id(), label="42", script={"hold": gate})
    await server.reached(gate)
    busy = await client.health()
    assert busy["lifecycle"] == {"accepting_rollouts": True, "active_rollouts": 1}
    assert busy["concurrency"] == {"max_concurrent": 3, "queued": 0, "running": 1}
    for name in ("process_id", "instance_id"):
        assert isinstance(busy[name], str)
        assert busy[name] == idle[name] != ""
    await server.release(gate)
    await handle.completion()


async def test_wait_idle_returns_once_the_last_rollout_is_over(pair):
    server, client = await pair.connect(max_concurrent=5)
    process_id = (await client.health())["process_id"]
    gate = fresh_id("gate")
    handle = await client.start(rollout_id=fresh_id(), label="42", script={"hold": gate})
    await server.reached(gate)
    with pytest.raises(Failed) as too_late:
        await client.wait_idle(timeout_sec=0.3, poll_interval_sec=0.05)
    assert "TimeoutError" in too_late.value.kinds
    idle = []

    async def wait() -> None:
        idle.append(
            await client.wait_idle(timeout_sec=30, poll_interval_sec=0.05, process_id=process_id)
        )

    seen = len(await client.answered("health"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        answers = await client.answered("health", count=seen + 2)
        assert answers[-1]["body"]["lifecycle"]["active_rollouts"] == 1
        assert not idle
        await server.release(gate)
    assert idle[0]["lifecycle"]["active_rollouts"] == 0
    assert idle[0]["process_id"] == process_id
    assert (await handle.completion())["status"] == "success"


async def test_wait_idle_refuses_another_process(pair):
    _, client = await pair.connect()
    with pytest.raises(Failed) as refused:
        await client.wait_idle(timeout_sec=30, process_id="of-another-server")
    assert "RolloutProtocolError" in refused.value.kinds


@pytest.mark.parametrize(
    "times",
    [
        {"timeout_sec": 0},
        {"timeout_sec": -1},
        {"timeout_sec": float("inf")},
        {"timeout_sec": float("nan")},
        {"poll_interval_sec": 0},
        {"poll_interval_sec": float("inf")},
    ],
)
async def test_wait_idle_refuses_times_without_an_end(pair, times):
    _, client = await pair.connect()
    with pytest.raises(Failed) as refused:
        await client.wait_idle(**times)
    assert "ValueError" in refused.value.kinds


async def test_a_restart_ends_wait_idle_and_the_polls(pair):
    async with pair.launched() as (process, url):
        client, other = await pair.client(url), await pair.client(url)
        before = await client.health()
        handle = await client.start(rollout_id=fresh_id(), label="42", script={"hold": "never"})
        assert await handle.running() == "running"
        refused, refusals = trio.open_memory_channel[Failed](2)

        async def wait(waiter, process_id) -> None:
            with pytest.raises(Failed) as refusal:
                await waiter.wait_idle(
                    timeout_sec=50, poll_interval_sec=0.05, process_id=process_id
                )
            refused.send_nowait(refusal.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, client, before["process_id"])
            nursery.start_soon(wait, other, None)
            await client.answered("health", count=2)
            await other.answered("health")
            process.kill()
            await process.wait()
            # Until the new process answers, there are only transport errors to be waited out.
            async with pair.launched(port=int(url.rsplit(":", 1)[1])) as (_, same_url):
                assert same_url == url
                with pytest.raises(Failed) as lost:
                    await handle.completion()
                after = await client.health()
                reasons = [await refusals.receive(), await refusals.receive()]
    assert all("RolloutProtocolError" in reason.kinds for reason in reasons)
    assert lost.value.kinds & {"RolloutProtocolError", "TransportError"}
    assert after["process_id"] != before["process_id"]
    assert after["lifecycle"]["active_rollouts"] == 0
