"""A trajectory made by hand says the same as the official package's."""

from __future__ import annotations

import importlib

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 6 * 7?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "And 7 * 7?"},
    {"role": "assistant", "content": "49"},
]
CALLS = [
    {"prompt_tokens": 10, "model_name": "policy"},
    {"prompt_tokens": 20, "completion_tokens": 4, "cost_usd": 0.5, "logprobs": [-0.5]},
]
BODY = {"trajectory": {"model_name": "m", "samples": {"0": {"llm_call_metrics": CALLS}}}}


class Response:
    def json(self):
        return BODY


def document(package):
    fields = {"rollout_id": "r", "request_extra_fields": {"set": 3}, "default_model_name": "m"}
    made_by = importlib.import_module(f"{package}.trajectory")
    sample = importlib.import_module(package).RolloutSample(messages=MESSAGES, reward=1.0)
    report = made_by.report_from_response(Response()).samples["0"]
    return made_by.convert_sample_to_trajectory(sample, report=report, **fields)


def test_steps_metrics_and_totals_are_the_same():
    ours = document("rollout")
    theirs = document("osmosis_ai.rollout").to_json_dict()
    for name in ("session_id", "trajectory_id", "final_metrics"):
        assert ours[name] == theirs[name]
    assert ours["agent"]["model_name"] == theirs["agent"]["model_name"] == "m"
    for our_step, their_step in zip(ours["steps"], theirs["steps"], strict=True):
        for name in ("step_id", "source", "message", "model_name", "metrics"):
            assert our_step.get(name) == their_step.get(name)
    requested = "request_extra_fields"
    assert ours["extra"]["osmosis"][requested] == theirs["extra"]["osmosis"][requested]
