"""What is made of the records: index, metrics and report. All of it can be made again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rollout._files.atomic import write_atomic, writing_atomic
from rollout.codec import dump_json
from rollout.errors import EvaluationError
from rollout.evaluation.folder.journal import final_records
from rollout.evaluation.folder.layout import INDEX, METRICS
from rollout.evaluation.folder.manifest import read_manifest
from rollout.evaluation.metrics import EvaluationMetrics, compute_metrics
from rollout.evaluation.records import AttemptRecord

__all__ = ["summarize"]

_INDEXED = (
    "row",
    "attempt",
    "retry",
    "rollout_id",
    "outcome",
    "reward",
    "passed",
    "err_category",
    "trajectory",
)


def summarize(folder: Path) -> EvaluationMetrics:
    """Write ``index.jsonl`` and ``metrics.json`` of a run, complete or not. Blocking.

    Returns:
        The metrics.

    Raises:
        EvaluationError: The folder holds no run, or its files cannot be written.
        EvaluationDamagedError: Its journal or manifest is damaged.
    """
    manifest = read_manifest(folder)
    try:
        with writing_atomic(folder / INDEX) as file:
            metrics = compute_metrics(
                _indexed(folder, file),
                rows=manifest["dataset"]["selected"],
                n=manifest["run"]["n"],
            )
        write_atomic(folder / METRICS, json.dumps(metrics.to_dict(), indent=2).encode() + b"\n")
    except OSError as error:
        raise EvaluationError(
            f"{folder}: index and metrics cannot be written: {error.strerror or error}"
        ) from error
    return metrics


def _indexed(folder: Path, file: IO[bytes]) -> Iterator[AttemptRecord]:
    for record in final_records(folder):
        file.write(dump_json({name: getattr(record, name) for name in _INDEXED}) + b"\n")
        yield record
