"""Folders of runs that never ran: plausible ones, and ones that are out to do harm."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rollout.codec import dump_json
from rollout.evaluation.folder.journal import encode_line, record_line
from rollout.evaluation.metrics import compute_metrics
from rollout.evaluation.records import AttemptOutcome, AttemptRecord

START = datetime(2026, 3, 14, 9, 26, 53, tzinfo=UTC)

HOSTILE = (
    "</script><script>window.harmed=1</script><img src=x onerror=window.harmed=1>"
    "<!--<script>\u2028\u2029\ud800\u202etxt.exe\u0000\u001b[31m]]>&lt;'\"`${window.harmed=1}"
    "{{ 7*7 }}{% raw %}"
)

TASKS = [
    ("How many weekdays lie between {a} March and {b} April 2026?", "calendar"),
    ("The order {a}{b} arrived damaged. Find it and say what the customer is owed.", "orders"),
    ("Sum the column `net` of invoices_{a}.csv for the rows where region is {b}.", "files"),
    ("Which of the {a} open tickets has waited longest, and who owns it?", "tickets"),
    ("Convert {a}.{b} nautical miles to kilometres, to two decimals.", "arithmetic"),
]


def manifest(rows: int, n: int, **chat: Any) -> dict[str, Any]:
    return {
        "schema": "rollout-evaluation/1",
        "run_id": "e7c1f0a2b94d",
        "created_at": "2026-03-14T09:26:53Z",
        "dataset": {
            "path": "/data/support-tasks.jsonl",
            "format": "jsonl",
            "digest": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            "rows": rows,
            "selected": rows,
            "selection": None,
            "limit": None,
            "columns": {"messages": "messages", "label": None},
            "encoding": "utf-8",
            "delimiter": None,
        },
        "server": {"app": "agent.py:app", "digest": "2c26b46b68ffc68ff99b453c1d30413413422d70"},
        "chat": {"url": "http://127.0.0.1:8000/v1", "model": "small-instruct-3b", **chat},
        "run": {
            "n": n,
            "agent_timeout_sec": 120.0,
            "grader_timeout_sec": 30.0,
            "pass_threshold": 0.8,
        },
    }


def document(rng: random.Random, record: AttemptRecord, prompt: str, kind: str) -> dict[str, Any]:
    """A conversation with tools: an ATIF document as a run keeps it."""
    steps: list[dict[str, Any]] = [
        {
            "source": "system",
            "message": "You help the back office of a small shop. Look things up with the tools "
            "that you have, and never guess. Answer in one sentence, then give the result alone "
            "on the last line.",
        },
        {"source": "user", "message": prompt},
    ]
    for turn in range(rng.randint(1, 4)):
        call = f"call_{turn}"
        name, arguments = rng.choice([
            ("search_orders", {"query": f"order {rng.randint(1000, 9999)}", "limit": 5}),
            ("run_python", {"code": "import csv\n\nwith open('invoices.csv') as file:\n    rows = "
             "list(csv.DictReader(file))\nprint(sum(float(row['net']) for row in rows))"}),
            ("read_file", {"path": f"notes/{kind}.md"}),
        ])  # fmt: skip
        found = [
            {"id": rng.randint(1000, 9999), "status": rng.choice(["sent", "returned", "open"])}
            for _ in range(rng.randint(1, 6))
        ]
        steps.append(
            {
                "source": "agent",
                "message": rng.choice(["", "Let me look that up.", "I need the exact rows first."]),
                "reasoning_content": "The question names a period, so I need the rows of that "
                "period alone. I look at the columns before I add anything up.",
                "tool_calls": [
                    {"tool_call_id": call, "function_name": name, "arguments": arguments}
                ],
                "observation": {
                    "results": [{"source_call_id": call, "content": json.dumps(found, indent=2)}]
                },
                "metrics": {
                    "prompt_tokens": rng.randint(300, 1800),
                    "completion_tokens": rng.randint(20, 160),
                    "cost_usd": round(rng.random() / 100, 5),
                    "logprobs": [-0.1] * rng.randint(20, 60),
                },
            }
        )
    steps.append(
        {
            "source": "agent",
            "message": f"The records show one match, checked twice.\n\n{rng.randint(10, 900)}",
            "metrics": {"prompt_tokens": 900, "completion_tokens": 24},
        }
    )
    for index, step in enumerate(steps):
        step["step_id"] = index + 1
        step["timestamp"] = (record.submitted_at + timedelta(seconds=index * 2)).isoformat()
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": record.rollout_id,
        "agent": {"name": "rollout", "version": "0.1.0", "model_name": "small-instruct-3b"},
        "steps": steps,
        "extra": {
            "label": str(rng.randint(10, 900)),
            "reward": record.reward,
            "metadata": {
                "kind": kind,
                "difficulty": rng.choice(["easy", "hard"]),
                "source": "shop",
            },
        },
    }


class RunFolder:
    """Builds a run folder record by record."""

    def __init__(self, folder: Path, rows: int, n: int, **chat: Any) -> None:
        self.folder, self.rows, self.n = folder, rows, n
        (folder / "trajectories").mkdir(parents=True)
        self.manifest = manifest(rows, n, **chat)
        (folder / "manifest.json").write_bytes(dump_json(self.manifest))
        self.records: list[AttemptRecord] = []

    def add(self, record: AttemptRecord, document: Any = None) -> None:
        self.records.append(record)
        if document is not None and record.trajectory:
            data = document if isinstance(document, bytes) else dump_json(document)
            (self.folder / "trajectories" / record.trajectory).write_bytes(data)

    def write(self, *, metrics: bool = True) -> Path:
        head = encode_line({"schema": "rollout-events/1", "run_id": self.manifest["run_id"]})
        lines = [head, *(record_line(record) for record in self.records)]
        (self.folder / "events.jsonl").write_bytes(b"".join(lines))
        if metrics:
            final = {record.key: record for record in self.records}
            found = compute_metrics(final.values(), rows=self.rows, n=self.n)
            (self.folder / "metrics.json").write_bytes(dump_json(found.to_dict()))
        return self.folder


def record(row: int = 0, attempt: int = 0, **fields: Any) -> AttemptRecord:
    """A record of a success, unless *fields* say otherwise."""
    retry = fields.get("retry", 0)
    given: dict[str, Any] = {
        "rollout_id": f"r-{row}-{attempt}-{retry}",
        "outcome": AttemptOutcome.SUCCESS,
        "submitted_at": START,
        "duration_sec": 1.5,
        "trajectory": f"{row}-{attempt}-{retry}.json",
    }
    return AttemptRecord(row=row, attempt=attempt, **{**given, **fields})


def _ending(rng: random.Random, skill: float) -> dict[str, Any]:
    chance = rng.random()
    if chance < 0.04:
        return {
            "outcome": AttemptOutcome.FAILURE,
            "err_category": "timeout",
            "err_message": "the agent did not end within 120 seconds",
            "duration_sec": 120 + rng.random(),
        }
    if chance < 0.065:
        return {
            "outcome": AttemptOutcome.FAILURE,
            "err_category": "agent_error",
            "err_message": "KeyError: 'order_id' (agent.py, line 84, in refund)",
            "duration_sec": 2 + rng.random() * 20,
        }
    if chance < 0.075:
        return {
            "outcome": AttemptOutcome.ERROR,
            "err_category": "unreachable",
            "err_message": "the server closed the connection before it answered",
            "duration_sec": 0.2 + rng.random(),
            "trajectory": None,
        }
    seconds = min(100.0, rng.lognormvariate(2.3, 0.6))
    if chance < 0.085:
        return {"removed": True, "duration_sec": seconds}
    graded = rng.betavariate(0.6 + 5 * skill, 0.6 + 5 * (1 - skill))
    reward = 1.0 if graded > 0.66 else 0.0 if graded < 0.12 else round(graded, 2)
    return {
        "reward": reward,
        "passed": reward >= 0.8,
        "duration_sec": seconds,
        "metrics": {"tool_calls": rng.randint(1, 4), "format_ok": 1.0},
    }


def _attempts(rng: random.Random, rows: int, n: int) -> Iterator[tuple[AttemptRecord, str, str]]:
    for row in range(rows):
        task, kind = TASKS[row % len(TASKS)]
        prompt = task.format(a=rng.randint(2, 28), b=rng.randint(2, 28))
        skill = rng.betavariate(1.6, 1.1)
        for attempt in range(n):
            start = START + timedelta(seconds=(row * n + attempt) * 0.7)
            if row > rows * 0.6:
                start += timedelta(hours=3)
            retry = 0
            if rng.random() < 0.01:
                again = record(
                    row, attempt, outcome=AttemptOutcome.FAILURE, err_category="http_error",
                    err_message="503 from the chat endpoint", superseded=True, submitted_at=start,
                    trajectory=None,
                )  # fmt: skip
                yield again, prompt, kind
                retry = 1
            yield (
                record(
                    row, attempt, retry=retry, submitted_at=start,
                    agent_started_at=start + timedelta(seconds=rng.random()),
                    prompt_tokens=rng.randint(800, 6000), completion_tokens=rng.randint(60, 700),
                    **_ending(rng, skill),
                ),
                prompt,
                kind,
            )  # fmt: skip


def plausible(folder: Path, *, rows: int = 1000, n: int = 4, seed: int = 7) -> Path:
    """A run as it could have been, the same for the same seed."""
    rng = random.Random(seed)
    run = RunFolder(folder, rows, n)
    for found, prompt, kind in _attempts(rng, rows, n):
        run.add(found, document(rng, found, prompt, kind) if found.trajectory else None)
    return run.write()


def hostile(folder: Path) -> Path:
    """A run in which every text that could be is out to do harm."""
    run = RunFolder(folder, 3, 2, model=HOSTILE, url=HOSTILE)
    run.manifest["dataset"]["path"] = f"/data/{HOSTILE}"
    run.manifest["created_at"] = HOSTILE
    (folder / "manifest.json").write_bytes(dump_json(run.manifest))
    for row in range(3):
        failed = record(
            row, 0, rollout_id=HOSTILE, outcome=AttemptOutcome.FAILURE, err_category=HOSTILE,
            err_message=HOSTILE, metrics={HOSTILE: 1.0},
        )  # fmt: skip
        run.add(failed, harmful_document())
    run.add(record(0, 1, trajectory=f"../{HOSTILE}"))
    run.add(record(1, 1, trajectory="javascript:window.harmed=1"))
    run.add(record(2, 1, reward=1e308, duration_sec=1e-9), harmful_document())
    return run.write()


def harmful_document() -> dict[str, Any]:
    call = {
        "tool_call_id": HOSTILE,
        "function_name": HOSTILE,
        "arguments": {HOSTILE: HOSTILE, "code": HOSTILE},
    }
    return {
        "schema_version": HOSTILE,
        "agent": {"name": HOSTILE, "model_name": HOSTILE, "tool_definitions": [{HOSTILE: HOSTILE}]},
        "steps": [
            {"source": "system", "message": HOSTILE},
            {"source": "user", "message": [{"type": "text", "text": HOSTILE}, {"type": HOSTILE}]},
            {"source": HOSTILE, "message": HOSTILE, "timestamp": HOSTILE},
            {
                "source": "agent",
                "message": HOSTILE,
                "reasoning_content": HOSTILE,
                "tool_calls": [call],
                "observation": {
                    "results": [
                        {"source_call_id": HOSTILE, "content": HOSTILE},
                        {"source_call_id": "other", "content": HOSTILE, "extra": {"x": HOSTILE}},
                    ]
                },
                "metrics": {HOSTILE: HOSTILE, "logprobs": [1, 2, 3]},
                "extra": {HOSTILE: HOSTILE},
            },
        ],
        "extra": {"label": HOSTILE, "metadata": {HOSTILE: HOSTILE}, HOSTILE: HOSTILE},
    }
