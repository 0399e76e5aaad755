"""Files of the project that repeat what stands elsewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_pre_commit_runs_the_ruff_of_the_lint_session():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    (pinned,) = (each for each in groups["lint"] if each.startswith("ruff=="))
    assert f"[{pinned}]" in (ROOT / ".pre-commit-config.yaml").read_text("utf-8")


def test_hosted_checks_run_every_python_and_sessions_that_exist():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    start = "Programming Language :: Python :: 3."
    pythons = [each[len(start) - 2 :] for each in project["classifiers"] if each.startswith(start)]
    assert re.search(r"python: (\[.*\])", workflow)[1] == str(pythons).replace("'", '"')

    noxfile = (ROOT / "noxfile.py").read_text("utf-8")
    sessions = re.findall(r"^ {10}- ([\w-]+)", workflow, re.MULTILINE)
    assert len(sessions) > 10
    assert [each for each in sessions if f"\ndef {each}(" not in noxfile and each != "python"] == []
