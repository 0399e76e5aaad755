"""Backends behind a server: what `ExecutionBackend` does by itself, and the whole way."""

from __future__ import annotations

import logging

import httpx
import pytest
import trio
import trio.testing
from backend.helpers import SECRET, assert_nothing_is_left, backend, counts, echo, full_marks
from support import CHAT_URL, in_process, make_app, prompt

from rollout import (
    ExecutionBackend,
    ExecutionOutcome,
    ExecutionResult,
    RolloutSample,
    RolloutStatus,
    get_rollout_context,
)
from rollout.errors import RolloutAdmissionTimeoutError
from rollout.types import RolloutErrorCategory


class Minimal(ExecutionBackend):
    """All that a backend has to write."""

    def __init__(self):
        self.go_on = trio.Event()
        self.requests = []

    async def execute(self, request):
        self.requests.append((request, get_rollout_context()))
        await self.go_on.wait()
        sample = RolloutSample(messages=request.prompt, reward=0.5)
        return ExecutionOutcome(workflow=ExecutionResult(status="success", sample=sample))


class Marking(Minimal):
    """Says itself when the agent starts."""

    reports_agent_start = True

    def __init__(self):
        super().__init__()
        self.start = trio.Event()

    async def execute(self, request):
        await self.start.wait()
        get_rollout_context().mark_agent_started()
        return await super().execute(request)


def test_execute_is_all_that_has_to_be_written():
    with pytest.raises(TypeError, match="execute"):
        ExecutionBackend()


async def test_an_endpoint_that_a_backend_cannot_reach_is_the_source_of_its_failure():
    class Unreachable(ExecutionBackend):
        async def execute(self, request):
            await trio.lowlevel.checkpoint()
            asked = httpx.Request("POST", f"{CHAT_URL}/chat/completions")
            raise httpx.ConnectError("refused", request=asked)

    async with in_process(make_app(Unreachable())) as client:
        result = await client.run_rollout(prompt(), CHAT_URL, "r", label="x")
    assert result.status == "failure"
    assert result.err_source == "model_endpoint"


async def test_the_defaults():
    minimal = Minimal()
    assert minimal.reports_agent_start is False
    assert minimal.has_capacity() is True
    assert minimal.reserve("r") is True
    assert minimal.release("r") is None
    assert minimal.rollout_status("r") is None
    assert minimal.cancel_rollouts(ids=["r"]) == {}
    assert minimal.cancel_rollouts(prefix="r", all=True) == {}
    assert minimal.health() == {"status": "ok"}
    assert await minimal.shutdown() is None


async def test_reserve_asks_for_capacity():
    class Full(Minimal):
        def has_capacity(self):
            return False

    assert Full().reserve("r") is False


async def test_a_minimal_backend_is_running_as_soon_as_it_executes(autojump_clock):
    minimal = Minimal()
    async with in_process(make_app(minimal)) as client:
        handle = await client.run_rollout_async(
            prompt(), CHAT_URL, "r", llm_api_key="key", label="42", agent_timeout_sec=7
        )
        assert await handle.wait_for_running() is RolloutStatus.RUNNING
        assert handle.latest_result.agent_started_at is not None
        minimal.go_on.set()
        result = await handle
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample.reward == 0.5
    assert result.agent_started_at == handle.latest_result.agent_started_at
    ((request, context),) = minimal.requests
    assert (request.id, request.label, request.grade) == ("r", "42", True)
    assert request.agent_timeout_sec == 7
    assert (context.chat_completions_url, context.api_key) == (CHAT_URL, "key")


async def test_a_backend_that_reports_starts_is_queued_until_it_does(autojump_clock):
    marking = Marking()
    async with in_process(make_app(marking)) as client:
        handle = await client.run_rollout_async(prompt(), CHAT_URL, "r")
        await trio.sleep(100)
        assert handle.status is RolloutStatus.QUEUED
        assert handle.latest_result.agent_started_at is None
        marking.start.set()
        assert await handle.wait_for_running() is RolloutStatus.RUNNING
        assert handle.latest_result.agent_started_at is not None
        assert trio.current_time() == 100
        marking.go_on.set()
        assert (await handle).status is RolloutStatus.SUCCESS


async def test_the_first_mark_counts(autojump_clock):
    class Twice(Marking):
        async def execute(self, request):
            get_rollout_context().mark_agent_started()
            await trio.sleep(1)
            return await super().execute(request)

    twice = Twice()
    twice.go_on.set()
    async with in_process(make_app(twice)) as client:
        handle = await client.run_rollout_async(prompt(), CHAT_URL, "r")
        await handle.wait_for_running()
        first = handle.latest_result.agent_started_at
        twice.start.set()
        assert (await handle).agent_started_at == first


async def test_a_minimal_backend_can_be_cancelled(autojump_clock):
    async with in_process(make_app(Minimal())) as client:
        handle = await client.run_rollout_async(prompt(), CHAT_URL, "r")
        await handle.wait_for_running()
        answer = await client.cancel_rollout("r")
        assert answer.dispositions == {"r": "cancelled_running"}
        result = await handle
    assert result.status is RolloutStatus.CANCELLED
    assert result.agent_started_at is not None


# --- LocalBackend -------------------------------------------------------------------------------


async def test_a_rollout_that_expires_in_the_queue_has_no_start(autojump_clock):
    async def run(ctx):
        await trio.sleep(60)
        return ctx.prompt

    local = backend(run, slots=1)
    async with in_process(make_app(local)) as client:
        first = await client.run_rollout_async(prompt(), CHAT_URL, "first", grade=False)
        second = await client.run_rollout_async(
            prompt(), CHAT_URL, "second", grade=False, agent_timeout_sec=5
        )
        result = await second
        assert trio.current_time() == pytest.approx(5, abs=0.5)
        assert result.err_category is RolloutErrorCategory.TIMEOUT
        assert "in the queue" in result.err_message
        assert result.agent_started_at is None
        assert [status async for status in second.statuses()] == ["failure"]
        assert (await first).status is RolloutStatus.SUCCESS
        assert (await first).agent_started_at is not None
    assert_nothing_is_left(local)


async def test_the_phases_as_a_client_sees_them(autojump_clock):
    async def run(ctx):
        await trio.sleep(10)
        return ctx.prompt

    async def grade(ctx):
        await trio.sleep(10)
        ctx.set_reward(1)

    local = backend(run, grade, slots=1)
    async with in_process(make_app(local)) as client:
        handles = [
            await client.run_rollout_async(prompt(), CHAT_URL, name, label="x")
            for name in ("first", "second")
        ]
        started = trio.current_time()
        for index, handle in enumerate(handles):
            assert await handle.wait_for_running() is RolloutStatus.RUNNING
            assert trio.current_time() - started == pytest.approx(20 * index, abs=0.5)
            assert await handle.wait_for_grading() is RolloutStatus.GRADING
            assert trio.current_time() - started == pytest.approx(20 * index + 10, abs=0.5)
            assert (await handle).sample.reward == 1.0
    assert_nothing_is_left(local)


async def test_health_shows_the_slots(autojump_clock):
    async def run(ctx):
        await trio.sleep(60)

    local = backend(run, slots=2, depth=3)
    async with in_process(make_app(local)) as client:
        handles = [
            await client.run_rollout_async(prompt(), CHAT_URL, f"r{index}", grade=False)
            for index in range(4)
        ]
        await handles[1].wait_for_running()
        health = await client.health()
        assert health["status"] == "ok"
        assert health["concurrency"] == {"max_concurrent": 2, "queued": 2, "running": 2}
        assert health["max_queue_depth"] == 3
        for handle in handles:
            await handle
        health = await client.health()
        assert health["concurrency"] == {"max_concurrent": 2, "queued": 0, "running": 0}


async def test_a_burst_is_cut_exactly_and_admitted_later(autojump_clock):
    async def run(ctx):
        await trio.sleep(1000)
        return ctx.prompt

    local = backend(run, slots=2, depth=3)
    admitted, refused = [], []
    app = make_app(local)
    async with in_process(app, admission_timeout_sec=10) as client:

        async def submit(index):
            try:
                handle = await client.run_rollout_async(
                    prompt(), CHAT_URL, f"r{index}", grade=False
                )
            except RolloutAdmissionTimeoutError:
                refused.append(index)
            else:
                admitted.append(handle)

        async with trio.open_nursery() as nursery:
            for index in range(20):
                nursery.start_soon(submit, index)
        assert (len(admitted), len(refused)) == (5, 15)
        assert counts(local) == (3, 2)
        await trio.sleep(1000)
        assert (await client.run_rollout(prompt(), CHAT_URL, "late", grade=False)).status
        for handle in admitted:
            assert (await handle).status is RolloutStatus.SUCCESS
    assert_nothing_is_left(local)


async def test_a_cancel_right_after_admission(autojump_clock):
    ran = []

    async def run(ctx):
        ran.append(ctx)

    local = backend(run, slots=1)
    app = make_app(local)
    async with in_process(app) as client:
        original = local.reserve

        def reserve(rollout_id):
            # The cancel request comes before the execution's task has run for the first time.
            taken = original(rollout_id)
            assert local.cancel_rollouts(ids=[rollout_id]) == {rollout_id: "cancelled_queued"}
            return taken

        local.reserve = reserve
        result = await client.run_rollout(prompt(), CHAT_URL, "r", grade=False)
    assert result.status is RolloutStatus.CANCELLED
    assert result.agent_started_at is None
    assert ran == []
    assert_nothing_is_left(local)


@pytest.mark.parametrize("phase", ["workflow", "grader"])
async def test_the_key_of_the_model_shows_up_nowhere(autojump_clock, caplog, phase):
    caplog.set_level(logging.DEBUG)

    async def leak(ctx):
        key = get_rollout_context().api_key
        try:
            raise ValueError(f"bad key {key}")
        except ValueError as error:
            raise RuntimeError(f"Bearer {key} was refused") from error

    local = backend(leak, full_marks) if phase == "workflow" else backend(echo, leak)
    async with in_process(make_app(local)) as client:
        result = await client.run_rollout(
            prompt(), CHAT_URL, "r", llm_api_key=SECRET, label="x", metadata={}
        )
    assert result.status is RolloutStatus.FAILURE
    assert result.err_message == "Bearer [redacted] was refused"
    assert "hunter2" not in caplog.text
    assert "bad key [redacted]" in caplog.text


async def test_grading_preconditions_reach_the_caller(autojump_clock):
    async def run(ctx):
        await trio.sleep(1000)

    local = backend(run, slots=1)
    async with in_process(make_app(local)) as client:
        blocking = await client.run_rollout_async(prompt(), CHAT_URL, "first", grade=False)
        await blocking.wait_for_running()
        before = trio.current_time()
        result = await client.run_rollout(prompt(), CHAT_URL, "second", label="42")
        assert trio.current_time() == before
        assert result.err_category is RolloutErrorCategory.VALIDATION_ERROR
        assert "no grader" in result.err_message
        assert result.agent_started_at is None
        await client.cancel_rollout("first")
        await blocking


async def test_a_plain_workflow_through_the_server(mock_clock):
    def run(ctx):
        return [*ctx.prompt, {"role": "assistant", "content": get_rollout_context().rollout_id}]

    def grade(ctx):
        ctx.set_reward(ctx.sample.messages[-1]["content"] == ctx.label)

    mock_clock.rate = 0
    async with in_process(make_app(backend(run, grade))) as client:
        result = await client.run_rollout(prompt(), CHAT_URL, "mine", label="mine")
    assert result.err_message is None
    assert result.sample.reward == 1.0
