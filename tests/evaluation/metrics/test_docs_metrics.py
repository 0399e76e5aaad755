"""The page on the figures is run, and its example is what the code writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from evaluation.metrics.attempts import table
from evaluation.metrics.folders import run_folder

from rollout.evaluation.estimators import EXACT_ATTEMPTS
from rollout.evaluation.metrics import EvaluationMetrics, compute_metrics

PAGE = (Path(__file__).parents[3] / "docs/metrics.md").read_text("utf-8")


def block(language: str, marker: str = "") -> str:
    (found,) = (
        code
        for code in re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        if marker in code
    )
    return found


def test_the_file_is_what_such_a_run_writes():
    document = json.loads(block("json"))
    metrics = compute_metrics(table("PP", "Pw", "fP"), rows=3, n=2)
    assert metrics.to_dict() == document
    assert EvaluationMetrics.from_dict(document) == metrics


def test_the_examples_run(tmp_path, capsys):
    before = run_folder(tmp_path / "before", table("P", "P", "f"))
    after = run_folder(tmp_path / "after", table("w", "P", "P"))
    (after / "metrics.json").write_text(block("json"))
    examples = {}
    exec(compile(block("python", "from_dict"), "metrics.md", "exec"), examples)
    examples["print_pass_rate"](after)
    assert capsys.readouterr().out == "0.6666666666666666 6\n"
    exec(compile(block("python", "compare_runs"), "metrics.md", "exec"), examples)
    examples["print_change"](before, after)
    assert capsys.readouterr().out == (
        "pass rate 0.667 to 0.667: -1.000 to +1.000\nno longer pass: 0\n"
    )


def test_the_bound_of_exact_fractions_is_the_one_in_the_text():
    assert f"Up to {EXACT_ATTEMPTS} attempts" in PAGE
