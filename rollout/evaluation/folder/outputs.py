"""Write the index and the metrics of a run; both can be made again from its records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rollout._files.atomic import write_atomic, writing_atomic
from rollout.codec import dump_json
from rollout.errors import EvaluationError
from rollout.evaluation.folder.journal import indexed_records, read_index
from rollout.evaluation.folder.layout import INDEX, METRICS
from rollout.evaluation.folder.manifest import read_manifest
from rollout.evaluation.index import AttemptIndex
from rollout.evaluation.metrics import EvaluationMetrics, compute_metrics
from rollout.evaluation.records import AttemptRecord
from rollout.evaluation.sequential import replay

__all__ = ["summarize", "write_outputs"]

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
    return write_outputs(folder, read_manifest(folder), read_index(folder))


def write_outputs(
    folder: Path, manifest: Mapping[str, Any], index: AttemptIndex
) -> EvaluationMetrics:
    """Write index and metrics of a run whose manifest and journal have been read. Blocking.

    *index* loses the rows that do not count of a run that stopped early, see
    `rollout.evaluation.sequential.replay`.

    Returns:
        The metrics.

    Raises:
        EvaluationError: The files cannot be written.
        EvaluationDamagedError: The journal was changed since it was indexed.
    """
    stopping = replay(manifest, index)
    try:
        with writing_atomic(folder / INDEX) as file:
            metrics = compute_metrics(
                _indexed(folder, index, file),
                rows=manifest["dataset"]["selected"],
                n=manifest["run"]["n"],
                stopping=stopping,
            )
        write_atomic(folder / METRICS, json.dumps(metrics.to_dict(), indent=2).encode() + b"\n")
    except OSError as error:
        raise EvaluationError(
            f"{folder}: index and metrics cannot be written: {error.strerror or error}"
        ) from error
    return metrics


def _indexed(folder: Path, index: AttemptIndex, file: IO[bytes]) -> Iterator[AttemptRecord]:
    for record in indexed_records(folder, index):
        file.write(dump_json({name: getattr(record, name) for name in _INDEXED}) + b"\n")
        yield record
