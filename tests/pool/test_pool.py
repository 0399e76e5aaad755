"""A front over real servers: what comes out of it is what comes out of its workers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import trio
from pool.helpers import (
    Agents,
    all_up,
    ask,
    front_over,
    net,
    start,
    statuses,
    unix_bind,
    until,
    worker_app,
)
from support import make_app

from rollout.errors import TrajectoryUnavailableError
from rollout.pool import PoolBackend
from rollout.types import RolloutErrorCategory, RolloutStatus


async def test_rollouts_run_on_both_workers_and_come_out_as_they_are():
    agents = Agents()
    async with net() as servers:
        first = await servers.serve(worker_app(agents))
        second = await servers.serve(worker_app(agents))
        async with front_over(PoolBackend([first.url, second.url])) as (client, backend):
            await all_up(backend, 2)
            handles = [await start(client, f"r{n}", hold=f"r{n}") for n in range(8)]
            await agents.until_started(*(f"r{n}" for n in range(8)))
            health = backend.health()
            assert [worker["in_flight"] for worker in health["workers"]] == [4, 4]
            assert health["concurrency"] == {"max_concurrent": 8, "queued": 0, "running": 8}
            agents.go_on.set()
            results = [await handle for handle in handles]
            assert {(r.status, r.sample.reward) for r in results} == {("success", 1.0)}
            assert [r.rollout_id for r in results] == [f"r{n}" for n in range(8)]
            assert agents.started == {f"r{n}": 1 for n in range(8)}
            assert backend.health()["concurrency"]["running"] == 0
            entries = {**first.app.registry._entries, **second.app.registry._entries}
            for result in results:
                theirs = entries[result.rollout_id].record.result
                assert theirs.agent_started_at == result.agent_started_at


async def test_where_a_rollout_failed_is_passed_on():
    async with net() as servers:
        worker = await servers.serve(worker_app())
        async with front_over(PoolBackend([worker.url])) as (client, _):
            graded = await ask(client, "graded", metadata={"grader": {"raise": "odd"}})
            assert (graded.err_phase, graded.err_category) == ("grading", "agent_error")
            ran = await ask(client, "ran", **{"raise": "odd"})
            assert (ran.err_phase, ran.err_category) == (None, "agent_error")


async def test_statuses_are_passed_on_in_their_order():
    async with net() as servers:
        worker = await servers.serve(worker_app())
        async with front_over(PoolBackend([worker.url])) as (client, _):
            handle = await start(client, "r", sleep=0.05)
            seen = [status async for status in handle.statuses()]
            assert [str(s) for s in seen] == ["queued", "running", "grading", "success"]


async def test_workers_on_unix_sockets_with_a_key():
    with tempfile.TemporaryDirectory(prefix="pool-") as folder:
        async with net() as servers:
            bind = unix_bind(Path(folder), "1")
            worker = await servers.serve(worker_app(api_key="a-key-of-the-workers"), bind)
            assert worker.url == bind
            pool = PoolBackend([worker.url], api_key="a-key-of-the-workers")
            async with front_over(pool) as (client, backend):
                result = await ask(client, "r")
                assert result.sample.reward == 1.0
                (said,) = backend.health()["workers"]
                assert (said["url"], said["status"]) == (bind, "up")


async def test_failures_of_rollouts_are_passed_on_and_start_nothing_elsewhere():
    agents = Agents()
    async with net() as servers:
        urls = [(await servers.serve(worker_app(agents))).url for _ in range(2)]
        async with front_over(PoolBackend(urls)) as (client, _):
            raised = await ask(client, "raised", **{"raise": "no idea"})
            assert raised.err_category is RolloutErrorCategory.AGENT_ERROR
            assert raised.err_message == "no idea"
            assert raised.agent_started_at is not None
            late = await ask(client, "late", sleep=60, agent_timeout_sec=0.2)
            assert late.err_category is RolloutErrorCategory.TIMEOUT
            no_label = await client.run_rollout([{"role": "user"}], "http://m/v1", "no-label")
            assert no_label.err_category is RolloutErrorCategory.VALIDATION_ERROR
            assert "neither a label nor metadata" in no_label.err_message
            assert no_label.agent_started_at is None


async def test_samples_travel_whole():
    said = {"role": "assistant", "content": "\ud800 and \u2028", "tool_calls": [{"a": [1, None]}]}
    async with net() as servers:
        worker = await servers.serve(worker_app())
        async with front_over(PoolBackend([worker.url])) as (client, _):
            result = await ask(client, "r", **{"return": [said]}, grade=False)
            assert result.sample.messages == [said]
            assert result.sample.label == "42"
            assert result.sample.reward is None


async def test_what_does_not_start_at_once_waits_at_the_front():
    agents = Agents()
    async with net() as servers:
        worker = await servers.serve(worker_app(agents, slots=1))
        pool = PoolBackend([worker.url], max_queue_depth=1)
        async with front_over(pool) as (client, backend):
            await all_up(backend, 1)
            first = await start(client, "first", hold="first")
            second = await start(client, "second", hold="second")
            await agents.until_started("first")
            assert backend.health()["concurrency"] == {
                "max_concurrent": 1,
                "queued": 1,
                "running": 1,
            }
            assert not backend.has_capacity()
            assert list(worker.app.registry._entries) == ["first"]
            agents.go_on.set()
            assert (await first).status == (await second).status == "success"
            assert agents.started == {"first": 1, "second": 1}


async def test_a_full_front_answers_429_and_takes_more_when_there_is_room():
    agents = Agents()
    async with net() as servers:
        worker = await servers.serve(worker_app(agents, slots=1))
        pool = PoolBackend([worker.url], max_queue_depth=1)
        async with front_over(pool) as (client, backend):
            await all_up(backend, 1)
            handles = [await start(client, name, hold=name) for name in ("first", "second")]
            body = {"initial_messages": [], "chat_completions_url": "http://m/v1"}
            answer = await client.http_client.post(
                f"{client.url}/rollout", json={**body, "rollout_id": "third"}
            )
            assert answer.status_code == 429
            agents.go_on.set()
            for handle in handles:
                await handle
            assert backend.has_capacity()


async def test_a_busy_worker_is_no_failure_and_the_rollout_goes_elsewhere():
    agents = Agents()
    async with net() as servers:
        shared = await servers.serve(worker_app(agents, slots=8, max_queue_depth=1))
        other = await servers.serve(worker_app(agents, slots=1))
        # Somebody else has all places of the first, which the front cannot know.
        for number in range(9):
            assert shared.app.backend.reserve(f"foreign-{number}")
        async with front_over(PoolBackend([shared.url, other.url])) as (client, backend):
            await all_up(backend, 2)
            assert (await ask(client, "r")).status is RolloutStatus.SUCCESS
            assert list(other.app.registry._entries) == ["r"]
            for number in range(9):
                shared.app.backend.release(f"foreign-{number}")


async def test_a_worker_that_joins_later_gets_what_waits():
    async with net() as servers:
        with tempfile.TemporaryDirectory(prefix="pool-") as folder:
            bind = unix_bind(Path(folder), "late")
            async with front_over(PoolBackend([bind])) as (client, backend):
                handle = await start(client, "r")
                assert statuses(backend) == ["joining"]
                assert backend.health()["status"] == "no worker is up"
                await servers.serve(worker_app(), bind)
                assert (await handle).status is RolloutStatus.SUCCESS


async def test_runs_take_turns_whatever_each_has_sent():
    order = []
    async with net() as servers:
        with tempfile.TemporaryDirectory(prefix="pool-") as folder:
            bind = unix_bind(Path(folder), "1")
            pool = PoolBackend([bind])
            async with front_over(pool) as (client, backend), trio.open_nursery() as nursery:

                async def one(name: str, run: str) -> None:
                    await ask(client, name, run=run)
                    order.append(name)

                for number in range(6):
                    nursery.start_soon(one, f"a{number}", "greedy")
                await until(lambda: len(backend._queue) == 6, backend)
                for number in range(2):
                    nursery.start_soon(one, f"b{number}", "modest")
                await until(lambda: len(backend._queue) == 8, backend)
                await servers.serve(worker_app(slots=1), bind)
    assert "".join(name[0] for name in order) in {"ababaaaa", "babaaaaa"}


async def test_no_more_of_a_run_than_its_cap_are_on_workers():
    agents = Agents()
    async with net() as servers:
        worker = await servers.serve(worker_app(agents))
        pool = PoolBackend([worker.url], max_per_run=1)
        async with front_over(pool) as (client, backend):
            await all_up(backend, 1)
            handles = [await start(client, f"a{n}", hold=f"a{n}", run="a") for n in range(2)]
            other = await start(client, "b", hold="b", run="b")
            await agents.until_started("a0", "b")
            assert backend.health()["concurrency"]["queued"] == 1
            agents.go_on.set()
            for handle in (*handles, other):
                assert (await handle).status is RolloutStatus.SUCCESS
            assert backend._queue.runs == {}


@pytest.mark.parametrize("held", [True, False])
async def test_what_was_handed_out_is_over_when_the_front_goes(held):
    """A front that shuts down has its workers stop; it leaves nothing running there."""
    agents = Agents()
    async with net() as servers:
        worker = await servers.serve(worker_app(agents))
        async with front_over(PoolBackend([worker.url])) as (client, backend):
            await all_up(backend, 1)
            if held:
                handle = await start(client, "r", hold="r")
                await agents.until_started("r")
                await client.cancel_rollout("r")
                assert (await handle).status is RolloutStatus.CANCELLED
            else:
                await ask(client, "r")
        entry = worker.app.registry._entries["r"]
        assert entry.record.result is not None
        assert not entry.executing


async def test_a_front_may_be_the_worker_of_another_front(caplog):
    agents = Agents()
    async with net() as servers:
        workers = [await servers.serve(worker_app(agents, slots=2)) for _ in range(2)]
        nodes = [await servers.serve(make_app(PoolBackend([each.url]))) for each in workers]
        async with front_over(PoolBackend([each.url for each in nodes])) as (client, backend):
            await until(lambda: backend.health()["concurrency"]["max_concurrent"] == 4, backend)
            handles = [await start(client, f"r{n}", hold=f"r{n}") for n in range(6)]
            await agents.until_started("r0", "r1", "r2", "r3")
            assert backend.health()["concurrency"]["queued"] == 2
            await client.cancel_rollout("r0")
            assert (await handles[0]).status is RolloutStatus.CANCELLED
            agents.go_on.set()
            for handle in handles[1:]:
                assert (await handle).status is RolloutStatus.SUCCESS
            assert agents.started == {f"r{n}": 1 for n in range(6)}
    assert not [each for each in caplog.messages if "refused" in each]


async def test_a_front_reads_trajectories_where_its_workers_write_them(tmp_path, monkeypatch):
    """It may be restarted, and the worker gone."""
    monkeypatch.setenv("ROLLOUT_ARTIFACT_ROOT", str(tmp_path / "files"))
    async with net() as servers:
        worker = await servers.serve(worker_app())
        backend = PoolBackend([worker.url])
        async with front_over(backend, state=tmp_path / "state") as (client, _):
            result = await ask(client, "r", answer="42")
            await worker.kill()
            assert (await client.fetch_trajectory("r")).extra["reward"] == result.sample.reward
            lease = client._trajectories._leases["r"]
        async with front_over(PoolBackend([worker.url]), state=tmp_path / "state") as (client, _):
            client._trajectories._leases["r"] = lease
            assert (await client.fetch_trajectory("r")).extra["reward"] == 1.0


async def test_a_front_without_a_folder_says_so(tmp_path):
    async with net() as servers:
        worker = await servers.serve(worker_app())
        async with front_over(PoolBackend([worker.url])) as (client, _):
            await ask(client, "r")
            with pytest.raises(TrajectoryUnavailableError, match="keeps no files of rollouts"):
                await client.fetch_trajectory("r")
        backend = PoolBackend([worker.url], artifact_root=tmp_path)
        async with front_over(backend) as (client, _):
            await ask(client, "s")
            with pytest.raises(TrajectoryUnavailableError, match="written on another machine"):
                await client.fetch_trajectory("s")
