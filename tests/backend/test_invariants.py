"""Random workloads through the server's routes: one execution, one end, no slot lost.

Several callers ask for few ids at random moments, cancel them, stop polling, come back or
disconnect in the middle of a poll. Whatever they do, at most one execution of an id runs at a
time, every observer sees statuses go forward only, and a terminal result never changes.
"""

from __future__ import annotations

import httpx
import trio
import trio.testing
from attrs import frozen
from backend.helpers import assert_nothing_is_left, backend, counts
from hypothesis import given, settings
from hypothesis import strategies as st
from support import CHAT_URL, make_app

from rollout.rules import is_terminal, may_follow
from rollout.types import POLLING_LEASE_HEADER, RolloutStatus

WAIT, LEASE, RETENTION = 2.0, 5.0, 12.0

moments = st.integers(0, 15)


@frozen
class Caller:
    """Asks for one rollout, and treats it as the plan says."""

    rollout_id: str
    arrives: int
    run_sec: int
    fails: bool
    swallows: bool
    graded: bool
    agent_timeout: int | None
    cancel_at: int | None
    polls_until: int | None
    disconnects: int | None


callers = st.builds(
    Caller,
    rollout_id=st.sampled_from(["a", "b", "c"]),
    arrives=st.integers(0, 30),
    run_sec=moments,
    fails=st.booleans(),
    swallows=st.booleans(),
    graded=st.booleans(),
    agent_timeout=st.none() | st.integers(0, 10),
    cancel_at=st.none() | moments,
    polls_until=st.none() | moments,
    disconnects=st.none() | st.sampled_from([1, 3]),
)


class World:
    """A server, its callers, and what each of them has seen."""

    def __init__(self, slots, depth):
        self.slots = slots
        self.executing = []
        self.executions = {}
        self.admitted = 0
        self.local = backend(self.run, self.grade, slots=slots, depth=depth)

    async def run(self, ctx):
        name, seconds = ctx.metadata["name"], ctx.metadata["sec"]
        key = ctx.metadata["key"]
        assert name not in self.executing
        self.executions[key] = self.executions.get(key, 0) + 1
        self.executing.append(name)
        self.check()
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            if not ctx.metadata["swallows"]:
                raise
        finally:
            self.executing.remove(name)
        if ctx.metadata["fails"]:
            raise KeyError(name)
        return ctx.prompt

    async def grade(self, ctx):
        name = ctx.metadata["name"]
        assert name not in self.executing
        self.executing.append(name)
        self.check()
        try:
            await trio.sleep(1)
        finally:
            self.executing.remove(name)
        ctx.set_reward(1)

    def check(self):
        queued, running = counts(self.local)
        assert len(self.executing) <= running <= self.slots
        if self.local.max_queue_depth is not None:
            assert queued + running <= self.slots + self.local.max_queue_depth

    async def call(self, http, key, caller):
        await trio.sleep(caller.arrives)
        answer = await http.post(
            "/rollout",
            json={
                "rollout_id": caller.rollout_id,
                "initial_messages": [{"role": "user"}],
                "chat_completions_url": CHAT_URL,
                "grade": caller.graded,
                "agent_timeout_sec": caller.agent_timeout,
                "metadata": {
                    "name": caller.rollout_id,
                    "key": key,
                    "sec": caller.run_sec,
                    "fails": caller.fails,
                    "swallows": caller.swallows,
                },
            },
        )
        self.check()
        assert answer.status_code in {202, 409, 429}
        if answer.status_code != 202:
            return
        self.admitted += 1
        observer = Observer(http, caller.rollout_id, answer.json()["polling_lease_token"])
        async with trio.open_nursery() as nursery:
            if caller.cancel_at is not None:
                nursery.start_soon(self.cancel, http, caller)
            await observer.watch(caller)
        # Gone for longer than the lease lasts: by now there is an end, and it stays.
        await trio.sleep(LEASE + 0.1)
        await observer.look_twice()

    async def cancel(self, http, caller):
        await trio.sleep(caller.cancel_at)
        answer = await http.post("/rollout/cancel", json={"ids": [caller.rollout_id]})
        assert answer.status_code == 200

    async def all(self, chosen):
        app = make_app(
            self.local,
            result_wait_timeout_sec=WAIT,
            polling_lease_timeout_sec=LEASE,
            result_retention_sec=RETENTION,
        )
        async with app.serving():
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                async with trio.open_nursery() as nursery:
                    for index, caller in enumerate(chosen):
                        nursery.start_soon(self.call, http, f"{index}", caller)
                await app.registry.wait_idle()
                assert app.registry.lifecycle.active_rollouts == 0
                assert_nothing_is_left(self.local)
                await trio.sleep(RETENTION + 1)
                assert app.registry._entries == {}
        assert self.executing == []
        assert all(times == 1 for times in self.executions.values())
        assert len(self.executions) <= self.admitted


class Observer:
    """Polls one rollout, and holds every answer against the ones before."""

    def __init__(self, http, rollout_id, token):
        self.http = http
        self.url = f"/rollout/{rollout_id}/result"
        self.headers = {POLLING_LEASE_HEADER: token}
        self.last = {"status": "queued", "agent_started_at": None}
        self.final = None

    async def poll(self):
        answer = await self.http.get(self.url, headers=self.headers)
        if answer.status_code in {403, 404}:
            return None  # forgotten, and perhaps somebody else's by now
        assert answer.status_code == 200
        body = answer.json()
        self.compare(body)
        return body

    def compare(self, body):
        if self.final is not None:
            assert body == self.final
            return
        old, new = RolloutStatus(self.last["status"]), RolloutStatus(body["status"])
        assert new == old or may_follow(new, old)
        if self.last["agent_started_at"] is not None:
            assert body["agent_started_at"] == self.last["agent_started_at"]
        if new in {"running", "grading"}:
            assert body["agent_started_at"] is not None
        self.last = body
        if is_terminal(new):
            self.final = body
        else:
            assert body["sample"] is None
            assert body["err_message"] is None

    async def watch(self, caller):
        until = float("inf")
        if caller.polls_until is not None:
            until = trio.current_time() + caller.polls_until
        while self.final is None and trio.current_time() < until:
            with trio.move_on_after(caller.disconnects or 1000) as scope:
                body = await self.poll()
            if not scope.cancelled_caught:
                assert body is not None

    async def look_twice(self):
        body = await self.poll()
        if body is not None:
            assert self.final is not None
            assert await self.poll() == self.final


@settings(max_examples=60)
@given(
    chosen=st.lists(callers, min_size=1, max_size=7),
    slots=st.sampled_from([1, 2]),
    depth=st.sampled_from([None, 1, 2]),
)
def test_one_execution_one_end_and_no_lost_slot(chosen, slots, depth):
    world = World(slots, depth)
    trio.run(world.all, chosen, clock=trio.testing.MockClock(autojump_threshold=0))
