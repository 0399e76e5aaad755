"""A server with a state: what is said only when it is kept, and what is read back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from server.faults import (
    LLM_KEY,
    admission,
    admit,
    assert_refused,
    finished,
    in_process_http,
    poll,
    result_path,
)
from support import Script, local_backend, make_app, prompt

from rollout import get_rollout_context
from rollout.backend import ExecutionBackend
from rollout.server.state import KeptRollout, SQLiteStore
from rollout.types import (
    POLLING_LEASE_HEADER,
    ExecutionOutcome,
    ExecutionRequest,
    ExecutionResult,
    RolloutInitRequest,
    RolloutSample,
    RolloutStatus,
)

pytestmark = pytest.mark.usefixtures("log_lines")

LEASE, RETENTION = 120.0, 900.0


ran_at: list[float] = []


class Notes(Script):
    """Notes when it runs."""

    async def run(self, ctx: Any) -> Any:
        ran_at.append(trio.current_time())
        return await super().run(ctx)


class Gated(SQLiteStore):
    """Commits when the gate is open."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = trio.Event()
        self.gate.set()
        self.left, self.held = 10**9, False
        self.sizes: list[int] = []

    def shut(self) -> None:
        self.gate = trio.Event()

    def close_for_good(self) -> None:
        self._writer._path = self.path / "nowhere"
        self._writer.close()

    def hold_after(self, commits: int) -> None:
        """Shut the gate once so many more commits have begun."""
        self.left = commits

    async def commit(self, rows: Sequence[KeptRollout], time: float) -> Any:
        self.left -= 1
        if self.left < 0 and self.gate.is_set() and not self.held:
            self.held = True
            self.shut()
        with trio.move_on_after(1e4):  # a failed test is to end
            await self.gate.wait()
        self.sizes.append(len(rows))
        return await super().commit(rows, time)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ran_at.clear()
    return tmp_path / "state"


def gated_app(path: Path, backend: Any = None, **options: Any) -> tuple[Any, Gated]:
    app = make_app(backend, **options)
    app.registry.store = store = Gated(path)
    return app, store


def rows_of(path: Path) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(
            "SELECT rollout_id, status, agent_started_at, body FROM rollouts ORDER BY number"
        ).fetchall()
    finally:
        connection.close()


# --- nothing is said before it is kept --------------------------------------------------------


async def test_an_admission_is_answered_and_started_once_it_is_kept(path, autojump_clock):
    app, store = gated_app(path)
    answers = []
    async with in_process_http(app) as http, trio.open_nursery() as nursery:
        store.shut()

        async def ask() -> None:
            answers.append(await http.post("/rollout", json=admission(rollout_id="r")))

        nursery.start_soon(ask)
        await trio.sleep(50)
        assert (answers, app.backend.executions["r"].started) == ([], False)
        assert app.registry.lifecycle.active_rollouts == 1
        again = await http.post("/rollout", json=admission(rollout_id="r"))
        assert_refused(again, 409)
        store.gate.set()
        await app.registry.wait_idle()
    assert answers[0].status_code == 202
    ((rollout_id, status, started, body),) = rows_of(path)
    assert (rollout_id, status, started) == ("r", "success", json.loads(body)["agent_started_at"])


async def test_an_admission_that_arrives_while_its_cancel_reads_the_state_does_not_start(
    path, autojump_clock, monkeypatch
):
    app, store = gated_app(path, local_backend(workflow=Notes))
    read, reading, go_on = store.find, trio.Event(), trio.Event()

    async def find(rollout_ids: Sequence[str]) -> list[KeptRollout]:
        reading.set()
        await go_on.wait()
        return await read(rollout_ids)

    monkeypatch.setattr(store, "find", find)
    answers = {}
    async with in_process_http(app) as http:

        async def send(route: str, body: Any) -> None:
            answers[route] = await http.post(route, json=body)

        async with trio.open_nursery() as nursery:
            wanted = {"ids": ["r"], "admission_keys": {"r": "k"}}
            nursery.start_soon(send, "/rollout/cancel", wanted)
            await reading.wait()
            store.shut()
            body = admission(rollout_id="r", admission_key="k")
            nursery.start_soon(send, "/rollout", body)
            await trio.testing.wait_all_tasks_blocked()
            go_on.set()
            await trio.sleep(50)
            assert answers == {}  # the cancelled admission is to be kept first
            store.gate.set()
        token = answers["/rollout"].json()["polling_lease_token"]
        cancelled = answers["/rollout/cancel"].json()
        assert cancelled == {"dispositions": {"r": "cancelled_queued"}}
        result = await finished(http, "r", {POLLING_LEASE_HEADER: token})
    assert (result["status"], result["agent_started_at"], ran_at) == ("cancelled", None, [])


async def test_a_batch_is_answered_once_all_of_it_is_kept(path, autojump_clock):
    app, store = gated_app(path)
    async with in_process_http(app) as http, trio.open_nursery() as nursery:
        store.shut()
        answers = []

        async def ask() -> None:
            many = [admission() for _ in range(20)]
            answers.append(await http.post("/rollouts", json={"rollouts": many}))

        nursery.start_soon(ask)
        await trio.sleep(50)
        assert answers == []
        store.gate.set()
        await trio.testing.wait_all_tasks_blocked()
    assert [each["status_code"] for each in answers[0].json()["outcomes"]] == [202] * 20
    assert max(store.sizes) >= 10


async def test_a_caller_that_leaves_before_the_commit_changes_nothing(path, autojump_clock):
    app, store = gated_app(path)
    async with in_process_http(app) as http:
        store.shut()
        with trio.move_on_after(5):
            await http.post("/rollout", json=admission(rollout_id="r"))
        store.gate.set()
        await app.registry.wait_idle()
        assert [row[:2] for row in rows_of(path)] == [("r", "success")]


async def test_an_agent_starts_once_that_is_kept_and_told(path, autojump_clock):
    app, store = gated_app(path, local_backend(Notes, max_concurrent=1), result_wait_timeout_sec=1)
    async with in_process_http(app) as http:
        await admit(http, initial_messages=prompt(sleep=5))
        rollout = await admit(http, initial_messages=prompt(sleep=30))
        store.shut()
        await trio.sleep(20)
        told = await poll(http, *rollout)
        assert (told["status"], told["agent_started_at"], ran_at) == ("queued", None, [0])
        store.gate.set()
        told = await poll(http, *rollout)
        assert told["status"] == "running"
        assert told["agent_started_at"] is not None
        await trio.sleep(1)
        assert ran_at == [0, 21]


@pytest.mark.parametrize("end", ["cancel", "deadline"])
async def test_an_agent_that_waits_for_the_commit_can_be_stopped(path, autojump_clock, end):
    app, store = gated_app(path, local_backend(Notes, max_concurrent=1))
    timeout = 20 if end == "deadline" else None
    async with in_process_http(app) as http:
        await admit(http, initial_messages=prompt(sleep=5))
        rollout = await admit(http, initial_messages=prompt(sleep=30), agent_timeout_sec=timeout)
        store.shut()
        await trio.sleep(10)
        if end == "cancel":
            await http.post("/rollout/cancel", json={"all": True})
        await trio.sleep(20)
        store.gate.set()
        result = await poll(http, *rollout)
        while result["status"] in {"queued", "running"}:
            result = await poll(http, *rollout)
    expected = ("cancelled", None) if end == "cancel" else ("failure", "timeout")
    assert (result["status"], result["err_category"]) == expected
    assert ran_at == [0]


class Reports(ExecutionBackend):
    """Says that its agent starts, and does not wait until that is kept."""

    reports_agent_start = True

    async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
        context = get_rollout_context()
        assert context is not None
        context.mark_agent_started()
        context.mark_agent_started()
        await trio.sleep(request.prompt[0].get("sleep", 0))
        sample = RolloutSample(messages=[*request.prompt])
        result = ExecutionResult(status=RolloutStatus.SUCCESS, sample=sample)
        return ExecutionOutcome(workflow=result)


class Silent(Reports):
    """Leaves it to the server to say when its agent starts."""

    reports_agent_start = False

    async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
        ran_at.append(trio.current_time())
        return await super().execute(request)


async def test_a_backend_that_does_not_wait_tells_no_start_before_it_is_kept(path, autojump_clock):
    app, store = gated_app(path, Reports(), result_wait_timeout_sec=1)
    async with in_process_http(app) as http:
        quick = await admit(http)
        result = await finished(http, *quick)
        assert (result["status"], result["agent_started_at"] is None) == ("success", False)
        answers = []

        async def ask() -> None:
            answers.append(await admit(http, initial_messages=prompt(sleep=20)))

        async with trio.open_nursery() as nursery:
            store.hold_after(1)
            nursery.start_soon(ask)
        told = await poll(http, *answers[0])
        assert (told["status"], told["agent_started_at"]) == ("queued", None)
        store.gate.set()
        result = await finished(http, *answers[0])
        assert (result["status"], result["agent_started_at"] is None) == ("success", False)


async def test_a_backend_that_reports_nothing_is_called_once_the_start_is_kept(
    path, autojump_clock
):
    app, store = gated_app(path, Silent())
    async with in_process_http(app) as http:
        store.hold_after(1)
        rollout = await admit(http)
        await trio.sleep(10)
        assert ran_at == []
        store.gate.set()
        assert (await finished(http, *rollout))["status"] == "success"
        assert ran_at == [10]


async def test_a_result_is_told_once_it_is_kept(path, autojump_clock):
    app, store = gated_app(path, result_wait_timeout_sec=1)
    async with in_process_http(app) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=30))
        await trio.sleep(10)
        store.shut()
        await trio.sleep(30)
        assert (await poll(http, *rollout))["status"] == "grading"
        assert app.registry.lifecycle.active_rollouts == 1
        store.gate.set()
        assert (await poll(http, *rollout))["status"] == "success"
        assert app.registry.lifecycle.active_rollouts == 0


async def test_an_expiry_waits_for_its_commit_and_is_not_overtaken(path, autojump_clock):
    app, store = gated_app(path, result_wait_timeout_sec=1)
    async with in_process_http(app) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=LEASE + 5))
        await trio.sleep(10)
        store.shut()
        await trio.sleep(LEASE + 50)
        store.gate.set()
        result = await finished(http, *rollout)
        assert (result["status"], result["err_category"]) == ("failure", "lease_expired")
    assert [row[:2] for row in rows_of(path)] == [(rollout[0], "failure")]


async def test_a_shutdown_waits_for_results_that_are_to_be_kept(path, autojump_clock):
    app, store = gated_app(path)
    polled = []
    async with in_process_http(app) as http, trio.open_nursery() as nursery:
        rollout = await admit(http, initial_messages=prompt(sleep=2))

        async def ask() -> None:
            result = await poll(http, *rollout)
            while result["status"] != "success":
                result = await poll(http, *rollout)
            polled.append(result)

        nursery.start_soon(ask)
        await trio.sleep(1)
        store.shut()
        nursery.start_soon(app.shutdown_stages.run)
        await trio.sleep(5)
        store.gate.set()
    assert [result["status"] for result in polled] == ["success"]


# --- what is kept is read back ----------------------------------------------------------------


async def test_a_result_that_was_fetched_leaves_the_memory_and_is_read_again(path, autojump_clock):
    app, _ = gated_app(path)
    async with in_process_http(app) as http:
        rollout = await admit(http)
        result = await finished(http, *rollout)
        assert app.registry._entries == {}
        assert await poll(http, *rollout) == result
        assert app.registry._entries == {}
        rollout_id, headers = rollout
        wrong = dict.fromkeys(headers, "wrong")
        assert_refused(await http.get(result_path(rollout_id), headers=wrong), 403)
        assert_refused(await http.get(result_path("other"), headers=headers), 404)
        assert_refused(await http.post("/rollout", json=admission(rollout_id=rollout_id)), 409)
        assert await poll(http, *rollout) == result


async def test_a_result_that_nobody_fetches_leaves_the_memory_with_its_lease(path, autojump_clock):
    app, _ = gated_app(path)
    async with in_process_http(app) as http:
        rollout = await admit(http)
        await trio.sleep(LEASE - 1)
        assert list(app.registry._entries) == [rollout[0]]
        await trio.sleep(2)
        assert app.registry._entries == {}
        assert (await poll(http, *rollout))["status"] == "success"


async def test_a_rollout_whose_caller_died_leaves_the_memory(path, autojump_clock):
    app, _ = gated_app(path)
    async with in_process_http(app) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=10_000))
        await trio.sleep(2 * LEASE + 1)
        assert app.registry._entries == {}
        assert (await poll(http, *rollout))["err_category"] == "lease_expired"


@pytest.mark.parametrize("kept", [True, False])
async def test_a_server_that_gives_up_while_an_admission_is_under_way(path, autojump_clock, kept):
    app, store = gated_app(path)
    async with in_process_http(app) as http:
        store.shut()
        with trio.move_on_after(1):
            await http.post("/rollout", json=admission(rollout_id="r"))
        app.registry.abandon()
        if not kept:
            store.close_for_good()
        store.gate.set()
        await app.registry.wait_idle()
        assert app.registry.lifecycle.active_rollouts == 0
        assert app.backend.executions == {}
        await trio.sleep(5)
        assert app.registry.lifecycle.active_rollouts == 0


async def test_an_id_is_free_again_when_the_retention_is_over(path, autojump_clock):
    app, _ = gated_app(path)
    async with in_process_http(app) as http:
        rollout = await admit(http, rollout_id="r")
        await finished(http, *rollout)
        ended = trio.current_time()
        await trio.sleep_until(ended + RETENTION - 1)
        assert (await poll(http, *rollout))["status"] == "success"
        await trio.sleep_until(ended + RETENTION + 0.001)  # no sweep has come since
        assert_refused(await http.get(result_path("r"), headers=rollout[1]), 404)
        again = await admit(http, rollout_id="r")
        assert again[1] != rollout[1]
        await finished(http, *again)
        assert len(rows_of(path)) == 1
        await trio.sleep(RETENTION + 20)
        assert rows_of(path) == []


async def test_an_admission_that_is_under_way_hides_no_result(path, autojump_clock):
    app, store = gated_app(path)
    async with in_process_http(app) as http, trio.open_nursery() as nursery:
        rollout = await admit(http, rollout_id="r")
        result = await finished(http, *rollout)
        store.shut()
        answers = []

        async def ask() -> None:
            answers.append(await http.post("/rollout", json=admission(rollout_id="r")))

        nursery.start_soon(ask)
        await trio.sleep(1)
        assert await poll(http, *rollout) == result
        store.gate.set()
        await trio.sleep(1)
        assert_refused(answers[0], 409)
        assert app.backend.executions == {}
        assert app.registry.lifecycle.active_rollouts == 0
        assert await poll(http, *rollout) == result


async def test_no_secret_is_in_the_files(path, autojump_clock):
    app = make_app(state=path, api_key="server-key-of-this-test")
    headers = {"Authorization": "Bearer server-key-of-this-test"}
    async with in_process_http(app) as http:
        http.headers.update(headers)
        _, lease = await admit(http, initial_messages=prompt(sleep=5, secret="of the prompt"))
        await trio.sleep(2)
        written = b"".join(each.read_bytes() for each in path.parent.iterdir())
        for secret in (LLM_KEY, *lease.values(), *headers.values(), "of the prompt"):
            assert secret.split()[-1].encode() not in written
        assert {oct(each.stat().st_mode & 0o777) for each in path.parent.iterdir()} == {"0o600"}


async def test_a_state_works_in_threads(path):
    app = make_app(state=path)
    async with in_process_http(app) as http:
        rollout = await admit(http)
        result = await finished(http, *rollout)
        assert await poll(http, *rollout) == result


def test_the_durability_is_checked(path):
    with pytest.raises(ValueError, match="durability must be one of process, power"):
        make_app(state=path, durability="eternal")


def test_the_entry_of_a_request_keeps_nothing_of_it(path):
    row = KeptRollout(1, "r", b"digest")
    request = RolloutInitRequest(**admission(rollout_id="r"))
    assert not set(request.secrets) & {str(value) for value in row}


# --- admission keys ---------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [False, True])
async def test_an_admission_of_a_result_that_is_only_kept_is_answered_again(
    path, autojump_clock, batch
):
    app, _ = gated_app(path)

    async def ask(**fields: Any) -> tuple[int, bytes]:
        body = admission(rollout_id="r", **fields)
        if not batch:
            answer = await http.post("/rollout", json=body)
            return answer.status_code, answer.content
        answer = await http.post("/rollouts", json={"rollouts": [body]})
        return answer.json()["outcomes"][0]["status_code"], answer.content

    async with in_process_http(app) as http:
        first = await ask(admission_key="k")
        await app.registry.wait_idle()
        await trio.sleep(LEASE + 1)
        assert app.registry._entries == {}
        assert first[0] == 202
        assert await ask(admission_key="k") == first
        await trio.sleep(LEASE + 1)
        assert (await ask(admission_key="other"))[0] == 409
        assert (await ask(admission_key="k", label="other"))[0] == 409
        assert (await ask())[0] == 409
        app.registry.accepting = False
        await trio.sleep(LEASE + 1)
        assert await ask(admission_key="k") == first
    assert len(rows_of(path)) == 1


async def test_two_admissions_with_one_key_share_a_commit(path, autojump_clock):
    app, store = gated_app(path)
    answers = []
    async with in_process_http(app) as http, trio.open_nursery() as nursery:
        store.shut()

        async def ask() -> None:
            body = admission(rollout_id="r", admission_key="k")
            answers.append((await http.post("/rollout", json=body)).content)

        nursery.start_soon(ask)
        nursery.start_soon(ask)
        await trio.sleep(1)
        assert answers == []
        store.gate.set()
        await app.registry.wait_idle()
    assert len(set(answers)) == 1
    assert len(rows_of(path)) == 1
