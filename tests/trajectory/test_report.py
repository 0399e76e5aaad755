"""Trajectories made by hand, with the calls that a caller has counted."""

from __future__ import annotations

import json
import logging

import httpx
import pytest

from rollout import ExecutionResult, RolloutSample
from rollout.errors import InvalidFieldError
from rollout.trajectory import (
    TrajectoryReport,
    convert_sample_to_trajectory,
    report_from_response,
    save_trajectory,
    trajectory_problems,
)
from rollout.trajectory.report import LlmCallMetrics, SampleReport

MESSAGES = [
    {"role": "user", "content": "What is 6 * 7?"},
    {"role": "assistant", "content": "Let me see."},
    {"role": "user", "content": "Well?"},
    {"role": "assistant", "content": "42", "usage": {"prompt_tokens": 1, "completion_tokens": 2}},
]
CALLS = [
    LlmCallMetrics(prompt_tokens=10, completion_tokens=3, model_name="policy"),
    LlmCallMetrics(prompt_tokens=20, completion_token_ids=[7, 8], logprobs=[-0.5, -0.25]),
]


def convert(calls, **more):
    sample = RolloutSample(messages=MESSAGES, reward=1.0)
    report = SampleReport(llm_call_metrics=calls, **more)
    document = convert_sample_to_trajectory(
        sample,
        rollout_id="r",
        request_label="42",
        request_extra_fields={"set": 3},
        report=report,
        default_model_name="default",
    )
    assert trajectory_problems(document) == []
    return document


def test_calls_stand_at_the_steps_of_the_agent():
    document = convert(CALLS)
    first, second = (step for step in document["steps"] if step["source"] == "agent")
    assert first["model_name"] == "policy"
    assert first["metrics"] == {"prompt_tokens": 10, "completion_tokens": 3}
    assert second["metrics"]["completion_token_ids"] == [7, 8]
    # What the report does not say of a call stays as the message has it.
    assert (second["metrics"]["prompt_tokens"], second["metrics"]["completion_tokens"]) == (20, 2)
    assert document["final_metrics"] == {
        "total_prompt_tokens": 30,
        "total_completion_tokens": 5,
        "total_steps": 4,
    }
    assert document["agent"]["model_name"] == "default"
    assert document["extra"]["label"] == "42"
    assert document["extra"]["osmosis"] == {"request_extra_fields": {"set": 3}}


def test_calls_that_cannot_be_placed_are_kept_beside_the_steps():
    document = convert(CALLS[:1], final_metrics={"total_cost_usd": 0.5})
    assert document["extra"]["osmosis"]["unmatched_llm_call_metrics"] == [
        {"prompt_tokens": 10, "completion_tokens": 3, "model_name": "policy"}
    ]
    assert document["final_metrics"] == {
        "total_prompt_tokens": 10,
        "total_completion_tokens": 3,
        "total_cost_usd": 0.5,
        "total_steps": 4,
    }


def test_a_sample_without_trajectory_messages_has_no_trajectory():
    sample = RolloutSample(messages=MESSAGES, trajectory_messages=None)
    with pytest.raises(InvalidFieldError, match="trajectory_messages"):
        convert_sample_to_trajectory(sample, rollout_id="r")


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[]", b"{}", b'{"trajectory": null}'])
def test_a_response_without_a_report(body):
    assert report_from_response(httpx.Response(200, content=body)) is None


def test_the_report_of_a_response(caplog):
    calls = {"llm_call_metrics": [{"prompt_tokens": 5, "unknown": 1}]}
    body = {"trajectory": {"model_name": "policy", "samples": {"0": calls}}}
    report = report_from_response(httpx.Response(200, json=body))
    assert report == TrajectoryReport(
        model_name="policy",
        samples={"0": SampleReport(llm_call_metrics=[LlmCallMetrics(prompt_tokens=5)])},
    )
    body["trajectory"]["samples"] = [calls]
    with caplog.at_level(logging.WARNING):
        assert report_from_response(httpx.Response(200, json=body)) is None
    assert "samples" in caplog.text


async def test_a_trajectory_is_saved_by_hand(tmp_path):
    result = ExecutionResult(
        status="success",
        sample=RolloutSample(messages=MESSAGES, reward=1.0),
        extra_fields={"phase": "done"},
    )
    report = TrajectoryReport(samples={"0": SampleReport(llm_call_metrics=CALLS)})
    await save_trajectory(rollout_id="r", result=result, report=report, artifact_root=tmp_path)
    document = json.loads((tmp_path / "r" / "trajectory.json").read_text())
    assert document["steps"][1]["metrics"]["prompt_tokens"] == 10
    assert json.loads((tmp_path / "r" / "diagnostics.json").read_text()) == {"phase": "done"}


async def test_a_result_without_a_sample_leaves_its_diagnostics(tmp_path):
    result = ExecutionResult(status="failure", err_message="x")
    await save_trajectory(
        rollout_id="r", result=result, artifact_root=tmp_path, diagnostics={"phase": "agent"}
    )
    assert [each.name for each in (tmp_path / "r").iterdir()] == ["diagnostics.json"]
