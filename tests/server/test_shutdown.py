"""The staged shutdown on a simulated clock: budgets, refusals, results for who keeps polling."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager

import pytest
import trio
from server.faults import admission, admit, in_process_http, poll
from support import CHAT_URL, Script, in_process, local_backend, make_app, prompt

from rollout import AgentWorkflow, ExecutionBackend
from rollout.server import ShutdownBudget
from rollout.types import ExecutionOutcome, ExecutionResult, RolloutStatus


class Stubborn(AgentWorkflow):
    """Takes ``stop_sec`` to clean up after its cancellation."""

    async def run(self, ctx):
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(ctx.prompt[0]["stop_sec"])


class Deaf(ExecutionBackend):
    """Answers every cancel request as done, and goes on until it is cancelled by force."""

    async def execute(self, request):
        await trio.sleep_forever()
        raise AssertionError

    def cancel_rollouts(self, ids=None, prefix=None, all=False):
        return dict.fromkeys(ids or [], "cancelled_running")


class Immovable(Deaf):
    """Not even force ends it."""

    def __init__(self):
        self.release_now = trio.Event()

    async def execute(self, request):
        with trio.CancelScope(shield=True):
            await self.release_now.wait()
        return ExecutionOutcome(workflow=ExecutionResult(status=RolloutStatus.SUCCESS))


async def start(client, rollout_id, **script):
    handle = await client.run_rollout_async(prompt(**script), CHAT_URL, rollout_id, label="42")
    await handle.wait_for_running()
    return handle


async def test_work_that_ends_within_the_drain_is_not_touched(autojump_clock):
    app = make_app()
    async with in_process(app) as client:
        handle = await start(client, "a", sleep=9)
        began = trio.current_time()
        await app.shutdown_stages.run()
        assert (await handle).status is RolloutStatus.SUCCESS
        assert trio.current_time() - began == pytest.approx(9, abs=0.1)


async def test_work_that_outlasts_the_drain_is_cancelled_and_its_result_served(autojump_clock):
    app = make_app()
    async with in_process(app) as client:
        handle = await start(client, "a", sleep=3600)
        began = trio.current_time()
        await app.shutdown_stages.run()
        assert (await handle).status is RolloutStatus.CANCELLED
        assert trio.current_time() - began == pytest.approx(10, abs=0.1)


async def test_cleanup_gets_its_time_after_the_cancellation(autojump_clock):
    app = make_app(local_backend(workflow=Stubborn))
    async with in_process(app) as client:
        handle = await start(client, "a", stop_sec=100)
        began = trio.current_time()
        await app.shutdown_stages.run()
        assert (await handle).status is RolloutStatus.CANCELLED
        assert trio.current_time() - began == pytest.approx(110, abs=0.1)
        assert app.shutdown_stages.stuck == []


async def test_a_backend_that_ignores_cancel_requests_is_cancelled_by_force(autojump_clock):
    app = make_app(Deaf())
    async with in_process(app) as client:
        handle = await start(client, "a")
        began = trio.current_time()
        await app.shutdown_stages.run()
        assert (await handle).status is RolloutStatus.CANCELLED
        assert trio.current_time() - began == pytest.approx(130, abs=0.1)


async def test_what_cannot_be_stopped_is_named_and_its_callers_get_an_end(autojump_clock, caplog):
    backend = Immovable()
    app = make_app(backend)
    async with in_process(app) as client:
        handle = await start(client, "a")
        began = trio.current_time()
        await app.shutdown_stages.run()
        result = await handle
        assert result.status is RolloutStatus.CANCELLED
        message = "the server shut down and the execution did not stop in time"
        assert result.err_message == message
        assert result.agent_started_at is not None
        assert trio.current_time() - began == pytest.approx(140, abs=0.1)
        assert app.shutdown_stages.stuck == ["a"]
        assert "these did not stop: a" in caplog.text
        backend.release_now.set()
    assert (await handle).status is RolloutStatus.CANCELLED


async def test_each_stage_says_what_it_waits_for(autojump_clock, caplog):
    caplog.set_level(logging.INFO, "rollout.server")

    class Slow(Deaf):
        async def shutdown(self):
            await trio.sleep(2)

    @asynccontextmanager
    async def lifespan(_):
        yield

    app = make_app(Slow(), lifespan=lifespan)
    app.shutdown_stages.budget = ShutdownBudget(drain_sec=1, cleanup_sec=2, forced_sec=1)
    async with in_process(app) as client:
        handles = [await start(client, f"r{number}") for number in range(7)]
        handles[0].cancel()  # its caller is heard of no more, and waited for
        await app.shutdown_stages.run()
    named = "r0, r1, r2, r3, r4 and 2 more"
    assert [record.getMessage() for record in caplog.records] == [
        f"shutting down: waiting for rollouts to end, up to 1 s: {named}",
        f"shutting down: rollouts were asked to stop, up to 2 s: {named}",
        f"shutting down: rollouts are cancelled by force, up to 1 s: {named}",
        "shutting down: waiting for results to be fetched, up to 10 s: r0",
        "shutting down: waiting for the backend's own shutdown, up to 60 s",
        "shutting down: waiting for the lifespan to end",
    ]


async def test_admissions_are_refused_and_polls_served_while_the_stages_run(autojump_clock):
    app = make_app(local_backend(workflow=Stubborn))
    async with in_process(app) as client:
        running = await start(client, "a", stop_sec=60)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(app.shutdown_stages.run)
            for _ in range(12):  # through drain and cleanup
                await trio.sleep(5)
                answer = await client.http_client.post("/rollout", json=admission())
                assert answer.status_code == 503
                assert "not accepting" in answer.json()["detail"]
                health = await client.health()
                assert health["lifecycle"] == {"accepting_rollouts": False, "active_rollouts": 1}
        assert (await running).status is RolloutStatus.CANCELLED


async def test_the_drain_can_be_skipped_but_not_the_cleanup(autojump_clock):
    app = make_app(local_backend(workflow=Stubborn))
    async with in_process(app) as client:
        handle = await start(client, "a", stop_sec=50)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(app.shutdown_stages.run)
            await trio.sleep(3)
            app.shutdown_stages.skip_drain()
            await trio.sleep(3)
            app.shutdown_stages.skip_drain()
        assert (await handle).status is RolloutStatus.CANCELLED
        assert trio.current_time() - began == pytest.approx(53, abs=0.1)


async def test_budgets_can_be_set(autojump_clock):
    app = make_app(Deaf())
    app.shutdown_stages.budget = ShutdownBudget(drain_sec=1, cleanup_sec=2, forced_sec=3)
    async with in_process(app) as client:
        handle = await start(client, "a")
        began = trio.current_time()
        await app.shutdown_stages.run()
        assert (await handle).status is RolloutStatus.CANCELLED
        assert trio.current_time() - began == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "10"])
@pytest.mark.parametrize("name", ["drain_sec", "cleanup_sec", "forced_sec", "delivery_sec"])
def test_a_budget_is_a_finite_time(name, value):
    with pytest.raises(ValueError, match=name):
        ShutdownBudget(**{name: value})


async def test_without_work_nothing_waits(autojump_clock):
    app = make_app()
    async with in_process(app):
        began = trio.current_time()
        await app.shutdown_stages.run()
        await app.shutdown_stages.run()
        assert trio.current_time() == began


async def test_a_result_that_nobody_polls_for_holds_nothing_up(autojump_clock):
    app = make_app()
    async with in_process(app) as client:
        handle = await start(client, "a", sleep=5)
        handle.cancel()
        await trio.sleep(8)
        began = trio.current_time()
        await app.shutdown_stages.run()
        assert trio.current_time() == began


async def test_a_caller_between_two_polls_is_waited_for(autojump_clock):
    app = make_app()
    async with in_process(app) as client:
        handle = await start(client, "a", sleep=5)
        entry = app.registry._entries["a"]
        token_owner = handle._scope  # the poll that is under way is cut off
        await trio.sleep(4)
        handle.cancel()
        assert token_owner.cancel_called
        entry.polled_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(app.shutdown_stages.run)
            await trio.sleep(3)  # the rollout has ended by now, and nobody has fetched it
            assert not app.shutdown_stages._finished.is_set()
            entry.record.answered()
            app.registry._delivered.set()
        assert app.shutdown_stages._finished.is_set()


class Recorder(ExecutionBackend):
    def __init__(self, events, shutdown=None):
        self.events = events
        self._shutdown = shutdown

    @asynccontextmanager
    async def running(self):
        self.events.append("backend runs")
        yield
        self.events.append("backend ends")

    async def execute(self, request):
        await trio.lowlevel.checkpoint()
        self.events.append(f"execute {request.id}")
        return ExecutionOutcome(workflow=ExecutionResult(status=RolloutStatus.SUCCESS))

    async def shutdown(self):
        self.events.append("backend shutdown")
        if self._shutdown is not None:
            await self._shutdown()


async def test_the_lifespan_spans_everything_and_gets_the_app(autojump_clock):
    events = []

    @asynccontextmanager
    async def lifespan(app):
        assert app is server
        events.append("entered")
        yield
        events.append("left")

    server = make_app(Recorder(events), lifespan=lifespan)
    async with in_process(server) as client:
        result = await client.run_rollout(prompt(), CHAT_URL, "a", grade=False)
        assert result.status is RolloutStatus.SUCCESS
    inner = ["entered", "execute a", "backend shutdown", "left"]
    assert events == ["backend runs", *inner, "backend ends"]


async def test_a_lifespan_that_fails_in_process_is_its_own_error(autojump_clock):
    cause = KeyError("which weights")

    @asynccontextmanager
    async def lifespan(_):
        raise LookupError("the weights are missing") from cause
        yield

    with pytest.raises(LookupError, match="weights are missing") as caught:
        async with make_app(lifespan=lifespan).serving():
            raise AssertionError
    assert caught.value.__cause__ is cause


async def test_a_backend_whose_shutdown_fails_or_hangs_is_reported(autojump_clock, caplog):
    async def fail():
        await trio.lowlevel.checkpoint()
        raise RuntimeError("no")

    async with in_process(make_app(Recorder([], fail))):
        pass
    assert "the backend's shutdown failed" in caplog.text
    began = trio.current_time()
    async with in_process(make_app(Recorder([], trio.sleep_forever))):
        pass
    assert "took longer than 60 s" in caplog.text
    assert trio.current_time() - began == pytest.approx(60)


async def test_leaving_by_an_exception_cancels_at_once_and_keeps_it_plain(autojump_clock):
    app = make_app(local_backend(workflow=Script))
    with pytest.raises(ExceptionGroup) as caught:
        async with app.serving():
            raise KeyError("mine")
    assert caught.group_contains(KeyError)


async def test_a_poll_that_got_no_answer_shows_that_its_caller_is_there(autojump_clock):
    app = make_app()
    async with in_process_http(app) as http, trio.open_nursery() as nursery:
        rollout = await admit(http, initial_messages=prompt(sleep=60), grade=False)
        assert (await poll(http, *rollout))["status"] == "running"
        await trio.sleep(58)
        with trio.move_on_after(1):  # its connection is lost
            await poll(http, *rollout)
        nursery.start_soon(app.shutdown_stages.run)
        await trio.sleep(3)
        assert not app.shutdown_stages._finished.is_set()
        assert (await poll(http, *rollout))["status"] == "success"
        await app.shutdown_stages.run()
        assert trio.current_time() == 62
