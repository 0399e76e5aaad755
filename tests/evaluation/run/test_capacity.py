"""How many attempts run at a time, if the config does not say."""

from __future__ import annotations

import os
import textwrap

import httpx
import pytest
import trio
from evaluation.run.cases import TESTS, config_of, run_all, scripted
from evaluation.run.fake import success

from rollout.client import RolloutClient
from rollout.evaluation.run import _capacity

APP = """
    from support import local_backend, make_app

    app = make_app(local_backend(max_concurrent=3))
"""


def healthy(**answer) -> httpx.Response:
    return httpx.Response(200, json={"status": "ok", **answer})


async def most_at_a_time(folder, server, count: int, **run) -> int:
    """How many rollouts the server has at a time; they end once there are so many."""
    most = 0
    enough = trio.Event()

    async def end(_):
        nonlocal most
        most = max(most, len(server.active))
        if most >= count:
            enough.set()
        await enough.wait()
        return success()

    server.end = end
    config = config_of(folder, server="http://fake", rows=scripted(60), **run)
    with trio.fail_after(60):
        run, records = await run_all(config)
    assert len(records) == 60
    assert run.max_in_flight == count
    return most


@pytest.mark.parametrize(
    ("health", "count"),
    [
        ({"concurrency": {"max_concurrent": 40, "running": 0}}, 40),
        ({"concurrency": {"max_concurrent": 2}}, 2),
        ({"concurrency": {"max_concurrent": None}}, 16),
        ({"concurrency": {"max_concurrent": 0}}, 16),
        ({"concurrency": {"max_concurrent": "9"}}, 16),
        ({"concurrency": 7}, 16),
        ({}, 16),
    ],
)
async def test_as_many_as_the_server_runs(tmp_path, server, health, count):
    server.healthy = healthy(**health)
    assert await most_at_a_time(tmp_path, server, count) == count


async def test_the_config_goes_first(tmp_path, server):
    server.healthy = healthy(concurrency={"max_concurrent": 40})
    assert await most_at_a_time(tmp_path, server, 5, max_in_flight=5) == 5


async def test_workers_that_start_are_waited_for(server, autojump_clock):
    started = trio.current_time()

    class Starting:
        status_code, headers = 200, httpx.Headers()

        @property
        def content(self) -> bytes:
            up = int((trio.current_time() - started) / 5)
            return httpx.Response(
                200,
                json={
                    "status": "ok",
                    "concurrency": {"max_concurrent": 2 * up},
                    "workers": [{"status": "up"}] * up + [{"status": "starting"}],
                    "processes": [{}] * 3,
                },
            ).content

    server.healthy = Starting()
    http = httpx.AsyncClient(transport=server)
    async with RolloutClient(url="http://fake", http_client=http) as client:
        assert await _capacity(client, workers=False) == 16
        assert await _capacity(client, workers=True) == 6
    assert 15 <= trio.current_time() - started < 16


async def test_the_capacity_of_a_real_server_with_workers(tmp_path, monkeypatch):
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    app = tmp_path / "own_app.py"
    app.write_text(textwrap.dedent(APP))
    server = {"app": f"{app}:app", "workers": 2}
    run, records = await run_all(config_of(tmp_path, server=server, rows=scripted(2)))
    assert len(records) == 2
    assert run.max_in_flight == 6
