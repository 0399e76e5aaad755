"""``rollout serve --workers``: a front, and processes that run the rollouts."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import trio
from cli.harness import serving
from support import CHAT_URL

from rollout.cli import serve
from rollout.client import RolloutClient

APP = """
import logging
import os
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from rollout import AgentWorkflow
from support import local_backend, make_app


class Where(AgentWorkflow):
    async def run(self, ctx):
        script = ctx.prompt[0]
        logging.getLogger("agent").info("at work")
        if "started" in script:
            Path(script["started"]).write_text(str(os.getpid()))
        await trio.sleep(script.get("sleep", 0))
        return [{"role": "assistant", "content": str(os.getpid())}]


@asynccontextmanager
async def lifespan(app):
    Path(f"lifespan-{os.getpid()}").touch()
    yield
    print("the lifespan has ended")


app = make_app(local_backend(Where, max_concurrent=2), lifespan=lifespan, api_key="key-of-the-app")
"""


async def until(path):
    while not (path.exists() and path.read_text()):
        await trio.sleep(0.01)
    return int(path.read_text())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pool_app.py").write_text(APP)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def rollout(client, rollout_id, **script):
    prompt = [{"role": "user", "content": "?", **script}]
    return client.run_rollout(prompt, CHAT_URL, rollout_id, grade=False)


async def both_up(client):
    while sum(each["status"] == "up" for each in (await client.health())["workers"]) < 2:
        await trio.sleep(0.05)


async def use(url, folder, process):
    """Use both workers, kill one, ask the other to end, and end the front under a rollout."""
    results = {}

    async def run(rollout_id, **script):
        results[rollout_id] = await rollout(client, rollout_id, **script)

    async with RolloutClient(url=url, api_key="key-of-the-app") as client:
        await both_up(client)
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(lambda number=number: run(f"r{number}", sleep=0.2))
        for number in range(4):
            trajectory = await client.fetch_trajectory(f"r{number}")
            assert trajectory.rollout_id == f"r{number}"
        where = {results[f"r{number}"].sample.messages[-1]["content"] for number in range(4)}
        assert len(where) == 2
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: run("killed", sleep=600, started=str(folder / "killed")))
            os.kill(await until(folder / "killed"), signal.SIGKILL)
        await both_up(client)
        health = await client.health()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: run("last", sleep=0.5, started=str(folder / "last")))
            # As a service manager does: to all processes.
            os.kill(await until(folder / "last"), signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
    return results, health


def test_a_front_and_its_workers(folder):
    options = ("--bind", "127.0.0.1:0", "--workers", "2", "--state", str(folder / "state"))
    options = (*options, "--log-format", "json")
    env = {"TMPDIR": str(folder / "tmp"), "ROLLOUT_ARTIFACT_ROOT": str(folder / "files")}
    with serving(folder, "pool_app.py:app", *options, **env) as (process, url):
        results, health = trio.run(use, url, folder, process)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert results["killed"].err_source == "worker_lost"
    assert "killed by SIGKILL" in results["killed"].err_message
    assert results["last"].status == "success"
    assert health["restarts"] == 1
    assert health["concurrency"]["max_concurrent"] == 4
    assert health["state"]["status"] == "ok"
    assert sorted(each["restarts"] for each in health["processes"]) == [0, 1]
    assert len(list(folder.glob("lifespan-*"))) == 3
    assert not (folder / f"lifespan-{process.pid}").exists()
    records = [json.loads(line) for line in err.splitlines()]
    ends = [each for each in records if each["message"] == "the lifespan has ended"]
    assert {each["worker"] for each in ends} == {"1", "2"}
    at_work = [each for each in records if each["message"] == "at work"]
    assert {each["rollout_id"] for each in at_work} == {*results}
    assert {each["worker"] for each in at_work} == {"1", "2"}
    assert [each for each in records if "worker" not in each]  # the front's own
    assert list((folder / "tmp").iterdir()) == []


def test_workers_end_with_a_front_that_is_killed(folder):
    """A worker removes its socket when it has shut down."""

    async def run_one(url):
        async with RolloutClient(url=url, api_key="key-of-the-app") as client:
            await rollout(client, "r")
            (worker,) = (await client.health())["workers"]
            return Path(worker["url"].removeprefix("unix:"))

    options = ("--bind", "127.0.0.1:0", "--workers", "1")
    with serving(folder, "pool_app.py:app", *options) as (process, url):
        socket = trio.run(run_one, url)
        assert socket.is_socket()
        process.kill()
        process.wait()
    deadline = time.monotonic() + 60
    while socket.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", ""])
def test_a_number_of_workers_that_cannot_be(cli, value):
    line = cli.fails(2, "serve", "nowhere:app", f"--workers={value}")
    assert line == f"rollout: --workers takes a number from 1, or auto, not {value!r}"


@pytest.mark.parametrize(("cores", "expected"), [(8, 7), (2, 1), (1, 1)])
def test_auto_leaves_a_core_to_the_front(monkeypatch, cores, expected):
    monkeypatch.setattr(serve, "processors", lambda: cores)
    assert serve._worker_count(None, None, "auto") == expected


def test_a_front_takes_no_workers_of_its_own(cli, tmp_path):
    code = "app = create_rollout_server(backend=PoolBackend(['http://x']), configure_logging=False)"
    (tmp_path / "front.py").write_text(
        "from rollout.pool import PoolBackend\nfrom rollout.server import create_rollout_server\n"
        + code
    )
    line = cli.fails(2, "serve", f"{tmp_path}/front.py:app", "--workers", "2")
    assert line == "rollout: --workers: the application is the front of a pool already"


def test_a_worker_needs_a_key(cli, monkeypatch):
    with Path(os.devnull).open("rb") as null:
        monkeypatch.setattr(serve, "_take_stdin", null.fileno)
        assert "stdin has no key" in cli.fails(2, "serve", "nowhere:app", "--worker-of=2")


def test_the_last_resort_ends_a_process_whose_output_nobody_reads(monkeypatch):
    class Gone:
        def flush(self):
            raise BrokenPipeError

    ended = []
    monkeypatch.setattr(serve.sys, "stdout", Gone())
    monkeypatch.setattr(serve.os, "_exit", ended.append)
    serve._end_process("it is stuck")
    assert ended == [3]
