"""Grade the attempts of a run again, with another grader, into a new run.

Theory of operation: the new run is made in a folder of its own beside its place, and gets its
name when it is complete; so there is never half of one. The old run is only read.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import evolve

from rollout._checks import is_finite_number
from rollout._files.atomic import reason_of, write_atomic
from rollout._files.folders import folder_name
from rollout._files.rollouts import problem_of
from rollout._page.conversation import read_document
from rollout._tasks import sole_error
from rollout.artifacts import ARTIFACTS, ArtifactStore
from rollout.backend import LocalBackend
from rollout.codec import dump_json
from rollout.errors import EvaluationError, InvalidFieldError, TrajectoryError
from rollout.evaluation.folder.journal import final_records, write_journal
from rollout.evaluation.folder.layout import ROLLOUTS, TRAJECTORIES
from rollout.evaluation.folder.manifest import (
    describe_app,
    new_manifest,
    read_manifest,
    write_manifest,
)
from rollout.evaluation.folder.outputs import summarize
from rollout.evaluation.metrics import EvaluationMetrics
from rollout.evaluation.records import AttemptOutcome, AttemptRecord
from rollout.trajectory.messages import messages_of
from rollout.types import ExecutionRequest, RolloutSample, RolloutStatus

__all__ = ["regrade_run"]

_RUN_ID_BYTES = 4
_SECTIONS = ("dataset", "server", "chat", "run")


async def regrade_run(
    folder: Path,
    backend: LocalBackend,
    *,
    app: str,
    output: Path,
    grader_timeout_sec: float | None = None,
    max_in_flight: int = 16,
    on_graded: Callable[[AttemptRecord], object] = lambda _: None,
) -> EvaluationMetrics:
    """Grade the attempts of a run again with the grader of *backend*; no agent runs.

    Attempts whose agent failed stay as they are, and cancelled ones are left out. An attempt
    whose sample cannot be rebuilt from its trajectory ends as an `error`.

    Args:
        folder: The run, complete or not; nothing is changed there.
        backend: What has the grader.
        app: Its application, as ``FILE.py:APP`` or ``MODULE:APP``, for the manifest.
        output: The folder of the new run, which must not exist.
        grader_timeout_sec: Time for the grader in seconds; that of the run by default.
        max_in_flight: How many attempts are graded at a time.
        on_graded: Called with each record of the new run.

    Raises:
        EvaluationError: One of the folders cannot be used.
        EvaluationDamagedError: A file of the run is damaged.

    Cancelling this leaves nothing behind.
    """
    old = await trio.to_thread.run_sync(read_manifest, folder)
    manifest = await trio.to_thread.run_sync(_manifest, old, app, grader_timeout_sec)
    grading = _Grading(folder, backend, manifest)
    records = await trio.to_thread.run_sync(lambda: list(final_records(folder)))
    grading.folder = await trio.to_thread.run_sync(_make_beside, output)
    try:
        limiter = trio.CapacityLimiter(max_in_flight)
        ended: list[AttemptRecord] = []

        async def one(record: AttemptRecord) -> None:
            async with limiter:
                ended.append(await grading.grade(record))
            on_graded(ended[-1])

        error: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                for record in records:
                    if record.outcome is not AttemptOutcome.CANCELLED:
                        nursery.start_soon(one, record)
        except BaseExceptionGroup as group:
            error = sole_error(group)
        if error is not None:
            raise error
        return await trio.to_thread.run_sync(_finish, grading.folder, output, manifest, ended)
    finally:
        with trio.CancelScope(shield=True):
            remove = partial(shutil.rmtree, grading.folder, ignore_errors=True)
            await trio.to_thread.run_sync(remove)


def _manifest(old: dict[str, Any], app: str, grader_timeout_sec: float | None) -> dict[str, Any]:
    now = datetime.now(UTC)
    inputs = {name: old[name] for name in _SECTIONS} | {"server": describe_app(app)}
    if grader_timeout_sec is not None:
        inputs["run"] = {**old["run"], "grader_timeout_sec": grader_timeout_sec}
    run_id = f"{now:%Y%m%d}-{secrets.token_hex(_RUN_ID_BYTES)}"
    return new_manifest(run_id, now, inputs) | {"regraded": old["run_id"]}


def _make_beside(output: Path) -> Path:
    if os.path.lexists(output):
        raise EvaluationError(f"{output} is there already; name another folder with --output")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
        (made / TRAJECTORIES).mkdir(0o700)
    except OSError as error:
        raise _unusable(output, error) from None
    return made


def _finish(
    made: Path, output: Path, manifest: dict[str, Any], records: list[AttemptRecord]
) -> EvaluationMetrics:
    from rollout.evaluation.report import write_report  # noqa: PLC0415 - templates take a while

    write_manifest(made, manifest)
    write_journal(made, manifest["run_id"], records)
    metrics = summarize(made)
    try:
        made.rename(output)
    except OSError as error:
        raise _unusable(output, error) from None
    write_report(output)
    return metrics


def _unusable(output: Path, error: OSError) -> EvaluationError:
    return EvaluationError(f"{output} cannot hold a run: {reason_of(error)}")


class _Grading:
    """Grades attempts of one run into the folder of another.

    Attributes:
        folder: The folder of the new run while it is made.
    """

    folder: Path

    def __init__(self, old: Path, backend: LocalBackend, manifest: dict[str, Any]) -> None:
        self._old = old
        self._backend = backend
        self._run: dict[str, Any] = manifest["run"]

    async def grade(self, record: AttemptRecord) -> AttemptRecord:
        """Grade an attempt whose agent succeeded; keep another as it is."""
        succeeded = record.outcome is AttemptOutcome.SUCCESS
        try:
            document = await trio.to_thread.run_sync(self._read, record)
        except TrajectoryError as error:
            if not succeeded and record.err_phase is None:
                return evolve(record, trajectory=None, retry=0)
            return _broken(record, error)
        if not succeeded and record.err_phase is None:
            return await trio.to_thread.run_sync(self._keep, record, document)
        try:
            request, sample = _rebuilt(record, document, self._run["grader_timeout_sec"])
            if not succeeded and not _has_reply(sample):
                return await trio.to_thread.run_sync(self._keep, record, document)
            artifacts = await trio.to_thread.run_sync(self._artifacts, record.rollout_id)
        except (TrajectoryError, InvalidFieldError) as error:
            return await trio.to_thread.run_sync(self._keep, _broken(record, error), document)
        result = await self._backend.grade(request, sample, artifacts_dir=artifacts)
        graded = result.sample or sample
        success = result.status is RolloutStatus.SUCCESS
        removed = success and graded.remove_sample
        reward = graded.reward if success and not removed else None
        ended = evolve(
            record,
            outcome=AttemptOutcome.SUCCESS if success else AttemptOutcome.FAILURE,
            reward=reward,
            passed=reward is not None and reward >= self._run["pass_threshold"],
            removed=removed,
            err_category=None if result.err_category is None else result.err_category.value,
            err_source=result.err_source,
            err_phase=None if success else "grading",
            err_message=result.err_message,
            metrics={k: v for k, v in graded.metrics.items() if is_finite_number(v)},
        )
        return await trio.to_thread.run_sync(self._keep, ended, document)

    def _read(self, record: AttemptRecord) -> dict[str, Any]:
        if record.trajectory is None:
            raise TrajectoryError("The record names no trajectory.")
        return read_document(self._old / TRAJECTORIES, record.trajectory)

    def _artifacts(self, rollout_id: str) -> Callable[[], Path | None] | None:
        """Copy the artifacts of a rollout, so that a grader changes nothing in the old run."""
        rollouts = self._old / ROLLOUTS
        if not rollouts.is_dir():
            return None  # they were kept elsewhere
        old = rollouts / folder_name(rollout_id) / ARTIFACTS
        store = ArtifactStore(self.folder / ROLLOUTS)
        if old.is_dir():
            try:
                store.take_in(rollout_id, ARTIFACTS, old, move=False)
            except OSError as error:
                reason = problem_of(error)
                raise TrajectoryError(f"its artifacts cannot be copied: {reason}") from None
        return partial(store.artifacts_dir, rollout_id)

    def _keep(self, record: AttemptRecord, document: dict[str, Any]) -> AttemptRecord:
        """Write the trajectory with the new end of its attempt."""
        extra = dict(document.get("extra") or {})
        for name in ("error", "remove_sample", "metrics"):
            extra.pop(name, None)
        extra |= {"status": record.outcome.value, "reward": record.reward, "retry": 0}
        if record.metrics:
            extra["metrics"] = record.metrics
        if record.removed:
            extra["remove_sample"] = True
        if record.outcome is not AttemptOutcome.SUCCESS:
            extra["error"] = {"category": record.err_category, "message": record.err_message}
            if record.err_source is not None:
                extra["error"]["source"] = record.err_source
            if record.err_phase is not None:
                extra["error"]["phase"] = record.err_phase
        name = f"{record.row}-{record.attempt}-0.json"
        path = self.folder / TRAJECTORIES / name
        try:
            write_atomic(path, dump_json({**document, "extra": extra}) + b"\n", sync_name=False)
        except OSError as error:
            raise _unusable(path, error) from None
        return evolve(record, trajectory=name, retry=0)


def _rebuilt(
    record: AttemptRecord, document: dict[str, Any], timeout_sec: float | None
) -> tuple[ExecutionRequest, RolloutSample]:
    """Rebuild what a grader gets of an attempt: without reward or mark for removal."""
    messages = messages_of(document)
    extra = document.get("extra") or {}
    if "dropped" in extra:
        raise TrajectoryError(f"values were left out of it: {extra['dropped'][0]}")
    label = extra.get("label")
    request = ExecutionRequest(
        id=record.rollout_id,
        prompt=[],
        label=label,
        metadata=extra.get("metadata"),
        grader_timeout_sec=timeout_sec,
    )
    sample = RolloutSample(
        messages=messages,
        label=label,
        metrics=dict(extra.get("metrics", {})),
        extra_fields=dict(extra.get("extra_fields", {})),
    )
    return request, sample


def _has_reply(sample: RolloutSample) -> bool:
    """Whether the agent left anything: of a grading without a sample, the prompt is kept."""
    return any(message.get("role") == "assistant" for message in sample.messages)


def _broken(record: AttemptRecord, error: Exception) -> AttemptRecord:
    return evolve(
        record,
        outcome=AttemptOutcome.ERROR,
        reward=None,
        passed=False,
        removed=False,
        err_category="protocol",
        err_source=None,
        err_phase=None,
        err_message=f"it cannot be graded again: {error}",
        trajectory=None,
        retry=0,
    )
