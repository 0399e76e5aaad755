"""The page as a whole: what is in it, what cannot be in it, and that it is always written."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from evaluation.report.reading import Page, digest
from evaluation.report.runs import (
    HOSTILE,
    START,
    RunFolder,
    hostile,
    plausible,
    record,
)

from rollout.errors import EvaluationError
from rollout.evaluation.records import AttemptOutcome
from rollout.evaluation.report import page as page_module
from rollout.evaluation.report import write_report


def report(folder: Path) -> Page:
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path)


def talk(*messages: str, **extra: Any) -> dict[str, Any]:
    steps = [{"source": "user", "message": message} for message in messages]
    return {"steps": steps, "extra": extra}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run", rows=2, n=2)


class TestContent:
    def test_every_attempt_has_its_conversation(self, tmp_path: Path) -> None:
        folder = plausible(tmp_path / "run", rows=60, n=3)
        page = report(folder)

        entries = page.entries()
        assert list(entries) == [f"{row}-{attempt}" for row in range(60) for attempt in range(3)]
        told = [name for name, entry in entries.items() if "talk" in entry]
        kept = {path.name.rpartition("-")[0] for path in (folder / "trajectories").iterdir()}
        assert set(told) == kept
        assert {entries[name]["talk"]["steps"][1]["s"] for name in told} == {"user"}

    def test_columns_say_what_the_records_say(self, run: RunFolder) -> None:
        run.add(
            record(1, 1, outcome=AttemptOutcome.FAILURE, err_category="timeout", err_message="a\nb",
                   prompt_tokens=7, completion_tokens=3, duration_sec=2.5)
        )  # fmt: skip
        run.add(record(0, 1, reward=0.25), talk("What is\n6 * 7?"))
        run.add(record(0, 0, reward=1.0, passed=True, submitted_at=START))
        run.add(record(1, 0, removed=True))
        run.add(record(1, 2))
        found = report(run.write(metrics=False)).attempts

        assert (found["row"], found["attempt"]) == ([0, 0, 1, 1, 1], [0, 1, 0, 1, 2])
        states = [found["states"][state] for state in found["state"]]
        assert states == ["passed", "below", "removed", "failure", "ungraded"]
        assert found["reward"] == [1.0, 0.25, None, None, None]
        assert [found["categories"][i] if i >= 0 else None for i in found["category"]] == [
            None, None, None, "timeout", None,
        ]  # fmt: skip
        assert found["duration"][3] == 2.5
        assert (found["tokens_in"][3], found["tokens_out"][3]) == (7, 3)
        assert found["message"] == ["", "", "", "a b", ""]
        assert found["prompts"] == {"0": "What is 6 * 7?"}
        assert found["submitted"][0] == START.timestamp() * 1000

    def test_the_headline_is_there_without_scripts(self, run: RunFolder) -> None:
        for row in range(2):
            run.add(record(row, 0, reward=1.0, passed=True, prompt_tokens=1234))
            run.add(record(row, 1, reward=0.0))
        page = report(run.write())

        for words in ("small-instruct-3b", "support-tasks.jsonl", "50.0", "0.500", "pass@2",
                      "100.0", "4 of 4", "2,468", "2026-03-14 09:26 UTC"):  # fmt: skip
            assert words in page.text, words

    def test_a_figure_of_zero_is_one(self, run: RunFolder) -> None:
        run.add(record(reward=0.0, duration_sec=0.0, prompt_tokens=0, completion_tokens=0))
        shown = report(run.write()).entries()["0-0"]["record"]

        assert [shown[name] for name in ("reward", "duration", "prompt", "completion")] == [0] * 4

    def test_what_was_expected_and_what_was_answered(self, run: RunFolder) -> None:
        steps = [
            {"source": "user", "message": "6 * 7?"},
            {"source": "agent", "message": "Let me see."},
            {"source": "agent", "message": "It is\n42" + "!" * 100},
        ]
        run.add(record(0, 0), {"steps": steps, "extra": {"label": "42", "seed": 3}})
        run.add(record(0, 1, trajectory=None))
        run.add(record(1, 0), {"steps": steps[:1]})
        page = report(run.write())

        assert page.attempts["labels"] == {"0": "42"}
        assert page.attempts["answer"] == ["…" + "!" * 79, "", ""]
        assert page.entries()["0-0"]["talk"]["named"] == "seed"

    def test_metrics_of_the_samples_are_in_the_summary(self, run: RunFolder) -> None:
        run.add(record(reward=1.0, metrics={"tool_calls": 3, "refusals": 0}))
        page = report(run.write())

        assert "tool calls" in page.text
        assert "3.000" in page.text
        assert "refusals" not in page.text

    def test_curves_come_from_the_metrics(self, run: RunFolder) -> None:
        for row in range(2):
            run.add(record(row, 0, reward=1.0, passed=True))
            run.add(record(row, 1, reward=0.0))
        charts = report(run.write()).data["charts"]

        assert charts["threshold"] == 0.8
        assert [point[:2] for point in charts["pass_at"]] == [[1, 0.5], [2, 1.0]]
        assert [point[:2] for point in charts["pass_hat"]] == [[1, 0.5], [2, 0.0]]
        for _, value, low, high in charts["pass_at"] + charts["pass_hat"]:
            assert low <= value <= high
            assert low < high

    def test_the_last_record_that_settles_counts_and_the_others_are_kept(
        self, run: RunFolder
    ) -> None:
        failed = record(outcome=AttemptOutcome.FAILURE, err_category="http_error", superseded=True)
        run.add(failed)
        run.add(record(retry=1, reward=1.0, passed=True), talk("hello"))
        run.add(record(retry=2, outcome=AttemptOutcome.CANCELLED))
        run.add(record(1, 0, outcome=AttemptOutcome.CANCELLED))
        run.add(record(1, 0, retry=1, outcome=AttemptOutcome.CANCELLED))
        page = report(run.write(metrics=False))

        entries = page.entries()
        assert entries["0-0"]["record"]["retry"] == 1
        assert [other["state"] for other in entries["0-0"]["others"]] == ["failure", "cancelled"]
        assert entries["0-0"]["others"][0]["superseded"] is True
        assert entries["1-0"]["record"]["retry"] == 1
        assert page.attempts["tries"] == [3, 2]

    def test_two_reports_of_one_run_are_the_same(self, tmp_path: Path) -> None:
        folder = plausible(tmp_path / "run", rows=10, n=2)
        first = write_report(folder).read_bytes()
        assert write_report(folder).read_bytes() == first

    def test_a_report_is_replaced_as_a_whole(
        self, run: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = write_report(run.write()).read_bytes()
        run.add(record())
        run.write()

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            write_report(run.folder)
        monkeypatch.undo()
        assert (run.folder / "report.html").read_bytes() == before
        assert not list(run.folder.glob("*.tmp")) + list(run.folder.glob(".*.tmp"))


class TestSealed:
    """Nothing runs, and nothing is loaded, but what the page itself holds."""

    @pytest.fixture(params=[plausible, hostile])
    def page(self, request: pytest.FixtureRequest, tmp_path: Path) -> Page:
        options = {"rows": 8, "n": 2} if request.param is plausible else {}
        return report(request.param(tmp_path / "run", **options))

    def test_the_policy_allows_one_script_and_one_style_and_no_connection(self, page: Page) -> None:
        (code,), (style,) = page.code, page.styles
        assert page.policy == {
            "default-src": ["'none'"],
            "script-src": [digest(code)],
            "style-src": [digest(style)],
            "base-uri": ["'none'"],
            "form-action": ["'none'"],
            "require-trusted-types-for": ["'script'"],
            "trusted-types": ["'none'"],
        }
        # It comes before anything that it has to hold for.
        tags = [tag for tag, _ in page.tags]
        assert tags.index("meta") < tags.index("style") < tags.index("script")

    def test_no_element_and_no_attribute_comes_from_data(self, page: Page) -> None:
        assert {tag for tag, _ in page.tags} <= {
            "html", "head", "meta", "title", "style", "body", "svg", "symbol", "circle", "path",
            "rect", "use", "a", "header", "div", "p", "h1", "h2", "h3", "bdi", "span", "label",
            "input", "main", "noscript", "section", "ul", "li", "b", "dl", "dt", "dd", "footer",
            "kbd", "dialog", "script",
        }  # fmt: skip
        for tag, attributes in page.tags:
            assert not [name for name in attributes if name.startswith("on") or name == "style"]
            assert "src" not in attributes
            assert str(attributes.get("href", "#")).startswith("#"), tag

    def test_no_address_is_ever_asked(self, page: Page) -> None:
        (code,), (style,) = page.code, page.styles
        assert "url(" not in style
        assert "@import" not in style
        for word in ("fetch(", "XMLHttpRequest", "WebSocket", "EventSource", "sendBeacon",
                     "import(", "new Image", "innerHTML", "outerHTML", "insertAdjacentHTML",
                     "document.write", "eval(", "new Function", "createContextualFragment",
                     "DOMParser", "srcdoc"):  # fmt: skip
            assert word not in code, word
        addresses = [part.split('"')[0] for part in code.split("http")[1:]]
        assert addresses == ["://www.w3.org/2000/svg"]

    def test_blocks_hold_no_markup(self, page: Page) -> None:
        blocks = [text for attributes, text in page.scripts if "type" in attributes]
        assert len(blocks) >= 2
        for block in blocks:
            assert block.isascii()
            assert not set("<>&") & set(block)

    def test_no_character_turns_the_direction_of_the_page(self, page: Page) -> None:
        assert not set("\u2028\u2029\u202e\0\u001b") & set(page.source)


def test_hostile_text_is_kept_as_it_is(tmp_path: Path) -> None:
    page = report(hostile(tmp_path / "run"))
    entry = page.entries()["0-0"]

    assert entry["record"]["message"] == HOSTILE
    assert entry["talk"]["steps"][0] == {"s": "system", "t": HOSTILE}
    (call,) = entry["talk"]["steps"][3]["c"]
    assert call["name"] == HOSTILE
    assert call["args"] == [[HOSTILE, HOSTILE], ["code", HOSTILE]]
    assert call["o"] == [{"t": HOSTILE}]
    assert entry["talk"]["label"] == HOSTILE


class TestIncomplete:
    """A report is written of whatever there is, and says what is not."""

    def test_no_attempts(self, run: RunFolder) -> None:
        page = report(run.write(metrics=False))
        assert page.attempts["row"] == []
        assert page.entries() == {}
        assert "4 of 4 attempts have no result yet" in page.text

    def test_not_even_a_journal(self, run: RunFolder) -> None:
        page = report(run.folder)
        assert "4 of 4 attempts have no result yet" in page.text

    def test_some_attempts(self, run: RunFolder) -> None:
        run.add(record(reward=1.0, passed=True), talk("hello"))
        run.add(record(0, 1, outcome=AttemptOutcome.CANCELLED))
        page = report(run.write(metrics=False))
        assert "3 of 4 attempts have no result yet" in page.text
        assert "100.0" in page.text

    def test_a_complete_run_has_no_notice(self, run: RunFolder) -> None:
        for row in range(2):
            for attempt in range(2):
                run.add(record(row, attempt))
        page = report(run.write())
        assert not [tag for tag, attributes in page.tags if attributes.get("role") == "note"]

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"results": 1}', b"\xff", b"[" * 5000])
    def test_damaged_metrics_are_worked_out_anew(self, run: RunFolder, content: bytes) -> None:
        run.add(record(reward=0.625))
        (run.write() / "metrics.json").write_bytes(content)
        assert "0.625" in report(run.folder).text

    def test_metrics_older_than_the_journal_are_not_used(self, run: RunFolder) -> None:
        run.add(record(reward=0.5))
        run.write()
        run.add(record(1, 0, reward=0.75))
        assert "0.625" in report(run.write(metrics=False)).text

    def test_metrics_of_another_shape(self, run: RunFolder) -> None:
        run.add(record(reward=0.5))
        odd = {"results": {"attempts": {"settled": 1}, "pass_rate": 3, "pass_at_k": [1, {}]}}
        (run.write() / "metrics.json").write_text(json.dumps(odd))
        assert report(run.folder).data["charts"]["pass_at"] == [[1, 0.0, None, None]]

    @pytest.mark.parametrize(
        "content", [b"", b"\xff", b"[1]", b'{"chat": 3}', b'{"run": {"n": "x"}}', b"[" * 5000]
    )
    def test_a_damaged_manifest(self, run: RunFolder, content: bytes) -> None:
        run.add(record(reward=0.5))
        (run.write() / "manifest.json").write_bytes(content)
        page = report(run.folder)
        assert "manifest.json is damaged" in page.text
        assert page.attempts["reward"] == [0.5]

    @pytest.mark.parametrize("n", [0, -1, 10**400, 10**15, 1e300, 2.5, True, None, "2"])
    def test_a_manifest_with_odd_numbers(self, run: RunFolder, n: Any) -> None:
        run.manifest["run"] |= {"n": n, "pass_threshold": n}
        run.manifest["dataset"] |= {"selected": n}
        (run.folder / "manifest.json").write_text(json.dumps(run.manifest))
        run.add(record(reward=0.5))
        assert report(run.write(metrics=False)).attempts["reward"] == [0.5]

    def test_a_torn_journal(self, run: RunFolder) -> None:
        run.add(record(0, 0))
        run.add(record(0, 1))
        path = run.write(metrics=False) / "events.jsonl"
        path.write_bytes(path.read_bytes()[:-20])
        assert report(run.folder).attempts["attempt"] == [0]

    def test_a_damaged_journal_shows_what_comes_before(self, run: RunFolder) -> None:
        for attempt in range(2):
            run.add(record(0, attempt))
        path = run.write(metrics=False) / "events.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(lines[0] + lines[1] + lines[2].replace(b"success", b"failure") + lines[1])
        page = report(run.folder)
        assert page.attempts["attempt"] == [0]
        assert "The journal cannot be read to its end" in page.text
        assert "line 3" in page.text

    def test_numbers_of_any_size(self, run: RunFolder) -> None:
        run.add(record(reward=1.0))
        run.add(record(0, 1, duration_sec=1e308, reward=-1e308))
        run.add(record(1, 1, prompt_tokens=10**400, completion_tokens=10**17))
        page = report(run.write(metrics=False))
        assert page.attempts["reward"] == [1.0, -1e308, None]
        assert page.attempts["tokens_in"][2] is None
        assert all(math.isfinite(value) for value in page.attempts["duration"])

    def test_an_attempt_that_no_run_has(self, run: RunFolder) -> None:
        run.add(record(0, 10**12, reward=0.5))
        run.add(record(10**12, 0, reward=0.5))
        page = report(run.write(metrics=False))
        assert page.attempts["attempt"] == [10**12, 0]
        assert "The figures cannot be computed" in page.text

    def test_a_folder_without_a_run_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(EvaluationError, match="holds no evaluation"):
            write_report(tmp_path)
        assert not list(tmp_path.iterdir())


class TestConversationFiles:
    """A conversation that cannot be shown costs the report nothing but itself."""

    @pytest.mark.parametrize(
        ("content", "note"),
        [
            (b"", "not JSON"),
            (b"\xff\xfe{", "not JSON"),
            (b"[" * 100_000, "not JSON"),
            (b"[1, 2]", "not a document of steps"),
            (b'"text"', "not a document of steps"),
        ],
    )
    def test_content(self, run: RunFolder, content: bytes, note: str) -> None:
        run.add(record(), content)
        entry = report(run.write()).entries()["0-0"]
        assert note in entry["note"]
        assert "talk" not in entry

    def test_missing(self, run: RunFolder) -> None:
        run.add(record())
        run.add(record(0, 1, trajectory=None))
        entries = report(run.write()).entries()
        assert entries["0-0"]["note"] == "The trajectory file is missing."
        assert entries["0-1"]["note"] == "No conversation of this attempt was kept."

    @pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
    def test_no_file_at_all(self, run: RunFolder, kind: str) -> None:
        secret = run.folder / "secret.json"
        secret.write_text('{"steps": [{"source": "user", "message": "secret"}]}')
        path = run.folder / "trajectories" / "0-0-0.json"
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(secret)
        run.add(record())
        entry = report(run.write()).entries()["0-0"]
        assert "note" in entry
        assert "talk" not in entry

    @pytest.mark.parametrize(
        "name", ["../secret.json", "/etc/hosts", "a/../../secret.json", "", "\0", "..", "x" * 300]
    )
    def test_a_name_cannot_lead_elsewhere(self, run: RunFolder, name: str) -> None:
        (run.folder / "secret.json").write_text('{"steps": []}')
        run.add(record(trajectory=name))
        entry = report(run.write()).entries()["0-0"]
        assert entry["note"] == "The record names a file that cannot be one of this run."

    def test_one_that_is_too_large_is_not_read(
        self, run: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rollout._page.conversation.MAX_FILE", 10)
        run.add(record(), talk("hello"))
        assert "too large" in report(run.write()).entries()["0-0"]["note"]

    def test_a_page_that_is_full_leaves_the_rest_in_their_files(
        self, run: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(page_module, "MAX_PACKED", 1)
        # Random text, since a block closes by what it holds.
        noise = os.urandom(300_000).hex()
        run.add(record(0, 0), talk(*(noise[i : i + 90_000] for i in range(0, 540_000, 90_000))))
        run.add(record(0, 1), talk("hello"))
        page = report(run.write())
        entries = page.entries()
        assert "talk" in entries["0-0"]
        assert "talk" not in entries["0-1"]
        assert "as large as it may get" in entries["0-1"]["note"]

    def test_thousands_of_categories_do_not_make_a_menu_of_thousands(self, tmp_path: Path) -> None:
        run = RunFolder(tmp_path / "many", rows=300, n=1)
        for row in range(300):
            failed = {"outcome": AttemptOutcome.FAILURE, "err_category": f"c{row}"}
            run.add(record(row, trajectory=None, **failed))
        found = report(run.write()).attempts
        assert len(found["categories"]) == 201
        assert found["categories"][-1] == "other"
