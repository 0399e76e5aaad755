"""Export to Parquet: a table with a row for each attempt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout.evaluation.export.placing import beside, check_free, place
from rollout.evaluation.export.reading import (
    METRIC,
    ExportedAttempt,
    ExportedRun,
    import_extra,
    text_of,
)

__all__ = ["export_parquet"]

_GROUP_ROWS = 256


def export_parquet(run: ExportedRun, target: Path, *, replace: bool) -> Path:
    """Write the attempts of a run into a Parquet file, with manifest and figures as its metadata.

    Returns:
        The file.

    Raises:
        EvaluationError: pyarrow is missing, or the file exists or cannot be written.
    """
    arrow = import_extra("parquet", "pyarrow", "pyarrow.parquet")
    check_free(target, replace=replace)
    schema = _schema(arrow, run)
    with beside(target) as folder:
        made = folder / "attempts.parquet"
        with arrow.parquet.ParquetWriter(made, schema, compression="zstd") as writer:
            rows: list[dict[str, Any]] = []
            for attempt in run.attempts():
                rows.append(_row(attempt))
                if len(rows) == _GROUP_ROWS:
                    writer.write_table(arrow.Table.from_pylist(rows, schema))
                    rows.clear()
            writer.write_table(arrow.Table.from_pylist(rows, schema))
        place(made, target)
    return target


def _schema(arrow: Any, run: ExportedRun) -> Any:
    text, whole, real, truth = arrow.string(), arrow.int64(), arrow.float64(), arrow.bool_()
    time = arrow.timestamp("us", "UTC")
    call = arrow.struct(
        {"id": text, "type": text, "function": arrow.struct({"name": text, "arguments": text})}
    )
    message = arrow.struct(
        {
            "role": text,
            "content": text,
            "reasoning_content": text,
            "tool_calls": arrow.list_(call),
            "tool_call_id": text,
        }
    )
    earlier = arrow.struct(
        {
            "rollout_id": text,
            "outcome": text,
            "err_category": text,
            "err_source": text,
            "err_message": text,
            "submitted_at": time,
            "duration_sec": real,
        }
    )
    columns = {
        "run_id": text,
        "row": whole,
        "attempt": whole,
        "retry": whole,
        "rollout_id": text,
        "outcome": text,
        "reward": real,
        "passed": truth,
        "removed": truth,
        "err_category": text,
        "err_source": text,
        "err_message": text,
        "submitted_at": time,
        "agent_started_at": time,
        "duration_sec": real,
        "prompt_tokens": whole,
        "completion_tokens": whole,
        **{f"{METRIC}{name}": real for name in run.metric_names},
        "prompt": text,
        "answer": text,
        "label": text,
        "metadata": text,
        "messages": arrow.list_(message),
        "earlier": arrow.list_(earlier),
    }
    about = {
        "rollout.manifest": json.dumps(run.manifest),
        "rollout.metrics": json.dumps(run.metrics.to_dict()),
    }
    run_id = str(run.manifest["run_id"])
    return arrow.schema(columns, metadata=about | {"rollout.run_id": run_id})


def _row(attempt: ExportedAttempt) -> dict[str, Any]:
    messages = attempt.messages
    if messages is not None:
        messages = [{**each, "content": text_of(each["content"])} for each in messages]
    return {
        **attempt.cells(),
        **{f"{METRIC}{name}": value for name, value in attempt.metrics().items()},
        "messages": messages,
        "earlier": attempt.earlier(),
    }
