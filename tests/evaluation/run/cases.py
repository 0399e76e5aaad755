"""What the tests of runs share: records, configs, servers, and a whole small run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from support import CHAT_URL

from rollout.evaluation import AttemptRecord, EvaluationConfig, evaluate
from rollout.evaluation.config import parse_config

TESTS = Path(__file__).parents[2]
RUN_ID = "20260101-00000000"


def record(row: int = 0, attempt: int = 0, retry: int = 0, **fields: Any) -> AttemptRecord:
    """A record; a success unless told otherwise."""
    fields.setdefault("outcome", "success")
    if fields["outcome"] == "success":
        fields.setdefault("reward", 1.0)
    fields.setdefault("rollout_id", f"{RUN_ID}-{row}-{attempt}-{retry}")
    return AttemptRecord(
        row=row,
        attempt=attempt,
        retry=retry,
        submitted_at=datetime(2026, 1, 1, 12, 30, 0, 250_000, tzinfo=UTC),
        duration_sec=1.5,
        **fields,
    )


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def scripted(count: int, **script: Any) -> list[dict[str, Any]]:
    """Rows whose prompts tell `support.Script` what to do; every row's label is 42."""
    return [
        {"messages": [{"role": "user", "content": f"row {row}", **script}], "ground_truth": "42"}
        for row in range(count)
    ]


def config_of(folder: Path, *, server: Any, rows: Any = None, **run: Any) -> EvaluationConfig:
    """A config with its dataset in *folder* and its output below it."""
    data = folder / "rows.jsonl"
    if rows is not None:
        write_rows(data, rows)
    run.setdefault("output", str(folder / "out"))
    dataset = {"path": str(data), **run.pop("dataset", {})}
    chat = {"url": CHAT_URL, **run.pop("chat", {})}
    chat = {name: value for name, value in chat.items() if value is not None}
    table = {"url": server} if isinstance(server, str) else server
    return parse_config({"server": table, "chat": chat, "dataset": dataset, "run": run})


async def run_all(config: EvaluationConfig, **options: Any) -> tuple[Any, list[AttemptRecord]]:
    """Run to the end; return the run and the records of this process."""
    async with evaluate(config, **options) as run:
        records = [record async for record in run]
    return run, records


def keys(records: Iterable[AttemptRecord]) -> list[tuple[int, int]]:
    """Which attempts these are, in order."""
    return sorted(record.key for record in records)


def all_keys(rows: int, n: int = 1) -> list[tuple[int, int]]:
    return [(row, attempt) for row in range(rows) for attempt in range(n)]


def python(code: str, *args: str, **options: Any) -> subprocess.Popen[str]:
    """A Python process with the tests on its path."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": path, **options.pop("env", {})},
        text=True,
        **options,
    )


def raising(error: Exception) -> Callable[..., Any]:
    """A function that raises, whatever it is given."""

    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call
