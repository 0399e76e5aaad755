"""Rollouts to their reward, over the wire."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from trial_support import KEY, TESTS, Chat, terminus

from rollout import Grader, RolloutSample
from rollout.types import RolloutErrorCategory, RolloutStatus

WRITE = (
    terminus("echo 42 > /app/answer.txt"),
    terminus(complete=True),
    terminus(complete=True),
)

pytestmark = [pytest.mark.harbor, pytest.mark.usefixtures("no_key_is_left")]


def kept(tmp_path, name, rollout_id="r"):
    return json.loads((tmp_path / "kept" / rollout_id / name).read_text())


async def test_the_oracle_on_a_template(make_task, make_backend, serving, tmp_path):
    make_task()
    async with serving(make_backend()) as rollouts:
        handle = await rollouts.start(label="42")
        seen = [status async for status in handle.statuses()]
        result = await handle
        health = await rollouts.client.health()
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert result.sample.reward == 1.0
    assert result.sample.label == "42"
    assert result.sample.messages == [{"role": "user", "content": "What is 6 * 7?\n"}]
    assert seen[-1] is RolloutStatus.SUCCESS
    assert health["agent"] == "oracle"
    assert health["environment"] == "namespace"
    assert health["concurrency"] == {"max_concurrent": 4, "queued": 0, "running": 0}
    assert list((tmp_path / "trials").iterdir()) == []
    assert kept(tmp_path, "diagnostics.json")["status"] == "success"
    assert kept(tmp_path, "trajectory.json")["schema_version"] == "ATIF-v1.8"


async def test_the_agents_start_lies_within_its_trial(make_task, make_backend, serving, tmp_path):
    make_task()
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42")
    trial = kept(tmp_path, "harbor/result.json")
    start, end = (datetime.fromisoformat(trial[name]) for name in ("started_at", "finished_at"))
    assert start.astimezone() <= result.agent_started_at <= end.astimezone()


async def test_tasks_of_a_dataset(make_task, make_backend, serving):
    make_task("one", solution="echo 1 > /app/answer.txt", instruction="Write one.\n")
    make_task("group/two", solution="echo 2 > /app/answer.txt", instruction="Write two.\n")
    backend = make_backend(tasks_dir=make_task.folder, task_mode="dataset")
    async with serving(backend) as rollouts:
        one = await rollouts.run("a", metadata={"harbor_task_id": "one"}, label="1")
        two = await rollouts.run("b", metadata={"harbor_task_id": "group/two"}, label="1")
        path = await rollouts.run(
            "c", metadata={"harbor_task": {"path": "group/two"}}, label="2", grade=True
        )
        out = await rollouts.run("d", metadata={"harbor_task": {"path": "../answer"}})
        none = await rollouts.run("e", metadata={"harbor_task_id": "three"})
    assert [each.sample.reward for each in (one, two, path)] == [1.0, 0.0, 1.0]
    assert one.sample.messages[0]["content"].strip() == "Write one."
    for refused in (out, none):
        assert refused.status is RolloutStatus.FAILURE
        assert refused.err_category is RolloutErrorCategory.VALIDATION_ERROR
        assert "metadata.harbor_task" in refused.err_message
        assert refused.agent_started_at is None


async def test_a_task_by_its_path(make_task, make_backend, serving, tmp_path):
    folder = make_task()
    async with serving(make_backend(tasks_dir=None, allow_any_path=True)) as rollouts:
        result = await rollouts.run(metadata={"harbor_task": {"path": str(folder)}})
    assert result.err_message is None
    assert result.sample.reward == 1.0
    assert folder.is_dir()


async def test_a_rollout_without_grading(make_task, make_backend, serving):
    make_task()
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(grade=False)
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample.reward is None


async def test_terminus_2(make_task, make_backend, serving, tmp_path):
    make_task()
    with Chat(*WRITE) as chat:
        async with serving(make_backend(agent="terminus-2", model="policy")) as rollouts:
            result = await rollouts.run(label="42", chat_completions_url=chat.url)
            refused = await rollouts.run(
                "m", chat_completions_url=chat.url, metadata={"harbor_model": ""}
            )
    assert result.err_message is None
    assert result.sample.reward == 1.0
    assert [key for key, _ in chat.asked] == [f"Bearer {KEY}"] * 3
    assert [message["role"] for message in result.sample.messages][:2] == ["user", "assistant"]
    assert "echo 42" in json.dumps(result.sample.messages)
    assert kept(tmp_path, "diagnostics.json")["harbor"]["usage"]["prompt_tokens"] == 21
    assert result.sample.metrics["input_tokens"] == 21
    assert result.sample.metrics["output_tokens"] == 9
    assert kept(tmp_path, "trajectory.json")["agent"]["name"] == "terminus-2"
    assert refused.err_category is RolloutErrorCategory.VALIDATION_ERROR


FLOW = """
from pathlib import Path

from rollout import AgentWorkflow, RolloutSample, SampleSource, get_rollout_context


class Source(SampleSource):
    async def get_sample(self):
        return RolloutSample(
            messages=[{"role": "assistant", "content": "42", "logprobs": [0.5, None]}],
            label="of the agent",
            metrics={"turns": 3},
            extra_fields={"deep": [{"a": [1, None]}]},
        )


class Agent(AgentWorkflow):
    async def run(self, ctx):
        assert ctx.metadata == {"row": 7}
        (ctx.artifacts_dir / "note.txt").write_text("kept")
        get_rollout_context().set_sample_source(Source())
"""


class Judge(Grader):
    """Grades what the agent handed back, and adds to it."""

    async def grade(self, ctx):
        assert ctx.metadata == {"row": 7}
        assert (ctx.artifacts_dir / "note.txt").read_text() == "kept"
        ctx.sample.metrics["judged"] = 1
        ctx.sample.extra_fields["why"] = "as the label says"
        ctx.set_reward(0.75 if ctx.sample.messages[-1]["content"] == ctx.label else 0.0)


async def test_a_workflow_with_a_grader_of_ours(
    make_task, make_backend, serving, tmp_path, monkeypatch
):
    make_task(tests=None)
    (tmp_path / "flow_of_backend_test.py").write_text(FLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    backend = make_backend(agent="flow_of_backend_test:Agent", grader=Judge)
    async with serving(backend) as rollouts:
        result = await rollouts.run(label="42", metadata={"row": 7})
    assert result.err_message is None
    assert result.sample == RolloutSample(
        messages=[{"role": "assistant", "content": "42", "logprobs": [0.5, None]}],
        label="of the agent",
        reward=0.75,
        metrics={"turns": 3, "judged": 1},
        extra_fields={"deep": [{"a": [1, None]}], "why": "as the label says"},
    )
    assert (tmp_path / "kept/r/artifacts/logs/artifacts/note.txt").read_text() == "kept"


PRESET = """
from rollout import AgentWorkflow, RolloutSample, SampleSource, get_rollout_context


class Source(SampleSource):
    def __init__(self, changes):
        self.changes = changes

    async def get_sample(self):
        return RolloutSample(messages=[{"role": "assistant", "content": "42"}], **self.changes)


class Agent(AgentWorkflow):
    async def run(self, ctx):
        get_rollout_context().set_sample_source(Source(ctx.metadata))
"""


async def test_a_removed_sample_and_a_preset_reward_need_none_of_the_tests(
    make_task, make_backend, serving, tmp_path, monkeypatch
):
    make_task(
        tests="#!/bin/bash\nmkdir -p /logs/verifier\n"
        """echo '{"style": 0.25}' > /logs/verifier/reward.json\n"""
    )
    (tmp_path / "preset_of_backend_test.py").write_text(PRESET)
    monkeypatch.syspath_prepend(str(tmp_path))
    async with serving(make_backend(agent="preset_of_backend_test:Agent")) as rollouts:
        removed = await rollouts.run("a", metadata={"remove_sample": True})
        preset = await rollouts.run("b", metadata={"reward": 0.75})
        neither = await rollouts.run("c", metadata={})
    assert (removed.err_message, removed.sample.remove_sample) == (None, True)
    assert (preset.err_message, preset.sample.reward) == (None, 0.75)
    assert preset.sample.extra_fields == {"rewards": {"style": 0.25}}
    assert neither.err_category is RolloutErrorCategory.VALIDATION_ERROR
    assert list((tmp_path / "trials").iterdir()) != []


async def test_several_channels(make_task, make_backend, serving):
    make_task(
        tests="#!/bin/bash\nmkdir -p /logs/verifier\n"
        """echo '{"reward": 0.5, "style": 0.25}' > /logs/verifier/reward.json\n"""
    )
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run()
    assert result.sample.reward == 0.5
    assert result.sample.extra_fields == {"rewards": {"style": 0.25}}


TEXT, JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
BROKEN = {
    "nothing": "true",
    "empty": f": > {TEXT}",
    "torn": f"""printf '{{"rew' > {JSON}""",
    "words": f"echo good > {TEXT}",
    "nan": f"echo nan > {TEXT}",
    "infinite": f"""echo '{{"reward": Infinity}}' > {JSON}""",
    "other channels": f"""echo '{{"style": 1, "speed": 2}}' > {JSON}""",
    "a list": f"echo '[1]' > {JSON}",
    "a folder": f"mkdir {TEXT}",
    "a pipe": f"mkfifo {TEXT}",
    "a link out": f"ln -s /etc/hostname {TEXT}",
    "nested": f"head -c 200000 /dev/zero | tr '\\0' '[' > {JSON}",
    "a hole": f"echo '{{\"reward\": 1}}' > {JSON}; truncate -s 200M {JSON}",
    "enormous": f"printf '%9000000s' 1 > {TEXT}",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_verifier_that_measured_no_reward(make_task, make_backend, serving, name, tmp_path):
    make_task(tests=f"#!/bin/bash\nmkdir -p /logs/verifier\n{BROKEN[name]}\n")
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42")
    assert result.status is RolloutStatus.FAILURE
    assert result.err_category is RolloutErrorCategory.VALIDATION_ERROR, result.err_message
    assert name != "other channels" or "speed, style" in result.err_message
    assert result.sample.reward is None
    assert result.agent_started_at is not None
    assert kept(tmp_path, "diagnostics.json")["harbor"]["kept_in"].startswith(str(tmp_path))
    if name in {"a hole", "enormous"}:
        assert "RewardFileNotFoundError" in result.err_message


@pytest.mark.parametrize("keep", [True, False])
async def test_a_failed_trial_stays_if_wanted(make_task, make_backend, serving, tmp_path, keep):
    make_task(tests=f"{TESTS}rm /logs/verifier/reward.txt\n")
    async with serving(make_backend(keep_failed_trials=keep)) as rollouts:
        result = await rollouts.run(label="42")
    assert result.status is RolloutStatus.FAILURE
    assert len(list((tmp_path / "trials").iterdir())) == keep
    assert (tmp_path / "kept/r/harbor/result.json").is_file()


async def test_a_task_of_several_steps(make_task, make_backend, serving, tmp_path):
    folder = make_task("stepped", tests=None, instruction="Two steps.\n")
    with (folder / "task.toml").open("a") as file:
        file.write('[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n')
    for number, name in enumerate(("one", "two")):
        step = folder / "steps" / name
        for part in ("solution", "tests"):
            (step / part).mkdir(parents=True)
        (step / "instruction.md").write_text(f"Step {name}.\n")
        (step / "solution/solve.sh").write_text(f"#!/bin/bash\necho {number} > /app/{name}\n")
        (step / "tests/test.sh").write_text(
            "#!/bin/bash\nmkdir -p /logs/verifier\n"
            f"test -f /app/{name} && echo {number} > /logs/verifier/reward.txt\n"
        )
    backend = make_backend(tasks_dir=make_task.folder, task_mode="dataset")
    async with serving(backend) as rollouts:
        result = await rollouts.run(metadata={"harbor_task_id": "stepped"})
    assert result.err_message is None
    assert result.sample.reward == 0.5
    assert result.agent_started_at is not None
