"""Workers that die: at most their own rollouts are lost, and no agent is started twice."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import trio
from pool.helpers import Agents, all_up, ask, front_over, net, start, unix_bind, until, worker_app
from support import CHAT_URL

from rollout.pool import PoolBackend
from rollout.server.asgi import Answer
from rollout.types import POLLING_LEASE_HEADER, WORKER_LOST, RolloutErrorCategory, RolloutStatus

START = ("POST", "/rollouts/start")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """The dead are found out in a moment."""
    monkeypatch.setattr("rollout.pool.worker.DEAD_SEC", 0.2)


def hold_confirmations(app):
    """Have a worker leave confirmations unanswered and undone; returns an event per arrival."""
    arrived = trio.Event()

    async def handler(_):
        arrived.set()
        await trio.sleep_forever()
        return Answer(b"")

    app._routes[START] = handler
    return arrived


async def test_a_rollout_whose_agent_had_started_fails_and_names_its_worker():
    agents = Agents()
    async with net() as servers:
        worker = await servers.serve(worker_app(agents))
        async with front_over(PoolBackend([worker.url])) as (client, backend):
            handle = await start(client, "r", hold="r")
            await agents.until_started("r")
            await worker.kill()
            result = await handle
            assert result.status is RolloutStatus.FAILURE
            assert result.err_category is RolloutErrorCategory.INTERNAL_ERROR
            assert result.err_source == WORKER_LOST
            name = worker.url.removeprefix("http://")
            assert f"its agent had started on worker {name}, which was lost: " in result.err_message
            assert result.agent_started_at is not None
            assert agents.started == {"r": 1}
            assert backend.health()["concurrency"]["running"] == 0


async def test_a_rollout_whose_agent_had_not_started_runs_elsewhere():
    agents = Agents()
    async with net() as servers:
        full = await servers.serve(worker_app(agents, slots=1))
        dying = await servers.serve(worker_app(agents, slots=8))
        # Admitted there, its agent never starts: that is the backend's, behind a full slot.
        for number in range(8):
            dying.app.backend.slots.limiter.acquire_on_behalf_of_nowait(number)
        async with front_over(PoolBackend([full.url, dying.url])) as (client, backend):
            await all_up(backend, 2)
            handle = await start(client, "r")
            await until(lambda: "r" in dying.app.registry._entries, backend)
            await dying.kill()
            assert (await handle).status is RolloutStatus.SUCCESS
            assert "r" in full.app.registry._entries


async def test_a_confirmation_that_may_have_arrived_counts_as_a_start():
    """Whether the worker has heard it is unknown, so the rollout must not run elsewhere."""
    agents = Agents()
    async with net() as servers:
        other = await servers.serve(worker_app(agents, slots=1))
        dying = await servers.serve(worker_app(agents, slots=8))
        arrived = hold_confirmations(dying.app)
        async with front_over(PoolBackend([other.url, dying.url])) as (client, backend):
            await all_up(backend, 2)
            handle = await start(client, "r", hold="r")
            await arrived.wait()
            await dying.kill()
            result = await handle
            assert result.err_source == WORKER_LOST
            assert result.agent_started_at is not None
            assert agents.started == {}
            assert "r" not in other.app.registry._entries


async def test_a_worker_that_its_source_has_lost_gives_up_at_once():
    agents = Agents()
    async with net() as servers:
        kept = await servers.serve(worker_app(agents, slots=1))
        gone = await servers.serve(worker_app(agents, slots=3))
        async with front_over(PoolBackend([kept.url, gone.url])) as (client, backend):
            await all_up(backend, 2)
            held = await start(client, "held", hold="held")
            await agents.until_started("held")
            worker = next(w for w in backend._workers if w.address.url == gone.url)
            for foreign in range(2):
                gone.app.backend.slots.limiter.acquire_on_behalf_of_nowait(foreign)
            waiting = await start(client, "waiting")
            await until(lambda: "waiting" in gone.app.registry._entries, backend)
            backend._workers.lose(worker, "its process was killed by SIGKILL")
            assert "killed by SIGKILL" in (await held).err_message
            assert (await waiting).status is RolloutStatus.SUCCESS
            assert [each.address.url for each in backend._workers] == [kept.url]
            agents.go_on.set()


async def test_a_worker_that_comes_back_is_used_again(tmp_path):
    agents = Agents()
    bind = unix_bind(tmp_path, "w")
    async with net() as servers:
        async with front_over(PoolBackend([bind])) as (client, _):
            first = await servers.serve(worker_app(agents), bind)
            held = await start(client, "held", hold="held")
            await agents.until_started("held")
            await first.kill()
            assert (await held).err_source == WORKER_LOST
            agents.go_on.set()
            await servers.serve(worker_app(agents), bind)
            assert (await ask(client, "next")).status is RolloutStatus.SUCCESS


async def test_a_worker_that_restarts_at_once_has_forgotten_what_had_started(tmp_path):
    agents = Agents()
    bind = unix_bind(tmp_path, "w")
    async with net() as servers:
        first = await servers.serve(worker_app(agents), bind)
        async with front_over(PoolBackend([bind])) as (client, _):
            held = await start(client, "held", hold="held")
            await agents.until_started("held")
            await first.kill()
            await servers.serve(worker_app(agents), bind)
            result = await held
            assert result.err_source == WORKER_LOST
            assert "unknown rollout_id" in result.err_message
            assert agents.started == {"held": 1}


async def test_results_of_a_front_with_a_state_outlive_it(tmp_path):
    agents = Agents()
    agents.go_on.set()
    options = {"state": tmp_path / "state"}
    request = {
        "rollout_id": "r",
        "initial_messages": [{"role": "user", "content": "6 * 7?", "hold": "r"}],
        "chat_completions_url": CHAT_URL,
        "grade": False,
        "admission_key": "a-key-of-the-admission",
    }

    async def ended(client):
        answer = await client.http_client.post(f"{client.url}/rollout", json=request)
        token = answer.json()["polling_lease_token"]
        while True:
            answer = await client.http_client.get(
                f"{client.url}/rollout/r/result", headers={POLLING_LEASE_HEADER: token}
            )
            if answer.json()["status"] in {"success", "failure", "cancelled"}:
                return answer.json()

    async with net() as servers:
        worker = await servers.serve(worker_app(agents))
        async with front_over(PoolBackend([worker.url]), **options) as (client, _):
            before = await ended(client)
        async with front_over(PoolBackend([worker.url]), **options) as (client, _):
            assert await ended(client) == before
    assert before["status"] == "success"
    assert agents.started == {"r": 1}


async def test_twenty_deaths_under_load(tmp_path):
    """Each agent is started once at most, each caller gets an end, and the slots come back."""
    agents = Agents()
    agents.go_on.set()
    draw = random.Random(5)
    binds = [unix_bind(tmp_path, str(number)) for number in range(3)]
    ends = Counter()

    async def live_and_die(servers, bind, deaths):
        for _ in range(deaths):
            worker = await servers.serve(worker_app(agents), bind)
            await trio.sleep(draw.uniform(0.1, 0.4))
            await worker.kill()
        await servers.serve(worker_app(agents), bind)

    async with net() as servers, front_over(PoolBackend(binds)) as (client, backend):

        async def one(number):
            name = f"r{number}"
            result = await ask(client, name, hold=name, sleep=0.05)
            ends[result.err_source or result.status] += 1
            if result.status is RolloutStatus.SUCCESS:
                assert agents.started[name] == 1
            else:
                assert result.agent_started_at is not None

        async with trio.open_nursery() as nursery:
            for bind, deaths in zip(binds, (7, 7, 6), strict=True):
                nursery.start_soon(live_and_die, servers, bind, deaths)
            for number in range(250):
                nursery.start_soon(one, number)
        assert ends.total() == 250
        assert set(ends) <= {RolloutStatus.SUCCESS, RolloutStatus.CANCELLED, WORKER_LOST}
        assert ends[RolloutStatus.SUCCESS] > 100
        assert max(agents.started.values()) == 1
        await until(lambda: backend._workers.in_flight == 0, backend)
        assert len(backend._queue) == 0
        assert backend._queue.runs == {}


# --- processes ------------------------------------------------------------------------------


async def worker_process(bind, task_status=trio.TASK_STATUS_IGNORED):
    command = [sys.executable, str(Path(__file__).with_name("worker_process.py")), bind]
    process = await trio.lowlevel.open_process(command)
    try:
        task_status.started(process)
        await process.wait()
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="needs Unix sockets and signals")
async def test_processes_that_exit_in_user_code_or_are_killed(tmp_path):
    binds = [unix_bind(tmp_path, str(number)) for number in range(2)]
    async with trio.open_nursery() as nursery, front_over(PoolBackend(binds)) as (client, backend):
        processes = {bind: await nursery.start(partial(worker_process, bind)) for bind in binds}
        await all_up(backend, 2)
        exited = await ask(client, "exited", exit=3)
        assert exited.err_source == WORKER_LOST
        assert exited.agent_started_at is not None
        for number in range(4):
            assert (await ask(client, f"r{number}")).sample.reward == 1.0
        handle = await start(client, "killed", sleep=60)
        await handle.wait_for_running()
        busy = next(worker for worker in backend._workers if worker.in_flight)
        os.kill(processes[busy.address.url].pid, signal.SIGKILL)
        killed = await handle
        assert killed.err_source == WORKER_LOST
        assert killed.agent_started_at is not None
        nursery.cancel_scope.cancel()
