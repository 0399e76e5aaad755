"""What goes into a sandbox and what comes back out of it. No Harbor is needed for that."""

from __future__ import annotations

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import AgentWorkflowConfig, ConcurrencyConfig
from rollout.backend.harbor.errors import WorkflowError
from rollout.backend.harbor.inside import documents as module
from rollout.backend.harbor.inside.documents import (
    WorkflowFailure,
    WorkflowResult,
    dump_config,
    dump_result,
    load_config,
    make_payload,
    read_result,
)
from rollout.errors import InvalidFieldError
from rollout.types import ExecutionRequest, RolloutErrorCategory, RolloutSample

TEXT = st.text(st.characters(), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
OBJECTS = st.dictionaries(TEXT, JSON, max_size=3)
MESSAGES = st.lists(OBJECTS, max_size=3)
SAMPLES = st.builds(
    lambda same, **fields: RolloutSample(
        **{k: v for k, v in fields.items() if not (same and k == "trajectory_messages")}
    ),
    same=st.booleans(),
    messages=MESSAGES,
    trajectory_messages=st.none() | MESSAGES,
    label=st.none() | TEXT,
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    remove_sample=st.booleans(),
    metrics=OBJECTS,
    extra_fields=OBJECTS,
)


def fields(sample):
    return (
        sample.messages, sample.trajectory_messages, sample.label, sample.reward,
        sample.remove_sample, sample.metrics, sample.extra_fields,
    )  # fmt: skip


@given(sample=SAMPLES)
def test_a_sample_comes_back_field_for_field(sample, tmp_path_factory):
    path = tmp_path_factory.mktemp("back") / "result.json"
    path.write_bytes(dump_result(WorkflowResult(sample=sample)))
    back = read_result(path)
    assert fields(back.sample) == fields(sample)
    assert back.dropped == ()
    assert back.failure is None


def test_no_sample_and_a_failure_come_back(tmp_path):
    path = tmp_path / "result.json"
    path.write_bytes(dump_result(WorkflowResult()))
    assert read_result(path) == WorkflowResult()
    failure = WorkflowFailure(
        message="m",
        category=RolloutErrorCategory.HTTP_ERROR,
        source="model_endpoint",
        traceback="Traceback",
    )
    path.write_bytes(dump_result(WorkflowResult(failure=failure)))
    assert read_result(path) == WorkflowResult(failure=failure)


def test_what_has_no_json_form_is_left_out_and_named(tmp_path):
    path = tmp_path / "result.json"
    sample = RolloutSample(
        messages=[{"role": "user", "content": object()}],
        metrics={"good": 1, "bad": math.nan},
        trajectory_messages=None,
    )
    path.write_bytes(dump_result(WorkflowResult(sample=sample)))
    back = read_result(path)
    assert back.sample.messages == [{"role": "user"}]
    assert back.sample.metrics == {"good": 1}
    assert back.sample.trajectory_messages is None
    assert [line.partition(": ")[0] for line in back.dropped] == ["messages", "metrics"]


def test_a_sample_as_deep_as_it_may_be_comes_back(tmp_path):
    deep = value = {}
    for _ in range(300):
        value["a"] = value = {}
    path = tmp_path / "result.json"
    path.write_bytes(dump_result(WorkflowResult(sample=RolloutSample(extra_fields=deep))))
    back = read_result(path)
    assert back.dropped
    assert back.sample.extra_fields["a"]["a"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"null",
        b'{"sample": {"messages": [',
        b'{"sample": 7}',
        b'{"sample": {"messages": "text"}}',
        b'{"sample": {"messages": [7]}}',
        b'{"sample": {"reward": NaN}}',
        b'{"sample": {"reward": 1e999}}',
        b'{"sample": {"reward": "1"}}',
        b'{"sample": {"reward": true}}',
        b'{"sample": {"label": 7}}',
        b'{"sample": {"remove_sample": 1}}',
        b'{"sample": {"trajectory_messages": 7}}',
        b'{"sample": {"trajectory_messages": false}}',
        b'{"sample": {"trajectory_messages": [7]}}',
        b'{"sample": {"metrics": []}}',
        b'{"sample": null, "sample": null}',
        b'{"sample": null, "dropped": 7}',
        b'{"sample": {"extra_fields": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}}",
        b'{"sample": ' + b"[" * 200_000,
        b'{"failure": {}}',
        b'{"failure": "x"}',
        b'{"failure": {"message": 7}}',
    ],
)
def test_what_is_no_result_is_refused(tmp_path, data):
    path = tmp_path / "result.json"
    path.write_bytes(data)
    with pytest.raises(InvalidFieldError, match=r"^result "):
        read_result(path)


@given(data=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_break_the_reader(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "result.json"
    path.write_bytes(data)
    with pytest.raises(InvalidFieldError):
        read_result(path)


def test_a_result_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 1024**2)
    path = tmp_path / "result.json"
    path.write_bytes(b" " * (1024**2 + 1))
    with pytest.raises(InvalidFieldError, match="larger than 1 MiB"):
        read_result(path)


def test_links_and_devices_are_no_results(tmp_path):
    (tmp_path / "link").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "gone"):
        with pytest.raises(FileNotFoundError):
            read_result(tmp_path / name)


@pytest.mark.parametrize("category", ["lease_expired", "internal_error", "nonsense", ""])
def test_a_sandbox_cannot_blame_the_server(tmp_path, category):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"failure": {"message": "m", "category": category}}))
    failure = read_result(path).failure
    raised = WorkflowError(failure.message, failure.category, failure.source)
    assert raised.category is RolloutErrorCategory.AGENT_ERROR


# --- payloads ---------------------------------------------------------------------------------


class Config(AgentWorkflowConfig):
    tools: tuple = ()


def test_a_payload_has_no_label():
    request = ExecutionRequest(
        id="r", prompt=[{"role": "user", "content": "p"}], label="the answer", metadata={"a": 1}
    )
    data = make_payload(
        request, workflow="m:C", config=None, instruction="task", artifacts_dir="/logs/artifacts"
    )
    assert b"the answer" not in data
    assert json.loads(data) == {
        "rollout_id": "r",
        "workflow": "m:C",
        "config": None,
        "prompt": [{"role": "user", "content": "p"}],
        "metadata": {"a": 1},
        "artifacts_dir": "/logs/artifacts",
    }


def test_a_request_without_messages_has_the_tasks_instruction():
    request = ExecutionRequest(id="r", prompt=[])
    data = make_payload(
        request, workflow="m:C", config=None, instruction="task", artifacts_dir="/a"
    )
    assert json.loads(data)["prompt"] == [{"role": "user", "content": "task"}]


def test_a_config_is_made_again_from_its_fields(monkeypatch):
    config = Config(
        name="c", description="d", tools=[1.5, "a"], concurrency=ConcurrencyConfig(max_concurrent=2)
    )
    monkeypatch.setattr(
        "rollout.backend.harbor.inside.documents.resolve_object", lambda ref, name: Config
    )
    dumped = json.loads(json.dumps(dump_config(config, "m:Config")))
    assert load_config(dumped) == config
    assert load_config(None) is None
