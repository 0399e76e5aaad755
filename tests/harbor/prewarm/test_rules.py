"""Which tasks are prewarmed, and what their failures mean; without Harbor."""

import asyncio
import os

import pytest
import trio
from attrs import define, field

from rollout.artifacts import ArtifactStore
from rollout.backend.harbor.agents.native import NativeAgent
from rollout.backend.harbor.environment import EnvironmentSpec
from rollout.backend.harbor.plan import ResolvedTask
from rollout.backend.harbor.result.facts import TrialError
from rollout.backend.harbor.settings import HarborSettings
from rollout.backend.harbor.trial import prewarm
from rollout.backend.harbor.trial.prewarm import PrewarmReport, prewarm_tasks
from rollout.backend.harbor.trial.runtime import Runtime
from rollout.errors import BackendConfigurationError
from rollout.integrations.asyncio_bridge import open_asyncio_bridge

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs descriptors of folders")


@define
class Tasks:
    names: list[str]

    def known(self):
        return [ResolvedTask(name=name, source={"path": name}) for name in self.names]


def settings_of(trials_dir, names=()):
    return HarborSettings(
        agent=NativeAgent("oracle", {}),
        environment=EnvironmentSpec(
            {"type": "opensandbox", "kwargs": {"domain": "x.test", "api_key": "secret-of-provider"}}
        ),
        tasks=Tasks(list(names)),
        store=ArtifactStore(False),
        trials_dir=trials_dir,
        stop_timeout_sec=1000.0,
    )


def runtime_of(bridge=None):
    return Runtime(trio.CapacityLimiter(1), bridge)


@define
class Trials:
    """The trials that would run: what became of each task, and how many ran at a time.

    Attributes:
        outcomes: By task: nothing, an error that Harbor records, or one that it raises.
    """

    outcomes: dict[str, object]
    full: dict[str, bool] = field(factory=dict)
    running: int = 0
    most: int = 0
    stopped: list[str] = field(factory=list)
    on_hang: object = None

    def config(self, run, plan):
        assert plan.workspace.is_dir()
        self.full[plan.task.name] = run.full
        return plan

    async def run(self, plan, stop):
        assert stop.trial == plan.name
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            outcome = self.outcomes.get(plan.task.name)
            if self.on_hang is not None:
                if self.running == 3:
                    self.on_hang()
                await asyncio.sleep(3600)
        finally:
            self.running -= 1
            self.stopped.append(plan.task.name)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


async def fetch(task, _workspace):
    await asyncio.sleep(0)
    return task


@pytest.fixture
def prewarmed(tmp_path, monkeypatch):
    async def call(names, outcomes=None, mode="full", limit=2, then=None, **more):
        trials = Trials(outcomes or {}, **more)
        monkeypatch.setattr(prewarm._Prewarm, "_config", lambda run, plan: trials.config(run, plan))
        monkeypatch.setattr(prewarm, "_run", trials.run)
        monkeypatch.setattr(prewarm, "fetch_task", fetch)
        async with open_asyncio_bridge() as bridge:
            settings = settings_of(tmp_path / "trials", names)
            try:
                report = await prewarm_tasks(settings, runtime_of(bridge), mode, limit)
            finally:
                if then is not None:
                    then(trials)
        assert not (tmp_path / "trials").exists() or not list((tmp_path / "trials").iterdir())
        return report, trials

    return call


async def test_off_does_nothing(tmp_path):
    assert await prewarm_tasks(settings_of(tmp_path), runtime_of(), "off", 2) == PrewarmReport()


async def test_no_such_mode(tmp_path):
    with pytest.raises(BackendConfigurationError, match="one of auto, full"):
        await prewarm_tasks(settings_of(tmp_path), runtime_of(), "all", 2)


@pytest.mark.parametrize(
    ("mode", "tasks", "tried", "full"),
    [
        ("full", "abcdef", "abcdef", True),
        ("healthcheck", "abc", "a", False),
        ("auto", "abcd", "abcd", True),
        ("auto", "abcde", "a", False),
        ("full", "", "", None),
    ],
)
async def test_modes(prewarmed, mode, tasks, tried, full):
    report, trials = await prewarmed(tasks, mode=mode)
    assert report.tried == list(tried)
    assert report.failed == {}
    assert report.seconds >= 0
    assert trials.full == dict.fromkeys(tried, full)


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (3, 3), (None, 8)])
async def test_as_many_at_a_time_as_trials_may_run(prewarmed, limit, most):
    _, trials = await prewarmed("abcdefgh", limit=limit)
    assert 1 <= trials.most <= most


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (TrialError(type="RuntimeError", message="unhealthy"), "RuntimeError: unhealthy"),
        (TrialError(type="EnvironmentStartTimeoutError"), "EnvironmentStartTimeoutError"),
        (ValueError("bad definition"), "bad definition"),
        (SystemExit("no docker"), "SystemExit: no docker"),
        (TrialError(type="E", message="of secret-of-provider"), "E: of [redacted]"),
        (TrialError(type="E", message="x" * 9999), "E: " + "x" * 1997),
    ],
)
async def test_a_task_that_fails_alone_is_named(prewarmed, outcome, reason, caplog):
    report, _ = await prewarmed("abc", {"b": outcome})
    assert report.tried == ["a", "b", "c"]
    assert report.failed == {"b": reason}
    assert "task b cannot be prewarmed" in caplog.text


async def test_secrets_of_the_environment_are_blanked_out(prewarmed, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "very-secret-value")
    report, _ = await prewarmed("ab", {"b": ValueError("with very-secret-value")})
    assert report.failed == {"b": "with [redacted]"}


async def test_when_all_fail_nothing_can_start(prewarmed):
    outcomes = {"a": ValueError("one reason"), "b": ValueError("another")}
    with pytest.raises(
        BackendConfigurationError, match=r"2 tasks, such as (a\): one reason|b\): another)"
    ):
        await prewarmed("ab", outcomes, limit=1)
    with pytest.raises(BackendConfigurationError, match=r"\(task a\): one reason"):
        await prewarmed("abcdefg", outcomes, mode="healthcheck")


async def test_the_first_few_failures_for_one_reason_end_it(prewarmed):
    names = [f"t{number}" for number in range(20)]
    outcomes = {name: TrialError(type="E", message=f"{name}: no route, try 7") for name in names}
    seen = []
    with pytest.raises(BackendConfigurationError, match=r"3 tasks, such as t\d+\): E: t"):
        await prewarmed(names, outcomes, limit=1, then=lambda trials: seen.append(trials))
    assert len(seen[0].stopped) < 20


async def test_failures_for_different_reasons_do_not_end_it(prewarmed):
    outcomes = {name: ValueError(f"because of {name * 3}") for name in "abcde"}
    report, _ = await prewarmed("abcdefg", outcomes, limit=1)
    assert report.tried == list("abcdefg")
    assert list(report.failed) == list("abcde")


async def test_cancelling_stops_what_was_started_and_removes_its_folders(prewarmed, tmp_path):
    seen = []
    token = trio.lowlevel.current_trio_token()
    all_run = trio.Event()

    async def call():
        await prewarmed(
            "abc",
            on_hang=lambda: token.run_sync_soon(all_run.set),
            limit=3,
            then=lambda trials: seen.append((trials.running, sorted(trials.stopped))),
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await all_run.wait()
        assert len(list((tmp_path / "trials").iterdir())) == 3
        nursery.cancel_scope.cancel()
    assert seen == [(0, ["a", "b", "c"])]
    assert list((tmp_path / "trials").iterdir()) == []
