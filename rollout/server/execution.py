"""One execution: the call of the backend in the rollout's context, and its outcome."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import trio

from rollout._threads import run_by_size
from rollout.artifacts import ArtifactStore
from rollout.backend.base import ExecutionBackend
from rollout.backend.executions import Phase
from rollout.backend.failures import categorize_exception, describe_exception, source_of
from rollout.backend.saving import leaves_files, save_files
from rollout.context import RolloutContext
from rollout.gateway import ModelGateway
from rollout.server.entry import Entry, log_failure
from rollout.types import (
    ExecutionOutcome,
    ExecutionRequest,
    ExecutionResult,
    RolloutInitRequest,
    RolloutStatus,
)

__all__ = ["run_backend"]


async def run_backend(
    backend: ExecutionBackend,
    entry: Entry,
    request: RolloutInitRequest,
    gateway: ModelGateway | None,
    files: ArtifactStore | None,
) -> None:
    """Run one rollout on its backend, and settle its end by what the backend returned or raised.

    With a gateway its agent gets that as the model's endpoint, for as long as it runs. Its files
    are kept in *files*, unless the backend keeps them itself.

    A call that is cancelled by force settles nothing.
    """
    asked = ExecutionRequest(
        id=request.rollout_id,
        prompt=request.initial_messages,
        label=request.label,
        metadata=request.metadata,
        agent_timeout_sec=request.agent_timeout_sec,
        grader_timeout_sec=request.grader_timeout_sec,
        grade=request.grade,
        run=request.run,
        limits=request.limits,
        extra_fields=request.extra_fields,
    )
    began = trio.current_time()
    entered: RolloutContext | None = None

    async def body() -> ExecutionOutcome:
        nonlocal entered
        if not backend.reports_agent_start:
            entry.report_agent_started()
            if entry.start_pending:
                ended = await _hold(entry, request.agent_timeout_sec)
                if ended is not None:
                    return ExecutionOutcome(workflow=ended)
        with _context(gateway, entry, request) as context, context:
            entered = entry.context = context
            outcome = await backend.execute(asked)
            if isinstance(outcome, ExecutionOutcome):  # a backend is not ours
                context.explain(outcome)
            return outcome

    run = entry.call.run if backend.isolates_user_code else entry.call.run_in_task
    returned = await run(body)
    if returned.interrupted:
        return
    outcome = returned.value
    if returned.error is not None:
        log_failure(entry.rollout_id, "execute", returned.error, request.secrets)
        outcome = ExecutionOutcome(
            workflow=ExecutionResult(
                status=RolloutStatus.FAILURE,
                err_message=describe_exception(returned.error, request.secrets),
                err_category=categorize_exception(returned.error),
                err_source=source_of(returned.error, request.chat_completions_url),
            )
        )
    if (
        files is not None
        and files.keeps
        and not backend.keeps_files
        and entered is not None
        and isinstance(outcome, ExecutionOutcome)
        and leaves_files(entered, outcome)
    ):
        timings = {"total_sec": trio.current_time() - began}
        phase = entry.record.status
        await save_files(files, asked, entered, outcome, phase=phase, timings=timings)
    entry.encoding = True
    sample = getattr(getattr(outcome, "result", None), "sample", None)
    await run_by_size(partial(entry.settle, outcome), sample)


@contextmanager
def _context(
    gateway: ModelGateway | None, entry: Entry, request: RolloutInitRequest
) -> Generator[RolloutContext, None, None]:
    if gateway is None:
        yield RolloutContext(
            chat_completions_url=request.chat_completions_url,
            api_key=request.llm_api_key,
            rollout_id=request.rollout_id,
            progress=entry,
        )
        return
    with gateway.session(
        rollout_id=request.rollout_id,
        chat_completions_url=request.chat_completions_url,
        api_key=request.llm_api_key,
        progress=entry,
        limits=request.limits,
        limited=lambda: entry.record.status is not RolloutStatus.GRADING,
    ) as session:
        yield session.context


async def _hold(entry: Entry, agent_timeout_sec: float | None) -> ExecutionResult | None:
    """Wait until the agent may start; return the result of a rollout whose time is up first."""
    phase = Phase("agent", agent_timeout_sec, trio.current_time())
    entry.held = True
    try:
        with trio.CancelScope(deadline=phase.deadline) as scope:
            await entry.wait_start_kept()
    finally:
        entry.held = False
    return phase.timeout() if scope.cancelled_caught else None
