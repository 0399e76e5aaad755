"""Environments of real tasks are started, checked and stopped by Harbor itself."""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from rollout.errors import BackendConfigurationError

pytestmark = pytest.mark.harbor

AGENT = """
from rollout import AgentWorkflow


class Agent(AgentWorkflow):
    async def run(self, context):
        raise AssertionError
"""

GRADER = """
from rollout import Grader


class Own(Grader):
    async def grade(self, context):
        raise AssertionError
"""


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """No folder of a trial or of a sandbox, and no process."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(children())
    yield
    # What was packaged goes with the backend.
    assert [path for path in folder.iterdir() if "agent" not in path.name] == []
    trials = tmp_path / "trials"
    assert not trials.exists() or list(trials.iterdir()) == []
    assert not (tmp_path / "kept").exists()
    assert set(children()) <= before


def children():
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found += (task / "children").read_text().split()
    return found


@pytest.mark.parametrize("mode", ["auto", "healthcheck", "full"])
async def test_a_good_task(tasks, backend, mode):
    tasks("good", healthcheck="test $(cat /app/marker) = good")
    made = backend()
    async with made.running():
        report = await made.prewarm(mode)
    assert report.tried == ["good"]
    assert report.failed == {}
    assert made.health()["unfit_tasks"] == 0


@pytest.mark.parametrize("mode", ["auto", "full"])
async def test_tasks_that_are_known_to_work(tasks, backend, tmp_path, monkeypatch, mode):
    (tmp_path / "agent_of_prewarm_test.py").write_text(AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    tasks("checked", healthcheck="true")
    tasks("plain")
    tasks("torn")
    (tasks.folder / "torn" / "task.toml").write_text("[")
    made = backend(
        agent="agent_of_prewarm_test:Agent",
        agent_setup_timeout_sec=0.001,
        verified_tasks=["checked", "plain", "torn"],
    )
    async with made.running():
        if mode == "full":  # sets the agents up, which takes too long
            with pytest.raises(BackendConfigurationError, match="no environment can be started"):
                await made.prewarm(mode)
            return
        report = await made.prewarm(mode)
    assert report.skipped == ["plain"]
    assert report.tried == ["checked", "torn"]
    assert list(report.failed) == ["torn"]


async def test_one_whose_health_check_fails_is_named(tasks, backend):
    tasks("good", healthcheck="true")
    tasks("ill", healthcheck="false")
    tasks("plain")
    made = backend()
    async with made.running():
        report = await made.prewarm("full")
    assert report.tried == ["good", "ill", "plain"]
    assert list(report.failed) == ["ill"]
    assert "ealthcheck" in report.failed["ill"]
    assert made.health()["unfit_tasks"] == 1


async def test_one_whose_definition_is_refused_is_named(tasks, backend):
    tasks("good")
    tasks("services", compose=True)
    made = backend()
    async with made.running():
        report = await made.prewarm()
    assert list(report.failed) == ["services"]
    assert "docker-compose.yaml" in report.failed["services"]


async def test_one_without_an_instruction_is_named(tasks, backend):
    tasks("good")
    (tasks("empty") / "instruction.md").unlink()
    made = backend()
    async with made.running():
        report = await made.prewarm()
    assert list(report.failed) == ["empty"]


NO_ENVIRONMENT = """
from rollout.backend.harbor.namespace import NamespaceEnvironment

class Environment(NamespaceEnvironment):
    def __init__(self, **_):
        raise LookupError("there is no such provider")
"""


async def test_an_environment_that_cannot_be_had_refuses_to_start(
    tasks, backend, tmp_path, monkeypatch
):
    tasks("a")
    tasks("b")
    (tmp_path / "no_environment.py").write_text(NO_ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = backend(environment={"import_path": "no_environment:Environment"})
    async with made.running():
        with pytest.raises(BackendConfigurationError, match="no environment can be started"):
            await made.prewarm()


async def test_a_lifespan_that_refuses_to_start(tasks, backend):
    tasks("ill", healthcheck="false")
    made = backend()
    async with made.running():
        with pytest.raises(BackendConfigurationError, match="task ill"):
            async with made.prewarm_lifespan("healthcheck")(None):
                raise AssertionError


async def test_the_setup_of_an_agent_is_part_of_the_full_mode(
    tasks, backend, tmp_path, monkeypatch
):
    tasks("good")
    (tmp_path / "prewarmed_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = backend(agent="prewarmed_agent:Agent", agent_options={"python": "/no/python"})
    async with made.running():
        assert (await made.prewarm("healthcheck")).failed == {}
        with pytest.raises(BackendConfigurationError, match="/no/python"):
            await made.prewarm("full")


async def test_a_task_that_a_grader_grades(tasks, backend, tmp_path, monkeypatch):
    shutil.rmtree(tasks("untested") / "tests")
    (tmp_path / "prewarmed_grader.py").write_text(GRADER)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = backend(grader="prewarmed_grader:Own")
    async with made.running():
        assert (await made.prewarm()).tried == ["untested"]


async def test_the_template(tasks, backend):
    folder = tasks("template", healthcheck="true")
    made = backend(tasks_dir=folder, task_mode="template")
    async with made.running():
        assert (await made.prewarm()).tried == ["template"]


async def test_it_belongs_into_a_running_backend(tasks, backend):
    tasks("good")
    with pytest.raises(BackendConfigurationError, match="running"):
        await backend().prewarm()


async def test_cancelling_stops_what_was_started(tasks, backend, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # The health check says that it runs, and goes on.
    tasks("slow", healthcheck="echo up > /shown/fifo; sleep 3600")
    mount = {"type": "bind", "source": str(fifo), "target": "/shown/fifo"}
    made = backend(environment={
        "import_path": "rollout.backend.harbor.namespace:NamespaceEnvironment",
        "mounts": [mount],
    })  # fmt: skip
    async with made.running(), trio.open_nursery() as nursery:
        nursery.start_soon(made.prewarm, "healthcheck")
        assert await trio.to_thread.run_sync(fifo.read_text, abandon_on_cancel=True) == "up\n"
        nursery.cancel_scope.cancel()
    assert nursery.cancel_scope.cancelled_caught
