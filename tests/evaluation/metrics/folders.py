"""Folders of runs that ended, as the runner leaves them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evaluation.metrics.attempts import NOON

from rollout.evaluation import AttemptRecord
from rollout.evaluation.folder.journal import EVENTS, encode_line, record_line
from rollout.evaluation.folder.manifest import new_manifest, write_manifest

INPUTS = {
    "dataset": {
        "path": "a.jsonl",
        "digest": "00",
        "selected": 9,
        "selection": None,
        "limit": None,
    },
    "server": {"url": "http://127.0.0.1:8000"},
    "chat": {"url": "http://127.0.0.1:9/v1", "model": "small"},
    "run": {"n": 1, "pass_threshold": 1.0},
}


def run_folder(folder: Path, records: Iterable[AttemptRecord], **changes: Any) -> Path:
    """Make the folder of a run, with *changes* of its inputs by section."""
    folder.mkdir()
    inputs = {section: {**values, **changes.get(section, {})} for section, values in INPUTS.items()}
    write_manifest(folder, new_manifest(folder.name, NOON, inputs))
    head = encode_line({"schema": "rollout-events/1", "run_id": folder.name})
    lines = b"".join(record_line(record) for record in records)
    (folder / EVENTS).write_bytes(head + lines)
    return folder
