"""One execution: call the backend in the rollout's context, and make a result of what comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rollout._threads import RESULTS, is_large, run_off_loop
from rollout.backend.base import ExecutionBackend
from rollout.backend.failures import categorize_exception, describe_exception, source_of
from rollout.backend.usercode import Outcome
from rollout.context import RolloutContext
from rollout.server.entry import Entry, log_failure
from rollout.server.finalize import encode
from rollout.types import (
    ExecutionOutcome,
    ExecutionRequest,
    ExecutionResult,
    RolloutInitRequest,
    RolloutResultResponse,
    RolloutStatus,
)

__all__ = ["run_backend"]


async def run_backend(
    backend: ExecutionBackend, entry: Entry, request: RolloutInitRequest
) -> tuple[RolloutResultResponse | None, bytes | None]:
    """Run one rollout on its backend.

    Returns:
        Its terminal result, ``None`` if the call was cancelled by force, and the encoded form
        of a large one. Whatever the backend raises or returns is a result too, unless it has
        settled one before.
    """

    async def body() -> ExecutionOutcome:
        if not backend.reports_agent_start:
            entry.report_agent_started()
        with RolloutContext(
            chat_completions_url=request.chat_completions_url,
            api_key=request.llm_api_key,
            rollout_id=request.rollout_id,
            progress=entry,
        ):
            return await backend.execute(
                ExecutionRequest(
                    id=request.rollout_id,
                    prompt=request.initial_messages,
                    label=request.label,
                    metadata=request.metadata,
                    agent_timeout_sec=request.agent_timeout_sec,
                    grader_timeout_sec=request.grader_timeout_sec,
                    grade=request.grade,
                )
            )

    run = entry.call.run if backend.isolates_user_code else entry.call.run_in_task
    outcome = await run(body)
    if outcome.interrupted:
        return None, None
    finish = partial(_result, entry, outcome, request.secrets)
    if not is_large(getattr(getattr(outcome.value, "result", None), "sample", None)):
        return finish(), None
    entry.encoding = True
    return await run_off_loop(partial(_encoded, finish), RESULTS)


def _encoded(
    finish: Callable[[], RolloutResultResponse],
) -> tuple[RolloutResultResponse, bytes | None]:
    result = finish()
    try:
        return result, encode(result)
    except Exception:  # noqa: BLE001 - whoever publishes the result meets it again, and logs it
        return result, None


def _result(entry: Entry, outcome: Outcome, secrets: Sequence[str | None]) -> RolloutResultResponse:
    value = outcome.value
    if outcome.error is not None:
        log_failure(entry.rollout_id, "execute", outcome.error, secrets)
        value = ExecutionOutcome(
            workflow=ExecutionResult(
                status=RolloutStatus.FAILURE,
                err_message=describe_exception(outcome.error, secrets),
                err_category=categorize_exception(outcome.error),
                err_source=source_of(outcome.error),
            )
        )
    return entry.settle(value)
