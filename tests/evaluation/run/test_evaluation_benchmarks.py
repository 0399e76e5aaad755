"""The benchmarks run and find what they claim; how fast anything is, is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys

from evaluation.run.cases import TESTS

BENCHMARKS = TESTS.parent / "benchmarks"


def benchmark(name: str, *options: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), "--json", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_run_that_is_killed_ends_with_the_figures_of_one_that_is_not(tmp_path):
    report = benchmark(
        "evaluation_killed.py",
        "--rows=20",
        "--n=2",
        "--kills=1",
        f"--keep={tmp_path}",
        # Slowly, so that it is not through before it can be killed.
        "--max-in-flight=2",
        "--think-sec=0.05",
    )
    assert report["findings"] == []
    assert len(report["killed_at"]) == 1
    assert report["records"] == 40
    assert 0 < report["passed"] < 40

    # The comparison is not blind: other figures, and an attempt that nobody asked for.
    metrics = tmp_path / "killed" / "metrics.json"
    metrics.write_text(metrics.read_text().replace('"rows": 20', '"rows": 21'))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from pathlib import Path; import evaluation_killed as killed;"
        "work = Path(sys.argv[2]);"
        "print(len(killed.findings(work / 'killed', work / 'calm', {(99, 0)})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(BENCHMARKS), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "2\n"


def test_memory_of_small_runs():
    runs = benchmark("evaluation_memory.py", "--rows", "20", "--resume")["runs"]
    found = [(run["rows"], run["ran"], run["attempts"]) for run in runs]
    assert found == [(20, 20, 20), (20, 0, 20)]
    for run in runs:
        peaks = list(run["peak_kib"].values())
        assert peaks == sorted(peaks)
        assert peaks[0] > 1000


def test_what_a_page_costs_of_a_small_run():
    runs = benchmark("live_report.py", "--rows", "20")["runs"]
    assert [(run["page"], run["attempts"]) for run in runs] == [
        ("none", 20),
        ("unseen", 20),
        ("seen", 20),
    ]
    assert [run["updates"] for run in runs[:2]] == [0, 0]
