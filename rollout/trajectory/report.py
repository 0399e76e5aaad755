"""Model calls as a caller has counted them, and how they come into a trajectory.

The names are those of the official package, for programs that make trajectories by hand. A server
needs none of this: it keeps the trajectories of its rollouts by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, field

from rollout._logs import get_logger
from rollout.artifacts import ArtifactStore
from rollout.codec import dump_large_json, structure
from rollout.errors import InvalidBodyError, InvalidFieldError
from rollout.trajectory.build import build_trajectory
from rollout.trajectory.totals import final_metrics
from rollout.types import ExecutionResult, RolloutSample

if TYPE_CHECKING:
    import os

    import httpx

__all__ = [
    "LlmCallMetrics",
    "SampleReport",
    "TrajectoryReport",
    "convert_sample_to_trajectory",
    "report_from_response",
    "save_trajectory",
]

logger = get_logger(__name__)


@define(kw_only=True)
class LlmCallMetrics:
    """What was counted at one call of the model, under ATIF's names."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    model_name: str | None = None
    extra: dict[str, Any] | None = None


@define(kw_only=True)
class SampleReport:
    """The calls of one sample, in their order, and their totals if those are known apart."""

    model_name: str | None = None
    llm_call_metrics: list[LlmCallMetrics] = field(factory=list)
    final_metrics: dict[str, Any] | None = None


@define(kw_only=True)
class TrajectoryReport:
    """The calls of a rollout, by sample; a rollout has one."""

    model_name: str | None = None
    samples: dict[str, SampleReport] = field(factory=dict)


def report_from_response(response: httpx.Response) -> TrajectoryReport | None:
    """Read the ``trajectory`` object of a response's body; ``None`` if it has none.

    One that is malformed is logged and gives ``None``.
    """
    try:
        body = response.json()
    except ValueError:
        return None
    payload = body.get("trajectory") if isinstance(body, Mapping) else None
    if payload is None:
        return None
    try:
        return structure(payload, TrajectoryReport)
    except InvalidBodyError as error:
        logger.warning("the trajectory report of a response is left out: %s", error)
        return None


def convert_sample_to_trajectory(
    sample: RolloutSample,
    *,
    rollout_id: str,
    request_label: str | None = None,
    request_metadata: dict[str, Any] | None = None,
    request_extra_fields: dict[str, Any] | None = None,
    report: SampleReport | None = None,
    default_model_name: str | None = None,
) -> dict[str, Any]:
    """Make the ATIF document of a sample, with the calls of a report at the agent's steps.

    Args:
        sample: The sample; its `trajectory_messages` become steps.
        rollout_id: The rollout's id.
        request_label: The label, if the sample has none.
        request_metadata: The request's metadata.
        request_extra_fields: The request's extra fields.
        report: The calls. If they are not as many as the agent's steps, they stand in the
            document's ``extra`` instead, under ``osmosis.unmatched_llm_call_metrics``.
        default_model_name: The model, if the report does not name one.

    Returns:
        The document in plain JSON types, see `build_trajectory`.

    Raises:
        InvalidFieldError: The sample has no messages for a trajectory.
    """
    if sample.trajectory_messages is None:
        raise InvalidFieldError("trajectory_messages", "is None, which keeps no trajectory")
    osmosis: dict[str, Any] = {}
    if request_extra_fields:
        osmosis["request_extra_fields"] = request_extra_fields
    extra: dict[str, Any] = {"osmosis": osmosis}
    if sample.label is None and request_label is not None:
        extra["label"] = request_label
    document = build_trajectory(
        sample.trajectory_messages,
        rollout_id=rollout_id,
        model_name=(report.model_name if report else None) or default_model_name,
        sample=sample,
        metadata=request_metadata,
        extra=extra,
    )
    unmatched = _apply(report, document)
    if unmatched:
        document["extra"]["osmosis"]["unmatched_llm_call_metrics"] = unmatched
    if not document["extra"]["osmosis"]:
        del document["extra"]["osmosis"]
    return document


def _apply(report: SampleReport | None, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Put the calls of a report at the agent's steps; return those that cannot be placed."""
    if report is None:
        return []
    calls = [
        {name: value for name, value in asdict(call).items() if value is not None}
        for call in report.llm_call_metrics
    ]
    steps = [step for step in document["steps"] if step["source"] == "agent"]
    matched = len(calls) == len(steps)
    for step, call in zip(steps, calls, strict=True) if matched else ():
        model_name = call.pop("model_name", None)
        if model_name is not None:
            step["model_name"] = model_name
        if call:
            step["metrics"] = (step.get("metrics") or {}) | call
    counted = final_metrics(document["steps"] if matched else [{"metrics": c} for c in calls])
    given = report.final_metrics or {}
    document["final_metrics"] |= counted | given | {"total_steps": len(document["steps"])}
    return [] if matched else calls


async def save_trajectory(
    *,
    rollout_id: str,
    result: ExecutionResult,
    request_label: str | None = None,
    request_metadata: dict[str, Any] | None = None,
    request_extra_fields: dict[str, Any] | None = None,
    report: TrajectoryReport | None = None,
    artifact_root: str | os.PathLike[str] | None = None,
    diagnostics: dict[str, Any] | None = None,
) -> None:
    """Write ``trajectory.json`` of a result's sample, and ``diagnostics.json`` if there are any.

    Never raises: what goes wrong is logged. Whatever is cancelled, it waits for a bounded time.

    Args:
        rollout_id: The rollout's id, and the name of its folder.
        result: Its sample is kept, if it has one with messages for a trajectory.
        request_label: The label, if the sample has none.
        request_metadata: The request's metadata.
        request_extra_fields: The request's extra fields.
        report: The calls of the model; of several samples in it, none is taken.
        artifact_root: See `rollout.artifacts.ArtifactStore`.
        diagnostics: What the diagnostics say; by default the result's extra fields.
    """
    sample = result.sample
    reports = list(report.samples.values()) if report is not None else []
    notes = result.extra_fields if diagnostics is None else diagnostics

    def contents() -> dict[str, bytes | None]:
        files: dict[str, bytes | None] = {}
        if notes is not None:
            files["diagnostics.json"] = dump_large_json(notes)
        if sample is not None and sample.trajectory_messages is not None:
            document = convert_sample_to_trajectory(
                sample,
                rollout_id=rollout_id,
                request_label=request_label,
                request_metadata=request_metadata,
                request_extra_fields=request_extra_fields,
                report=reports[0] if len(reports) == 1 else None,
                default_model_name=report.model_name if report is not None else None,
            )
            files["trajectory.json"] = dump_large_json(document)
        return files

    await ArtifactStore(artifact_root).save(rollout_id, contents, in_thread=True)
