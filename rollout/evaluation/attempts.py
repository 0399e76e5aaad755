"""Run one attempt, and write its trajectory."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import trio
from attrs import evolve, frozen

from rollout._checks import is_finite_number
from rollout._files.atomic import write_atomic
from rollout._json.text import utf8
from rollout._redaction import Redactor, redact
from rollout.backend.failures import describe_exception
from rollout.client import RolloutClient, RolloutHandle
from rollout.codec import dump_json
from rollout.errors import (
    EvaluationError,
    InvalidFieldError,
    RolloutAdmissionTimeoutError,
    RolloutClientClosedError,
    RolloutError,
    RolloutHandleCancelled,
    RolloutProtocolError,
)
from rollout.evaluation.config import EvaluationConfig
from rollout.evaluation.datasets import DatasetRow
from rollout.evaluation.folder.layout import TRAJECTORIES
from rollout.evaluation.model import Access
from rollout.evaluation.records import AttemptOutcome, AttemptRecord
from rollout.evaluation.standstill import Standstill
from rollout.trajectory import build_trajectory, token_totals
from rollout.trajectory.totals import token_count
from rollout.types import (
    RolloutErrorCategory,
    RolloutResultResponse,
    RolloutSample,
    RolloutStatus,
)

__all__ = [
    "Attempt",
    "Credentials",
    "Ending",
    "check_usable",
    "ending_of",
    "keep_attempt",
    "run_rollout",
]

UNREACHABLE = "unreachable"
_ID_BYTES = 6
_OUTCOMES = {
    RolloutStatus.SUCCESS: AttemptOutcome.SUCCESS,
    RolloutStatus.FAILURE: AttemptOutcome.FAILURE,
    RolloutStatus.CANCELLED: AttemptOutcome.CANCELLED,
}
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, InvalidFieldError)
_REFUSALS = frozenset({*range(400, 500), 503})
"""Answers of a server that has not admitted the rollout; with other errors it may have."""
_NOBODY_BEHIND = frozenset({502, 503, 504})
"""Answers of a gateway or a server that is shutting down."""
_REFUSED_KEY = frozenset({401, 403})
_NO_ROLLOUT_SERVER = frozenset({404, 405})


@frozen(kw_only=True)
class Credentials:
    """The keys of a run; they are never written anywhere.

    Attributes:
        server: The rollout server's key.
        chat: The chat endpoint's key.
        urls: The secret parts of both URLs.
        more: What else must not get into a file.
    """

    server: str | None = None
    chat: str | None = None
    urls: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    @property
    def secrets(self) -> tuple[str | None, ...]:
        """All that must not get into a file."""
        return (self.chat, self.server, *self.urls, *self.more)

    def __repr__(self) -> str:
        return "<Credentials>"


@frozen(kw_only=True)
class Attempt:
    """One try of one attempt.

    Attributes:
        row: The row of the dataset.
        number: Which of the row's attempts, from 0.
        retry: How many records of it there are already.
        rollout_id: Its id, which no other try has.
    """

    row: DatasetRow
    number: int
    retry: int
    rollout_id: str

    @classmethod
    def fresh(cls, run_id: str, row: DatasetRow, number: int, retry: int) -> Attempt:
        """Make a try with an id of its own.

        A process that was killed may have left a rollout of the same attempt on the server,
        so the id has a random part.
        """
        token = secrets.token_hex(_ID_BYTES)
        rollout_id = f"{run_id}-{row.index}-{number}-{token}"
        return cls(row=row, number=number, retry=retry, rollout_id=rollout_id)


@frozen(kw_only=True)
class Ending:
    """The end of a rollout, as the client saw it.

    Attributes:
        record: Its record, but for the trajectory.
        sample: The sample of its terminal result, if there is one.
    """

    record: AttemptRecord
    sample: RolloutSample | None


async def run_rollout(
    client: RolloutClient,
    config: EvaluationConfig,
    credentials: Credentials,
    attempt: Attempt,
    access: Access,
    *,
    run_id: str,
    standstill: Standstill,
    on_admitted: Callable[[], None],
) -> Ending:
    """Run the rollout of an attempt to its end; an error of the request is an end, too.

    A rollout that the server gave up because this process stood still ends as cancelled: that
    says nothing about the model.

    Args:
        client: The server.
        config: The run's settings.
        credentials: The keys.
        attempt: The attempt.
        access: How its agent reaches the model.
        run_id: The run that it belongs to, for a server that takes turns between runs.
        standstill: Knows whether this process stood still.
        on_admitted: Called once the server has admitted it.

    Raises:
        EvaluationError: The server refuses the key, or is not a rollout server, so that no
            attempt can do any better.

    Cancelling this leaves the rollout on the server; the caller cancels it there.
    """
    submitted_at, started = datetime.now(UTC), trio.current_time()
    sample: RolloutSample | None = None
    handle: RolloutHandle | None = None
    try:
        handle = await client.run_rollout_async(
            initial_messages=attempt.row.initial_messages,
            chat_completions_url=access.url,
            rollout_id=attempt.rollout_id,
            llm_api_key=access.key,
            label=attempt.row.label,
            metadata=attempt.row.metadata,
            agent_timeout_sec=config.run.agent_timeout_sec,
            grader_timeout_sec=config.run.grader_timeout_sec,
            run=run_id,
        )
        on_admitted()
        result = await handle
        sample, facts = result.sample, _facts(result, config, credentials)
        access.complete(facts)
    except (RolloutHandleCancelled, RolloutClientClosedError):
        raise  # it says nothing about the rollout
    except (RolloutError, httpx.HTTPError, httpx.InvalidURL) as error:
        if handle is None:
            check_usable(error, client.url)
        facts = _failure(error, credentials, admitted=handle is not None)
        if handle is not None and standstill.since(started):
            facts["outcome"] = AttemptOutcome.CANCELLED
    finally:
        if handle is not None:
            handle.cancel()  # nobody is going to await it again
            # Nor to hear why it failed, if it did so while this was being cancelled.
            handle._failure_to_raise()  # noqa: SLF001
    record = AttemptRecord(
        row=attempt.row.index,
        attempt=attempt.number,
        retry=attempt.retry,
        rollout_id=attempt.rollout_id,
        submitted_at=submitted_at,
        duration_sec=trio.current_time() - started,
        **facts,
    )
    return Ending(record=record, sample=sample)


def ending_of(
    result: RolloutResultResponse,
    config: EvaluationConfig,
    credentials: Credentials,
    attempt: Attempt,
) -> Ending:
    """Return the end of a rollout that nobody waited for; how long it took is not known."""
    record = AttemptRecord(
        row=attempt.row.index,
        attempt=attempt.number,
        retry=attempt.retry,
        rollout_id=attempt.rollout_id,
        submitted_at=result.agent_started_at or datetime.now(UTC),
        duration_sec=0.0,
        **_facts(result, config, credentials),
    )
    return Ending(record=record, sample=result.sample)


def check_usable(error: Exception, url: str) -> None:
    """Stop at a server that refuses every request, not just this one.

    Raises:
        EvaluationError: It refuses the key, or is not a rollout server.
    """
    if not isinstance(error, RolloutProtocolError):
        return
    if error.status_code in _REFUSED_KEY:
        raise EvaluationError(
            f"the rollout server at {url} refuses the key (HTTP {error.status_code}); name the "
            "variable that holds it as server.api_key_env"
        ) from error
    if error.status_code in _NO_ROLLOUT_SERVER:
        raise EvaluationError(
            f"the server at {url} is not a rollout server (HTTP {error.status_code})"
        ) from error


def keep_attempt(
    config: EvaluationConfig,
    credentials: Credentials,
    attempt: Attempt,
    ending: Ending,
    folder: Path,
) -> AttemptRecord:
    """Write the trajectory of an attempt, and return its record with that. Blocking.

    Raises:
        EvaluationError: The trajectory cannot be written (a full disk, say).
    """
    document = _trajectory(config, credentials, attempt, ending)
    name = f"{attempt.row.index}-{attempt.number}-{attempt.retry}.json"
    path = folder / TRAJECTORIES / name
    try:
        # The journal's next sync has the name on the disk, see `Journal`.
        write_atomic(path, dump_json(document) + b"\n", sync_name=False)
    except OSError as error:
        raise EvaluationError(
            f"{path}: {error.strerror or error}; the run stops, because its results "
            "could not be kept"
        ) from error
    # The metrics also count the calls that are not in the sample.
    told, totals = ending.record.metrics, token_totals(document)
    prompt_tokens, completion_tokens = (
        total if (count := token_count(told.get(name))) is None else count
        for name, total in zip(("prompt_tokens", "completion_tokens"), totals, strict=True)
    )
    return evolve(
        ending.record,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        trajectory=name,
    )


def _failure(error: Exception, credentials: Credentials, *, admitted: bool) -> dict[str, Any]:
    """Describe an attempt that got no terminal result."""
    status = error.status_code if isinstance(error, RolloutProtocolError) else None
    unreachable = (
        isinstance(error, (httpx.TransportError, RolloutAdmissionTimeoutError))
        or status in _NOBODY_BEHIND
    )
    refused = isinstance(error, _NEVER_SENT) or status in _REFUSALS
    text = describe_exception(error, credentials.secrets)
    if isinstance(error, httpx.TransportError):
        text = f"the server is out of reach ({type(error).__name__}: {text})"
    return {
        "outcome": AttemptOutcome.ERROR,
        "err_category": UNREACHABLE if unreachable else "protocol",
        "err_message": text,
        "may_have_run": admitted or not refused,
    }


def _facts(
    result: RolloutResultResponse, config: EvaluationConfig, credentials: Credentials
) -> dict[str, Any]:
    """Describe an attempt by its terminal result."""
    sample = result.sample
    outcome = _OUTCOMES[result.status]
    if result.err_category is RolloutErrorCategory.LEASE_EXPIRED:
        outcome = AttemptOutcome.CANCELLED  # this process was silent for too long
    success = outcome is AttemptOutcome.SUCCESS
    removed = success and sample is not None and sample.remove_sample
    reward = sample.reward if sample is not None and success and not removed else None
    message = result.err_message
    if message is not None:
        message = redact(utf8(message), credentials.secrets)
    return {
        "outcome": outcome,
        "reward": reward,
        "passed": reward is not None and reward >= config.run.pass_threshold,
        "removed": removed,
        "err_category": None if result.err_category is None else result.err_category.value,
        "err_source": result.err_source,
        "err_phase": result.err_phase,
        "err_message": message,
        "agent_started_at": result.agent_started_at,
        "may_have_run": result.agent_started_at is not None,
        "metrics": {} if sample is None else _numbers(sample.metrics, credentials),
    }


def _numbers(metrics: dict[str, Any], credentials: Credentials) -> dict[str, Any]:
    numbers = {name: value for name, value in metrics.items() if is_finite_number(value)}
    clean: dict[str, Any] = Redactor(credentials.secrets).value(numbers)
    return clean


def _trajectory(
    config: EvaluationConfig,
    credentials: Credentials,
    attempt: Attempt,
    ending: Ending,
) -> dict[str, Any]:
    """Build the trajectory of an attempt; without a sample it is the prompt."""
    sample, record = ending.sample, ending.record
    ended: dict[str, Any] = {"status": record.outcome.value}
    if record.outcome is not AttemptOutcome.SUCCESS:
        error = {"category": record.err_category, "message": record.err_message}
        if record.err_source is not None:
            error["source"] = record.err_source
        if record.err_phase is not None:
            error["phase"] = record.err_phase
        ended |= {"reward": None, "error": error}
    messages = attempt.row.initial_messages
    if sample is not None and sample.messages:
        messages = [dict(message) for message in sample.messages]
    document = build_trajectory(
        messages,
        rollout_id=attempt.rollout_id,
        prompt=attempt.row.initial_messages,
        sample=sample,
        metadata=attempt.row.metadata,
        secrets=credentials.secrets,
        extra=ended
        | {
            "row": attempt.row.index,
            "attempt": attempt.number,
            "retry": attempt.retry,
            "label": attempt.row.label,
        },
    )
    if config.chat.model is not None:  # unless the messages name the model that answered
        document["agent"].setdefault("model_name", config.chat.model)
    return document
