"""The files of a finished rollout, for any backend."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from attrs import evolve

from rollout import (
    ExecutionOutcome,
    ExecutionRequest,
    ExecutionResult,
    RolloutContext,
    RolloutErrorCategory,
    RolloutSample,
    RolloutStatus,
)
from rollout.backend.saving import RolloutFiles

PROMPT = [{"role": "user", "content": "hi"}]
GRADED = RolloutSample(messages=[*PROMPT, {"role": "assistant", "content": "yes"}], reward=1.0)


def finished(workflow, grader=None, **fields):
    outcome = ExecutionOutcome(workflow=workflow, grader=grader)
    started = fields.pop("agent_started_at", datetime(2030, 1, 2, tzinfo=UTC))
    end = RolloutContext(rollout_id="r").settle(outcome)
    return RolloutFiles(
        request=ExecutionRequest(id="r", prompt=PROMPT, label="L"),
        outcome=outcome,
        end=evolve(end, agent_started_at=started),
        **{
            "phase": RolloutStatus.GRADING,
            "timings": {"agent_sec": 1.23456789, "grader_sec": None},
            **fields,
        },
    )


def files(*args, **fields):
    made = finished(*args, **fields).contents()
    assert made.keys() == {"trajectory.json", "diagnostics.json"}
    return tuple(None if data is None else json.loads(data) for data in made.values())


def success(**fields):
    return ExecutionResult(status=RolloutStatus.SUCCESS, **fields)


def test_diagnostics():
    _, diagnostics = files(success(sample=GRADED), success(sample=GRADED))
    assert diagnostics.pop("sizes")["prompt_messages"] == 1
    assert diagnostics.pop("version")
    assert diagnostics == {
        "schema": "rollout-diagnostics/1",
        "rollout_id": "r",
        "status": "success",
        "error": None,
        "phase": "grading",
        "agent_started_at": "2030-01-02T00:00:00Z",
        "timings": {"agent_sec": 1.234568, "grader_sec": None},
    }


def test_what_a_backend_notes():
    notes = {"exit_code": 3, "odd": {1}, "key": "sk-secret"}
    _, diagnostics = files(success(sample=GRADED, extra_fields=notes), secrets=("sk-secret",))
    assert diagnostics["extra_fields"] == {"exit_code": 3, "key": "[redacted]"}
    assert diagnostics["dropped"] == ["odd: of type set"]


def test_the_graded_sample_is_the_one_to_keep():
    plain = RolloutSample(messages=PROMPT)
    trajectory, _ = files(success(sample=plain), success(sample=GRADED))
    assert len(trajectory["steps"]) == 2
    assert trajectory["extra"]["reward"] == 1.0


def test_a_sample_of_the_grader_after_a_failed_workflow():
    failed = ExecutionResult(
        status=RolloutStatus.FAILURE,
        err_message="late",
        err_category=RolloutErrorCategory.TIMEOUT,
    )
    trajectory, diagnostics = files(failed, success(sample=GRADED))
    assert len(trajectory["steps"]) == 2
    assert trajectory["extra"]["reward"] is None
    assert diagnostics["error"] == {"category": "timeout", "message": "late"}


def test_no_sample_at_all():
    trajectory, diagnostics = files(success())
    assert [step["message"] for step in trajectory["steps"]] == ["hi"]
    assert trajectory["extra"] == {"status": "success", "label": "L"}
    assert diagnostics["sizes"]["messages"] is None


def test_no_trajectory_is_kept_where_none_is_wanted():
    trajectory, diagnostics = files(
        success(sample=RolloutSample(messages=PROMPT, trajectory_messages=None))
    )
    assert trajectory is None
    assert diagnostics["sizes"]["trajectory_bytes"] is None
