"""Leases, retention, the serving clock and capacity, on a simulated clock."""

from __future__ import annotations

import json
import math
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
    run,
    served_http,
)
from support import Script, local_backend, make_app, prompt

from rollout.rules import PollingLease, ServingClock
from rollout.server.registry import RolloutRegistry
from rollout.types import RolloutInitRequest

pytestmark = pytest.mark.usefixtures("log_lines")

LEASE, RETENTION = 120.0, 900.0


class Lingers(Script):
    """Takes ``linger`` seconds to clean up once it is cancelled."""

    async def run(self, ctx: Any) -> Any:
        try:
            return await super().run(ctx)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(ctx.prompt[0].get("linger", 0))


async def status_of(http: Any, rollout_id: str, headers: dict[str, str]) -> int:
    return (await http.get(result_path(rollout_id), headers=headers)).status_code


# --- leases -----------------------------------------------------------------------------------


async def test_every_poll_renews_for_a_full_lease(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=10_000))
        await poll(http, *rollout)
        for _ in range(5):
            await trio.sleep(85)
            assert (await poll(http, *rollout))["status"] == "running"  # held for 30 s
        assert trio.current_time() == 5 * (85 + 30)


async def test_the_lease_counts_from_the_arrival_of_a_poll_not_from_its_answer(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=10_000))
        await poll(http, *rollout)
        await poll(http, *rollout)
        arrived = trio.current_time() - 30
        await trio.sleep_until(arrived + LEASE)
        assert (await poll(http, *rollout))["err_category"] == "lease_expired"


async def test_expiry_is_seen_at_the_deadline_and_stops_the_execution(autojump_clock):
    app = make_app()
    async with in_process_http(app) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(sleep=10_000))
        await trio.sleep(LEASE - 0.001)
        assert app.registry.lifecycle.active_rollouts == 1
        await trio.sleep(0.002)
        assert app.registry.lifecycle.active_rollouts == 0
        result = await poll(http, rollout_id, headers)
        assert (result["status"], result["err_category"]) == ("failure", "lease_expired")
        assert result["agent_started_at"]


async def test_a_late_poll_does_not_revive_and_what_comes_later_does_not_overwrite(autojump_clock):
    async with in_process_http(make_app(local_backend(Lingers))) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=10_000, linger=60))
        await trio.sleep(LEASE)
        expired = await poll(http, *rollout)
        assert expired["err_category"] == "lease_expired"
        await trio.sleep(30)
        assert await poll(http, *rollout) == expired
        assert (await http.get("/health")).json()["lifecycle"]["active_rollouts"] == 1
        await trio.sleep(60)  # the execution has ended in the meantime
        assert await poll(http, *rollout) == expired
        assert (await http.get("/health")).json()["lifecycle"]["active_rollouts"] == 0


async def test_a_completion_in_the_moment_of_the_deadline_is_too_late(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=LEASE))
        await trio.sleep(LEASE + 1)
        assert (await poll(http, *rollout))["err_category"] == "lease_expired"


async def test_a_queued_rollout_expires_without_ever_having_started(autojump_clock):
    async with in_process_http(make_app(local_backend(max_concurrent=1))) as http:
        busy = await admit(http, initial_messages=prompt(sleep=10_000))
        queued = await admit(http)
        for _ in range(5):
            await poll(http, *busy)
        result = await poll(http, *queued)
        assert (result["err_category"], result["agent_started_at"]) == ("lease_expired", None)


# --- retention --------------------------------------------------------------------------------


async def test_a_result_is_kept_for_the_retention_and_its_id_is_reserved(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout_id, headers = await admit(http)
        result = await finished(http, rollout_id, headers)
        await trio.sleep(RETENTION - 1)
        assert await poll(http, rollout_id, headers) == result
        assert_refused(await http.post("/rollout", json=admission(rollout_id=rollout_id)), 409)
        await trio.sleep(2)
        assert await status_of(http, rollout_id, headers) == 404
        again, new = await admit(http, rollout_id=rollout_id)
        assert await status_of(http, rollout_id, headers) == 403  # the old token is worth nothing
        assert (await finished(http, again, new))["status"] == "success"


async def test_polling_a_result_does_not_prolong_its_retention(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout_id, headers = await admit(http)
        await finished(http, rollout_id, headers)
        for _ in range(9):
            await trio.sleep(RETENTION / 10)
            assert await status_of(http, rollout_id, headers) == 200
        await trio.sleep(RETENTION / 10 + 1)
        assert await status_of(http, rollout_id, headers) == 404


async def test_an_id_stays_reserved_while_the_cleanup_outlasts_the_retention(autojump_clock):
    app = make_app(local_backend(Lingers), result_retention_sec=10)
    async with in_process_http(app) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(sleep=10_000, linger=500))
        await trio.sleep(LEASE + 100)
        assert await status_of(http, rollout_id, headers) == 200
        assert_refused(await http.post("/rollout", json=admission(rollout_id=rollout_id)), 409)
        await trio.sleep(401)
        assert await status_of(http, rollout_id, headers) == 404
        assert (await run(http, rollout_id=rollout_id))["status"] == "success"


async def test_without_retention_a_waiting_poll_still_gets_the_result(autojump_clock):
    async with in_process_http(make_app(result_retention_sec=0)) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(sleep=10), grade=False)
        await poll(http, rollout_id, headers)
        assert (await poll(http, rollout_id, headers))["status"] == "success"
        assert await status_of(http, rollout_id, headers) == 404
        assert (await admit(http, rollout_id=rollout_id))[0] == rollout_id


async def test_observers_are_told_of_each_event(autojump_clock):
    app = make_app(result_retention_sec=10)
    told: list[str] = []
    also: list[str] = []
    for each in (told, also):
        app.registry.hooks.observers.append(lambda what, entry, to=each: to.append(what))
    async with in_process_http(app) as http:
        rollout = await admit(http, rollout_id="a", initial_messages=prompt(sleep=60))
        await poll(http, *rollout)
        app.registry.cancel(ids=["a"])
        await trio.sleep(11)
        begun = ["admitted", "execution-started", "agent-started", "status"]
        ended = ["stop-requested", "finished", "execution-ended", "forgotten"]
        assert told == [*begun, "lease-renewed", *ended]
        told.clear()
        await admit(http, rollout_id="a", initial_messages=prompt(sleep=60))
        await trio.sleep(1)
        entry = app.registry._entries["a"]
        entry.record.lease.deadline = 0.0
        assert not app.registry.renew(entry, trio.current_time())
        assert told == [*begun, "lease-refused", "finished", "stop-requested"]
        assert also == [*begun, "lease-renewed", *ended, *told]


async def test_nothing_of_a_forgotten_rollout_is_kept(autojump_clock):
    app = make_app()
    async with in_process_http(app) as http:
        for _ in range(20):
            await run(http)
        await trio.sleep(RETENTION + LEASE + 1)
        registry = app.registry
        assert (registry._entries, len(registry._deadlines)) == ({}, 0)
        assert registry.backend.executions == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            (name, value)
            for name in (
                "result_wait_timeout_sec",
                "polling_lease_timeout_sec",
                "result_retention_sec",
            )
            for value in (-1, math.nan, math.inf, True, "30", None, 10**400)
        ],
        ("result_wait_timeout_sec", 0),
        ("result_wait_timeout_sec", 120),
        ("polling_lease_timeout_sec", 30),
        ("polling_lease_timeout_sec", 0),
        ("watchdog_sec", 0),
        ("watchdog_sec", -1),
        ("watchdog_sec", math.nan),
    ],
)
def test_a_time_that_makes_no_sense_is_refused_at_construction(name: str, value: Any):
    with pytest.raises(ValueError, match=name):
        make_app(**{name: value})


# --- a process that is stopped ----------------------------------------------------------------


async def test_a_process_that_stands_still_expires_nobody(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=1e6))
        await poll(http, *rollout)
        for _ in range(3):
            await trio.sleep(60)
            autojump_clock.jump(5000)  # nothing of the process runs in the meantime
            await trio.lowlevel.checkpoint()
            assert (await poll(http, *rollout))["status"] == "running"


async def test_standing_still_right_after_the_admission_expires_nobody(autojump_clock):
    app = make_app()
    async with in_process_http(app):
        entry, _ = app.registry.admit(
            RolloutInitRequest(**admission(initial_messages=prompt(sleep=1e6)))
        )
        autojump_clock.jump(5000)
        await trio.sleep(60)
        assert entry.record.result is None
        await trio.sleep(61)
        assert entry.record.result is not None


async def test_after_standing_still_a_lease_has_what_it_had_left(autojump_clock):
    app = make_app()
    async with in_process_http(app) as http:
        rollout_id, _ = await admit(http, initial_messages=prompt(sleep=1e6))
        await trio.sleep(60)
        autojump_clock.jump(5000)
        await trio.sleep(58)
        entry = app.registry._entries[rollout_id]
        assert entry.record.result is None
        await trio.sleep(3)
        assert entry.record.result is not None


class Blocks(Script):
    """Blocks the event loop, as seen from the simulated clock."""

    clock: Any

    async def run(self, ctx: Any) -> Any:
        await trio.sleep(5)
        self.clock.jump(ctx.prompt[0].get("block", 0))
        return await super().run(ctx)


async def test_a_rollout_that_blocks_the_loop_costs_no_other_its_lease(autojump_clock):
    workflow = type("BlocksHere", (Blocks,), {"clock": autojump_clock})
    async with in_process_http(make_app(local_backend(workflow))) as http:
        patient = await admit(http, initial_messages=prompt(sleep=1e6))
        for _ in range(3):
            blocking = await admit(http, initial_messages=prompt(block=1000))
            assert (await finished(http, *blocking))["status"] == "success"
            assert (await poll(http, *patient))["status"] == "running"


async def test_a_process_that_was_stopped_forgets_no_result_that_nobody_could_fetch(autojump_clock):
    async with in_process_http(make_app(local_backend())) as http:
        rollout = await admit(http)
        await finished(http, *rollout)
        await trio.sleep(100)
        autojump_clock.jump(5000)
        await trio.testing.wait_all_tasks_blocked()
        assert await status_of(http, *rollout) == 200
        await trio.sleep(1000)
        assert await status_of(http, *rollout) == 404


def test_the_serving_clock_takes_out_what_a_tick_is_late():
    clock = ServingClock(1.0)
    lease = PollingLease.starting(clock.time(0), 10)
    assert clock.tick(0, at_most=lease.deadline) == 1
    assert clock.time(1) == 1
    assert clock.time(501) == 1  # not accounted for yet, and already seen
    assert clock.tick(501, at_most=lease.deadline) == 502
    assert clock.stalled_sec == 500
    assert clock.at(lease.deadline) == 510
    assert not lease.expired(clock.time(501.5))
    clock.stop(503)
    assert (clock.stalled_sec, clock.due) == (501, None)
    assert clock.time(504) == 3


# --- capacity ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "depth"), [(1, 1), (2, 3), (4, 8)])
async def test_a_burst_is_cut_at_exactly_slots_and_depth(slots: int, depth: int):
    app = make_app(local_backend(max_concurrent=slots, max_queue_depth=depth))
    async with served_http(app) as http:
        answers: list[Any] = []

        async def one() -> None:
            body = admission(initial_messages=prompt(sleep=60))
            answers.append(await http.post("/rollout", content=json.dumps(body)))

        async with trio.open_nursery() as nursery:
            for _ in range(slots + depth + 5):
                nursery.start_soon(one)
        statuses = [answer.status_code for answer in answers]
        assert statuses.count(202) == slots + depth
        assert statuses.count(429) == 5
        for answer in answers:
            if answer.status_code == 429:
                assert_refused(answer, 429)
                assert answer.headers["retry-after"] in {"5", "6", "7", "8"}
        assert (await http.get("/health")).json()["lifecycle"]["active_rollouts"] == slots + depth


async def test_a_burst_in_one_moment_is_cut_before_any_task_runs(autojump_clock):
    app = make_app(local_backend(max_concurrent=2, max_queue_depth=3))
    async with in_process_http(app) as http:
        registry: RolloutRegistry = app.registry
        admitted = 0
        for _ in range(10):
            try:
                registry.admit(RolloutInitRequest(**admission(initial_messages=prompt(sleep=9))))
            except RuntimeError:
                continue
            admitted += 1
        assert admitted == 5
        await trio.sleep(9.5)  # two have ended
        assert (await http.post("/rollout", json=admission())).status_code == 202
        assert (await http.post("/rollout", json=admission())).status_code == 202
        assert_refused(await http.post("/rollout", json=admission()), 429)


async def test_a_refused_admission_can_be_sent_again_with_the_same_id(autojump_clock):
    async with in_process_http(
        make_app(local_backend(max_concurrent=1, max_queue_depth=1))
    ) as http:
        for _ in range(2):
            await admit(http, initial_messages=prompt(sleep=9))
        body = admission()
        assert_refused(await http.post("/rollout", json=body), 429)
        await trio.sleep(10)
        assert (await http.post("/rollout", json=body)).status_code == 202


async def test_while_shutting_down_admissions_are_503_and_polls_are_served(autojump_clock):
    app = make_app()
    async with in_process_http(app) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=5))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(app.shutdown_stages.run)
            await trio.sleep(1)
            response = await http.post("/rollout", json=admission())
            assert_refused(response, 503)
            assert response.headers["retry-after"] in {"5", "6", "7", "8"}
            lifecycle = (await http.get("/health")).json()["lifecycle"]
            assert lifecycle == {"accepting_rollouts": False, "active_rollouts": 1}
            assert (await finished(http, *rollout))["status"] == "success"
