"""Backends from their start to their end, alone and beside others."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import ClassVar

import httpx
import pytest
import trio
from support import make_app, served
from trial_support import KEY, files_with

from rollout import ConcurrencyConfig, ExecutionRequest, Grader, GraderConfig, RolloutContext
from rollout.client import RolloutClient
from rollout.errors import BackendConfigurationError, BridgeError, RolloutServerError
from rollout.integrations.asyncio_bridge import get_bridge, open_asyncio_bridge
from rollout.server import serve
from rollout.types import RolloutErrorCategory, RolloutStatus

pytestmark = pytest.mark.harbor

REQUEST = ExecutionRequest(id="r", prompt=[{"role": "user", "content": "What is 6 * 7?"}])


async def test_outside_of_running(make_task, make_backend, tmp_path):
    make_task()
    backend = make_backend()
    with pytest.raises(BackendConfigurationError, match="running"):
        await backend.execute(REQUEST)
    assert backend.rollout_status("r") is None
    assert not (tmp_path / "trials").exists()


async def test_running_twice_in_sequence(make_task, make_backend):
    make_task()
    backend = make_backend()
    for _ in range(2):
        async with backend.running():
            outcome = await backend.execute(REQUEST)
            assert outcome.result.sample.reward == 1.0
            with pytest.raises(BackendConfigurationError, match="already"):
                async with backend.running():
                    pass
    with pytest.raises(BackendConfigurationError):
        _ = backend.bridge


async def test_an_error_while_it_runs_is_plain(make_task, make_backend):
    make_task()
    with pytest.raises(KeyError):
        async with make_backend().running():
            raise KeyError("of the server")


async def test_two_backends_at_the_same_time(make_task, make_backend, serving):
    make_task()
    make_task("other", solution="echo 43 > /app/answer.txt")
    first = make_backend()
    second = make_backend(tasks_dir=first.settings.tasks.tasks_dir.parent / "other")
    results = {}
    async with serving(first) as a, serving(second) as b, trio.open_nursery() as nursery:

        async def run(name, rollouts):
            results[name] = await rollouts.run("the-same-id", label="42")

        nursery.start_soon(run, "a", a)
        nursery.start_soon(run, "b", b)
    assert results["a"].sample.reward == 1.0
    assert results["b"].sample.reward == 0.0


async def test_fifty_at_the_same_time(make_task, make_backend, serving, tmp_path):
    make_task()
    backend = make_backend(max_concurrent=None)
    results = []
    async with serving(backend) as rollouts:

        async def run(number):
            results.append(await rollouts.run(f"r-{number}", label="42"))

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(run, number)
    assert [each.err_message for each in results] == [None] * 50
    assert {each.sample.reward for each in results} == {1.0}
    assert all(each.agent_started_at is not None for each in results)
    assert list((tmp_path / "trials").iterdir()) == []
    assert files_with(tmp_path, KEY) == []


async def test_the_lifespans_own_bridge(make_task, make_backend):
    make_task()
    backend, seen = make_backend(), {}

    async def asked():
        return get_bridge().name

    @asynccontextmanager
    async def lifespan(_):
        seen["before"] = get_bridge().name
        async with open_asyncio_bridge(name="of the user"):
            seen["within"] = get_bridge().name
            yield
        seen["after"] = get_bridge().name

    app = make_app(backend, lifespan=lifespan)
    async with app.serving():
        with RolloutContext(rollout_id="r"):
            outcome = await backend.execute(REQUEST)
    assert outcome.result.sample.reward == 1.0
    assert seen == {"before": "harbor", "within": "of the user", "after": "harbor"}
    with pytest.raises(BridgeError):
        get_bridge()


async def test_a_server_that_cannot_start_environments_does_not_start(make_task, make_backend):
    make_task()
    backend = make_backend(kind="trial_variants:FailingStart")
    app = make_app(backend, lifespan=backend.prewarm_lifespan("full"))
    with pytest.raises(RolloutServerError, match="no room for another sandbox") as caught:
        await serve(app, bind="127.0.0.1:0", handle_signals=False)
    assert "BackendConfigurationError: no environment can be started" in str(caught.value)
    with pytest.raises(BackendConfigurationError):
        _ = backend.bridge


async def test_one_bad_task_is_marked_and_the_others_run(make_task, make_backend, tmp_path):
    make_task("good")
    make_task("ill", environment='[environment.healthcheck]\ncommand = "false"\nretries = 1\n')
    backend = make_backend(tasks_dir=make_task.folder, task_mode="dataset")
    app = make_app(backend, lifespan=backend.prewarm_lifespan("full"))
    async with served(app) as url:
        async with RolloutClient(url=url) as client, httpx.AsyncClient() as http:
            assert (await http.get(f"{url}/health")).json()["unfit_tasks"] == 1
            results = {
                name: await client.run_rollout(
                    initial_messages=[],
                    chat_completions_url="http://127.0.0.1:9/v1",
                    rollout_id=name,
                    metadata={"harbor_task_id": name},
                )
                for name in ("good", "ill")
            }
    assert results["good"].sample.reward == 1.0
    assert results["ill"].status is RolloutStatus.FAILURE
    assert results["ill"].err_category is RolloutErrorCategory.INTERNAL_ERROR
    assert "could not be prewarmed" in results["ill"].err_message
    assert results["ill"].agent_started_at is None
    note = json.loads((tmp_path / "kept/ill/diagnostics.json").read_text())
    assert note["status"] == "failure"


class OneAtATime(Grader):
    """Notes when it comes and goes; the first one waits until it is let go."""

    notes: ClassVar[list] = []
    let_go: ClassVar[trio.Event]

    async def grade(self, ctx):
        self.notes.append("come")
        await self.let_go.wait()
        self.notes.append("gone")
        ctx.set_reward(1.0)


async def test_graders_have_a_limit_of_their_own(
    make_task, make_backend, serving, tmp_path, monkeypatch
):
    make_task(tests=None)
    (tmp_path / "echo_of_backend_test.py").write_text(
        "from rollout import AgentWorkflow\n\n\n"
        "class Echo(AgentWorkflow):\n"
        "    async def run(self, ctx):\n        return ctx.prompt\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(OneAtATime, "notes", [])
    OneAtATime.let_go = trio.Event()
    backend = make_backend(
        agent="echo_of_backend_test:Echo",
        grader=OneAtATime,
        grader_config=GraderConfig(name="one", concurrency=ConcurrencyConfig(max_concurrent=1)),
    )
    async with serving(backend) as rollouts:
        handles = [await rollouts.start(f"r-{number}", label="42") for number in range(2)]
        for handle in handles:
            await handle.wait_for_grading()
        while backend.runtime.grader_slots.statistics().tasks_waiting == 0:
            await trio.lowlevel.checkpoint()
        assert OneAtATime.notes == ["come"]
        OneAtATime.let_go.set()
        assert [(await handle).sample.reward for handle in handles] == [1.0, 1.0]
    assert OneAtATime.notes == ["come", "gone"] * 2


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), "20", True])
def test_a_grace_period_that_is_none(make_task, make_backend, seconds):
    make_task()
    with pytest.raises(BackendConfigurationError, match="cancel_grace_sec"):
        make_backend(cancel_grace_sec=seconds)


async def test_a_folder_for_trials_that_cannot_be_had(make_task, make_backend, tmp_path):
    make_task()
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendConfigurationError, match="trials_dir cannot be used"):
        async with make_backend(trials_dir=tmp_path / "file" / "trials").running():
            raise AssertionError


@pytest.mark.parametrize("way", ["link", "open to all"])
async def test_a_default_folder_that_others_could_change(make_task, make_backend, tmp_path, way):
    make_task()
    backend = make_backend(trials_dir=None)
    assert backend.settings.trials_dir.parent == tmp_path / "tmp"
    if way == "link":
        backend.settings.trials_dir.symlink_to(tmp_path / "tasks")
    else:
        backend.settings.trials_dir.mkdir()
        backend.settings.trials_dir.chmod(0o777)
    with pytest.raises(BackendConfigurationError, match="others can write"):
        async with backend.running():
            raise AssertionError


async def test_a_relative_folder_for_trials(make_task, make_backend, tmp_path, monkeypatch):
    make_task()
    monkeypatch.chdir(tmp_path)
    backend = make_backend(trials_dir="trials", artifact_root=False)
    async with backend.running():
        monkeypatch.chdir("/")
        outcome = await backend.execute(REQUEST)
    assert outcome.result.sample.reward == 1.0
    assert backend.settings.trials_dir == tmp_path / "trials"
