"""The files that are kept of a rollout: its trajectory, and diagnostics."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from attrs import define, field

from rollout._json.fit import fit
from rollout._logs import get_logger
from rollout._redaction import redactor_of
from rollout._threads import is_large, run_by_size
from rollout._version import package_version
from rollout.artifacts import ArtifactStore
from rollout.codec import MAX_JSON_DEPTH, dump_json, dump_large_json, format_timestamp
from rollout.context import RolloutContext
from rollout.trajectory import build_trajectory
from rollout.types import (
    ExecutionOutcome,
    ExecutionRequest,
    RolloutResultResponse,
    RolloutSample,
    RolloutStatus,
)

__all__ = [
    "DIAGNOSTICS",
    "TRAJECTORY",
    "RolloutFiles",
    "leaves_files",
    "save_files",
    "settle_end",
]

logger = get_logger(__name__)

TRAJECTORY = "trajectory.json"
DIAGNOSTICS = "diagnostics.json"
_SCHEMA = "rollout-diagnostics/1"
_EXTRA_DEPTH = MAX_JSON_DEPTH - 4
_ANY_SURROGATE = b"\\ud"
"""How JSON in ASCII begins a lone surrogate, and each half of a pair."""

_INDENTED = json.JSONEncoder(indent=2, allow_nan=False)


def leaves_files(context: RolloutContext, outcome: ExecutionOutcome) -> bool:
    """Whether the files of a rollout that has ended are kept.

    Not of one that was cancelled while its agent waited for its caller: that may have it run on
    another server, which keeps its files in the same folder.
    """
    return not (context.start_pending and outcome.result.status is RolloutStatus.CANCELLED)


async def settle_end(context: RolloutContext, outcome: ExecutionOutcome) -> RolloutResultResponse:
    """Call `RolloutContext.settle`, in a thread if it has much to do."""
    return await run_by_size(partial(context.settle, outcome), outcome.result.sample)


async def save_files(
    store: ArtifactStore,
    request: ExecutionRequest,
    context: RolloutContext,
    outcome: ExecutionOutcome,
    *,
    phase: RolloutStatus,
    timings: Mapping[str, float | None],
    unfinished: RolloutSample | None = None,
) -> None:
    """Write the files of a rollout that has ended.

    Never raises, and waits for a bounded time, whatever is cancelled. The arguments are
    attributes of `RolloutFiles`.
    """
    files = RolloutFiles(
        request=request,
        outcome=outcome,
        end=await settle_end(context, outcome),
        phase=phase,
        timings=timings,
        secrets=tuple(context.secrets),
        info=context.info,
        unfinished=unfinished,
    )
    await store.save(request.id, files.contents, in_thread=files.large)


@define(kw_only=True, eq=False)
class RolloutFiles:
    """The files that are kept of a rollout that has ended.

    Attributes:
        request: What was asked for.
        outcome: How it ended.
        end: What is published of how it ended; see `rollout.context.RolloutContext.settle`.
        phase: How far it came: `queued`, `running` or `grading`.
        timings: Seconds by name; ``None`` for what never began.
        secrets: What is never kept.
        document: The trajectory as the agent itself wrote it, a valid ATIF document; without
            one it is made of the sample's messages.
        info: Notes of the rollout's own code, for the trajectory.
        diagnostics: More for the note, by name.
        unfinished: What the sample source of a rollout without a sample had at its end.
        large: Whether making the files takes more than a few milliseconds.
    """

    request: ExecutionRequest
    outcome: ExecutionOutcome
    end: RolloutResultResponse
    phase: RolloutStatus
    timings: Mapping[str, float | None]
    secrets: tuple[str | None, ...] = ()
    document: Mapping[str, Any] | None = field(default=None, repr=False)
    info: Mapping[str, Any] = field(factory=dict, repr=False)
    diagnostics: Mapping[str, Any] = field(factory=dict)
    unfinished: RolloutSample | None = field(default=None, repr=False)
    large: bool = field(init=False)

    def __attrs_post_init__(self) -> None:
        sample, history = self._sample(), self._history()
        self.large = is_large(
            None if history is None else [*history],
            None if sample is None else (sample.metrics, sample.extra_fields),
            *(self.request.metadata, self.request.extra_fields, self.document),
            *(self.info, self.diagnostics),
        )

    def contents(self) -> dict[str, bytes | None]:
        """Make the contents of the files by name; ``None`` for one that is not to exist.

        Blocking; takes as long as its messages are many.
        """
        trajectory = self._trajectory()
        return {TRAJECTORY: trajectory, DIAGNOSTICS: self._diagnostics(trajectory)}

    def _trajectory(self) -> bytes | None:
        request, end = self.request, self.end
        sample = self._sample()
        messages = self._history()
        if messages is None:
            return None
        extra: dict[str, Any] = {"status": str(end.status)}
        if end.status != RolloutStatus.SUCCESS:
            # A grader may have set one before it failed; that is no reward.
            extra |= {"reward": None, "error": _error(end)}
        if sample is None:
            extra["label"] = request.label
        if self.info:
            extra["info"] = dict(self.info)
        if request.extra_fields:
            extra["osmosis"] = {"request_extra_fields": request.extra_fields}
        try:
            built = build_trajectory(
                messages,
                rollout_id=request.id,
                prompt=request.prompt,
                sample=sample,
                metadata=request.metadata,
                secrets=None,
                extra=extra,
            )
            dump = dump_large_json if self.large else dump_json
            return self._written(built if self.document is None else self._adopted(built), dump)
        except Exception as error:  # noqa: BLE001 - a message may hold anything
            # Without its text, which may hold what no log should.
            logger.warning(
                "rollout %s: its trajectory is not saved (%s)", request.id, type(error).__name__
            )
            return None

    def _history(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the messages of the trajectory; ``None`` if none is to be kept."""
        if self.document is not None:
            return []  # what there is to say of them is said there
        sample = self._sample()
        return self.request.prompt if sample is None else sample.trajectory_messages

    def _adopted(self, built: dict[str, Any]) -> dict[str, Any]:
        """Add the rollout's end to an agent's own document."""
        theirs = dict(self.document or {})
        ours = {"rollout_id": self.request.id, **built["extra"]}
        return theirs | {"extra": (theirs.get("extra") or {}) | ours}

    def _written(self, document: dict[str, Any], dump: Callable[[Any], bytes]) -> bytes:
        """Write JSON without secrets and lone surrogates, which hardly any document has."""
        redactor = redactor_of(self.secrets)
        data = dump(document)
        if _ANY_SURROGATE in data or redactor.may_hold(data):
            data = dump(redactor.value(document))
        return data

    def _sample(self) -> RolloutSample | None:
        sample = self.outcome.result_to_save.sample
        if sample is None:
            sample = self.outcome.result.sample
        return self.unfinished if sample is None else sample

    def _diagnostics(self, trajectory: bytes | None) -> bytes:
        end = self.end
        sample = self._sample()
        started = end.agent_started_at
        document: dict[str, Any] = {
            "schema": _SCHEMA,
            "rollout_id": self.request.id,
            "status": str(end.status),
            "error": _error(end),
            "phase": str(self.phase),
            "agent_started_at": None if started is None else format_timestamp(started),
            "timings": {
                name: None if seconds is None else round(seconds, 6)
                for name, seconds in self.timings.items()
            },
            "sizes": {
                "prompt_messages": len(self.request.prompt),
                "messages": None if sample is None else len(sample.messages),
                "trajectory_bytes": None if trajectory is None else len(trajectory),
            },
            "version": package_version(),
        }
        dropped: list[str] = []
        if self.diagnostics:
            notes, dropped = fit(dict(self.diagnostics), max_depth=_EXTRA_DEPTH)
            document |= {k: v for k, v in (notes or {}).items() if k not in document}
        # A backend may give its notes along with a result, too.
        more_notes = self.outcome.result.extra_fields or {}
        own = {k: v for k, v in more_notes.items() if k not in self.diagnostics}
        if own:
            document["extra_fields"], more = fit(own, max_depth=_EXTRA_DEPTH)
            dropped += more
        if dropped:
            document["dropped"] = dropped
        return self._written(document, _dump_indented)


def _dump_indented(document: Any) -> bytes:
    return _INDENTED.encode(document).encode("ascii") + b"\n"


def _error(end: RolloutResultResponse) -> dict[str, Any] | None:
    if end.err_message is None and end.err_category is None:
        return None
    error = {
        "category": None if end.err_category is None else str(end.err_category),
        "message": end.err_message,
    }
    return error if end.err_source is None else error | {"source": end.err_source}
