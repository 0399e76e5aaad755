"""After a trial: its sample is read, its folder cleaned, archived or kept, and removed."""

import json
import logging
import os
from datetime import UTC, datetime
from types import SimpleNamespace

import attrs
import pytest

from rollout.artifacts import ArtifactStore
from rollout.backend.harbor import verify_trial_evidence
from rollout.backend.harbor.agents.native import NativeAgent
from rollout.backend.harbor.agents.spec import AgentSpec
from rollout.backend.harbor.environment import EnvironmentSpec
from rollout.backend.harbor.limits import EnvironmentWatch
from rollout.backend.harbor.plan import ResolvedTask, TrialPlan
from rollout.backend.harbor.result.facts import TrialError, TrialFacts
from rollout.backend.harbor.result.scrub import ScrubReport
from rollout.backend.harbor.result.settle import Settled, agent_sample, settle
from rollout.backend.harbor.settings import HarborSettings
from rollout.backend.saving import RolloutFiles
from rollout.context import RolloutContext
from rollout.errors import EvidenceError
from rollout.trajectory import trajectory_problems
from rollout.types import (
    ExecutionOutcome,
    ExecutionRequest,
    ExecutionResult,
    RolloutErrorCategory,
    RolloutSample,
    RolloutStatus,
)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs descriptors of folders")

KEY = "sk-secret-key-1234"
PROMPT = [{"role": "user", "content": "do it"}]
DOCUMENT = {
    "schema_version": "ATIF-v1.7",
    "agent": {"name": "terminus-2", "version": "2"},
    "steps": [
        {"step_id": 1, "source": "user", "message": f"use {KEY}"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "done",
            "metrics": {"prompt_tokens": 3, "completion_tokens": 1},
        },
    ],
    "extra": {"of": "the agent", "reward": 9},
}
FACTS = TrialFacts(
    rewards={"reward": 1.0, "style": 0.5},
    agent=("terminus-2", "2.0"),
    timings={"agent_execution": 1.25},
    usage={"prompt_tokens": 3},
)
FAILED = TrialFacts(errors=(TrialError(type="AgentTimeoutError", message=f"with {KEY}"),))
CANCELLED = TrialFacts(errors=(TrialError(type="CancelledError"),))


class Workflow(AgentSpec):
    """An agent whose sample is what is in its file, as it is."""

    name = "workflow"
    on_host = False

    def prepare(self):
        raise NotImplementedError

    def fields(self, plan):
        raise NotImplementedError

    def sample(self, plan):
        path = plan.trial_dir / "agent" / "sample.json"
        if not path.exists():
            return None
        return RolloutSample(messages=json.loads(path.read_text()), metrics={"m": 1})


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "kept")


@pytest.fixture
def plan(tmp_path):
    plan = TrialPlan(
        request=ExecutionRequest(id="r", prompt=PROMPT, label="42", metadata={"key": KEY}),
        context=RolloutContext(api_key=KEY),
        workspace=tmp_path / "work" / "r-1",
        name="r-1",
        task=ResolvedTask(name="tasks/a", source={}, instruction="Do it."),
    )
    write(plan, "agent/log.txt", f"called with {KEY}")
    write(plan, "artifacts/out.txt", "out")
    write(plan, "result.json", "{}")
    return plan


def write(plan, name, content):
    path = plan.trial_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def settled(
    plan, store, facts=FACTS, *, agent=None, keep_failed=True, watch=None, where="docker", **more
):
    result = Settled(sample=RolloutSample(messages=PROMPT))
    settings = HarborSettings(
        agent=agent or NativeAgent("oracle", {}),
        environment=EnvironmentSpec(where),
        tasks=None,
        store=store,
        trials_dir=plan.workspace.parent,
    )
    watch = watch or EnvironmentWatch("r-1", 1.0)
    settle(result, plan, facts, settings, watch, keep_failed=keep_failed, **more)
    return result


def everything_below(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_trial_that_went_well(plan, store, tmp_path):
    write(plan, "agent/trajectory.json", DOCUMENT)
    result = settled(plan, store)
    assert result.sample.messages == [
        {"role": "user", "content": "use [redacted]"},
        {"role": "assistant", "content": "done"},
    ]
    assert result.sample.label == "42"
    assert result.sample.reward is None
    assert result.document["steps"][0]["message"] == "use [redacted]"
    assert result.diagnostics == {
        "harbor": {
            "trial": "r-1",
            "task": "tasks/a",
            "agent": {"name": "terminus-2", "version": "2.0"},
            "timings": {"agent_execution": 1.25},
            "errors": [],
            "rewards": {"reward": 1.0, "style": 0.5},
            "usage": {
                "prompt_tokens": 3,
                "cached_tokens": None,
                "completion_tokens": None,
                "cost_usd": None,
            },
            "scrubbed": {"cleaned": 2, "deleted": [], "verified": True},
            "trajectory": "adopted agent/trajectory.json",
            "archive": {"folders": ["artifacts", "harbor"]},
        }
    }
    assert (store.root / "r" / "harbor" / "agent" / "log.txt").read_text() == (
        "called with [redacted]"
    )
    assert (store.root / "r" / "artifacts" / "out.txt").read_text() == "out"
    evidence = verify_trial_evidence(store.root / "r" / "harbor", "r")
    assert [entry["path"] for entry in evidence["files"]] == [
        "agent/log.txt", "agent/trajectory.json", "result.json"
    ]  # fmt: skip
    assert list((tmp_path / "work").iterdir()) == []
    assert KEY.encode() not in everything_below(tmp_path)


def test_evidence_that_had_to_be_deleted_is_incomplete(plan, store):
    (plan.trial_dir / "agent" / "core").write_bytes(b"\xff\0" + KEY.encode())
    settled(plan, store)
    with pytest.raises(EvidenceError, match=r"incomplete.*agent/core"):
        verify_trial_evidence(store.root / "r" / "harbor", "r")


@pytest.mark.parametrize(
    ("facts", "more", "stays"),
    [
        (FACTS, {}, False),
        (FAILED, {}, True),
        (FAILED, {"keep_failed": False}, False),
        (CANCELLED, {}, False),
        (TrialFacts(), {"error": ValueError("x")}, True),
        (TrialFacts(rewards={"style": 1}), {}, True),
        (TrialFacts(rewards={"reward": "nan"}), {}, True),
    ],
)
def test_failed_trials_stay(plan, store, tmp_path, facts, more, stays):
    write(plan, "../../task/task.toml", "")
    result = settled(plan, store, facts, **more)
    assert plan.trial_dir.exists() is stays
    assert result.diagnostics["harbor"].get("kept_in") == (str(plan.trial_dir) if stays else None)
    assert not (plan.workspace / "task").exists()
    assert (store.root / "r" / "harbor" / "agent" / "log.txt").exists()
    assert KEY.encode() not in everything_below(tmp_path)
    if stays:
        assert (plan.trial_dir / "agent" / "log.txt").read_text() == "called with [redacted]"
        assert (plan.trial_dir / "artifacts" / "out.txt").exists()


@pytest.mark.parametrize(("document", "why"), [
    (None, "the agent left no trajectory"),
    ("{", "agent/trajectory.json is not adopted: it is not JSON"),
])  # fmt: skip
def test_an_agent_that_calls_a_model_needs_a_trajectory(plan, store, document, why):
    if document is not None:
        write(plan, "agent/trajectory.json", document)
    result = settled(plan, store, agent=NativeAgent("terminus-2", {}))
    assert result.sample is None
    assert result.missing.startswith(f"terminus-2 left no conversation: {why}")
    assert plan.trial_dir.exists()
    assert agent_sample(plan, NativeAgent("terminus-2", {}), None) is None
    assert agent_sample(plan, NativeAgent("oracle", {}), None).messages[0]["content"] == "Do it."


@pytest.mark.parametrize(
    ("graded", "stays"),
    [
        ({"remove_sample": True}, False),
        ({"reward": 0.5}, False),
        ({}, True),
    ],
)
def test_a_sample_that_needs_no_reward_of_the_verifier_has_not_failed(plan, store, graded, stays):
    settled(plan, store, TrialFacts(), graded=RolloutSample(**graded))
    assert plan.trial_dir.exists() is stays


def test_without_a_grading_no_reward_is_missed(plan, store):
    plan = attrs.evolve(plan, request=attrs.evolve(plan.request, grade=False))
    settled(plan, store, TrialFacts())
    assert not plan.trial_dir.exists()


def test_several_trajectories_leave_the_folder(plan, store):
    write(plan, "agent/trajectory.json", DOCUMENT)
    write(plan, "agent/trajectory.cont-1.json", DOCUMENT)
    result = settled(plan, store, keep_failed=False)
    notes = result.diagnostics["harbor"]
    assert notes["trajectory"].startswith("2 trajectories, none is adopted")
    assert notes["kept_in"] == str(plan.trial_dir)
    assert result.document is None
    assert result.sample.messages == [{"role": "user", "content": "Do it."}]
    assert (plan.trial_dir / "agent" / "trajectory.cont-1.json").exists()
    assert KEY.encode() not in everything_below(plan.workspace)


def test_a_workflows_sample_is_taken_as_it_is(plan, store, tmp_path):
    messages = [{"role": "assistant", "content": f"my key is {KEY}"}]
    write(plan, "agent/sample.json", messages)
    write(plan, "agent/trajectory.json", DOCUMENT)
    result = settled(plan, store, agent=Workflow())
    assert result.sample.messages == messages
    assert result.sample.metrics == {"m": 1}
    assert result.document is None
    assert "trajectory" not in result.diagnostics["harbor"]
    assert KEY.encode() not in everything_below(tmp_path)


def test_a_workflow_that_agent_sample_nothing_has_no_sample(plan, store):
    assert settled(plan, store, agent=Workflow()).sample is None


def test_a_workflow_that_agent_sample_nonsense(plan, store, caplog):
    write(plan, "agent/sample.json", f'{{"{KEY}')
    result = settled(plan, store, agent=Workflow())
    assert result.sample is None
    assert "Unterminated string" in result.diagnostics["harbor"]["sample"]
    assert "is not a sample" in caplog.text
    assert KEY not in caplog.text


def test_an_agents_folder_that_is_locked_can_be_read(plan, store):
    write(plan, "agent/sample.json", [{"role": "assistant", "content": "x"}])
    (plan.trial_dir / "agent" / "sample.json").chmod(0o000)
    (plan.trial_dir / "agent").chmod(0o000)
    result = settled(plan, store, agent=Workflow())
    assert result.sample.messages == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize("facts", [FACTS, FAILED])
def test_nothing_of_a_folder_that_is_not_clean_is_kept(
    plan, store, tmp_path, facts, caplog, monkeypatch
):
    monkeypatch.setattr(
        "rollout.backend.harbor.result.settle.scrub_folder",
        lambda *_: ScrubReport(reason="something cannot be removed"),
    )
    write(plan, "agent/trajectory.json", DOCUMENT)
    result = settled(plan, store, facts)
    notes = result.diagnostics["harbor"]
    assert not notes["scrubbed"]["verified"]
    assert "archive" not in notes
    assert result.document is None
    assert len(result.sample.messages) == 2
    assert "nothing of its trial is kept" in caplog.text
    assert list((tmp_path / "work").iterdir()) == []
    assert not (tmp_path / "kept").exists()


def test_without_a_key(plan, store):
    plan = attrs.evolve(plan, context=RolloutContext())
    os.mkfifo(plan.trial_dir / "artifacts" / "pipe")
    (plan.trial_dir / "artifacts" / "out").symlink_to("/etc/passwd")
    report = settled(plan, store).diagnostics["harbor"]["scrubbed"]
    assert report["verified"]
    assert sorted(report["deleted"]) == [
        "artifacts/out: it is a link that leads out",
        "artifacts/pipe: it is a special file",
    ]
    kept = store.root / "r" / "artifacts"
    assert [path.name for path in kept.iterdir()] == ["out.txt"]


@pytest.mark.parametrize("key", [KEY, None])
def test_a_folder_that_cannot_be_tamed_is_not_kept(plan, store, monkeypatch, key):
    def tame(_path, _tell):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("rollout.backend.harbor.result.settle.tame_tree", tame)
    plan = attrs.evolve(plan, context=RolloutContext(api_key=key))
    notes = settled(plan, store, FAILED).diagnostics["harbor"]
    assert not notes["scrubbed"]["verified"]
    assert "cannot be read or removed" in notes["scrubbed"]["reason"]
    assert not (store.root / "r").exists()
    assert not plan.workspace.exists()


def test_a_trial_that_never_had_a_folder(plan, store, tmp_path):
    plan = attrs.evolve(plan, name="r-2")
    result = settled(plan, store, TrialFacts(), error=ValueError("no such task"))
    notes = result.diagnostics["harbor"]
    assert "scrubbed" not in notes
    assert "kept_in" not in notes
    assert result.sample.messages == [{"role": "user", "content": "Do it."}]
    assert list((tmp_path / "work").iterdir()) == []


def test_a_link_in_the_place_of_the_trials_folder(plan, store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text(KEY)
    plan = attrs.evolve(plan, name="r-2")
    plan.trial_dir.symlink_to(outside)
    settled(plan, store)
    assert (outside / "file").read_text() == KEY
    assert not (tmp_path / "kept").exists()
    assert list((tmp_path / "work").iterdir()) == []


def test_a_workspace_that_cannot_be_removed_is_named(plan, store, monkeypatch):
    monkeypatch.setattr("rollout.backend.harbor.workspaces.remove_tree", lambda _: ["x: busy"])
    notes = settled(plan, store).diagnostics["harbor"]
    assert notes["not_removed"] == str(plan.workspace)


def test_a_store_that_keeps_nothing(plan, tmp_path):
    result = settled(plan, ArtifactStore(False))
    assert result.diagnostics["harbor"]["archive"] == {}
    assert list((tmp_path / "work").iterdir()) == []


def test_a_sandbox_that_may_still_be_there_is_named(plan, store):
    spec = {"type": "opensandbox", "kwargs": {"domain": "sandboxes.test"}}
    watch = EnvironmentWatch("r-1", 1.0)
    error = TrialError(type="SandboxReadyTimeoutException", message="too slow")
    for facts, raised in (
        (TrialFacts(errors=(attrs.evolve(error, type="SandboxTimeoutException"),)), None),
        (TrialFacts(), type("SandboxTimeoutException", (Exception,), {})()),
    ):
        for has_no_sandbox in (True, False):
            watch.has_no_sandbox = has_no_sandbox
            result = settled(plan, store, facts, where=spec, watch=watch, error=raised)
            assert ("leftover" in result.diagnostics["harbor"]) is has_no_sandbox
            if has_no_sandbox:
                found = result.diagnostics["harbor"]["leftover"]["opensandbox"]
                assert found["domain"] == "sandboxes.test"
    watch.has_no_sandbox = True
    result = settled(plan, store, TrialFacts(errors=(error,)), where=spec, watch=watch)
    assert "leftover" not in result.diagnostics["harbor"]


# --- what is saved at the end -----------------------------------------------------------------


async def save(store, outcome, settled, **more):
    end = RolloutContext(rollout_id="r").settle(outcome)
    fields = {
        "request": ExecutionRequest(id="r", prompt=PROMPT, label="42", metadata={"id": 7}),
        "outcome": outcome,
        "end": attrs.evolve(end, agent_started_at=datetime(2026, 1, 2, tzinfo=UTC)),
        "phase": RolloutStatus.GRADING,
        "timings": {"total_sec": 1.5},
        "secrets": (KEY,),
        "document": settled.document,
        "diagnostics": settled.diagnostics,
    }
    await store.save("r", RolloutFiles(**fields | more).contents)
    folder = store.root / "r"
    return tuple(
        json.loads(path.read_text()) if path.exists() else None
        for path in (folder / "trajectory.json", folder / "diagnostics.json")
    )


def graded(sample):
    ok = ExecutionResult(status=RolloutStatus.SUCCESS, sample=sample)
    return ExecutionOutcome(
        workflow=ok, grader=ExecutionResult(status=RolloutStatus.SUCCESS, sample=sample)
    )


async def test_an_adopted_document_is_saved_with_what_became_of_it(store):
    sample = RolloutSample(messages=PROMPT, label="42", reward=0.5, metrics={"m": 1})
    result = Settled(document=DOCUMENT, diagnostics={"harbor": {"trial": f"r-{KEY}"}})
    trajectory, diagnostics = await save(store, graded(sample), result)
    assert trajectory_problems(trajectory) == []
    assert trajectory["steps"][1] == DOCUMENT["steps"][1]
    assert trajectory["extra"] == {
        "of": "the agent",
        "rollout_id": "r",
        "reward": 0.5,
        "label": "42",
        "metrics": {"m": 1},
        "metadata": {"id": 7},
        "status": "success",
    }
    assert diagnostics["harbor"] == {"trial": "r-[redacted]"}
    assert diagnostics["agent_started_at"].startswith("2026-01-02T00:00:00")
    assert diagnostics["timings"] == {"total_sec": 1.5}
    assert KEY.encode() not in everything_below(store.root)


async def test_without_a_document_the_samples_messages_are_saved(store):
    trajectory, _ = await save(store, graded(RolloutSample(messages=PROMPT)), Settled())
    assert trajectory["steps"] == [{"step_id": 1, "source": "user", "message": "do it"}]


async def test_a_failure_is_saved_without_a_reward_and_notes_are_there_once(store):
    notes = {"harbor": {"trial": "r-1"}}
    workflow = ExecutionResult(
        status=RolloutStatus.FAILURE,
        err_message=f"no {KEY}",
        err_category=RolloutErrorCategory.TIMEOUT,
        sample=RolloutSample(messages=PROMPT, reward=1.0),
        extra_fields={**notes, "more": 1},
    )
    trajectory, diagnostics = await save(
        store,
        ExecutionOutcome(workflow=workflow),
        Settled(document=DOCUMENT, diagnostics=notes),
    )
    assert trajectory["extra"]["reward"] is None
    assert trajectory["extra"]["error"] == {"category": "timeout", "message": "no [redacted]"}
    assert diagnostics["harbor"] == {"trial": "r-1"}
    assert diagnostics["extra_fields"] == {"more": 1}


async def test_a_document_that_cannot_be_saved_is_no_failure(store, caplog):
    document = {**DOCUMENT, "extra": {"x": object()}}
    sample = RolloutSample(messages=PROMPT)
    with caplog.at_level(logging.WARNING):
        trajectory, diagnostics = await save(store, graded(sample), Settled(document=document))
    assert "its trajectory is not saved (TypeError)" in caplog.text
    assert trajectory is None
    assert diagnostics is not None


def watch_of(*, mounted, may_run):
    """The watch of an environment."""

    async def call(*_, **__):
        raise NotImplementedError

    names = ("start", "exec", "upload_file", "upload_dir", "download_file", "download_dir", "stop")
    environment = SimpleNamespace(
        capabilities=SimpleNamespace(mounted=mounted), **dict.fromkeys(names, call)
    )
    watch = EnvironmentWatch("r-1", 1.0)
    watch.watch(environment)
    watch.may_run = may_run
    return watch


def test_nothing_is_kept_of_a_folder_that_a_container_may_still_write_to(plan, store):
    result = settled(plan, store, watch=watch_of(mounted=True, may_run=True))
    note = result.diagnostics["harbor"]
    assert note["scrubbed"]["reason"] == "its environment may still write there"
    assert "archive" not in note
    assert not plan.workspace.exists()
    assert result.sample is not None


@pytest.mark.parametrize(
    ("mounted", "may_run", "facts"),
    [(False, True, FACTS), (True, False, FACTS), (True, True, FAILED)],
)
def test_of_any_other_folder_it_is(plan, store, mounted, may_run, facts):
    """Where the agent never ran, nobody is there who would write."""
    result = settled(plan, store, facts, watch=watch_of(mounted=mounted, may_run=may_run))
    assert result.diagnostics["harbor"]["scrubbed"]["verified"]
    assert result.diagnostics["harbor"]["archive"]["folders"] == ["artifacts", "harbor"]
