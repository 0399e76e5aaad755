"""A server whose state cannot be written or read for a while."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from server.faults import (
    admission,
    admit,
    assert_refused,
    finished,
    in_process_http,
    poll,
    result_path,
)
from support import local_backend, make_app, prompt

from rollout.server.state import KeptRollout, SQLiteStore
from rollout.server.state import sqlite as sqlite_store

pytestmark = pytest.mark.usefixtures("log_lines")

FULL = "database or disk is full"


class Fails(SQLiteStore):
    """Cannot write while `full`, nor read while `unreadable`."""

    full = unreadable = False

    async def commit(self, rows: Sequence[KeptRollout], time: float) -> Any:
        if self.full:
            await self._write(self._fail)
        return await super().commit(rows, time)

    async def sweep(self, time: float) -> bool:
        if self.full:
            await self._write(self._fail)
        return await super().sweep(time)

    async def find(self, rollout_ids: Sequence[str]) -> list[KeptRollout]:
        if self.unreadable:
            self._reader.call(self._fail)
        return await super().find(rollout_ids)

    def _fail(self, _: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError(FULL)


def failing_app(tmp_path: Path, backend: Any = None) -> tuple[Any, Fails]:
    app = make_app(backend, result_wait_timeout_sec=1)
    app.registry.store = store = Fails(tmp_path / "state")
    return app, store


async def test_a_full_disk_refuses_admissions_until_it_is_over(tmp_path, autojump_clock, log_lines):
    app, store = failing_app(tmp_path)
    async with in_process_http(app) as http:
        assert (await http.get("/health")).json()["state"] == {"status": "ok", "detail": None}
        store.full = True
        for _ in range(3):  # the first one finds it out
            answer = await http.post("/rollout", json=admission())
            assert FULL in assert_refused(answer, 503)
            assert 5 <= int(answer.headers["Retry-After"]) <= 8
        batch = await http.post("/rollouts", json={"rollouts": [admission(), admission()]})
        assert [each["status_code"] for each in batch.json()["outcomes"]] == [503, 503]
        assert app.backend.executions == {}
        health = (await http.get("/health")).json()
        assert health["state"]["status"] == "error"
        assert FULL in health["state"]["detail"]
        assert health["lifecycle"] == {"accepting_rollouts": False, "active_rollouts": 0}
        store.full = False
        await trio.sleep(2)
        rollout = await admit(http)
        assert (await finished(http, *rollout))["status"] == "success"
    assert sum("admissions are refused" in line for line in log_lines) == 1
    assert sum("can be written again" in line for line in log_lines) == 1


async def test_running_rollouts_go_on_and_their_results_are_delivered(tmp_path, autojump_clock):
    app, store = failing_app(tmp_path)
    async with in_process_http(app) as http:
        running = await admit(http, initial_messages=prompt(sleep=30))
        silent = await admit(http, initial_messages=prompt(sleep=10))
        await trio.sleep(5)
        store.full = True
        result = await finished(http, *running)
        assert result["status"] == "success"
        assert await poll(http, *running) == result
        assert app.registry.lifecycle.active_rollouts == 0
        store.full = False
        await trio.sleep(200)
        assert app.registry._entries == {}  # by now they are kept
        assert await poll(http, *running) == result
        assert (await poll(http, *silent))["status"] == "success"


async def test_an_early_cancel_is_kept_once_there_is_room(tmp_path, autojump_clock):
    app, store = failing_app(tmp_path)
    async with in_process_http(app) as http:
        store.full = True
        wanted = {"ids": ["r"], "admission_keys": {"r": "k"}}
        answer = await http.post("/rollout/cancel", json=wanted)
        assert answer.json() == {"dispositions": {"r": "cancelled_queued"}}
        store.full = False
        await trio.sleep(2)
    async with in_process_http(make_app(state=tmp_path / "state")) as http:
        rollout = await admit(http, rollout_id="r", admission_key="k")
        assert (await poll(http, *rollout))["status"] == "cancelled"


async def test_an_agent_that_has_not_started_waits(tmp_path, autojump_clock):
    app, store = failing_app(tmp_path, local_backend(max_concurrent=1))
    async with in_process_http(app) as http:
        await admit(http, initial_messages=prompt(sleep=5))
        rollout = await admit(http, initial_messages=prompt(sleep=5))
        await trio.sleep(1)
        store.full = True
        for _ in range(20):
            told = await poll(http, *rollout)
            assert (told["status"], told["agent_started_at"]) == ("queued", None)
        store.full = False
        assert (await finished(http, *rollout))["status"] == "success"


async def test_a_shutdown_delivers_what_cannot_be_kept(tmp_path, autojump_clock):
    app, store = failing_app(tmp_path)
    results: list[Any] = []
    async with in_process_http(app) as http, trio.open_nursery() as nursery:
        rollout = await admit(http, initial_messages=prompt(sleep=10))
        await trio.sleep(5)
        store.full = True

        async def ask() -> None:
            results.append(await finished(http, *rollout))

        nursery.start_soon(ask)
        await app.shutdown_stages.run()
    assert [result["status"] for result in results] == ["success"]


async def test_a_result_that_cannot_be_read_is_asked_for_again(tmp_path, autojump_clock):
    app, store = failing_app(tmp_path)
    async with in_process_http(app) as http:
        rollout = await admit(http, rollout_id="r", admission_key="k")
        result = await finished(http, *rollout)
        store.unreadable = True
        answer = await http.get(result_path("r"), headers=rollout[1])
        assert "cannot be read" in assert_refused(answer, 503)
        assert "Retry-After" in answer.headers
        claims = [{"rollout_id": "r", "polling_lease_token": next(iter(rollout[1].values()))}]
        assert_refused(await http.post("/rollouts/feed", json={"leases": claims}), 503)
        again = await http.post("/rollout", json=admission(rollout_id="r", admission_key="k"))
        assert_refused(again, 503)
        store.unreadable = False
        assert await poll(http, *rollout) == result


async def test_what_sqlite_itself_says_of_a_full_disk(tmp_path, monkeypatch):
    """Under the system's clock and in threads, with SQLite's own limit in place of a disk's."""
    honest, pages = sqlite_store._connect, [1 << 30]

    def connect(path: Path, mode: str) -> sqlite3.Connection:
        connection = honest(path, mode)
        connection.execute(f"PRAGMA max_page_count = {pages[0]}")
        return connection

    monkeypatch.setattr(sqlite_store, "_connect", connect)
    monkeypatch.setattr("rollout.server.state.journal._RETRY_SEC", 0.01)
    app = make_app()
    app.registry.store = store = SQLiteStore(tmp_path / "state")
    async with in_process_http(app) as http:
        first = await admit(http)
        await finished(http, *first)
        rollout = await admit(http, initial_messages=prompt(answer="x" * 100_000, sleep=0.05))
        pages[0] = 1
        store._writer.close()
        assert len((await finished(http, *rollout))["sample"]["messages"][-1]["content"]) == 100_000
        assert FULL in assert_refused(await http.post("/rollout", json=admission()), 503)
        pages[0] = 1 << 30
        while app.registry.trouble is not None:
            await trio.sleep(0.01)
        assert (await finished(http, *await admit(http)))["status"] == "success"
        assert (await finished(http, *first))["status"] == "success"


async def test_a_damaged_page_is_said_and_harms_no_other(tmp_path):
    path = tmp_path / "state"
    large = prompt(answer="y" * 50_000)
    async with in_process_http(make_app(state=path)) as http:
        one, other = await admit(http), await admit(http, initial_messages=large)
        await finished(http, *one)
        await finished(http, *other)
    content = path.read_bytes()
    at = content.index(b"y" * 3000)
    damaged = at - at % 4096  # a page in the middle of the large body: its link to the next one
    path.write_bytes(content[:damaged] + b"\xff" * 4096 + content[damaged + 4096 :])
    async with in_process_http(make_app(state=path)) as http:
        assert (await poll(http, *one))["status"] == "success"
        answer = await http.get(result_path(other[0]), headers=other[1])
        assert "malformed" in assert_refused(answer, 503)
        assert (await poll(http, *one))["status"] == "success"
        assert (await finished(http, *await admit(http)))["status"] == "success"


async def test_a_changed_byte_of_a_result_is_an_error_and_no_other_result(tmp_path):
    path = tmp_path / "state"
    async with in_process_http(make_app(state=path)) as http:
        one = await admit(http, initial_messages=prompt(answer="yes, yes"))
        await finished(http, *one)
    path.write_bytes(path.read_bytes().replace(b"yes, yes", b"yes, yet"))
    async with in_process_http(make_app(state=path)) as http:
        answer = await http.get(result_path(one[0]), headers=one[1])
        assert "does not fit its checksum" in assert_refused(answer, 503)
        assert_refused(await http.post("/rollout", json=admission(rollout_id=one[0])), 409)
