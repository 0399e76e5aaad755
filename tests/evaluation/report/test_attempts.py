"""The attempts of a journal: in order, whatever order they were written in, and few bytes each."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from evaluation.metrics.folders import INPUTS
from evaluation.report.reading import Page
from evaluation.report.runs import START, RunFolder, record
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import EvaluationDamagedError
from rollout.evaluation.folder.journal import encode_line, record_line
from rollout.evaluation.folder.manifest import new_manifest, write_manifest
from rollout.evaluation.index import state_of
from rollout.evaluation.records import AttemptOutcome, AttemptRecord
from rollout.evaluation.report import gather as gather_module
from rollout.evaluation.report import page as page_module
from rollout.evaluation.report import write_report
from rollout.evaluation.report.gather import gather

HEAD = encode_line({"schema": "rollout-events/1", "run_id": "r"})

ENDINGS: list[dict[str, Any]] = [
    {"reward": 1.0, "passed": True},
    {"reward": -0.5},
    {"removed": True},
    {"outcome": AttemptOutcome.FAILURE, "superseded": True},
    {"outcome": AttemptOutcome.CANCELLED},
]


def expected(records: list[AttemptRecord]) -> list[tuple[AttemptRecord, list[AttemptRecord]]]:
    """The plain way: everything in a dictionary."""
    found: dict[tuple[int, int], list[AttemptRecord]] = {}
    for each in records:
        found.setdefault(each.key, []).append(each)
    told = []
    for key in sorted(found):
        settling = [each for each in found[key] if each.counts]
        final = (settling or found[key])[-1]
        told.append((final, [each for each in found[key] if each is not final]))
    return told


drawn_records = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from(ENDINGS)), max_size=40
)


@given(drawn_records)
def test_attempts_are_those_of_the_plain_way(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int, dict[str, Any]]]
) -> None:
    records = [
        record(row, attempt, retry=at, submitted_at=START + timedelta(seconds=7 * at), **ending)
        for at, (row, attempt, ending) in enumerate(drawn)
    ]
    folder = tmp_path_factory.mktemp("run")
    write_manifest(folder, new_manifest("r", START, INPUTS))
    (folder / "events.jsonl").write_bytes(HEAD + b"".join(map(record_line, records)))
    plain = expected(records)
    rewards = [final.reward for final, _ in plain if final.reward is not None]
    run = gather(folder)
    overview = run.overview
    for _ in range(2):
        assert [(each.record, each.others) for each in run.attempts()] == plain
    assert not any("cannot be read" in notice for notice in run.notices)
    assert overview.attempts == len(plain)
    assert overview.settled == sum(final.counts for final, _ in plain)
    assert overview.rows == len({final.row for final, _ in plain})
    assert overview.most == max((final.attempt + 1 for final, _ in plain), default=0)
    assert overview.states == Counter(state_of(final) for final, _ in plain)
    assert overview.tries == len(records) - len(plain)
    assert overview.rewards == ((min(rewards), max(rewards)) if rewards else None)
    assert overview.elapsed_sec == (7 * (len(records) - 1) + 1.5 if records else None)


def test_a_number_that_is_too_large_ends_the_journal(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", rows=1, n=1)
    run.add(record(0, 0, reward=0.5))
    run.add(record(2**64, 0))
    run.add(record(0, 2**64))
    page = Page(write_report(run.write(metrics=False)))
    assert page.attempts["row"] == [0]
    assert "The journal cannot be read to its end" in page.text


def test_a_journal_that_is_changed_while_it_is_read(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", rows=1, n=1)
    run.add(record(0, 0))
    path = run.write() / "events.jsonl"
    attempts = gather(run.folder).attempts()
    path.write_bytes(HEAD + b"x" * 1000)
    with pytest.raises(EvaluationDamagedError, match="changed while it was read"):
        list(attempts)


def peak_of_report(tmp_path: Path, rows: int, turn: int = 0) -> int:
    run = RunFolder(tmp_path / f"run-{rows}-{turn}", rows=rows, n=1)
    rng = random.Random(1)
    for row in range(rows):
        # Messages and prompts that differ, so that none of them can be kept once for all.
        failed = {"outcome": AttemptOutcome.FAILURE, "err_message": rng.randbytes(100).hex()}
        run.add(record(row, reward=None, **failed), {"steps": [{"source": "user", "message": "x"}]})
    folder = run.write()
    run.records.clear()
    tracemalloc.start()
    try:
        write_report(folder)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_a_few_bytes_for_each_attempt(tmp_path: Path) -> None:
    peak_of_report(tmp_path, 1)  # what is imported and cached
    # The smallest of a few, since a table of the interpreter may grow meanwhile.
    small, large = (
        min(peak_of_report(tmp_path, rows, turn) for turn in range(3)) for rows in (150, 1_150)
    )
    # Seventeen bytes in the index's blocks, and what the arrays of durations have.
    assert (large - small) / 1_000 < 100, (small, large)


@pytest.mark.parametrize("module", [gather_module, page_module])
def test_no_file_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    run = RunFolder(tmp_path / "run", rows=1, n=1)
    run.add(record(0, 0))
    folder = run.write(metrics=False)
    before = sorted(folder.iterdir())

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    name = "compute_metrics" if module is gather_module else "writing_atomic"
    monkeypatch.setattr(module, name, fail)
    with pytest.raises(OSError, match="No space"):
        write_report(folder)
    assert sorted(folder.iterdir()) == before
