"""``rollout eval regrade``: stored attempts, another grader."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from rollout.errors import TrajectoryError
from rollout.evaluation import final_records, read_manifest
from rollout.trajectory import build_trajectory
from rollout.trajectory.messages import messages_of

GRADERS = """
from rollout import Grader
from support import local_backend, make_app

class Lenient(Grader):
    def grade(self, ctx):
        assert ctx.label == "42" and ctx.sample.reward is None
        answer = ctx.sample.messages[-1]
        assert answer == {"role": "assistant", "content": answer["content"]}
        ctx.set_reward(1.0 if answer["content"] in {"41", "42"} else 0.0)

class Broken(Grader):
    def grade(self, ctx):
        raise RuntimeError("no good")

class Files(Grader):
    def grade(self, ctx):
        file = ctx.artifacts_dir / "answer.txt"
        ctx.set_reward(float(file.read_text()))
        file.write_text("7")

class Slow(Grader):
    async def grade(self, ctx):
        import trio
        await trio.sleep_forever()

class Signalled(Grader):
    async def grade(self, ctx):
        import os, signal, trio
        os.kill(os.getpid(), signal.SIGINT)
        await trio.sleep_forever()

lenient = make_app(local_backend(grader=Lenient))
broken = make_app(local_backend(grader=Broken))
files = make_app(local_backend(grader=Files))
slow = make_app(local_backend(grader=Slow))
signalled = make_app(local_backend(grader=Signalled))
without = make_app(local_backend(grader=None))
"""


@pytest.fixture(scope="session")
def graders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graders") / "other_graders.py"
    path.write_text(GRADERS)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_rewards_are_new_and_the_rest_is_the_same(cli, finished, graders):
    before = contents(finished)
    done = cli("eval", "regrade", str(finished), "--app", f"{graders}:lenient")
    assert (done.exit_code, done.stderr) == (0, "")
    assert contents(finished) == before
    new = finished.with_name("finished-regraded")
    assert sorted(path.name for path in finished.parent.iterdir()) == [finished.name, new.name]
    pairs = list(zip(final_records(finished), final_records(new), strict=True))
    assert [(a.row, a.attempt, a.rollout_id) for a, _ in pairs] == [
        (b.row, b.attempt, b.rollout_id) for _, b in pairs
    ]
    assert [b.reward for _, b in pairs] == [1, 1, 1, 1, None, None, 1, 1, 1, 1]
    assert [a.err_message for a, _ in pairs] == [b.err_message for _, b in pairs]
    manifest = read_manifest(new)
    assert manifest["regraded"] == read_manifest(finished)["run_id"] != manifest["run_id"]
    assert manifest["server"]["app"] == "other_graders.py:lenient"
    assert json.loads((new / "trajectories/1-0-0.json").read_text())["extra"]["reward"] == 1
    assert (new / "report.html").is_file()
    compared = cli("eval", "compare", str(finished), str(new))
    assert "Passed in B, not in A: 1, 4" in compared.stdout
    again = cli("eval", "regrade", str(finished), "--app", f"{graders}:lenient")
    assert again.exit_code == 2
    assert "is there already; name another folder with --output" in again.stderr


def test_a_grader_that_fails_and_a_trajectory_that_is_missing(cli, finished, graders, tmp_path):
    (finished / "trajectories/0-0-0.json").unlink()
    new = tmp_path / "new"
    arguments = ("--app", f"{graders}:broken", "--output", str(new), "--json")
    done = cli("eval", "regrade", str(finished), *arguments)
    assert done.exit_code == 0
    assert json.loads(done.stdout)["counts"]["error"] == 1
    first, second, *_ = final_records(new)
    assert (first.outcome, first.trajectory) == ("error", None)
    assert first.err_message.endswith("The trajectory file is missing.")
    assert (second.outcome, second.reward, second.err_category) == ("failure", None, "agent_error")
    assert "no good" in second.err_message


def test_failed_gradings_are_graded_again(cli, finished, graders, tmp_path):
    failed, new = tmp_path / "failed", tmp_path / "new"
    arguments = ("--app", f"{graders}:broken", "--output", str(failed))
    assert cli("eval", "regrade", str(finished), *arguments).exit_code == 0
    assert [record.err_phase for record in final_records(failed)] == [
        "grading" if record.outcome == "success" else None for record in final_records(finished)
    ]
    document = json.loads((failed / "trajectories/0-0-0.json").read_text())
    assert document["extra"]["error"]["phase"] == "grading"
    del document["steps"][-1]  # as if the agent had left nothing
    (failed / "trajectories/0-0-0.json").write_text(json.dumps(document))
    arguments = ("--app", f"{graders}:lenient", "--output", str(new))
    assert cli("eval", "regrade", str(failed), *arguments).exit_code == 0
    records = list(final_records(new))
    assert [each.reward for each in records] == [None, 1, 1, 1, None, None, 1, 1, 1, 1]
    assert [each.err_phase for each in records] == ["grading", *[None] * 9]
    assert [each.outcome for each in records] == ["failure", *["success"] * 3, *["failure"] * 2] + [
        "success"
    ] * 4


def test_artifacts_are_graded_as_copies(cli, finished, graders, tmp_path):
    for record in final_records(finished):
        folder = finished / "rollouts" / record.rollout_id / "artifacts"
        folder.mkdir(parents=True)
        (folder / "answer.txt").write_text("0.5")
    before = contents(finished)
    new = tmp_path / "new"
    done = cli("eval", "regrade", str(finished), "--app", f"{graders}:files", "--output", str(new))
    assert done.exit_code == 0
    assert contents(finished) == before
    record = next(final_records(new))
    assert record.reward == 0.5
    assert (new / "rollouts" / record.rollout_id / "artifacts/answer.txt").read_text() == "7"


def test_the_graders_time_is_bounded(cli, finished, graders):
    arguments = ("--app", f"{graders}:slow", "--grader-timeout", "0.01", "--max-in-flight", "2")
    done = cli("eval", "regrade", str(finished), *arguments)
    assert done.exit_code == 0
    new = finished.with_name("finished-regraded")
    assert next(final_records(new)).err_category == "timeout"
    assert read_manifest(new)["run"]["grader_timeout_sec"] == 0.01


def test_a_signal_leaves_nothing(cli, finished, graders):
    done = cli("eval", "regrade", str(finished), "--app", f"{graders}:signalled")
    assert done.exit_code == 128 + signal.SIGINT
    assert "nothing was written" in done.stderr
    assert list(finished.parent.iterdir()) == [finished]


def test_what_cannot_be_graded_is_said(cli, finished, graders, tmp_path):
    done = cli("eval", "regrade", str(finished), "--app", f"{graders}:without")
    assert done.exit_code == 2
    assert "has no LocalBackend with a grader" in done.stderr
    done = cli("eval", "regrade", str(tmp_path / "no"), "--app", f"{graders}:lenient")
    assert done.exit_code == 2
    assert "holds no evaluation" in done.stderr


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
    ]},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"x":1}'}},
        {"id": "b", "type": "function", "function": {"name": "look", "arguments": "not json"}},
    ]},
    {"role": "tool", "content": "one", "tool_call_id": "a"},
    {"role": "tool", "content": "two", "tool_call_id": "b"},
    {"role": "assistant", "content": "A cat.", "custom": {"kept": True}},
]  # fmt: skip


def test_messages_come_back():
    assert messages_of(build_trajectory(MESSAGES, rollout_id="r")) == MESSAGES


def test_messages_that_steps_cannot_say_are_refused():
    strange = [{"role": "user", "content": [{"type": "file", "file": {"id": "f"}}]}]
    with pytest.raises(TrajectoryError, match="cannot express"):
        messages_of(build_trajectory(strange, rollout_id="r"))


def test_a_run_that_is_graded_again_cannot_be_gone_on_with(cli, unfinished, graders):
    done = cli("eval", "regrade", str(unfinished), "--app", f"{graders}:lenient")
    assert "not complete: 6 of 10 attempts have ended" in done.stdout
    assert "rollout eval run" not in done.stdout
