"""Traces of MLflow: the conversation of an attempt, with reward and metrics as assessments."""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from rollout.evaluation.export.reading import METRIC, ExportedAttempt
from rollout.evaluation.records import AttemptOutcome

__all__ = ["milliseconds", "trace_id", "write_trace"]

_PREVIEW = 1000
_ID_BYTES = 16
_SPAN_BYTES = 8
_SCORER = "rollout"


def trace_id(run_id: str, attempt: ExportedAttempt) -> str:
    """Return the id of the trace of an attempt, the same in each export of its run."""
    return f"tr-{_digest(run_id, attempt).hex()}"


def _digest(run_id: str, attempt: ExportedAttempt) -> bytes:
    name = f"{run_id}/{attempt.record.row}/{attempt.record.attempt}"
    return hashlib.sha256(name.encode()).digest()[:_ID_BYTES]


def milliseconds(time: datetime) -> int:
    """Return a time in milliseconds since 1970."""
    return int(time.timestamp() * 1000)


def write_trace(
    entities: Any,
    store: Any,
    folder: Path,
    attempt: ExportedAttempt,
    *,
    experiment: str,
    mlflow_run: str,
    run_id: str,
) -> None:
    """Write the trace of an attempt.

    Args:
        entities: MLflow's module of that name.
        store: The file store.
        folder: The folder of the experiment in it.
        attempt: The attempt.
        experiment: The id of the experiment.
        mlflow_run: The run that the trace is shown with.
        run_id: The id of the evaluation.
    """
    record, cells, name = attempt.record, attempt.cells(), trace_id(run_id, attempt)
    succeeded = record.outcome is AttemptOutcome.SUCCESS
    facts = ("row", "attempt", "outcome", "err_category", "err_source")
    info = entities.TraceInfo(
        trace_id=name,
        trace_location=entities.TraceLocation.from_experiment_id(experiment),
        request_time=milliseconds(record.submitted_at),
        state=entities.TraceState.OK if succeeded else entities.TraceState.ERROR,
        request_preview=(attempt.prompt or "")[:_PREVIEW],
        response_preview=(attempt.answer or cells["err_message"] or "")[:_PREVIEW],
        client_request_id=cells["rollout_id"],
        execution_duration=int(record.duration_sec * 1000),
        trace_metadata={
            "mlflow.sourceRun": mlflow_run,
            "mlflow.trace.tokenUsage": json.dumps(_usage(attempt)),
            "mlflow.trace_schema.version": "3",
        },
        tags={"mlflow.traceName": "rollout"}
        | {each: str(cells[each]) for each in facts if cells[each] is not None},
    )
    store.start_trace(info)
    spans = {"spans": [_span(attempt, name, _digest(run_id, attempt), succeeded=succeeded)]}
    artifacts = folder / "traces" / name / "artifacts"
    artifacts.mkdir()
    (artifacts / "traces.json").write_text(json.dumps(spans), encoding="utf-8")
    for assessment in _assessments(entities, attempt, name):
        store.create_assessment(assessment)


def _usage(attempt: ExportedAttempt) -> dict[str, int]:
    sent = attempt.record.prompt_tokens or 0
    said = attempt.record.completion_tokens or 0
    return {"input_tokens": sent, "output_tokens": said, "total_tokens": sent + said}


def _span(attempt: ExportedAttempt, name: str, digest: bytes, *, succeeded: bool) -> dict[str, Any]:
    messages, record = attempt.messages or [], attempt.record
    first = next(
        (at for at, each in enumerate(messages) if each["role"] == "assistant"), len(messages)
    )
    attributes = {
        "mlflow.traceRequestId": name,
        "mlflow.spanType": "AGENT",
        "mlflow.spanInputs": {"messages": messages[:first]},
        "mlflow.spanOutputs": {"messages": messages[first:]},
    }
    message = attempt.cells()["err_message"] or record.err_category
    return {
        "trace_id": base64.b64encode(digest).decode(),
        "span_id": base64.b64encode(digest[:_SPAN_BYTES]).decode(),
        "parent_span_id": None,
        "name": "rollout",
        "start_time_unix_nano": milliseconds(record.submitted_at) * 1_000_000,
        "end_time_unix_nano": milliseconds(attempt.ended_at) * 1_000_000,
        "events": [],
        "status": {
            "code": "STATUS_CODE_OK" if succeeded else "STATUS_CODE_ERROR",
            "message": "" if succeeded else message or record.outcome.value,
        },
        "attributes": {key: json.dumps(value) for key, value in attributes.items()},
    }


def _assessments(entities: Any, attempt: ExportedAttempt, name: str) -> list[Any]:
    source = entities.AssessmentSource(source_type="CODE", source_id=_SCORER)
    values: dict[str, Any] = {}
    if attempt.record.reward is not None:
        values = {"reward": float(attempt.record.reward), "passed": attempt.record.passed}
    values |= {METRIC + each: value for each, value in attempt.metrics().items()}
    found = [
        entities.Feedback(name=each, value=value, source=source, trace_id=name)
        for each, value in values.items()
    ]
    if attempt.label is not None:
        label = entities.Expectation(
            name="label", value=attempt.label, source=source, trace_id=name
        )
        found.append(label)
    return found
