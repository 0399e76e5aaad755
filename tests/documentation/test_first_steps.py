"""The first steps lead where they say, one after the other, as they stand on the page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from documentation.blocks import ROOT, defined_by, find
from documentation.serving import (
    CHAT_URL_IN_TEXT,
    SERVER_URL_IN_TEXT,
    rollout_command,
    rollout_serve,
    run_python,
)
from support import make_app

from rollout.client import RolloutClient

STEPS = "docs/first-steps.md"
MIGRATION = "docs/migration.md"
TESTING = "docs/testing.md"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "trio_mode=true")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the three files of the first steps."""
    for name, marker in [
        ("my_server.py", "class Solve"),
        ("my_harness.py", "def requests"),
        ("test_my_server.py", "async def test_a_right_answer"),
    ]:
        (tmp_path / name).write_text(find(STEPS, marker).code, "utf-8")
        assert f"`{name}`" in (ROOT / STEPS).read_text("utf-8")
    return tmp_path


def shape(text: str) -> list[str]:
    """What is printed, without what differs from run to run."""
    text = re.sub(r"^rollout .*$", "rollout ID", text, flags=re.MULTILINE)
    text = re.sub(r"^agent started .*$", "agent started T", text, flags=re.MULTILINE)
    lines = re.sub(r"^ +[0-9.]+ s  ", "", text, flags=re.MULTILINE).splitlines()
    return [line for line in lines if line not in {"queued", "running", "grading"}]


async def test_the_server_the_rollout_and_the_harness(files):
    model = rollout_command("demo", "--serve-chat", "--think-sec=0")
    async with model as chat_url, rollout_serve(files / "my_server.py") as url:
        command = re.search(
            r"^\$ rollout run (?s:.*?)--label \d+$", (ROOT / STEPS).read_text("utf-8"), re.MULTILINE
        )
        assert command is not None
        assert SERVER_URL_IN_TEXT in command[0]
        assert CHAT_URL_IN_TEXT in command[0]
        arguments = ["-m", "rollout.cli", "run", url, "--chat-url", chat_url]
        arguments += ["--message", "What is 6 * 7?", "--label", "42"]
        printed = await run_python(*arguments)
        program = f"import trio, my_harness; trio.run(my_harness.main, {url!r}, {chat_url!r})"
        rewards = await run_python("-c", program, PYTHONPATH=str(files))
    assert shape(printed) == shape(find(STEPS, "agent started", "text").code)
    assert f"$ python my_harness.py\n{rewards}" in (ROOT / STEPS).read_text("utf-8")


def test_the_test_of_the_first_steps_passes(files):
    done = subprocess.run(
        [sys.executable, *PYTEST, str(files)],
        cwd=files, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_the_tests_of_the_page_on_testing_pass(files):
    markers = ("def reward(", "async def calling", "QUESTION =")
    parts = [find(TESTING, marker).code for marker in markers]
    (files / "test_my_server.py").write_text("\n".join(parts), "utf-8")
    done = subprocess.run(
        [sys.executable, *PYTEST, str(files)],
        cwd=files,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


async def test_a_server_on_a_port():
    served_on_a_port = defined_by(find(TESTING, "async def served"))["served"]
    async with served_on_a_port(make_app()) as url, RolloutClient(url=url) as client:
        assert (await client.health())["status"] == "ok"
