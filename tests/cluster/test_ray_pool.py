"""Workers on a Ray cluster: they join, die, are created again, and end with the pool."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from cli.harness import serving
from cluster.conftest import APP
from cluster.served import CALLERS_KEY
from pool.helpers import all_up, front_over, statuses, until
from support import CHAT_URL, in_process, make_app

from rollout.client import RolloutClient
from rollout.errors import RolloutServerError
from rollout.pool import PoolBackend
from rollout.pool.ray import RayPool
from rollout.types import WORKER_LOST


async def run(client: Any, rollout_id: str, **script: Any) -> Any:
    message = {"role": "user", "content": "?", "name": rollout_id, **script}
    return await client.run_rollout([message], CHAT_URL, rollout_id, grade=False)


def process_of(result: Any) -> int:
    return int(result.sample.messages[-1]["content"])


def starts_in(path: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in path.read_text().splitlines())


async def until_started(path: Path, count: int) -> None:
    with trio.fail_after(60):
        while not path.exists() or len(path.read_text().splitlines()) < count:
            await trio.sleep(0.02)


async def until_gone(*processes: int) -> None:
    with trio.fail_after(60):
        while any(Path(f"/proc/{each}").exists() for each in processes):
            await trio.sleep(0.05)


async def test_a_node_that_is_killed_under_load_costs_what_it_had_started(nodes, tmp_path):
    """Each agent starts once at most, each caller has an end, a node that joins has a worker."""
    starts, go_on = tmp_path / "starts", tmp_path / "go"
    pool = RayPool(APP, nodes.address, workers=2)
    async with front_over(PoolBackend(pool)) as (client, backend):
        await all_up(backend, 2)
        results: dict[str, Any] = {}

        async def one(name: str) -> None:
            results[name] = await run(client, name, starts=str(starts), until=str(go_on))

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(one, f"r{number}")
            await until_started(starts, 4)
            await trio.to_thread.run_sync(nodes.kill)
            await until(lambda: statuses(backend).count("up") == 1, backend)
            go_on.touch()
        assert max(starts_in(starts).values()) == 1
        lost = [each for each in results.values() if each.status == "failure"]
        assert len(lost) == 2
        assert {each.err_source for each in lost} == {WORKER_LOST}
        rest = [each for each in results.values() if each not in lost]
        assert {each.status for each in rest} == {"success"}
        assert len(rest) == 10
        nodes.join()  # sets a signal handler, so in this thread
        await all_up(backend, 2)
        again = [await run(client, f"again{number}") for number in range(4)]
        assert {each.status for each in again} == {"success"}
        assert backend.health()["restarts"] >= 1
    await until_gone(*(process_of(each) for each in again))


async def test_a_worker_that_an_agent_ends_or_blocks_is_created_again(nodes, monkeypatch):
    monkeypatch.setattr("rollout.pool.local._LOOK_SEC", 0.1)
    pool = RayPool(APP, nodes.address, workers=1, silence_sec=1)
    async with front_over(PoolBackend(pool)) as (client, backend):
        await all_up(backend, 1)
        ended = await run(client, "ends", exit=True)
        assert (ended.status, ended.err_source) == ("failure", WORKER_LOST)
        assert "its actor is dead because its worker process has died" in ended.err_message
        blocked = await run(client, "blocks", block=True)
        assert blocked.err_source == WORKER_LOST
        assert "it did not answer for" in blocked.err_message
        after = await run(client, "after")
        assert after.status == "success"
        (actor,) = backend.health()["actors"]
        assert (actor["status"], actor["restarts"]) == ("listening", 2)


async def test_the_number_of_workers_follows_the_rollouts(nodes, tmp_path):
    """Up while rollouts wait; down by draining a worker first, which finishes what it has."""
    starts = tmp_path / "starts"
    pool = RayPool(APP, nodes.address, workers=0, max_workers=2, idle_sec=2)
    async with front_over(PoolBackend(pool)) as (client, backend):
        assert backend.health()["actors"] == []
        results: dict[str, Any] = {}

        async def one(name: str) -> None:
            until = str(tmp_path / name)
            results[name] = await run(client, name, starts=str(starts), until=until)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(one, f"r{number}")
            await until_started(starts, 4)
            assert statuses(backend) == ["up", "up"]
            of_each: dict[str, list[str]] = {}
            for line in starts.read_text().splitlines():
                name, process = line.split()
                of_each.setdefault(process, []).append(name)
            (first, later), (second, last) = of_each.values()
            for name in (first, second):  # one rollout is left on each worker
                (tmp_path / name).touch()
            await until(lambda: "draining" in statuses(backend), backend)
            assert backend.health()["concurrency"]["running"] == 2
            for name in (later, last):
                (tmp_path / name).touch()
        assert {each.status for each in results.values()} == {"success"}
        assert starts_in(starts) == {f"r{number}": 1 for number in range(4)}
        await until_gone(*map(int, of_each))


async def test_cancelled_the_pool_leaves_no_actor(nodes, tmp_path):
    starts = tmp_path / "starts"
    with trio.CancelScope() as scope:
        backend = PoolBackend(RayPool(APP, nodes.address, workers=2))
        async with in_process(make_app(backend)) as client, trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(
                    lambda name: run(client, name, starts=str(starts), until="/nowhere"),
                    f"r{number}",
                )
            await until_started(starts, 2)
            scope.cancel()
    await until_gone(*{int(line.split()[1]) for line in starts.read_text().splitlines()})


async def test_an_application_that_no_worker_finds_ends_the_pool(nodes):
    with pytest.raises(RolloutServerError, match="no worker comes up on Ray") as caught:
        async with make_app(PoolBackend(RayPool("/no/file.py:app", nodes.address))).serving():
            await trio.sleep_forever()
    assert str(caught.value).endswith("failed: there is no file '/no/file.py'")


def test_the_command_takes_the_folder_of_the_application_to_the_workers(nodes, tmp_path):
    shutil.copy(Path(__file__).with_name("served.py"), tmp_path)
    options = ("--bind", "127.0.0.1:0", "--ray", nodes.address, "--workers", "1")
    taken = ("--runtime-env", '{"working_dir": "."}', "--worker-resources", '{"CPU": 0.5}')
    with serving(tmp_path, "served.py:app", *options, *taken) as (process, url):
        result, key_refused, actor = trio.run(use, url)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert result.status == "success"
    folder, _, name = result.sample.messages[-1]["content"].rpartition("/")
    assert (name, Path(folder) != tmp_path) == ("served.py", True)
    assert key_refused == 401
    trio.run(until_gone, actor)
    assert "Traceback" not in out + err


async def use(url: str) -> tuple[Any, int, int]:
    """Run a rollout, ask its worker for its health with the callers' key, and find its process."""
    async with RolloutClient(url=url, api_key=CALLERS_KEY) as client:
        result = await run(client, "r", file=True)
        (worker,) = (await client.health())["workers"]
        actor = process_of(await run(client, "again"))
    key = {"Authorization": f"Bearer {CALLERS_KEY}"}
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.get(f"{worker['url']}/health", headers=key)
    return result, answer.status_code, actor
