"""Workers that are cut off, fall silent or shut down, on a simulated clock."""

from __future__ import annotations

import httpx
import pytest
import trio
import trio.testing
from pool.helpers import TIMES, Agents, all_up, ask, machines, start, statuses, until, worker_app

from rollout.backend.executions import failure
from rollout.types import WORKER_LOST, ExecutionOutcome, RolloutErrorCategory, RolloutStatus


def worker(agents, **options):
    return worker_app(agents, **TIMES, **options)


async def test_a_rollout_outlives_a_cut_that_is_shorter_than_its_lease(autojump_clock):
    agents = Agents()
    async with machines(worker(agents)) as (client, backend, (machine,)):
        handle = await start(client, "r", hold="r")
        await agents.until_started("r")
        machine.cut()
        await trio.sleep(40)
        assert statuses(backend) == ["away"]
        machine.mend()
        agents.go_on.set()
        assert (await handle).status is RolloutStatus.SUCCESS
        assert agents.started == {"r": 1}


async def test_a_cut_that_is_longer_than_the_lease_loses_what_had_started(autojump_clock):
    agents = Agents()
    async with machines(worker(agents)) as (client, backend, (machine,)):
        handle = await start(client, "r", hold="r")
        await agents.until_started("r")
        cut_at = trio.current_time()
        machine.cut()
        result = await handle
        assert result.err_source == WORKER_LOST
        assert trio.current_time() - cut_at <= 2 * TIMES["polling_lease_timeout_sec"] + 20
        machine.mend()
        await until(lambda: backend._workers.in_flight == 0, backend)


async def test_a_lease_that_ended_on_the_worker_is_no_expiry_for_the_caller(autojump_clock):
    agents = Agents()
    async with machines(worker(agents)) as (client, _, (machine,)):
        handle = await start(client, "r", hold="r")
        await agents.until_started("r")
        await trio.sleep(9)  # it was renewed when it started
        machine.cut()
        await trio.sleep(56)
        machine.mend()
        result = await handle
        assert result.err_source == WORKER_LOST
        assert result.err_category is RolloutErrorCategory.INTERNAL_ERROR
        assert "cut off for longer than a lease" in result.err_message


async def test_a_result_that_a_worker_has_kept_outlives_its_process(autojump_clock, tmp_path):
    agents = Agents()
    first = worker(agents, state=tmp_path / "state")
    async with machines(first) as (client, _, (machine,)):
        handle = await start(client, "r", hold="r")
        await agents.until_started("r")
        machine.cut()
        agents.go_on.set()
        await trio.sleep(1)
        assert first.registry._entries["r"].stored
        machine.scope.cancel()
        await trio.sleep(1)
        second = worker(agents, state=tmp_path / "state")
        async with second.serving():
            machine.transport.app = second.asgi_app
            machine.mend()
            assert (await handle).status is RolloutStatus.SUCCESS
            assert agents.started == {"r": 1}


async def test_after_ten_silent_seconds_what_has_not_started_goes_elsewhere(autojump_clock):
    agents = Agents()
    agents.go_on.set()
    apps = worker(agents, slots=1), worker(agents, slots=8)
    for number in range(8):
        apps[1].backend.slots.limiter.acquire_on_behalf_of_nowait(number)
    async with machines(*apps) as (client, backend, (_, silent)):
        handle = await start(client, "r", hold="r")
        await until(lambda: "r" in apps[1].registry._entries, backend)
        at = trio.current_time()
        silent.transport.hold = trio.Event()
        assert (await handle).status is RolloutStatus.SUCCESS
        assert 9 <= trio.current_time() - at <= 16
        assert "r" in apps[0].registry._entries
        # When it answers again it hears that it is not wanted any more, and has room again.
        silent.transport.hold.set()
        await until(lambda: backend._workers.in_flight == 0, backend)
        assert apps[1].registry._entries["r"].record.result.status is RolloutStatus.CANCELLED
        assert agents.started == {"r": 1}


async def test_the_only_worker_is_asked_again_under_another_id(autojump_clock):
    """It has the first id for as long as it keeps results."""
    agents = Agents()
    agents.go_on.set()
    app = worker(agents, slots=1)
    app.backend.slots.limiter.acquire_on_behalf_of_nowait("somebody else")
    async with machines(app) as (client, backend, (machine,)):
        handle = await start(client, "r", hold="r")
        await until(lambda: "r" in app.registry._entries, backend)
        machine.transport.down = httpx.ReadTimeout("silence")
        machine.transport.break_streams()
        await until(lambda: len(backend._queue) == 1, backend)
        machine.mend()
        app.backend.slots.limiter.release_on_behalf_of("somebody else")
        result = await handle
        assert (result.status, result.rollout_id) == (RolloutStatus.SUCCESS, "r")
        assert list(app.registry._entries) == ["r", "r-again-1"]
        assert agents.started == {"r": 1}


async def test_a_worker_that_knows_the_id_is_asked_under_another_one(autojump_clock):
    """As one does that keeps the results of an earlier front, or of its own last process."""
    agents = Agents()
    agents.go_on.set()
    app = worker(agents, slots=1)
    async with machines(app) as (client, backend, _):
        worker_client = next(iter(backend._workers)).client
        await ask(worker_client, "r")
        assert (await (await start(client, "r", hold="r"))).status is RolloutStatus.SUCCESS
        assert list(app.registry._entries) == ["r", "r-again-1"]


async def test_a_worker_that_shuts_down_gets_nothing_new(autojump_clock):
    agents = Agents()
    apps = worker(agents, slots=1), worker(agents, slots=8)
    async with machines(*apps) as (client, backend, _):
        held = await start(client, "held", hold="held")
        await agents.until_started("held")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(apps[1].shutdown_stages.run)
            other = await ask(client, "other")
            assert other.status is RolloutStatus.SUCCESS
            assert "other" in apps[0].registry._entries
            await trio.sleep(1.1)
            assert statuses(backend) == ["up", "closed"]
            agents.go_on.set()
            assert (await held).status is RolloutStatus.SUCCESS


async def test_a_rollout_that_no_worker_starts_fails_in_the_end(autojump_clock, monkeypatch):
    async def broken(_):
        return ExecutionOutcome(
            workflow=failure("its disk is full", RolloutErrorCategory.INTERNAL_ERROR)
        )

    apps = [worker(None) for _ in range(2)]
    for app in apps:
        monkeypatch.setattr(app.backend, "execute", broken)
    async with machines(*apps) as (client, _, _):
        result = await ask(client, "r")
        assert result.status is RolloutStatus.FAILURE
        assert result.err_source == WORKER_LOST
        assert result.agent_started_at is None
        assert "no worker started its agent in 10 attempts" in result.err_message
        assert "its disk is full" in result.err_message


async def test_a_drained_worker_finishes_what_it_has(autojump_clock):
    agents = Agents()
    apps = worker(agents, slots=1), worker(agents, slots=8)
    async with machines(*apps) as (client, backend, _):
        held = await start(client, "held", hold="held")
        await agents.until_started("held")
        workers = backend._workers
        drained = next(each for each in workers if each.in_flight)
        workers.drain(drained)
        assert statuses(backend) == ["up", "draining"]
        assert (await ask(client, "other")).status is RolloutStatus.SUCCESS
        assert "other" in apps[0].registry._entries
        async with trio.open_nursery() as nursery:
            nursery.start_soon(workers.drained, drained)
            await trio.sleep(5)
            agents.go_on.set()
        workers.lose(drained, "it is drained")
        assert (await held).status is RolloutStatus.SUCCESS
        assert statuses(backend) == ["up"]


# --- cancels --------------------------------------------------------------------------------


async def test_cancelling_what_waits_at_the_front(autojump_clock):
    agents = Agents()
    app = worker(agents, slots=1)
    async with machines(app) as (client, backend, _):
        await start(client, "held", hold="held")
        await agents.until_started("held")
        waiting = await start(client, "waiting")
        answer = await client.cancel_rollout("waiting")
        assert answer.dispositions == {"waiting": "cancelled_queued"}
        result = await waiting
        assert result.status is RolloutStatus.CANCELLED
        assert result.err_message == "cancelled while it waited for a slot"
        assert "waiting" not in app.registry._entries
        assert len(backend._queue) == 0
        agents.go_on.set()


async def test_cancelling_what_its_worker_has_not_started(autojump_clock):
    app = worker(None, slots=1)
    app.backend.slots.limiter.acquire_on_behalf_of_nowait("somebody else")
    async with machines(app) as (client, backend, _):
        handle = await start(client, "r")
        await until(lambda: "r" in app.registry._entries, backend)
        await client.cancel_rollout("r")
        result = await handle
        assert result.status is RolloutStatus.CANCELLED
        assert result.agent_started_at is None
        await until(lambda: backend._workers.in_flight == 0, backend)
        await trio.testing.wait_all_tasks_blocked()
        assert app.registry._entries["r"].record.result.status is RolloutStatus.CANCELLED


async def test_cancelling_what_runs(autojump_clock):
    agents = Agents()
    app = worker(agents)
    async with machines(app) as (client, backend, _):
        handle = await start(client, "r", hold="r")
        await agents.until_started("r")
        answer = await client.cancel_rollout("r")
        assert answer.dispositions == {"r": "cancelled_running"}
        result = await handle
        assert result.status is RolloutStatus.CANCELLED
        assert result.err_message == "cancelled while its agent ran"
        assert result.agent_started_at is not None
        assert backend._workers.in_flight == 0


async def test_a_shutdown_waits_for_no_worker_that_does_not_answer(autojump_clock):
    agents = Agents()
    app = worker(agents)
    async with machines(app) as (client, backend, (machine,)):
        handle = await start(client, "r", hold="r")
        await agents.until_started("r")
        machine.cut()
        await until(lambda: statuses(backend) == ["away"], backend)
        await client.cancel_rollout("r")  # which the worker cannot be told
        at = trio.current_time()
        await backend.shutdown()
        assert trio.current_time() - at < 1
        machine.mend()
        assert (await handle).status is RolloutStatus.CANCELLED


async def test_a_caller_that_is_gone_frees_the_worker(autojump_clock):
    agents = Agents()
    app = worker(agents)
    async with machines(app) as (client, backend, _):
        handle = await start(client, "r", hold="r")
        await agents.until_started("r")
        handle.cancel()
        await trio.sleep(TIMES["polling_lease_timeout_sec"] + 11)
        assert app.registry._entries["r"].record.result.status is RolloutStatus.CANCELLED
        assert backend._workers.in_flight == 0


# --- deadlines ------------------------------------------------------------------------------


async def test_the_time_in_the_queue_counts_as_the_agents(autojump_clock):
    agents = Agents()
    async with machines(worker(agents, slots=1)) as (client, _, _):
        await start(client, "held", hold="held")
        await agents.until_started("held")
        late = await start(client, "late", sleep=5, agent_timeout_sec=8)
        await trio.sleep(6)
        agents.go_on.set()
        result = await late
        assert result.err_category is RolloutErrorCategory.TIMEOUT
        assert result.agent_started_at is not None


async def test_a_deadline_that_passes_in_the_queue(autojump_clock):
    agents = Agents()
    async with machines(worker(agents, slots=1)) as (client, backend, _):
        await start(client, "held", hold="held")
        await agents.until_started("held")
        at = trio.current_time()
        result = await ask(client, "late", agent_timeout_sec=8)
        assert result.err_category is RolloutErrorCategory.TIMEOUT
        assert result.err_message == (
            "workflow exceeded its deadline of 8 s (8.0 s of it in the queue)"
        )
        assert result.agent_started_at is None
        assert trio.current_time() - at == pytest.approx(8, abs=0.5)
        assert len(backend._queue) == 0
        agents.go_on.set()


async def test_a_front_without_workers_lets_nobody_wait_past_a_deadline(autojump_clock):
    async with machines(worker(None)) as (client, backend, (machine,)):
        machine.cut()
        await until(lambda: "up" not in statuses(backend), backend)
        result = await ask(client, "r", agent_timeout_sec=30)
        assert result.err_category is RolloutErrorCategory.TIMEOUT
        machine.mend()
        await all_up(backend, 1)
        assert (await ask(client, "s")).status is RolloutStatus.SUCCESS
