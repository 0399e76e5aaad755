"""When the agent started, in every response that follows, also in those of the server's own."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import trio
from server.faults import admit, finished, in_process_http, poll, run
from support import Script, local_backend, make_app, prompt

from rollout import RolloutContext, get_rollout_context
from rollout.backend import ExecutionBackend
from rollout.errors import InvalidFieldError
from rollout.types import ExecutionOutcome, ExecutionRequest, ExecutionResult, RolloutStatus

pytestmark = pytest.mark.usefixtures("log_lines")


def moment(answer: dict[str, Any]) -> datetime | None:
    """The time that an answer names; it is RFC 3339 in UTC."""
    text = answer["agent_started_at"]
    if text is None:
        return None
    assert text.endswith("Z")
    return datetime.fromisoformat(text)


class Late(ExecutionBackend):
    """Reports the agent's start itself, after ``setup`` seconds; then does as it is told."""

    reports_agent_start = True

    async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
        script = request.prompt[0]
        context = get_rollout_context()
        assert context is not None
        await trio.sleep(script.get("setup", 0))
        if not script.get("never"):
            context.mark_agent_started()
            context.mark_agent_started()
        await trio.sleep(script.get("sleep", 0))
        if "raise" in script:
            raise RuntimeError(script["raise"])
        if "garbage" in script:
            return None  # type: ignore[return-value]
        return ExecutionOutcome(workflow=ExecutionResult(status=RolloutStatus.SUCCESS))


class Plain(ExecutionBackend):
    """Reports nothing, so the server takes the moment when it calls `execute`."""

    async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
        await trio.sleep(request.prompt[0].get("sleep", 0))
        return ExecutionOutcome(workflow=ExecutionResult(status=RolloutStatus.SUCCESS))


async def test_a_poll_is_answered_as_soon_as_the_agent_starts(autojump_clock):
    async with in_process_http(make_app(Late())) as http:
        before = datetime.now(UTC)
        rollout = await admit(http, initial_messages=prompt(setup=7, sleep=100))
        answer = await poll(http, *rollout)
        assert (answer["status"], trio.current_time()) == ("running", 7)
        started = moment(answer)
        assert started is not None
        assert before <= started <= datetime.now(UTC)
        assert moment(await finished(http, *rollout)) == started


async def test_a_start_that_follows_the_running_status_is_news_of_its_own(autojump_clock):
    class RunsFirst(Late):
        async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
            context = get_rollout_context()
            assert context is not None
            await context.set_status(RolloutStatus.RUNNING)
            return await super().execute(request)

    async with in_process_http(make_app(RunsFirst())) as http:
        rollout = await admit(http, initial_messages=prompt(setup=7, sleep=100))
        answer = await poll(http, *rollout)
        assert (answer["status"], moment(answer)) == ("running", None)
        answer = await poll(http, *rollout)
        assert answer["status"] == "running"
        assert moment(answer) is not None
        assert trio.current_time() == 7


@pytest.mark.parametrize("script", [{}, {"raise": "boom"}, {"garbage": True}])
@pytest.mark.parametrize("never", [False, True])
async def test_an_end_says_whether_the_agent_had_started(script: Any, never: bool):
    async with in_process_http(make_app(Late())) as http:
        result = await run(http, initial_messages=prompt(never=never, **script))
        assert result["status"] == ("success" if not script else "failure")
        assert (moment(result) is None) == never


@pytest.mark.parametrize("never", [False, True])
async def test_a_cancellation_says_whether_the_agent_had_started(never: bool, autojump_clock):
    async with in_process_http(make_app(Late())) as http:
        rollout = await admit(http, initial_messages=prompt(never=never, sleep=100))
        await trio.sleep(1)
        await http.post("/rollout/cancel", json={"all": True})
        result = await finished(http, *rollout)
        assert result["status"] == "cancelled"
        assert (moment(result) is None) == never


@pytest.mark.parametrize("never", [False, True])
async def test_a_lease_expiry_says_whether_the_agent_had_started(never: bool, autojump_clock):
    async with in_process_http(make_app(Late())) as http:
        rollout = await admit(http, initial_messages=prompt(never=never, sleep=1000))
        await trio.sleep(130)
        result = await poll(http, *rollout)
        assert result["err_category"] == "lease_expired"
        assert (moment(result) is None) == never


@pytest.mark.parametrize("never", [False, True])
async def test_a_result_that_cannot_be_encoded_says_so_too(never: bool, monkeypatch):
    """A crash of the server's own."""
    from rollout.server import entry, registry

    encode = registry.encode
    calls = []

    def crash_once(response: Any) -> bytes:
        calls.append(response)
        if response.status is RolloutStatus.SUCCESS:
            raise LookupError("a defect of the server")
        return encode(response)

    for module in (entry, registry):
        monkeypatch.setattr(module, "encode", crash_once)
    async with in_process_http(make_app(Late())) as http:
        result = await run(http, initial_messages=prompt(never=never))
        assert (result["status"], result["err_category"]) == ("failure", "internal_error")
        assert result["err_message"] == "the server failed to finish this rollout"
        assert (moment(result) is None) == never
        assert calls
        assert (await http.get("/health")).json()["lifecycle"]["active_rollouts"] == 0


async def test_a_start_after_the_end_is_not_recorded(autojump_clock):
    class Stubborn(Late):
        async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
            with trio.CancelScope(shield=True):
                return await super().execute(request)

    async with in_process_http(make_app(Stubborn())) as http:
        rollout = await admit(http, initial_messages=prompt(setup=300))
        await trio.sleep(130)
        expired = await poll(http, *rollout)
        assert (expired["err_category"], moment(expired)) == ("lease_expired", None)
        await trio.sleep(300)
        assert await poll(http, *rollout) == expired


async def test_for_a_backend_that_reports_nothing_it_is_the_call_of_execute(autojump_clock):
    async with in_process_http(make_app(Plain())) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=100))
        answer = await poll(http, *rollout)
        assert answer["status"] == "running"
        assert moment(answer) is not None
        assert trio.current_time() == 0


async def test_a_rollout_that_waits_for_a_slot_has_not_started(autojump_clock):
    async with in_process_http(make_app(local_backend(max_concurrent=1))) as http:
        await admit(http, initial_messages=prompt(sleep=60))
        timed_out = await run(http, agent_timeout_sec=10)
        assert (timed_out["err_category"], moment(timed_out)) == ("timeout", None)
        rollout = await admit(http)
        await http.post("/rollout/cancel", json={"ids": [rollout[0]]})
        assert moment(await finished(http, *rollout)) is None


async def test_a_backend_may_pass_on_the_time_of_a_start_elsewhere(autojump_clock):
    at = datetime(2026, 1, 31, 13, tzinfo=timezone(timedelta(hours=1)))

    class Front(Late):
        async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
            context = get_rollout_context()
            assert context is not None
            with pytest.raises(InvalidFieldError, match="at must be a datetime with a time zone"):
                context.mark_agent_started(at.replace(tzinfo=None))
            context.mark_agent_started(at)
            return await super().execute(request)

    async with in_process_http(make_app(Front())) as http:
        result = await run(http)
    assert (result["status"], result["agent_started_at"]) == ("success", "2026-01-31T12:00:00Z")


def test_outside_of_a_server_the_time_of_a_start_is_kept_too():
    context, at = RolloutContext(), datetime(2026, 1, 31, tzinfo=UTC)
    context.mark_agent_started(at)
    context.mark_agent_started()
    assert context.agent_started_at == at


def in_a_thread_of_its_own(function: Any) -> None:
    thread = threading.Thread(target=contextvars.copy_context().run, args=(function,))
    thread.start()
    thread.join()


def in_asyncio(function: Any) -> None:
    async def main() -> None:
        function()
        await get_rollout_context().set_status(RolloutStatus.RUNNING)  # type: ignore[union-attr]

    asyncio.run(main())


@pytest.mark.parametrize("where", [lambda function: function(), in_a_thread_of_its_own, in_asyncio])
async def test_a_plain_workflow_reports_from_its_threads(where: Any):
    polled = threading.Event()

    class Reports(Late):
        async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
            await trio.to_thread.run_sync(self.work)
            return ExecutionOutcome(workflow=ExecutionResult(status=RolloutStatus.SUCCESS))

        def work(self) -> None:
            context = get_rollout_context()
            assert context is not None
            where(context.mark_agent_started)
            assert polled.wait(60)
            with pytest.raises(ValueError, match="nonsense"):
                context.report_status("nonsense")  # type: ignore[arg-type]
            where(lambda: context.report_status(RolloutStatus.GRADING))

    async with in_process_http(make_app(Reports(), result_wait_timeout_sec=60)) as http:
        rollout = await admit(http)
        first = await poll(http, *rollout)  # it is held until the report wakes it
        assert (first["status"], moment(first) is None) == ("running", False)
        polled.set()
        result = await finished(http, *rollout)
    assert (result["status"], moment(result)) == ("success", moment(first))


class ReportsFromUserCode(Script):
    async def run(self, ctx: Any) -> Any:
        context = get_rollout_context()
        assert context is not None
        for status in ("success", "queued", "unknown", "running"):
            await context.set_status(RolloutStatus(status))
        context.mark_agent_started()
        return await super().run(ctx)


async def test_reports_that_lead_nowhere_are_ignored(autojump_clock):
    async with in_process_http(make_app(local_backend(ReportsFromUserCode))) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=10))
        first = await poll(http, *rollout)
        assert first["status"] == "running"
        result = await finished(http, *rollout)
        assert result["status"] == "success"
        assert moment(result) == moment(first)
