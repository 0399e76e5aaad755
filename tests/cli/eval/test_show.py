"""``rollout eval show``, ``report`` and ``compare``, on runs that are complete and that are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli.harness import Cli
from evaluation.metrics.folders import run_folder
from evaluation.run.cases import record

from rollout.cli.eval.compare import _ranges
from rollout.cli.eval.summary import _curves, print_summary
from rollout.evaluation import compute_metrics
from rollout.evaluation.folder.journal import decode_line, encode_line
from rollout.evaluation.metrics import threshold_note

MISSING = "not complete: 6 of 10 attempts have ended; rollout eval run goes on with it"


def written(folder):
    """Every file of a run and its bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_show(cli, finished):
    before = written(finished)
    done = cli("eval", "show", str(finished))
    assert (done.exit_code, done.stderr) == (0, "")
    assert "5 rows, n = 2" in done.stdout
    assert "8 attempts)" in done.stdout
    assert "10 attempts)" in done.stdout
    rows = [line.strip("│ ").split() for line in done.stdout.splitlines() if "│" in line]
    assert [[*row[:3], row[6]] for row in rows if row[0] in {"1", "2"}] == [
        ["1", "│", "0.400", "0.400"],
        ["2", "│", "0.400", "0.400"],
    ]
    assert "error" not in done.stdout.replace("agent_error", "")
    assert "tokens" not in done.stdout
    assert "not complete" not in done.stdout
    assert done.stdout.endswith(f"Report: {finished / 'report.html'}\n")
    assert written(finished) == before


def test_show_failures(cli, finished):
    done = cli("eval", "show", str(finished), "--failures")
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        r"row 2 attempt 0: failure, agent_error: \x1b[31mboom",
        r"row 2 attempt 1: failure, agent_error: \x1b[31mboom",
    ]


@pytest.mark.parametrize("options", [[], ["--failures"]])
def test_show_json(cli, finished, options):
    done = cli("eval", "show", str(finished), "--json", *options)
    (line,) = done.stdout.splitlines()
    document = json.loads(line)
    assert document["complete"] is True
    assert document["metrics"] == json.loads((finished / "metrics.json").read_text())
    failed = [(each["row"], each["err_category"]) for each in document.get("failures", [])]
    assert failed == [(2, "agent_error")] * 2 * len(options)


def test_show_a_run_that_is_not_complete(cli, unfinished):
    before = written(unfinished)
    done = cli("eval", "show", str(unfinished))
    assert done.exit_code == 0
    assert f"The run is {MISSING}.\n" in done.stdout
    assert "rollout eval report makes the report" in done.stdout
    document = json.loads(cli("eval", "show", str(unfinished), "--json").stdout)
    assert (document["complete"], document["report"]) == (False, None)
    assert document["counts"]["settled"] == 6
    assert written(unfinished) == before


def test_report_makes_the_files_again(cli, finished):
    before = written(finished)
    for name in ("metrics.json", "index.jsonl", "report.html"):
        (finished / name).unlink()
    done = cli("eval", "report", str(finished))
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{finished / 'report.html'}\n"
    assert written(finished).keys() == before.keys()
    for name in ("metrics.json", "index.jsonl"):
        assert (finished / name).read_bytes() == before[finished / name]
    assert b"<html" in (finished / "report.html").read_bytes()


def test_report_of_a_run_that_is_not_complete(cli, unfinished):
    done = cli("eval", "report", str(unfinished))
    assert done.exit_code == 0
    assert done.stdout == f"{unfinished / 'report.html'}\n"
    assert done.stderr == f"rollout: the run is {MISSING}\n"


@pytest.fixture
def other(finished, server, chat, tmp_path):
    """Another run of the same rows, in which row 1 passes and row 3 does not."""
    config = tmp_path / "other.toml"
    rows = json.loads((finished / "manifest.json").read_text())["dataset"]["path"]
    config.write_text(
        f'[server]\nurl = "{server}"\n[chat]\nurl = "{chat}"\nmodel = "other"\n'
        f"[dataset]\npath = {json.dumps(rows)}\n[run]\noutput = {json.dumps(str(tmp_path / 'b'))}\n"
        "n = 2\npass_threshold = 0.0\n"
    )
    assert Cli()("eval", "run", str(config)).exit_code == 0
    return tmp_path / "b"


def test_compare(cli, finished, other):
    done = cli("eval", "compare", str(finished), str(other))
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"A: {finished}\nB: {other}\n")
    assert "5 paired rows" in done.stdout
    cells = {
        line.strip("│ ").split("│")[0].strip(): [
            cell.strip() for cell in line.strip("│ ").split("│")[1:]
        ]
        for line in done.stdout.splitlines()
        if line.startswith("│")
    }
    assert cells["pass rate"][:3] == ["0.400", "0.800", "+0.400"]
    assert "(95%)" in cells["pass rate"][3]
    assert cells["mean reward"] == ["0.500", "0.500", "0", "-"]
    assert "Rows: 2 better, 0 worse, 3 the same (sign test p = 0.5)" in done.stdout
    assert (
        "Passed in A, not in B: no row\nPassed in B, not in A: 1, 4\n"
        "  row 1: row 1\n    A: 41 (reward 0)\n    B: 41 (reward 0)\n"
        "  row 4: row 4\n    A: 41 (reward 0)\n    B: 41 (reward 0)\n"
    ) in done.stdout
    assert "Differs: run.pass_threshold: 1.0 and 0.0" in done.stdout
    assert "not complete" not in done.stdout


def test_compare_json(cli, finished, other):
    done = cli("eval", "compare", str(finished), str(other), "--json")
    (line,) = done.stdout.splitlines()
    document = json.loads(line)
    assert document["a"] == {"folder": str(finished), "complete": True}
    assert document["fail_to_pass"] == [1, 4]
    assert document["pass_rate"]["difference"] == pytest.approx(0.4)


def test_compare_says_which_run_is_ahead(cli, finished, other, unfinished):
    done = cli("eval", "compare", str(finished), str(other), "--sequential")
    assert (
        "Sequential: open which run is ahead after 5 of 5 rows; B - A of the pass rate +0.400, "
        "95% confidence sequence -"
    ) in done.stdout
    document = json.loads(
        cli("eval", "compare", str(finished), str(other), "--sequential", "--json").stdout
    )
    assert (document["sequential"]["ahead"], document["sequential"]["rows"]) == (None, 5)
    line = cli.fails(2, "eval", "compare", str(finished), str(unfinished), "--sequential")
    assert "is not complete and runs its rows in the order of the file" in line


def test_compare_with_a_run_that_is_not_complete(cli, finished, unfinished):
    done = cli("eval", "compare", str(finished), str(unfinished))
    assert done.exit_code == 0
    assert f"B: {unfinished} ({MISSING})\n" in done.stdout
    document = json.loads(cli("eval", "compare", str(unfinished), str(finished), "--json").stdout)
    assert (document["a"]["complete"], document["b"]["complete"]) == (False, True)


def test_compare_runs_of_different_datasets(cli, finished, tmp_path):
    changed = shutil.copytree(finished, tmp_path / "changed")
    manifest = json.loads((changed / "manifest.json").read_text())
    manifest["dataset"]["digest"] = "0" * 64
    (changed / "manifest.json").write_text(json.dumps(manifest))
    line = cli.fails(2, "eval", "compare", str(finished), str(changed))
    assert "dataset changed: rows.jsonl (" in line
    assert "0" * 9 not in line
    args = ("eval", "compare", str(finished), str(changed), "--allow-different-datasets")
    assert cli(*args).exit_code == 0


@pytest.mark.parametrize("command", ["show", "report", "compare"])
def test_a_folder_without_a_run(cli, tmp_path, finished, command):
    more = [str(finished)] if command == "compare" else []
    for folder in (tmp_path, tmp_path / "missing"):
        line = cli.fails(2, "eval", command, *more, str(folder))
        assert f"{folder} holds no evaluation" in line


@pytest.mark.parametrize("command", ["show", "report", "compare"])
def test_a_damaged_run(cli, finished, command):
    journal = finished / "events.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"success"', b'"successs"', 1))
    more = [str(finished)] if command == "compare" else []
    line = cli.fails(2, "eval", command, *more, str(finished))
    assert "does not fit its checksum" in line
    assert "events.jsonl, line " in line


@pytest.mark.parametrize("args", [["show"], ["report"], ["compare", "a"], ["nonsense"]])
def test_wrong_use(cli, args):
    assert cli.fails(2, "eval", *args)


@pytest.mark.parametrize(
    ("rows", "written"),
    [((), []), ((4,), ["4"]), ((0, 1, 2, 5, 7, 8), ["0-2", "5", "7-8"])],
)
def test_rows_are_written_as_ranges(rows, written):
    assert list(_ranges(rows)) == written


def test_compare_shows_failures_and_missing_files_too(cli, finished, tmp_path):
    """Row 2 fails in A; in B, which is edited, it passes and its file is missing."""
    other = shutil.copytree(finished, tmp_path / "other")
    lines = (other / "events.jsonl").read_bytes().splitlines(keepends=True)
    for at, line in enumerate(lines[1:], start=1):
        entry = decode_line(line)
        if entry["row"] == 2:
            (other / "trajectories" / entry["trajectory"]).unlink()
            entry |= {"outcome": "success", "reward": 1.0, "passed": True, "err_category": None}
            entry.pop("crc32", None)
            lines[at] = encode_line(entry)
    (other / "events.jsonl").write_bytes(b"".join(lines))
    done = cli("eval", "compare", str(finished), str(other))
    assert (
        "Passed in B, not in A: 2\n  row 2: row 2\n"
        "    A: failure, agent_error: \\x1b[31mboom\n    B: (no answer on record) (reward 1)\n"
    ) in done.stdout


def test_a_threshold_that_nothing_reaches_is_pointed_out(cli, tmp_path):
    rewards = [record(row, reward=reward) for row, reward in enumerate([0.9, 0.2])]
    folder = run_folder(tmp_path / "run", rewards, dataset={"selected": 2})
    note = "No attempt passes: the best reward, 0.9, is below the pass threshold of 1"
    assert note in cli("eval", "show", str(folder)).stdout
    assert f"B: {note}" in cli("eval", "compare", str(folder), str(folder)).stdout
    cli("eval", "report", str(folder))
    assert note in (folder / "report.html").read_text()
    for passed, best in ((1, 1.0), (0, 0.0), (0, None)):
        assert threshold_note(passed, best, 1.0) is None


@pytest.mark.parametrize(
    ("n", "shown"), [(1, []), (3, ["1", "2", "3"]), (100, ["1", "2", "4", "8", "16", "32", "100"])]
)
def test_a_long_curve_is_told_by_a_few_of_its_values(n, shown):
    metrics = compute_metrics([record(0, attempt) for attempt in range(n)], rows=1, n=n)
    assert [name.strip() for name, _ in _curves(metrics)][1:] == shown


def test_what_a_sample_tells_does_not_break_the_summary(capsys):
    told = {"x" * 33: 1.0, "y" * 32: 2.0, "a\n\x1b[31m[b]": 3.0}
    told["none"] = 0
    records = [record(prompt_tokens=1_234_567, completion_tokens=89, metrics=told)]
    manifest = {"run_id": "r", "chat": {"model": "m"}, "run": {}}
    print_summary(Path("nowhere"), manifest, compute_metrics(records, rows=1, n=1))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "Run r, m, 1 row, n = 1"
    assert max(map(len, lines)) <= 80
    rows = dict(line.strip("│ ").split(" │ ") for line in lines if " │ " in line)
    rows = {name.strip(): value.strip() for name, value in rows.items()}
    assert rows["tokens"] == "1,234,567 prompt, 89 completion"
    assert rows["x" * 31 + "…"] == "1.000  (1 attempt)"
    assert rows["y" * 32] == "2.000  (1 attempt)"
    assert rows[r"a \x1b[31m[b]"] == "3.000  (1 attempt)"
    assert "none" not in rows


def test_the_summary_of_a_run_has_no_box(cli, finished):
    assert "│" in cli("eval", "show", str(finished)).stdout
    assert "│" not in cli("eval", "show", str(finished), "--plain").stdout
    (made,) = cli("eval", "report", str(finished), "--json").stdout.splitlines()
    assert json.loads(made) == {
        "report": str(finished / "report.html"),
        "damage": None,
        "note": None,
    }
