"""A run with all that an export has to place: failures, retries, tools, odd text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evaluation.report.runs import RunFolder, record

from rollout.evaluation import AttemptOutcome
from rollout.trajectory import build_trajectory

PROMPT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 6 * 7?"},
]
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "multiply", "arguments": '{"left":6,"right":7}'},
}
MESSAGES = [
    *PROMPT,
    {"role": "assistant", "content": "", "reasoning_content": "I multiply.", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is 42 \ud800"},
]


def trajectory(row: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return build_trajectory(
        messages,
        rollout_id=f"r-{row}",
        prompt=PROMPT,
        metadata={"level": row},
        extra={"label": "42"},
    )


def exported(folder: Path, *, complete: bool = True) -> Path:
    """Three rows of two attempts: passed after a retry, below, removed, failed, lost, cancelled."""
    run = RunFolder(folder, 3, 2)
    first = record(
        outcome=AttemptOutcome.FAILURE,
        err_category="http_error",
        err_message="no agent",
        superseded=True,
        trajectory=None,
    )
    run.add(first)
    tokens = {"prompt_tokens": 30, "completion_tokens": 7}
    passed = record(retry=1, reward=1.0, passed=True, metrics={"calls/all": 2, "ok": 1.0}, **tokens)
    run.add(passed, trajectory(0, MESSAGES))
    run.add(record(0, 1, reward=0.25, metrics={"ok": 0.0}), trajectory(0, MESSAGES))
    run.add(record(1, 0, removed=True), trajectory(1, MESSAGES))
    failed = {"outcome": AttemptOutcome.FAILURE, "err_category": "timeout", "err_source": "agent"}
    run.add(record(1, 1, err_message="too slow", **failed), trajectory(1, PROMPT))
    lost = {"outcome": AttemptOutcome.ERROR, "err_category": "unreachable", "trajectory": None}
    run.add(record(2, 0, err_message="gone", **lost))
    if complete:
        run.add(record(2, 1, reward=1.0, passed=True), trajectory(2, MESSAGES))
    else:
        run.add(record(2, 1, outcome=AttemptOutcome.CANCELLED), trajectory(2, PROMPT))
    return run.write()
