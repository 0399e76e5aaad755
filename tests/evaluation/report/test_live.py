"""The report of a run that goes on: what an update reads, and what a page gets of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evaluation.report.runs import HOSTILE, RunFolder, harmful_document, plausible, record

from rollout.errors import EvaluationDamagedError
from rollout.evaluation.folder.journal import read_records
from rollout.evaluation.records import AttemptOutcome
from rollout.evaluation.report import live
from rollout.evaluation.report import page as page_module
from rollout.evaluation.report.gather import Attempt, gather
from rollout.evaluation.report.summary import summarize
from rollout.evaluation.sequential import drawn_order

FAILED = {"outcome": AttemptOutcome.FAILURE, "err_category": "timeout", "err_message": "too slow"}


def talk(text: str) -> dict[str, Any]:
    return {"steps": [{"source": "user", "message": text}]}


def rows_of(report: live.LiveReport, start: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.rows(start)[0].splitlines()]


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run", rows=3, n=2)


@pytest.fixture
def report(run):
    found = live.LiveReport(run.folder, run.manifest)
    yield found
    found.close()


def test_a_run_without_records_has_a_page(run, report):
    report.update()
    assert b"This run is not complete: 6 of 6" in report.page
    assert b"connect-src &#39;self&#39;" in report.page
    assert report.rows(0) == (b"", False)


def test_an_update_reads_what_is_new_alone(run, report, monkeypatch):
    run.add(record(0, 0, reward=1.0, passed=True), talk("the first"))
    run.write(metrics=False)
    report.update()
    (row,) = rows_of(report)
    assert (row["row"], row["reward"], row["prompt"]) == (0, 1.0, "the first")
    page, end = report.page, len(report.rows(0)[0])
    report.update()
    assert (report.version, report.page) == (1, page)

    read = []

    def entry_of(folder: Path, attempt: Attempt, *, room: bool) -> Any:
        read.append(attempt.record.key)
        return page_module.entry_of(folder, attempt, room=room)

    monkeypatch.setattr(live, "entry_of", entry_of)
    run.add(record(2, 1, **FAILED), talk("the second"))
    run.write(metrics=False)
    report.update()
    assert read == [(2, 1)]
    (row,) = rows_of(report, end)
    assert (row["category"], row["message"], row["reward"]) == ("timeout", "too slow", None)
    assert (report.version, len(rows_of(report))) == (2, 2)


def test_a_line_that_is_being_written_is_read_once_it_is_whole(run, report):
    run.add(record(0, 0))
    run.add(record(0, 1))
    whole = (run.write(metrics=False) / "events.jsonl").read_bytes()
    (run.folder / "events.jsonl").write_bytes(whole[:-20])
    report.update()
    assert len(rows_of(report)) == 1
    (run.folder / "events.jsonl").write_bytes(whole)
    report.update()
    assert len(rows_of(report)) == 2


def test_the_figures_are_those_of_the_report(tmp_path):
    folder = plausible(tmp_path / "run", rows=40, n=3)
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    report = live.LiveReport(folder, manifest)
    for end in (10, 60, len(lines)):
        (folder / "events.jsonl").write_bytes(b"".join(lines[:end]))
        report.update()
        for card in summarize(gather(folder)).cards:
            assert f'<p class="card-value">{card.value}'.encode() in report.page
            assert card.note.encode() in report.page
    assert len(rows_of(report)) == len(list(read_records(folder)))
    report.close()


def test_an_attempt_that_is_run_again_replaces_its_row_and_counts_once(run, report):
    run.add(record(0, 0, **FAILED))
    run.write(metrics=False)
    report.update()
    run.add(record(0, 0, retry=1, superseded=True, **FAILED))
    run.write(metrics=False)
    report.update()
    assert len(rows_of(report)) == 1  # the failure stands until its attempt has ended again
    run.add(record(0, 0, retry=2, reward=1.0, passed=True), talk("at last"))
    run.write(metrics=False)
    report.update()
    first, last = rows_of(report)
    assert (first["tries"], last["tries"], last["prompt"]) == (1, 3, "at last")
    assert b'<p class="card-value">100.0' in report.page
    entry = json.loads(report.entry(0, 0) or b"")
    assert (entry["record"]["retry"], len(entry["others"])) == (2, 2)
    assert report.entry(1, 0) is None


def test_a_damaged_journal_is_an_error_and_the_page_stays(run, report):
    run.add(record(0, 0))
    run.write(metrics=False)
    report.update()
    page = report.page
    with (run.folder / "events.jsonl").open("ab") as file:
        file.write(b'{"damaged": true}\n')
    with pytest.raises(EvaluationDamagedError):
        report.update()
    assert report.page == page


def test_hostile_text_stays_text(run, report):
    run.add(record(0, 0, **{**FAILED, "err_message": HOSTILE}), harmful_document())
    run.write(metrics=False)
    report.update()
    assert b"harmed" not in report.page
    assert report.rows(0)[0].isascii()


def test_rows_come_in_pieces(run, report, monkeypatch):
    for number in range(6):
        run.add(record(number // 2, number % 2))
    run.write(metrics=False)
    report.update()
    monkeypatch.setattr(live, "_MOST_ROWS_BYTES", len(report.rows(0)[0]) // 2 + 5)
    data, more = report.rows(0)
    assert (len(data.splitlines()), more) == (3, True)
    rest, more = report.rows(len(data))
    assert (len(rest.splitlines()), more) == (3, False)
    assert report.rows(10**9) == (b"", False)


def test_a_run_that_stops_when_enough_is_known_shows_its_sequence(tmp_path):
    run = RunFolder(tmp_path / "run", rows=60, n=1)
    run.manifest["run"] |= {"until": 0.1, "seed": 1}
    (run.folder / "manifest.json").write_text(json.dumps(run.manifest))
    report = live.LiveReport(run.folder, run.manifest)
    for row in drawn_order(range(60), 1)[:20]:
        run.add(record(row, 0, reward=1.0, passed=True), talk("?"))
    run.write(metrics=False)
    report.update()
    assert b"95% confidence sequence" in report.page
    assert b"40 of 60 attempts have no result yet" in report.page
    for row in drawn_order(range(60), 1)[20:50]:
        run.add(record(row, 0, reward=1.0, passed=True), talk("?"))
    run.write(metrics=False)
    report.update()
    assert b"The run stopped early" in report.page
    report.close()
