"""``rollout eval fuzz-grader``: findings on the screen, in a file, and again."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

GRADERS = """
import os
import signal

import trio
from rollout import Grader
from support import local_backend, make_app


class Contains(Grader):
    async def grade(self, ctx):
        assert ctx.metadata != {"broken": True}, "this row is broken"
        ctx.set_reward(1.0 if ctx.label in ctx.sample.messages[-1]["content"] else 0.0)


class Exact(Grader):
    async def grade(self, ctx):
        ctx.set_reward(1.0 if ctx.sample.messages[-1]["content"] == ctx.label else 0.0)


class Signalled(Contains):
    async def grade(self, ctx):
        await super().grade(ctx)
        if " or " in ctx.sample.messages[-1]["content"]:
            os.kill(os.getpid(), signal.SIGINT)
            await trio.sleep_forever()


contains = make_app(local_backend(grader=Contains))
exact = make_app(local_backend(grader=Exact))
signalled = make_app(local_backend(grader=Signalled))
without = make_app(local_backend(grader=None))
"""

SKIP = [
    word
    for family in ("whitespace", "number", "latex", "empty", "prompt", "injection", "huge", "odd")
    for word in ("--skip", family)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a dataset and graders."""
    rows = [{"user_prompt": f"What is 6 * {7 + at}?", "ground_truth": str(42 + 6 * at)}
            for at in range(6)]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (tmp_path / "fuzzed.py").write_text(GRADERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fuzz(cli, *arguments, app="contains", skip=SKIP):
    given = ("--app", f"fuzzed.py:{app}", "--examples", "20", *skip, *arguments)
    return cli("eval", "fuzz-grader", "rows.jsonl", *given)


def test_findings_are_printed_kept_and_graded_again(cli, folder):
    done = fuzz(cli)
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "Passed, and deserves nothing:",
        '  near         "142"  (row 0, label "42", reward 1.0)',
        '  denial       "not 42"  (row 0, label "42", reward 1.0)',
        '  candidates   "42 or 43"  (row 0, label "42", reward 1.0)',
    ]
    assert done.stderr == (
        "rollout: 3 answers judged wrongly; they are in grader-findings.json, "
        "again: rollout eval fuzz-grader --replay grader-findings.json\n"
    )
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {
        "fuzzed.py", "grader-findings.json", "rows.jsonl",
    }  # fmt: skip
    document = json.loads(Path("grader-findings.json").read_text())
    assert document["complete"] is True
    assert [each["answer"] for each in document["findings"]] == ["142", "not 42", "42 or 43"]
    again = cli("eval", "fuzz-grader", "--replay", "grader-findings.json")
    assert again.exit_code == 1
    assert again.stdout == done.stdout + "0 of 3 judged rightly\n"
    assert "3 answers of grader-findings.json judged wrongly" in again.stderr
    repaired = cli(
        "eval", "fuzz-grader", "--replay", "grader-findings.json", "--app", "fuzzed.py:exact"
    )
    assert repaired.exit_code == 0
    assert repaired.stdout == "No answer was judged wrongly.\n3 of 3 judged rightly\n"
    assert "is there already; name another file with --output" in fuzz(cli).stderr


def test_the_page_shows_what_the_example_prints(cli, tmp_path):
    example = ROOT / "examples" / "evaluation"
    done = cli(
        "eval", "fuzz-grader", str(example / "questions.jsonl"), "--examples", "20",
        "--app", f"{example}/server.py:app", "--output", str(tmp_path / "found.json"),
    )  # fmt: skip
    assert f"```text\n{done.stdout}```" in (ROOT / "docs" / "fuzzing.md").read_text("utf-8")


def test_json(cli, folder):
    done = fuzz(cli, "--json", "--seed", "3", "--rows", "1-2")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["settings"]["seed"] == 3
    assert [each["row"] for each in document["findings"]] == [1, 1, 1]
    again = cli("eval", "fuzz-grader", "--replay", "grader-findings.json", "--json")
    assert json.loads(again.stdout) == {"replayed": 3, "findings": document["findings"]}


def test_the_config_of_an_evaluation_has_columns_and_threshold(cli, folder):
    Path("rows.csv").write_text("question;answer\n6 * 7?;42\n")
    Path("eval.toml").write_text("""
[server]
app = "fuzzed.py:contains"
[chat]
url = "http://127.0.0.1:9/v1"
[dataset]
path = "rows.csv"
delimiter = ";"
columns = { user_prompt = "question", ground_truth = "answer" }
[run]
output = "runs"
pass_threshold = 2.0
""")
    given = ("--app", "fuzzed.py:contains", "--examples", "5", *SKIP)
    done = cli("eval", "fuzz-grader", "eval.toml", *given)
    assert done.exit_code == 1
    assert '  label        "42"  (row 0, label "42", reward 1.0)' in done.stdout
    assert "No label passes as it is" in done.stdout
    assert json.loads(Path("grader-findings.json").read_text())["settings"]["pass_threshold"] == 2
    Path("grader-findings.json").unlink()
    done = cli("eval", "fuzz-grader", "eval.toml", "--pass-threshold", "1", *given)
    assert "not 42" in done.stdout
    assert "No label passes" not in done.stdout


def test_a_grader_with_nothing_wrong_leaves_no_file(cli, folder):
    skip = [*SKIP, "--skip", "full-stop", "--skip", "punctuation"]
    done = fuzz(cli, app="exact", skip=skip)
    assert (done.exit_code, done.stdout) == (0, "No answer was judged wrongly.\n")
    assert not Path("grader-findings.json").exists()


def test_rows_on_which_the_grader_fails(cli, folder):
    rows = [{"user_prompt": "?", "ground_truth": "4", "metadata": {"broken": True}}] * 5
    Path("rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    skip = [*SKIP, "--skip", "near", "--skip", "denial", "--skip", "candidates", "--skip", "digits"]
    done = fuzz(cli, skip=skip)
    assert done.exit_code == 1
    assert done.stdout.count("this row is broken") == 3
    assert "  label        and in 2 rows more" in done.stdout
    assert done.stderr.count("\n") == 1  # failures are findings and no log
    assert len(json.loads(Path("grader-findings.json").read_text())["findings"]) == 5


def test_an_interruption_leaves_what_was_found(cli, folder):
    done = fuzz(cli, app="signalled")
    assert done.exit_code == 128 + signal.SIGINT
    assert "2 answers judged wrongly so far, in grader-findings.json" in done.stderr
    document = json.loads(Path("grader-findings.json").read_text())
    assert document["complete"] is False
    assert [each["family"] for each in document["findings"]] == ["near", "denial"]


def test_hypothesis_is_an_extra(cli, folder, monkeypatch):
    for name in ("families", "search"):
        monkeypatch.delitem(sys.modules, f"rollout.evaluation.fuzzing.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    done = fuzz(cli)
    assert done.exit_code == 2
    assert 'install it with pip install "trio-rollout[simulation]"' in done.stderr
    assert not Path("grader-findings.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--app", "fuzzed.py:contains"], "DATASET is missing"),
        (["rows.jsonl"], "--app is missing"),
        (["rows.jsonl", "--app", "fuzzed.py:without"], "has no LocalBackend with a grader"),
        (["no.jsonl", "--app", "fuzzed.py:contains"], "no.jsonl"),
        (["rows.jsonl", "--app", "fuzzed.py:contains", "--form", "x"], "form must have {answer}"),
        (["rows.jsonl", "--app", "fuzzed.py:contains", "--skip", "all"], "--skip"),
        (
            ["rows.jsonl", "--app", "fuzzed.py:contains", "--output", "no/f"],
            "there is no folder no",
        ),
        (["rows.jsonl", "--replay", "found.json"], "drop DATASET"),
        (["--replay", "found.json", "--grader-timeout", "3"], "drop --grader-timeout"),
        (["--replay", "rows.jsonl"], "rows.jsonl is"),
        (["rows.jsonl", "--app", "fuzzed.py:contains", "--grader-timeout", "0"], "grader_timeout"),
    ],
)
def test_bad_input_gets_one_line(cli, folder, arguments, said):
    done = cli("eval", "fuzz-grader", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not Path("grader-findings.json").exists()
