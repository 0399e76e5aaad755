"""What LocalBackend keeps of its rollouts, however they end."""

from __future__ import annotations

import json
import logging
import os
import signal

import httpx
import pytest
import trio
from artifacts.writing import hanging, until_sent, writer_pid
from backend.helpers import SECRET, backend, echo, execute, full_marks
from server.faults import admit, in_process_http, poll
from support import in_process, local_backend, make_app, prompt

from rollout import (
    AgentWorkflow,
    AgentWorkflowContext,
    AgentWorkflowOutput,
    ExecutionRequest,
    GraderContext,
    LocalBackend,
    RolloutSample,
    artifacts,
    get_rollout_context,
)
from rollout.artifacts import ArtifactStore
from rollout.context import SampleSource
from rollout.integrations.chat import get_recorder
from rollout.simulation import simulate
from rollout.trajectory import trajectory_problems
from rollout.types import RolloutInitRequest

CHAT = "http://127.0.0.1:9/v1"
posix = pytest.mark.skipif(os.name != "posix", reason="processes are stopped by signals")


class Nothing(AgentWorkflow):
    async def run(self, ctx):
        return []


def keeping(root, run=echo, grade=None, **options):
    local = backend(run, grade, **options)
    local.artifacts = ArtifactStore(root)
    return local


def saved(root, rollout_id="r"):
    """The two documents of a rollout."""
    trajectory, diagnostics = (
        json.loads((root / rollout_id / f"{name}.json").read_bytes())
        for name in ("trajectory", "diagnostics")
    )
    assert trajectory_problems(trajectory) == []
    return trajectory, diagnostics


def test_the_root_is_an_argument(tmp_path):
    local = LocalBackend(workflow=Nothing, artifact_root=tmp_path)
    assert local.artifacts.root == tmp_path
    assert LocalBackend(workflow=Nothing, artifact_root=False).artifacts.root is None


class Halfway(SampleSource):
    """What an agent has said so far; asked after its end it may raise."""

    def __init__(self, trouble=None):
        self.trouble = trouble

    async def get_sample(self):
        if self.trouble is not None:
            raise RuntimeError(f"{self.trouble} {SECRET}")
        return RolloutSample(messages=[{"role": "assistant", "content": "I was about to say"}])


@pytest.mark.parametrize("trouble", [None, "it broke"])
async def test_what_a_failed_agent_had_said_is_in_its_trajectory(tmp_path, trouble, caplog):
    async def run(ctx):
        get_rollout_context().set_sample_source(Halfway(trouble))
        raise RuntimeError("lost")

    outcome = await execute(keeping(tmp_path, run), "r", grade=False)
    assert outcome.result.sample is None
    trajectory, _ = saved(tmp_path)
    said = [step["message"] for step in trajectory["steps"]]
    assert (said == ["I was about to say"]) is (trouble is None)
    assert ("it broke" in caplog.text) is (trouble is not None)
    assert SECRET not in caplog.text


async def test_a_success(tmp_path):
    async def run(ctx):
        (ctx.artifacts_dir / "note.txt").write_text("from the workflow")
        return [*ctx.prompt, {"role": "assistant", "content": "42"}]

    async def grade(ctx):
        assert (ctx.artifacts_dir / "note.txt").read_text() == "from the workflow"
        ctx.sample.metrics["tries"] = 2
        ctx.set_reward(0.5)

    local = keeping(tmp_path, run, grade)
    outcome = await execute(local, grade=True, label="42", metadata={"row": 7})
    assert outcome.result.status == "success"
    trajectory, diagnostics = saved(tmp_path)
    assert [(step["source"], step["message"]) for step in trajectory["steps"]] == [
        ("user", "What is 6 * 7?"),
        ("agent", "42"),
    ]
    assert trajectory["extra"] == {
        "reward": 0.5,
        "label": "42",
        "metrics": {"tries": 2},
        "metadata": {"row": 7},
        "status": "success",
    }
    assert diagnostics["rollout_id"] == "r"
    assert (diagnostics["status"], diagnostics["phase"]) == ("success", "grading")
    assert diagnostics["error"] is None
    assert diagnostics["agent_started_at"].endswith("Z")
    times = diagnostics["timings"]
    assert times.keys() == {"queue_sec", "agent_sec", "grader_sec", "total_sec"}
    assert all(seconds >= 0 for seconds in times.values())
    assert diagnostics["sizes"]["messages"] == 2
    assert diagnostics["sizes"]["trajectory_bytes"] == len(
        (tmp_path / "r" / "trajectory.json").read_bytes()
    )
    assert (tmp_path / "r" / "artifacts" / "note.txt").exists()


async def test_plain_functions_have_the_folder_too(tmp_path):
    def run(ctx):
        (ctx.artifacts_dir / "note.txt").write_text("x")
        return ctx.prompt

    await execute(keeping(tmp_path, run))
    assert (tmp_path / "r" / "artifacts" / "note.txt").read_text() == "x"


async def test_the_folder_is_made_when_it_is_asked_for(tmp_path):
    made = []

    async def run(ctx):
        made.append((tmp_path / "r").exists())
        assert ctx.artifacts_dir == ctx.artifacts_dir == tmp_path / "r" / "artifacts"
        assert ctx.artifacts_dir.is_dir()
        return ctx.prompt

    await execute(keeping(tmp_path, run))
    assert made == [False]


async def test_no_folder_for_what_nobody_asks_for(tmp_path):
    await execute(keeping(tmp_path, echo, full_marks), grade=True, label="x")
    names = sorted(path.name for path in (tmp_path / "r").iterdir())
    assert names == ["diagnostics.json", "trajectory.json"]


async def test_the_grader_alone_may_ask_for_the_folder(tmp_path):
    async def grade(ctx):
        (ctx.artifacts_dir / "note.txt").write_text("from the grader")
        ctx.set_reward(1.0)

    await execute(keeping(tmp_path, echo, grade), grade=True, label="x")
    assert (tmp_path / "r" / "artifacts" / "note.txt").read_text() == "from the grader"


def asking(folders):
    """A workflow and a grader that ask for their folder."""

    async def run(ctx):
        folders.append(ctx.artifacts_dir)
        return ctx.prompt

    async def grade(ctx):
        folders.append(ctx.artifacts_dir)
        ctx.set_reward(1.0)

    return run, grade


async def test_the_grader_has_no_folder_if_the_workflow_got_none(tmp_path):
    root, folders = tmp_path / "root", []
    root.write_text("a file")
    ask, grade = asking(folders)

    async def run(ctx):
        messages = await ask(ctx)
        root.unlink()
        return messages

    await execute(keeping(root, run, grade), grade=True, label="x")
    assert folders == [None, None]


def test_contexts_take_a_folder(tmp_path):
    for ctx in (AgentWorkflowContext([], artifacts_dir=tmp_path), GraderContext()):
        assert ctx.artifacts_dir in (tmp_path, None)
        ctx.artifacts_dir = tmp_path / "other"
        assert ctx.artifacts_dir == tmp_path / "other"


async def test_nothing_is_kept_without_a_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = []
    outcome = await execute(keeping(False, *asking(folders)), grade=True, label="x")
    assert outcome.result.status == "success"
    assert folders == [None, None]
    assert list(tmp_path.iterdir()) == []


async def test_unusable_storage_fails_no_rollout(tmp_path, caplog):
    (tmp_path / "root").write_text("a file")
    local = keeping(tmp_path / "root", echo, full_marks)
    with caplog.at_level(logging.WARNING, logger="rollout"):
        for number in range(3):
            outcome = await execute(local, f"r{number}", grade=True, label="x")
            assert outcome.result.sample.reward == 1.0
    assert len(caplog.records) == 1


# --- other ends -------------------------------------------------------------------------------


async def test_a_failure(tmp_path):
    async def run(ctx):
        raise ValueError("no such tool")

    await execute(keeping(tmp_path, run))
    trajectory, diagnostics = saved(tmp_path)
    error = {"category": "validation_error", "message": "no such tool"}
    assert [step["message"] for step in trajectory["steps"]] == ["What is 6 * 7?"]
    assert trajectory["extra"]["error"] == diagnostics["error"] == error
    assert (diagnostics["status"], diagnostics["phase"]) == ("failure", "running")
    assert diagnostics["timings"]["grader_sec"] is None


async def test_a_failed_grading_keeps_the_conversation_and_no_reward(tmp_path):
    async def grade(ctx):
        ctx.set_reward(1.0)
        raise RuntimeError("after all")

    await execute(keeping(tmp_path, echo, grade), grade=True, label="x")
    trajectory, diagnostics = saved(tmp_path)
    assert trajectory["extra"]["reward"] is None
    assert trajectory["extra"]["error"]["message"] == "after all"
    assert diagnostics["phase"] == "grading"


async def test_a_rollout_that_never_began(tmp_path):
    await execute(keeping(tmp_path), grade=True, label="x")
    trajectory, diagnostics = saved(tmp_path)
    assert diagnostics["phase"] == "queued"
    assert diagnostics["agent_started_at"] is None
    assert diagnostics["error"]["category"] == "validation_error"
    assert trajectory["extra"]["label"] == "x"
    assert not (tmp_path / "r" / "artifacts").exists()


async def test_a_timeout(tmp_path):
    await execute(keeping(tmp_path), agent_timeout_sec=0)
    _, diagnostics = saved(tmp_path)
    assert (diagnostics["status"], diagnostics["error"]["category"]) == ("failure", "timeout")


async def test_a_cancelled_rollout(tmp_path):
    running = trio.Event()

    async def run(ctx):
        running.set()
        await trio.sleep_forever()

    local = keeping(tmp_path, run)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(execute, local)
        await running.wait()
        local.cancel_rollouts(["r"])
    trajectory, diagnostics = saved(tmp_path)
    assert trajectory["extra"]["status"] == diagnostics["status"] == "cancelled"
    assert diagnostics["error"]["message"] == "cancelled while its agent ran"


async def test_a_rollout_that_is_ended_by_force(tmp_path):
    running = trio.Event()

    async def run(ctx):
        running.set()
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(execute, keeping(tmp_path, run))
        await running.wait()
        nursery.cancel_scope.cancel()
    _, diagnostics = saved(tmp_path)
    assert (diagnostics["status"], diagnostics["phase"]) == ("cancelled", "running")


# --- what is kept -----------------------------------------------------------------------------


class Source(SampleSource):
    def __init__(self, sample):
        self.sample = sample

    async def get_sample(self):
        return self.sample


def from_source(**fields):
    async def run(ctx):
        get_rollout_context().set_sample_source(Source(RolloutSample(**fields)))

    return run


@pytest.mark.parametrize("way", ["recorder", "output"])
async def test_notes_of_a_workflow_are_in_its_trajectory_alone(tmp_path, way):
    async def run(ctx):
        if way == "output":
            return AgentWorkflowOutput(messages=ctx.prompt, info={"seen": 3, "key": SECRET})
        get_recorder().info.update(seen=3, key=SECRET)
        return None

    outcome = await execute(keeping(tmp_path, run), "r", grade=False)
    trajectory, _ = saved(tmp_path)
    assert trajectory["extra"]["info"]["seen"] == 3
    assert SECRET not in json.dumps(trajectory)
    assert "seen" not in json.dumps(outcome.result.sample.extra_fields)


async def test_trajectory_messages_come_first(tmp_path):
    run = from_source(
        messages=[{"role": "user", "content": "short"}],
        trajectory_messages=[{"role": "user", "content": "long"}],
    )
    outcome = await execute(keeping(tmp_path, run))
    assert saved(tmp_path)[0]["steps"][0]["message"] == "long"
    assert outcome.result.sample.messages[0]["content"] == "short"


async def test_no_trajectory_messages_means_no_trajectory(tmp_path):
    await execute(keeping(tmp_path))
    assert (tmp_path / "r" / "trajectory.json").exists()
    run = from_source(messages=[{"role": "user", "content": "x"}], trajectory_messages=None)
    await execute(keeping(tmp_path, run))
    assert not (tmp_path / "r" / "trajectory.json").exists()
    assert json.loads((tmp_path / "r" / "diagnostics.json").read_bytes())["status"] == "success"


async def test_the_key_never_gets_in(tmp_path):
    async def run(ctx):
        key = get_rollout_context().api_key
        return [
            {"role": "user", "content": key, key: {key: [key]}},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": key, "function": {"name": key, "arguments": json.dumps({key: key})}}
                ],
            },
        ]

    async def grade(ctx):
        ctx.sample.extra_fields[SECRET] = SECRET
        raise ValueError(f"refused: {SECRET}")

    await execute(
        keeping(tmp_path, run, grade), grade=True, label=SECRET, metadata={SECRET: SECRET}
    )
    saved(tmp_path)
    for name in ("trajectory.json", "diagnostics.json"):
        text = (tmp_path / "r" / name).read_text()
        assert SECRET not in text
        assert "hunter2" not in text
        assert "[redacted]" in text


async def test_no_secret_of_the_urls_gets_in(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    shown = []

    async def run(ctx):
        context = get_rollout_context()
        shown.append(repr(context))
        url = httpx.URL(context.chat_completions_url)
        said = [str(url), url.password, dict(url.params), url.userinfo.decode()]
        said.append(httpx.BasicAuth(url.username, url.password)._auth_header)
        context.set_sample_source(Said([{"role": "assistant", "content": str(said)}]))
        try:
            httpx.Response(404, request=httpx.Request("POST", url)).raise_for_status()
        except httpx.HTTPStatusError as error:
            raise RuntimeError(str(said)) from error

    url = "http://someone:pw-hunter2@127.0.0.1:9/v1?k=query-hunter2&short=h2"
    request = RolloutInitRequest(
        rollout_id="r", initial_messages=prompt(), chat_completions_url=url, grade=False
    )
    async with in_process(make_app(keeping(tmp_path, run))) as client:
        result = await client.run_rollout(prompt(), url, "r", grade=False)
    assert "someone" not in result.err_message
    assert "http://[redacted]127.0.0.1:9/v1?[redacted]" in result.err_message
    saved(tmp_path)
    files = [
        (tmp_path / "r" / f"{name}.json").read_text() for name in ("trajectory", "diagnostics")
    ]
    for text in (*files, caplog.text, result.err_message, *shown, repr(request)):
        assert "127.0.0.1:9/v1" in text
        for part in ("hunter2", "=h2", "c29tZW9uZTpwdy1odW50ZXIy"):
            assert part not in text


class Said(SampleSource):
    def __init__(self, messages):
        self.messages = messages

    async def get_sample(self):
        return RolloutSample(messages=self.messages)


async def test_saving_leaves_the_result_as_it_is(tmp_path):
    odd = object()
    run = from_source(
        messages=[{"role": "user", "content": odd}],
        trajectory_messages=[{"role": "user", "content": odd}],
        extra_fields={"odd": odd},
    )
    outcome = await execute(keeping(tmp_path, run))
    assert outcome.result.sample.messages[0]["content"] is odd
    assert outcome.result.sample.extra_fields == {"odd": odd}
    assert saved(tmp_path)[0]["extra"]["dropped"]


# --- when -------------------------------------------------------------------------------------


@posix
async def test_a_rollout_is_active_until_it_is_saved(tmp_path):
    local = local_backend()
    local.artifacts = ArtifactStore(tmp_path)
    with hanging(await writer_pid(local.artifacts)):
        async with in_process(make_app(local)) as client:
            handle = await client.run_rollout_async(prompt(), CHAT, "r", label="42")
            await until_sent(local.artifacts)
            assert (await client.health())["lifecycle"]["active_rollouts"] == 1
            assert not handle.done()
            os.kill(local.artifacts._writer.pid, signal.SIGCONT)
            assert (await handle).sample.reward == 1.0
            assert (await client.health())["lifecycle"]["active_rollouts"] == 0
    assert saved(tmp_path)[1]["status"] == "success"


@posix
@pytest.mark.parametrize("during", ["agent", "saving"])
async def test_what_is_published_is_what_is_written(tmp_path, during):
    entered = trio.Event()

    class Waits(AgentWorkflow):
        async def run(self, ctx):
            if during == "agent":
                entered.set()
                await trio.sleep_forever()
            return ctx.prompt

    local = local_backend(Waits)
    local.artifacts = ArtifactStore(tmp_path)
    app = make_app(local)
    with hanging(await writer_pid(local.artifacts)):
        async with in_process_http(app) as http:
            _, lease = await admit(http, rollout_id="r", grade=False)
            await (entered.wait() if during == "agent" else until_sent(local.artifacts))
            app.registry._entries["r"].record.lease.deadline = 0.0  # its caller was silent
            published = await poll(http, "r", lease)
            os.kill(local.artifacts._writer.pid, signal.SIGCONT)
            await app.registry.wait_idle()
    trajectory, diagnostics = saved(tmp_path)
    # What was decided before its lease ended, and is being written, stays.
    expired = ("failure", "lease_expired")
    ended = published["status"], published["err_category"]
    assert ended == (expired if during == "agent" else ("success", None))
    assert trajectory["extra"]["status"] == diagnostics["status"] == published["status"]
    assert diagnostics["agent_started_at"] == published["agent_started_at"]
    for error in (trajectory["extra"].get("error"), diagnostics["error"]):
        assert (error and error["category"]) == published["err_category"]


@posix
async def test_a_disk_that_hangs_does_not_hang_workflow_and_grader(tmp_path, mock_clock, caplog):
    folders = []
    local = keeping(tmp_path, *asking(folders))

    async def run_both():
        for rollout_id in ("r1", "r2"):
            outcome = await execute(local, rollout_id, grade=True, label="x")
            assert outcome.result.sample.reward == 1.0

    with hanging(await writer_pid(local.artifacts)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_both)
            await until_sent(local.artifacts)
            mock_clock.jump(artifacts.LONGEST_WAIT_SEC)
    assert folders == [tmp_path / "r1" / "artifacts"] * 2 + [None] * 2
    assert caplog.text.count("did not answer") == 1


@pytest.mark.parametrize("explicit", [True, False])
def test_no_files_in_a_simulation(tmp_path, monkeypatch, explicit):
    monkeypatch.setenv("ROLLOUT_ARTIFACT_ROOT", str(tmp_path))
    folders = []

    class Run(Nothing):
        async def run(self, ctx):
            folders.append(ctx.artifacts_dir)
            return ctx.prompt

    async def scenario(world):
        async with world.client() as client:
            return await client.run_rollout([], CHAT, "r", grade=False)

    run = simulate(
        scenario,
        seed=1,
        faults="none",
        backend=lambda _: LocalBackend(workflow=Run, artifact_root=tmp_path if explicit else None),
    )
    assert run.value.status == "success"
    assert folders == [None]
    assert list(tmp_path.iterdir()) == []


async def test_a_backend_without_a_server(tmp_path):
    local = LocalBackend(workflow=Nothing, artifact_root=tmp_path)
    outcome = await local.execute(ExecutionRequest(id="r", prompt=[], grade=False))
    assert outcome.result.status == "success"
    assert saved(tmp_path)[0]["steps"] == [{"step_id": 1, "source": "system", "message": ""}]
