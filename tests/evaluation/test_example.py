"""The example evaluation as a user runs it: with the commands of the README, in processes."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.harness import environment

from rollout.demo.arithmetic import ScriptedModel, last_number
from rollout.evaluation import evaluate, load_config

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/evaluation.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")


def commands_of(text: str) -> list[list[str]]:
    """The command that serves the model, and those of the block that runs the example."""
    serve = re.findall(r"`(rollout demo --serve-chat)`, in another terminal", text)
    (block,) = re.findall(
        r"^```console\n(\$ rollout eval run examples/.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    lines = [line.removeprefix("$ ") for line in block.splitlines()]
    return [shlex.split(line) for line in (*serve, *lines)]


SERVE, RUN, SHOW = commands_of(README)


def python(command: list[str], *more: str) -> list[str]:
    """A command of the README in this environment, with something added to it."""
    assert command[0] == "rollout"
    return [sys.executable, "-W", "error", "-m", "rollout.cli", *command[1:], *more]


@pytest.fixture(scope="session")
def chat() -> Iterator[str]:
    """The URL of the chat endpoint, on a free port."""
    more = ("--bind", "127.0.0.1:0", "--think-sec", "0.01")
    with subprocess.Popen(
        python(SERVE, *more), env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process.stdout.readline().split()[-1]
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        finally:
            process.kill()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the example at its place."""
    return check_out(tmp_path)


def check_out(tmp_path: Path) -> Path:
    ignore = shutil.ignore_patterns("run", "__pycache__")
    shutil.copytree(ROOT / "examples/evaluation", tmp_path / "examples/evaluation", ignore=ignore)
    return tmp_path


def call(folder: Path, command: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        python(command, *more), cwd=folder, env=environment(), capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def complete(
    tmp_path_factory: pytest.TempPathFactory, chat: str
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder with a complete run of the example, and what the command printed."""
    folder = check_out(tmp_path_factory.mktemp("complete"))
    return folder, call(folder, RUN, "--chat-url", chat)


def expected_rewards() -> list[float]:
    """What the scripted model earns, worked out here; the attempt is the seed."""
    model = ScriptedModel()
    text = (ROOT / "examples/evaluation/questions.jsonl").read_text("utf-8")
    return [
        float(last_number(model.answer(row["user_prompt"], attempt)) == row["ground_truth"])
        for row in map(json.loads, text.splitlines())
        for attempt in range(4)
    ]


def test_the_commands_of_the_readme(complete):
    checkout, done = complete
    assert (done.returncode, done.stderr) == (0, "")
    rewards = expected_rewards()
    assert len([line for line in done.stdout.splitlines() if line.startswith("[")]) == len(rewards)
    report = checkout / "examples/evaluation/run/report.html"
    assert done.stdout.endswith(f"Report: {report.relative_to(checkout)}\n")
    assert b"<html" in report.read_bytes()

    shown = call(checkout, SHOW)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"64 of {len(rewards)} have ended" in shown.stdout

    document = json.loads(call(checkout, SHOW, "--json").stdout)
    results = document["metrics"]["results"]
    assert results["mean_reward"]["value"] == pytest.approx(sum(rewards) / len(rewards))
    assert 0 < sum(rewards) < len(rewards)
    assert results["completion_tokens"]["attempts"] == len(rewards)
    # Attempts differ, so that there is something to see in pass@k.
    assert results["pass_at_k"][0]["value"] < results["pass_at_k"][3]["value"]


def test_killed_and_resumed_it_has_the_same_results(checkout, chat, complete):
    folder, _ = complete
    document = json.loads(call(folder, SHOW, "--json").stdout)
    output = str(checkout / "killed")
    more = ("--chat-url", chat, "--output", output, "--max-in-flight", "2")
    for lines in (3, 5):
        with subprocess.Popen(
            python(RUN, *more), cwd=checkout, env=environment(), stdout=subprocess.PIPE, text=True
        ) as process:
            for _ in range(lines):
                assert process.stdout.readline()
            process.kill()
    resumed = json.loads(call(checkout, RUN, *more, "--json").stdout)
    assert resumed["complete"] is True
    assert resumed["counts"]["resumed"] >= 7
    for each in (resumed, document):
        del each["metrics"]["results"]["sample_metrics"]["latency_sec"]
    assert resumed["metrics"]["results"] == document["metrics"]["results"]


def test_an_endpoint_that_dies_stops_the_run(checkout):
    more = ("--chat-url", "http://127.0.0.1:9/v1", "--no-check", "--breaker-failures", "4")
    done = call(checkout, RUN, *more)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "model_endpoint: all attempts to connect to 127.0.0.1:9 failed; once fixed" in line


def test_the_guide_shows_the_example(checkout):
    assert commands_of(GUIDE) == [SERVE, RUN, SHOW]
    (shown,) = re.findall(r"^```toml\n(\[server\].*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    config = (checkout / "examples/evaluation/eval.toml").read_text("utf-8")
    assert tomllib.loads(shown) == tomllib.loads(config)


@pytest.mark.parametrize(
    ("text", "name"), [(GUIDE, "mean_reward"), (README, "run_evaluation")], ids=["guide", "readme"]
)
async def test_the_same_from_python(checkout, chat, capsys, text, name):
    (block,) = [
        code
        for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if f"def {name}(path)" in code
    ]
    namespace: dict[str, object] = {}
    exec(compile(ast.parse(block), name, "exec"), namespace)
    config = checkout / "examples/evaluation/eval.toml"
    config.write_text(config.read_text().replace("http://127.0.0.1:9000/v1", chat))
    got = await namespace[name](config)
    mean = got if name == "mean_reward" else got.results.mean_reward.value
    rewards = expected_rewards()
    assert mean == pytest.approx(sum(rewards) / len(rewards))
    assert len(capsys.readouterr().out.splitlines()) == len(rewards)
    async with evaluate(load_config(config)) as again:
        assert [record async for record in again] == []
    assert again.metrics.results.mean_reward.value == mean
