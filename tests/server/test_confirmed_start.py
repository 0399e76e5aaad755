"""Agents that start only once their callers confirm it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import trio
from feed.streaming import admit_many, open_feed
from server.faults import (
    admission,
    admit,
    assert_refused,
    finished,
    in_process_http,
    poll,
    problem_at,
    run,
    served_http,
)
from server.test_state import Gated
from server.test_state_restart import left_behind
from support import Compare, Script, local_backend, make_app, prompt

from rollout import get_rollout_context
from rollout.artifacts import ArtifactStore
from rollout.backend import ExecutionBackend
from rollout.types import (
    POLLING_LEASE_HEADER,
    ExecutionOutcome,
    ExecutionRequest,
    ExecutionResult,
    RolloutStatus,
)

pytestmark = pytest.mark.usefixtures("log_lines")

RUNS: dict[str, float] = {}


@pytest.fixture(autouse=True)
def runs():
    RUNS.clear()
    return RUNS


def note_run() -> None:
    """Note that an agent runs; a second time is a defect."""
    rollout_id = get_rollout_context().rollout_id
    assert rollout_id not in RUNS
    RUNS[rollout_id] = trio.current_time()


class Noted(Script):
    async def run(self, ctx: Any) -> Any:
        note_run()
        return await super().run(ctx)


class Plain(ExecutionBackend):
    """Leaves it to the server to say when its agent starts; takes charge of every cancel."""

    def __init__(self) -> None:
        self.scopes: dict[str, trio.CancelScope] = {}

    def reserve(self, rollout_id: str) -> bool:
        self.scopes[rollout_id] = trio.CancelScope()
        return True

    def release(self, rollout_id: str) -> None:
        del self.scopes[rollout_id]

    def cancel_rollouts(self, ids=None, prefix=None, all=False) -> dict[str, str]:
        for rollout_id in ids:
            self.scopes[rollout_id].cancel()
        return dict.fromkeys(ids, "cancelled_running")

    async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
        note_run()
        status = RolloutStatus.CANCELLED
        with self.scopes[request.id]:
            await trio.sleep(request.prompt[0].get("sleep", 0))
            status = RolloutStatus.SUCCESS
        return ExecutionOutcome(workflow=ExecutionResult(status=status))


BACKENDS = {"local": lambda: local_backend(Noted), "plain": Plain}


@pytest.fixture(params=itertools.product(BACKENDS, ["no state", "state"]), ids=" ".join)
def app(request, tmp_path):
    backend, state = request.param
    path = tmp_path / "state" if state == "state" else None
    return make_app(BACKENDS[backend](), state=path, result_wait_timeout_sec=1)


async def held(http, **fields):
    """Admit a rollout, and wait until its agent could start but for its caller."""
    rollout = await admit(http, confirm_start=True, **fields)
    while (await poll(http, *rollout))["agent_started_at"] is None:
        pass
    return rollout


async def confirm(http, *rollouts):
    """Confirm starts; return the status of each."""
    claims = [
        {"rollout_id": name, "polling_lease_token": headers[POLLING_LEASE_HEADER]}
        for name, headers in rollouts
    ]
    answer = await http.post("/rollouts/start", content=json.dumps({"rollouts": claims}))
    assert answer.status_code == 200, answer.text
    outcomes = answer.json()["outcomes"]
    assert [each["rollout_id"] for each in outcomes] == [name for name, _ in rollouts]
    return [each["status_code"] for each in outcomes]


async def test_an_agent_waits_for_its_caller(app, runs, autojump_clock):
    async with in_process_http(app) as http:
        rollout = await held(http)
        for _ in range(3):
            told = await poll(http, *rollout)
            assert told["status"] == "running"
        assert runs == {}
        confirmed_at = trio.current_time()
        assert await confirm(http, rollout) == [200]
        result = await finished(http, *rollout)
        assert (result["status"], result["agent_started_at"]) == (
            "success",
            told["agent_started_at"],
        )
        assert runs == {rollout[0]: confirmed_at}


async def test_a_confirmation_may_come_again(app, runs, autojump_clock):
    async with in_process_http(app) as http:
        rollout = await held(http, initial_messages=prompt(sleep=5))
        assert await confirm(http, rollout, rollout) == [200, 200]
        assert await confirm(http, rollout) == [200]
        assert (await finished(http, *rollout))["status"] == "success"
        assert await confirm(http, rollout) == [200]
    assert list(runs) == [rollout[0]]


async def test_each_of_a_request_has_an_outcome_of_its_own(app, autojump_clock):
    async with in_process_http(app) as http:
        rollout = await held(http)
        free = await admit(http, initial_messages=prompt(sleep=5))
        wrong = {POLLING_LEASE_HEADER: "\ud800"}
        asked = [(rollout[0], wrong), rollout, ("unknown", wrong), ("\ud800", wrong), free]
        assert await confirm(http, *asked) == [403, 200, 404, 404, 200]
        assert await confirm(http) == []
        assert (await finished(http, *rollout))["status"] == "success"


async def test_a_rollout_that_waits_for_a_slot_does_not_wait_for_its_caller(runs, autojump_clock):
    app = make_app(local_backend(Noted, max_concurrent=1))
    async with in_process_http(app) as http:
        first = await held(http, initial_messages=prompt(sleep=10))
        second = await admit(http, confirm_start=True)
        assert await confirm(http, second, first) == [409, 200]
        await poll(http, *second)
        await trio.sleep(100)
        assert list(runs) == [first[0]]
        assert await confirm(http, second) == [200]
        assert (await finished(http, *second))["status"] == "success"


@pytest.mark.parametrize("end", ["cancel", "deadline", "lease", "shutdown"])
async def test_an_agent_that_waits_can_be_stopped(app, runs, autojump_clock, end):
    async with in_process_http(app) as http:
        rollout = await held(http, agent_timeout_sec=20 if end == "deadline" else None)
        async with trio.open_nursery() as nursery:
            if end == "cancel":
                answer = await http.post("/rollout/cancel", json={"ids": [rollout[0]]})
                assert answer.json()["dispositions"] == {rollout[0]: "cancelled_running"}
                assert await confirm(http, rollout) == [409]
            elif end == "lease":
                await trio.sleep(121)
            elif end == "shutdown":
                nursery.start_soon(app.shutdown_stages.run)
            result = await finished(http, *rollout)
        assert result["agent_started_at"] is not None
        assert (result["status"], result["err_category"]) == {
            "cancel": ("cancelled", None),
            "deadline": ("failure", "timeout"),
            "lease": ("failure", "lease_expired"),
            "shutdown": ("cancelled", None),
        }[end]
        await app.registry.wait_idle()
        assert app.backend.has_capacity()
        assert set(await confirm(http, rollout)) <= {200, 409}
        await trio.sleep(10)
    assert runs == {}


async def test_one_that_is_cancelled_while_it_waits_leaves_no_files(runs, tmp_path):
    """Its caller may have it run elsewhere, and its files are in the same folder then."""
    backend = local_backend(Noted)
    backend.artifacts = ArtifactStore(tmp_path)
    app = make_app(backend, result_wait_timeout_sec=1)
    async with in_process_http(app) as http:
        late = await held(http, agent_timeout_sec=0.2)
        assert (await finished(http, *late))["err_category"] == "timeout"
        gone = await held(http)
        await http.post("/rollout/cancel", json={"ids": [gone[0]]})
        assert (await finished(http, *gone))["status"] == "cancelled"
    assert [folder.name for folder in tmp_path.iterdir()] == [late[0]]


@pytest.mark.parametrize("first", ["confirm", "end"])
async def test_who_is_not_confirmed_never_runs_however_close_it_is(
    app, runs, autojump_clock, first
):
    """Confirmations, cancellations and deadlines of one moment, in either order."""
    codes: dict[str, int] = {}
    async with in_process_http(app) as http:
        rollouts = [
            await held(http, initial_messages=prompt(sleep=1), agent_timeout_sec=limit)
            for limit in (None, 50) * 2
        ]
        start = trio.current_time()

        async def one(act) -> None:
            await trio.sleep_until(start + 50)
            await act

        async def confirm_all() -> None:
            for rollout in rollouts:
                (codes[rollout[0]],) = await confirm(http, rollout)

        async def end_some() -> None:
            ids = [name for name, _ in rollouts[:2]]
            await http.post("/rollout/cancel", json={"ids": ids})

        tasks = [confirm_all, end_some] if first == "confirm" else [end_some, confirm_all]
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(one, task())
        results = [await finished(http, *rollout) for rollout in rollouts]
    assert {each["rollout_id"] for each in results if each["status"] == "success"} <= set(runs)
    assert all(codes[name] == 200 for name in runs)


async def test_a_cancellation_after_the_confirmation_stops_the_agent(app, runs, autojump_clock):
    async with in_process_http(app) as http:
        rollout = await held(http, initial_messages=prompt(sleep=100))
        assert await confirm(http, rollout) == [200]
        await trio.sleep(1)
        await http.post("/rollout/cancel", json={"all": True})
        assert (await finished(http, *rollout))["status"] == "cancelled"
        assert await confirm(http, rollout) == [200]
    assert list(runs) == [rollout[0]]


async def test_a_confirmation_renews_no_lease(app, runs, autojump_clock):
    async with in_process_http(app) as http:
        rollout = await held(http, initial_messages=prompt(sleep=1000))
        renewed_at = trio.current_time()
        for _ in range(12):
            await trio.sleep(10)
            assert await confirm(http, rollout) == [200]
        await trio.sleep_until(renewed_at + 121)
        assert (await poll(http, *rollout))["err_category"] == "lease_expired"


async def test_an_admission_that_comes_again_does_not_confirm(app, runs, autojump_clock):
    fields = admission(admission_key="k", confirm_start=True)
    async with in_process_http(app) as http:
        first = await http.post("/rollout", json=fields)
        await trio.sleep(5)
        assert (await http.post("/rollout", json=fields)).content == first.content
        assert_refused(await http.post("/rollout", json=fields | {"confirm_start": False}), 409)
        await trio.sleep(5)
        assert runs == {}
        lease = {POLLING_LEASE_HEADER: first.json()["polling_lease_token"]}
        assert await confirm(http, (fields["rollout_id"], lease)) == [200]
        assert (await finished(http, fields["rollout_id"], lease))["status"] == "success"


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
async def test_a_start_is_confirmed_once_it_is_kept(backend, runs, tmp_path, autojump_clock):
    app = make_app(backend(), result_wait_timeout_sec=1)
    app.registry.store = store = Gated(tmp_path / "state")
    async with in_process_http(app) as http:
        store.hold_after(1)  # the admission's
        rollout = await admit(http, confirm_start=True)
        await trio.sleep(10)
        assert await confirm(http, rollout) == [409]
        store.gate.set()
        while (await poll(http, *rollout))["agent_started_at"] is None:
            assert runs == {}
        assert await confirm(http, rollout) == [200]
        assert (await finished(http, *rollout))["status"] == "success"


async def test_a_confirmation_that_comes_after_a_restart_starts_nothing(
    runs, tmp_path, autojump_clock
):
    path = tmp_path / "state"
    async with in_process_http(make_app(local_backend(Noted), state=path)) as http:
        rollout = await held(http)
        killed = left_behind(path)
    async with in_process_http(make_app(local_backend(Noted), state=killed)) as http:
        assert await confirm(http, (rollout[0], {POLLING_LEASE_HEADER: "wrong"})) == [403]
        assert await confirm(http, rollout) == [200]
        assert (await poll(http, *rollout))["err_source"] == "server_restart"
    assert runs == {}


async def test_a_feed_reports_what_waits_and_what_a_batch_admits(runs):
    async with served_http(make_app(local_backend(Noted))) as http, open_feed(http) as feed:
        bodies = [admission(confirm_start=True, grade=False) for _ in range(3)]
        answer = await admit_many(http, bodies, feed.token)
        rollouts = [
            (each["admission"]["rollout_id"], each["admission"]["polling_lease_token"])
            for each in answer["outcomes"]
        ]
        waiting = [await feed.result() for _ in rollouts]
        assert {each["status"] for each in waiting} == {"running"}
        assert runs == {}
        asked = [(name, {POLLING_LEASE_HEADER: token}) for name, token in rollouts]
        assert await confirm(http, *asked) == [200] * 3
        ended = [await feed.result() for _ in rollouts]
        assert {each["status"] for each in ended} == {"success"}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "rollouts"),
        ({"rollouts": {}}, "rollouts"),
        ({"rollouts": [7]}, "rollouts.0"),
        ({"rollouts": [{"rollout_id": "r"}]}, "rollouts.0"),
        ({"rollouts": [{"rollout_id": "r", "polling_lease_token": 7}]}, "rollouts.0"),
        ({"rollouts": [{}] * (16 * 1024 + 1)}, "rollouts"),
        ([], "rollouts"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_what_is_no_list_of_leases_is_refused(body, where, autojump_clock):
    async with in_process_http(make_app()) as http:
        answer = await http.post("/rollouts/start", json=body)
        assert problem_at(answer) == [["body", where]]


async def test_the_extension_is_announced_and_others_are_left_alone(autojump_clock):
    async with in_process_http(make_app()) as http:
        assert "confirmed-start" in (await http.get("/health")).json()["extensions"]
        assert (await run(http))["status"] == "success"
        assert_refused(await http.get("/rollouts/start"), 405)


class Exact(Compare):
    pass


@pytest.mark.parametrize(
    ("backend", "application"),
    [
        (lambda: local_backend(Noted, Exact), f"{__name__}:Noted/{__name__}:Exact"),
        (lambda: local_backend(Noted, None), f"{__name__}:Noted"),
        (Plain, None),
    ],
)
async def test_the_health_names_what_the_server_runs(backend, application, autojump_clock):
    async with in_process_http(make_app(backend())) as http:
        assert (await http.get("/health")).json()["application"] == application
