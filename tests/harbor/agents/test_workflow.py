"""Workflows inside of a sandbox, and graders outside of it, in real trials."""

from __future__ import annotations

import json
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
import trio

from rollout import AgentWorkflowConfig, ConcurrencyConfig, Grader
from rollout.backend.harbor import HarborBackend, python_paths
from rollout.backend.harbor.agents import agent_spec
from rollout.errors import BackendConfigurationError
from rollout.integrations.asyncio_bridge import open_asyncio_bridge
from rollout.types import RolloutErrorCategory, RolloutStatus

pytestmark = pytest.mark.harbor

SOURCE = '''
import json, os, subprocess, sys, time, urllib.request
from pathlib import Path

import helper_of_the_workflow
from rollout import (
    AgentWorkflow, AgentWorkflowConfig, AgentWorkflowOutput, RolloutSample, SampleSource,
    get_rollout_context,
)


class Config(AgentWorkflowConfig):
    greeting: str = "hello"
    tools: list = []


CONFIG = Config(name="by reference", greeting="servus")


def ask(messages):
    rollout = get_rollout_context()
    request = urllib.request.Request(
        rollout.chat_completions_url + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"authorization": f"Bearer {rollout.api_key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


class Ask(AgentWorkflow):
    """Asks the model, and says where it has been."""

    async def run(self, ctx):
        reply = ask(ctx.prompt)
        Path("/app/answer.txt").write_text(reply["content"])
        (ctx.artifacts_dir / "note.txt").write_text("kept")
        print("on standard output")
        print("on standard error", file=sys.stderr)
        inherited = [name for name in os.environ if "KEY" in name]
        return AgentWorkflowOutput(
            messages=[*ctx.prompt, reply],
            metrics={"asked": 1, "prefix": float(helper_of_the_workflow.ANSWER)},
            info={"never": "seen"},
        )


class Plain(AgentWorkflow):
    def run(self, ctx):
        import trio
        trio.from_thread.check_cancelled()
        return [*ctx.prompt, {"role": "assistant", "content": json.dumps({
            "config": None if self.config is None else
                [self.config.name, self.config.greeting, self.config.tools],
            "same": ctx.config == self.config,
            "metadata": ctx.metadata,
            "id": get_rollout_context().rollout_id,
            "python": sys.version_info[:2],
            "keys": [name for name in os.environ if "KEY" in name],
            "key": get_rollout_context().api_key,
            "user": os.geteuid(),
        })}]


class Source(SampleSource):
    async def get_sample(self):
        return RolloutSample(
            messages=[{"role": "assistant", "content": "\\ud800 42"}],
            trajectory_messages=[{"role": "user", "content": "kept on disk"}],
            label="its own",
            metrics={"m": 1.5, "lost": object()},
            extra_fields={"deep": [{"a": [1, None]}]},
            remove_sample=True,
        )


class FromSource(AgentWorkflow):
    async def run(self, ctx):
        get_rollout_context().set_sample_source(Source())


class Nothing(AgentWorkflow):
    async def run(self, ctx):
        return None


class Raise(AgentWorkflow):
    async def run(self, ctx):
        rollout = get_rollout_context()
        raise eval(ctx.prompt[0]["raise"])


class Die(AgentWorkflow):
    async def run(self, ctx):
        print(f"key {get_rollout_context().api_key}: dying", file=sys.stderr, flush=True)
        os._exit(7)


class Hang(AgentWorkflow):
    async def run(self, ctx):
        subprocess.Popen(["sleep", ctx.prompt[0]["sleep"]])
        Path("/logs/artifacts/hangs").write_text("")
        time.sleep(100)


class Forge(AgentWorkflow):
    async def run(self, ctx):
        out = Path(sys.argv[2]) / "out" / "result.json"
        out.write_text(ctx.prompt[0]["result"])
        os._exit(0)
'''


@pytest.fixture
def workflows(tmp_path, monkeypatch):
    """A module with workflows that is not installed, and its name."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "flows_of_a_user.py").write_text(SOURCE)
    (folder / "helper_of_the_workflow.py").write_text("ANSWER = 42\n")
    monkeypatch.syspath_prepend(str(folder))
    yield "flows_of_a_user"
    for name in ("flows_of_a_user", "helper_of_the_workflow"):
        sys.modules.pop(name, None)


class Exact(Grader):
    """Rewards the label, and leaves marks on the sample."""

    async def grade(self, ctx):
        assert (ctx.artifacts_dir / "note.txt").read_text() == "kept"
        ctx.sample.metrics["graded"] = 2.0
        ctx.sample.extra_fields["by"] = [self.config.name, ctx.metadata["row"]]
        ctx.set_reward(1.0 if ctx.sample.messages[-1]["content"] == ctx.label else 0.0)


async def prepared(*args):
    spec = agent_spec(*args)
    await trio.to_thread.run_sync(spec.prepare)
    return spec


def said(ran):
    return json.loads(ran.outcome.result.sample.messages[-1]["content"])


async def test_a_workflow_and_a_grader_field_for_field(workflows, make_task, run_trial, chat):
    endpoint = chat("42")
    spec = await prepared(f"{workflows}:Ask", None, None)
    ran = await run_trial(
        spec, make_task(tests=False), url=endpoint.url, grader=Exact,
        label="42", metadata={"row": 7},
    )  # fmt: skip
    result = ran.outcome.result
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    sample = result.sample
    assert sample.reward == 1.0
    assert sample.label == "42"
    assert sample.messages == [
        {"role": "user", "content": "What is 6 * 7?"},
        {"role": "assistant", "content": "42"},
    ]
    assert sample.trajectory_messages == sample.messages
    assert sample.metrics == {"asked": 1, "prefix": 42.0, "graded": 2.0}
    assert sample.extra_fields == {"by": ["g", 7]}
    assert endpoint.keys == ["Bearer sk-hunter2/with+marks-4711"]
    assert ran.log("agent/workflow-output.txt") == "on standard output\n"
    assert ran.log("agent/workflow-errors.txt") == "on standard error\n"
    assert ran.log("artifacts/logs/artifacts/note.txt") == "kept"
    assert ran.files_with("hunter2") == []
    assert "AGENT_START" in ran.events


async def test_a_workflow_is_graded_by_the_tasks_own_tests(workflows, make_task, run_trial, chat):
    spec = await prepared(f"{workflows}:Ask", None, None)
    ran = await run_trial(spec, make_task(), url=chat("41").url)
    assert ran.outcome.result.status is RolloutStatus.SUCCESS
    assert ran.outcome.result.sample.reward == 0.0
    assert ran.outcome.result.sample.metrics["asked"] == 1


async def test_what_a_plain_workflow_sees(workflows, make_task, run_trial):
    spec = await prepared(f"{workflows}:Plain", f"{workflows}:CONFIG", None)
    ran = await run_trial(
        spec, make_task(agent="user = 'nobody'\n"), grade=False, rollout_id="r-7",
        metadata={"a": [1, {"b": None}]},
    )  # fmt: skip
    assert said(ran)["user"] != 0
    assert said(ran) == {
        "config": ["by reference", "servus", []],
        "same": True,
        "metadata": {"a": [1, {"b": None}]},
        "id": "r-7",
        "python": said(ran)["python"],
        "keys": [],
        "key": "sk-hunter2/with+marks-4711",
        "user": said(ran)["user"],
    }


async def test_a_class_with_a_config_object_on_the_python_of_this_process(
    workflows, make_task, run_trial
):
    import flows_of_a_user as flows

    config = flows.Config(
        name="by value", tools=["a", {"b": 1}], concurrency=ConcurrencyConfig(max_concurrent=3)
    )
    spec = await prepared(flows.Plain, config, {"python": sys.executable})
    ran = await run_trial(
        spec, make_task(), grade=False, key=None,
        environment={"kwargs": {"read_only_paths": python_paths()}},
    )  # fmt: skip
    assert said(ran)["config"] == ["by value", "hello", ["a", {"b": 1}]]
    assert said(ran)["same"]
    assert said(ran)["python"] == list(sys.version_info[:2])
    assert said(ran)["key"] is None


async def test_a_sample_out_of_a_source(workflows, make_task, run_trial, caplog):
    spec = await prepared(f"{workflows}:FromSource", None, None)
    ran = await run_trial(spec, make_task(), grade=False, label="the request's")
    sample = ran.outcome.result.sample
    assert sample.messages == [{"role": "assistant", "content": "\ud800 42"}]
    assert sample.trajectory_messages == [{"role": "user", "content": "kept on disk"}]
    assert sample.label == "its own"
    assert sample.metrics == {"m": 1.5}
    assert sample.extra_fields == {"deep": [{"a": [1, None]}]}
    assert sample.remove_sample
    assert "metrics: lost: of type object" in caplog.text


async def test_a_workflow_out_of_a_wheel_that_is_not_installed_here(make_task, run_trial, tmp_path):
    path = tmp_path / "only_inside-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("only_inside/__init__.py", "")
        archive.writestr("only_inside/flows.py", SOURCE)
        archive.writestr("helper_of_the_workflow.py", "ANSWER = 42")
        archive.writestr("only_inside-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: o\n")
    spec = agent_spec("only_inside.flows:Plain", "only_inside.flows:CONFIG", None, bundle=path)
    await trio.to_thread.run_sync(spec.prepare)
    ran = await run_trial(spec, make_task(), grade=False)
    assert said(ran)["config"] == ["by reference", "servus", []]
    assert "only_inside" not in sys.modules


def test_a_backend_with_a_folder_of_code_imports_nothing_of_it(tmp_path):
    names = {"agent": "only_inside:Flow", "agent_config": "only_inside:CONFIG"}
    assert HarborBackend(**names, code_dir=tmp_path).max_concurrent == 4
    with pytest.raises(BackendConfigurationError, match="no module 'only_inside'"):
        HarborBackend(**names)


@pytest.mark.parametrize(
    ("error", "category", "message"),
    [
        ("TimeoutError('slow ' + rollout.api_key)", "timeout", "slow [redacted]"),
        ("type('SandboxConnectionException', (Exception,), {})('lost')", "http_error", "lost"),
    ],
)
async def test_what_a_workflow_raises(
    workflows, make_task, run_trial, error, category, message, caplog
):
    spec = await prepared(f"{workflows}:Raise", None, None)
    ran = await run_trial(spec, make_task(tests=False), prompt=[{"raise": error}], label="x",
                          grader=Exact)  # fmt: skip
    result = ran.outcome.result
    assert result.status is RolloutStatus.FAILURE
    assert result.err_category == category
    assert result.err_message == message
    assert "flows_of_a_user.py" in caplog.text
    assert "hunter2" not in caplog.text
    assert ran.files_with("hunter2") == []


async def test_a_process_that_dies_says_its_last_words(workflows, make_task, run_trial):
    spec = await prepared(f"{workflows}:Die", None, None)
    ran = await run_trial(spec, make_task(), grade=False)
    result = ran.outcome.result
    assert result.err_category is RolloutErrorCategory.AGENT_ERROR
    assert "code 7" in result.err_message
    assert "key [redacted]: dying" in result.err_message


async def test_a_workflow_out_of_time_is_killed_with_its_children(workflows, make_task, run_trial):
    task = make_task()
    (task.folder / "tests" / "test.sh").write_text(
        "#!/bin/bash\ngrep -l -e 4711 -e bootstrap /proc/[0-9]*/cmdline > /logs/verifier/left\n"
        "echo 1 > /logs/verifier/reward.txt\n"
    )
    spec = await prepared(f"{workflows}:Hang", None, None)
    ran = await run_trial(spec, task, agent_sec=3, prompt=[{"sleep": "4711"}])
    assert ran.outcome.result.err_category is RolloutErrorCategory.TIMEOUT
    assert (ran.folder / "artifacts/logs/artifacts/hangs").exists()
    assert ran.log("verifier/left") == ""


async def test_a_result_that_is_none_is_refused(workflows, make_task, run_trial):
    spec = await prepared(f"{workflows}:Forge", None, None)
    forged = '{"sample": {"messages": ['
    ran = await run_trial(spec, make_task(), grade=False, prompt=[{"result": forged}])
    assert ran.outcome.result.err_category is RolloutErrorCategory.VALIDATION_ERROR
    assert "result cannot be read" in ran.outcome.result.err_message
    assert spec.sample(ran.plan) is None


async def test_rollouts_at_the_same_time_do_not_mix(workflows, make_task, run_trial):
    task = make_task()
    spec = await prepared(f"{workflows}:Plain", None, None)
    seen = {}

    async def one(name):
        ran = await run_trial(
            spec, task, grade=False, rollout_id=name, key=f"sk-of-{name}-0815", bridge=bridge,
            metadata={"name": name},
        )  # fmt: skip
        seen[name] = (said(ran)["id"], said(ran)["key"], said(ran)["metadata"]["name"])

    async with open_asyncio_bridge(grace_sec=5) as bridge, trio.open_nursery() as nursery:
        for name in ("a", "b", "c"):
            nursery.start_soon(one, name)
    assert seen == {name: (name, f"sk-of-{name}-0815", name) for name in ("a", "b", "c")}


async def test_a_cancelled_rollout_leaves_no_process(workflows, make_task, run_trial):
    spec = await prepared(f"{workflows}:Hang", None, None)
    mark, seconds = f"cancelled-{uuid4().hex}", str(uuid4().int % 10**9 + 10**6)
    with trio.CancelScope() as scope:
        await run_trial(
            spec, make_task(), grade=False, rollout_id=mark, prompt=[{"sleep": seconds}],
            on_agent_start=scope.cancel,
        )  # fmt: skip
    assert scope.cancelled_caught
    assert [line for line in commands() if mark in line or f"sleep {seconds}" in line] == []


def commands():
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


async def test_a_sandbox_without_a_python_says_so(workflows, make_task, run_trial):
    spec = await prepared(f"{workflows}:Plain", None, {"python": "/no/such/python"})
    ran = await run_trial(spec, make_task(), grade=False)
    assert ran.outcome.result.err_category is RolloutErrorCategory.AGENT_ERROR
    assert "no Python from 3.11 on (tried /no/such/python)" in ran.outcome.result.err_message
    assert "AGENT_START" not in ran.events


async def test_a_sandbox_that_lacks_a_distribution_says_so(workflows, make_task, run_trial):
    options = {"python": "/usr/bin/python3", "requirements": ["no-such-distribution-0815==1"]}
    spec = await prepared(f"{workflows}:Plain", None, options)
    ran = await run_trial(spec, make_task(extra='network_mode = "no-network"\n'), grade=False)
    assert ran.outcome.result.err_category is RolloutErrorCategory.AGENT_ERROR
    assert "lacks no-such-distribution-0815==1" in ran.outcome.result.err_message
    assert "AGENT_START" not in ran.events


# --- graders ----------------------------------------------------------------------------------


class Scripted(Grader):
    """Does what the metadata says."""

    async def grade(self, ctx):
        if "raise" in ctx.metadata:
            raise eval(ctx.metadata["raise"])
        if "sleep" in ctx.metadata:
            await trio.sleep_forever()
        if "remove" in ctx.metadata:
            ctx.sample.remove_sample = True


async def test_what_a_grader_raises(make_task, run_trial, workflows):
    spec = await prepared(f"{workflows}:Plain", None, None)
    script = {"raise": "TimeoutError('its own')"}
    ran = await run_trial(spec, make_task(tests=False), grader=Scripted, metadata=script)
    assert ran.outcome.workflow.status is RolloutStatus.SUCCESS
    result = ran.outcome.result
    assert result.status is RolloutStatus.FAILURE
    assert result.err_category is RolloutErrorCategory.TIMEOUT
    assert result.err_message == "its own"
    assert result.sample.messages


async def test_a_removed_sample_needs_no_reward(make_task, run_trial, workflows):
    spec = await prepared(f"{workflows}:Plain", None, None)
    ran = await run_trial(spec, make_task(tests=False), grader=Scripted, metadata={"remove": True})
    result = ran.outcome.result
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample.remove_sample
    assert result.sample.reward is None


async def test_a_grader_out_of_time_is_a_timeout(make_task, run_trial, workflows):
    spec = await prepared(f"{workflows}:Plain", None, None)
    ran = await run_trial(
        spec, make_task(tests=False), grader=Scripted, metadata={"sleep": True}, grader_sec=0.2
    )
    assert ran.outcome.result.status is RolloutStatus.FAILURE
    assert ran.outcome.result.err_category is RolloutErrorCategory.TIMEOUT


async def test_an_agent_of_harbors_own_with_a_config_is_no_workflow():
    assert agent_spec("oracle", AgentWorkflowConfig(name="slots"), None).on_host
