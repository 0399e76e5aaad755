"""What a server makes of the state that a killed one left behind."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from feed.streaming import claim, open_feed
from server.faults import (
    admission,
    admit,
    assert_refused,
    finished,
    in_process_http,
    poll,
    result_path,
    served_http,
)
from support import Script, local_backend, make_app, prompt

from rollout.errors import RolloutServerError
from rollout.server.state import KeptRollout, SQLiteStore, ended_by_restart
from rollout.server.state.thread import JobThread
from rollout.types import POLLING_LEASE_HEADER

pytestmark = pytest.mark.usefixtures("log_lines")

LEASE, RETENTION = 120.0, 900.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def left_behind(path: Path) -> Path:
    """The files as a server that is killed now would leave them."""
    copy = path.with_name(f"{path.name}-killed")
    for suffix in ("", "-wal"):
        if path.with_name(path.name + suffix).exists():
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    return copy


def database(path: Path, statement: str) -> list[Any]:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


async def test_a_result_is_served_until_its_retention_ends(path, autojump_clock):
    async with in_process_http(make_app(state=path)) as http:
        rollout = await admit(http, rollout_id="r")
        result = await finished(http, *rollout)
        await trio.sleep(100)
        killed = left_behind(path)
    await trio.sleep(10_000)  # downtime ages nothing
    async with in_process_http(make_app(state=killed)) as http:
        assert await poll(http, *rollout) == result
        assert_refused(await http.post("/rollout", json=admission(rollout_id="r")), 409)
        wrong = {POLLING_LEASE_HEADER: "wrong"}
        assert_refused(await http.get(result_path("r"), headers=wrong), 403)
        await trio.sleep(RETENTION - 100 - 1)
        assert await poll(http, *rollout) == result
        await trio.sleep(12)  # some of it is generous: the clock is kept every 10 s
        assert_refused(await http.get(result_path("r"), headers=rollout[1]), 404)
        again = await admit(http, rollout_id="r")
        assert (await finished(http, *again))["status"] == "success"


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("retention", [0, RETENTION])
async def test_a_rollout_in_flight_ends_as_a_failure(path, autojump_clock, started, retention):
    backend = local_backend(max_concurrent=1)
    async with in_process_http(make_app(backend, state=path)) as http:
        first = await admit(http, initial_messages=prompt(sleep=1000))
        second = await admit(http, initial_messages=prompt(sleep=1000))
        rollout = first if started else second
        await trio.sleep(20)
        before = await poll(http, *rollout)
        killed = left_behind(path)
    async with in_process_http(make_app(state=killed, result_retention_sec=retention)) as http:
        await trio.sleep(LEASE - 40)
        result = await poll(http, *rollout)
        assert (result["status"], result["err_category"]) == ("failure", "internal_error")
        ran = "had started" if started else "had not started"
        assert result["err_message"] == (
            f"the rollout server restarted while the rollout was in flight; its agent {ran}"
        )
        assert result["agent_started_at"] == before["agent_started_at"]
        assert (result["agent_started_at"] is not None) == started
        assert await poll(http, *rollout) == result


async def test_a_graceful_stop_leaves_results_to_the_next_server(path, autojump_clock):
    async with in_process_http(make_app(state=path)) as http:
        rollout = await admit(http)
        await trio.sleep(1)
    assert not path.with_name("state-wal").exists()
    async with in_process_http(make_app(state=path)) as http:
        assert (await poll(http, *rollout))["status"] == "success"


async def test_a_feed_brings_what_an_older_server_left(path):
    async with served_http(make_app(state=path)) as http:
        done, done_lease = await admit(http)
        await finished(http, done, done_lease)
        running, running_lease = await admit(http, initial_messages=prompt(sleep=60))
        while (await poll(http, running, running_lease))["status"] == "queued":
            pass
        killed = left_behind(path)
    async with served_http(make_app(state=killed)) as http:
        claims = [
            claim(done, done_lease[POLLING_LEASE_HEADER]),
            claim(running, running_lease[POLLING_LEASE_HEADER], "running"),
            claim("\ud800", "x"),
            claim("r", "wrong"),
        ]
        async with open_feed(http, *claims) as feed:
            assert feed.hello["refused"] == ["\ud800", "r"]
            results = [await feed.result() for _ in range(2)]
        statuses = {result["rollout_id"]: result["status"] for result in results}
        assert statuses == {done: "success", running: "failure"}


async def test_an_admission_with_a_key_is_known_after_a_restart(path, autojump_clock):
    runs = []

    class Counted(Script):
        async def run(self, ctx: Any) -> Any:
            runs.append(1)
            return await super().run(ctx)

    body = admission(rollout_id="r", admission_key="k", initial_messages=prompt(sleep=1000))
    async with in_process_http(make_app(local_backend(Counted), state=path)) as http:
        first = await http.post("/rollout", json=body)
        await trio.sleep(5)
        killed = left_behind(path)
    async with in_process_http(make_app(local_backend(Counted), state=killed)) as http:
        again = await http.post("/rollout", json=body)
        assert (again.status_code, again.content) == (202, first.content)
        lease = {POLLING_LEASE_HEADER: again.json()["polling_lease_token"]}
        assert (await poll(http, "r", lease))["status"] == "failure"
    assert runs == [1]


async def test_what_was_cancelled_before_it_arrived_does_not_start_after_a_restart(
    path, autojump_clock
):
    wanted = {"ids": ["r", "done"], "admission_keys": {"r": "k", "done": "other"}}
    async with in_process_http(make_app(state=path)) as http:
        done = await admit(http, rollout_id="done", admission_key="k")
        result = await finished(http, *done)
        answer = await http.post("/rollout/cancel", json=wanted)
        dispositions = {"r": "cancelled_queued", "done": "not_found"}
        assert answer.json() == {"dispositions": dispositions}
        killed = left_behind(path)
    async with in_process_http(make_app(state=killed)) as http:
        rollout, lease = await admit(http, rollout_id="r", admission_key="k")
        assert (await poll(http, rollout, lease))["status"] == "cancelled"
        assert await poll(http, *done) == result


async def test_numbers_and_the_secret_go_on(path, autojump_clock):
    async with in_process_http(make_app(state=path)) as http:
        await finished(http, *await admit(http))
        killed = left_behind(path)
    app = make_app(state=killed)
    async with in_process_http(app) as http:
        assert database(path, "SELECT secret FROM server") == [(app.registry.secret,)]
        await finished(http, *await admit(http))
        assert database(killed, "SELECT number FROM rollouts") == [(1,), (2,)]


def test_what_a_restart_makes_of_a_row():
    row = KeptRollout(7, "r", b"digest", b"request", "2026-01-02T03:04:05.6Z")
    ended = ended_by_restart(row, 99.0)
    body = json.loads(ended.body or b"")
    assert ended[:5] == row[:5]
    assert (ended.status, ended.until) == ("failure", 99.0)
    assert body["agent_started_at"] == "2026-01-02T03:04:05.600000Z"


# --- states that cannot be used -----------------------------------------------------------------


async def refusal(path: Path) -> str:
    with pytest.raises(RolloutServerError) as caught:
        async with make_app(state=path).serving():
            pass
    return str(caught.value)


async def test_a_state_that_is_in_use_is_refused(path):
    async with make_app(state=path).serving():
        assert "is in use by another server of this process" in await refusal(path)
    async with make_app(state=path).serving():
        pass


async def test_a_state_that_another_process_holds_is_refused(path):

    code = "import sys, rollout.server.state.sqlite as s; s._locked(s.Path(sys.argv[1])); print(1)"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{code}; sys.stdout.flush(); sys.stdin.read()", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"1\n"
        expected = f"the state {path} is held by another process ({holder.pid})"
        assert await refusal(path) == expected
        holder.kill()
    async with make_app(state=path).serving():
        pass


async def test_another_version_or_program_is_refused_and_left_alone(path):
    database(path, "CREATE TABLE mine (x)")
    before = path.read_bytes()
    assert await refusal(path) == f"the state {path} is a database of another program"
    assert path.read_bytes() == before
    path.unlink()
    async with make_app(state=path).serving():
        pass
    database(path, "PRAGMA user_version = 7")
    before = path.read_bytes()
    assert "was written by another version: its schema is 7" in await refusal(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["text", "middle"])
async def test_a_damaged_file_is_refused_and_left_alone(path, damage):
    if damage == "text":
        path.write_bytes(b"not a database at all, but long enough to look at" * 100)
    else:
        async with make_app(state=path).serving():
            pass
        content = bytearray(path.read_bytes())
        content[4096:] = b"\xff" * (len(content) - 4096)
        path.write_bytes(content)
    before = path.read_bytes()
    assert f"the state {path} is damaged, or not a database" in await refusal(path)
    assert path.read_bytes() == before


async def test_paths_that_cannot_be_a_state_are_refused(path, tmp_path):
    assert "Is a directory" in await refusal(tmp_path)
    assert "No such file or directory" in await refusal(tmp_path / "missing" / "state")


async def test_a_file_system_without_wal_is_refused(path, monkeypatch):
    def memory(*_: Any, **__: Any) -> sqlite3.Connection:
        return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)

    monkeypatch.setattr("rollout.server.state.sqlite._connect", memory)
    assert "is on a file system where SQLite's WAL mode does not work" in await refusal(path)


async def test_a_store_can_be_opened_again(path):
    store = SQLiteStore(path)
    first = await store.open()
    await store.close()
    assert await store.open() == first
    await store.close()


async def test_a_thread_that_was_ended_may_start_again_at_once():
    thread = JobThread("again")
    for number in range(500):
        assert await thread.run(partial(abs, -number)) == number
        thread.end()


async def test_no_thread_is_left(path):
    before = threading.active_count()
    async with in_process_http(make_app(state=path)) as http:
        await finished(http, *await admit(http))
        assert "rollout-state" in {each.name for each in threading.enumerate()}
    path.write_bytes(b"no database" * 1000)
    await refusal(path)
    while threading.active_count() > before and "rollout-state" in {
        each.name for each in threading.enumerate()
    }:
        await trio.sleep(0.01)
