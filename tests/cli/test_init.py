"""``rollout init``: each template passes its own tests, and an evaluation right away."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cli.eval.test_serve_chat import chat
from cli.harness import command_line, environment

from rollout.cli.init import TEMPLATES

FILES = {
    "README.md",
    "eval.toml",
    "pytest.ini",
    "questions.jsonl",
    "server.py",
    "test_server.py",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_passes_its_own_tests(cli, tmp_path, template):
    result = cli("init", str(tmp_path / "new"), "--template", template)
    assert result.exit_code == 0, result.stderr
    assert {each.name for each in (tmp_path / "new").iterdir()} == FILES
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "new",
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_evaluations_of_all_templates_run_right_away(cli, tmp_path):
    with chat("--error-rate", "0") as (_, http):
        for template in TEMPLATES:
            folder = tmp_path / template
            assert cli("init", str(folder), "--template", template).exit_code == 0
            options = ["--limit", "1", "--n", "1", "--chat-url", str(http.base_url)]
            done = subprocess.run(
                command_line("eval", "run", str(folder / "eval.toml"), *options),
                env=environment(),
                capture_output=True,
                text=True,
                check=False,
            )
            if template == "sandbox" and "namespaces" in done.stderr:
                continue  # its own test has said why they do not work here
            assert done.returncode == 0, done.stdout + done.stderr
            _, line = (folder / "run" / "events.jsonl").read_text().splitlines()
            assert json.loads(line)["reward"] == 1.0


def test_no_file_is_replaced(cli, tmp_path):
    (tmp_path / "server.py").write_text("mine")
    line = cli.fails(2, "init", str(tmp_path))
    assert "has server.py already; choose another folder" in line
    assert [each.name for each in tmp_path.iterdir()] == ["server.py"]


def test_a_folder_that_cannot_be_made(cli, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written: " in cli.fails(2, "init", str(tmp_path / "file" / "new"))
