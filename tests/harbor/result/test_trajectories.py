"""Exactly one trajectory document of a trial is adopted, checked and free of the key."""

import copy
import json
import os

import pytest

from rollout.backend.harbor.plan import ResolvedTask, TrialPlan
from rollout.backend.harbor.result.trajectories import adopt_trajectory, messages_from
from rollout.context import RolloutContext
from rollout.trajectory import build_trajectory, trajectory_problems
from rollout.types import ExecutionRequest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs descriptors of folders")

KEY = "sk-secret-key-1234"
DOCUMENT = {
    "schema_version": "ATIF-v1.8",
    "session_id": "s",
    "agent": {"name": "terminus-2", "version": "2", "model_name": "policy"},
    "steps": [
        {"step_id": 1, "source": "system", "message": "be good"},
        {"step_id": 2, "source": "user", "message": "do it"},
        {
            "step_id": 3,
            "source": "agent",
            "message": "I do",
            "reasoning_content": "hm",
            "tool_calls": [
                {"tool_call_id": "a", "function_name": "bash", "arguments": {"cmd": "lä"}},
                {"tool_call_id": "b", "function_name": "look", "arguments": {}},
            ],
            "observation": {
                "results": [
                    {"source_call_id": "a", "content": "out a"},
                    {"source_call_id": "b", "content": None},
                    {"content": "the screen"},
                ]
            },
            "metrics": {"prompt_tokens": 3, "completion_tokens": 2, "logprobs": [-0.5]},
        },
        {"step_id": 4, "source": "agent", "message": "done"},
    ],
}
MESSAGES = [
    {"role": "system", "content": "be good"},
    {"role": "user", "content": "do it"},
    {
        "role": "assistant",
        "content": "I do",
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "bash", "arguments": '{"cmd": "lä"}'},
            },
            {"id": "b", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "out a"},
    {"role": "tool", "tool_call_id": "b", "content": ""},
    {"role": "user", "content": "the screen"},
    {"role": "assistant", "content": "done"},
]


@pytest.fixture
def plan(tmp_path):
    plan = TrialPlan(
        request=ExecutionRequest(id="r", prompt=[{"role": "user", "content": "do it"}]),
        context=RolloutContext(api_key=KEY),
        workspace=tmp_path,
        name="r-1",
        task=ResolvedTask(name="task", source={}),
    )
    (plan.trial_dir / "agent").mkdir(parents=True)
    return plan


def write(path, document=DOCUMENT):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))


def test_the_one_document_is_adopted(plan):
    write(plan.trial_dir / "agent" / "trajectory.json")
    write(plan.trial_dir / "agent" / "mini-swe-agent.trajectory.json", {"other": "form"})
    write(plan.trial_dir / "agent" / "trajectory.summarization-1-summary.json")
    adoption = adopt_trajectory(plan)
    assert adoption.document == DOCUMENT
    assert adoption.messages == MESSAGES
    assert adoption.note == "adopted agent/trajectory.json"
    assert not adoption.undecided


def test_a_task_of_one_step_out_of_several(plan):
    write(plan.trial_dir / "steps" / "first" / "agent" / "trajectory.json")
    (plan.trial_dir / "steps" / "second" / "agent").mkdir(parents=True)
    assert adopt_trajectory(plan).note == "adopted steps/first/agent/trajectory.json"


def test_no_document(plan):
    adoption = adopt_trajectory(plan)
    assert (adoption.document, adoption.messages, adoption.undecided) == (None, [], False)
    assert adoption.note == "the agent left no trajectory"


@pytest.mark.parametrize(
    "others",
    [
        ["agent/trajectory.json", "agent/trajectory.cont-1.json"],
        ["steps/a/agent/trajectory.json", "steps/b/agent/trajectory.json"],
        ["agent/trajectory.json", "steps/a/agent/trajectory.json"],
    ],
)
def test_of_several_none_is_adopted(plan, others):
    for name in others:
        write(plan.trial_dir / name)
    adoption = adopt_trajectory(plan)
    assert adoption.document is None
    assert adoption.undecided
    assert adoption.note == f"2 trajectories, none is adopted: {', '.join(others)}"


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ("{", "JSON"),
        ("", "empty"),
        ('{"steps": NaN}', "NaN"),
        ('{"a": 1, "a": 2}', "a stands more than once"),
        ("[" * 10_000, "deep"),
        ({**DOCUMENT, "steps": []}, "must not be empty"),
        ({**DOCUMENT, KEY: 1}, "[redacted]: is not a field of ATIF"),
        ({**DOCUMENT, "x": 1, "y": 1}, "(and 1 more)"),
        ("[]", "must be an object"),
    ],
)
def test_an_invalid_one_is_not_adopted(plan, document, why):
    write(plan.trial_dir / "agent" / "trajectory.json", document)
    adoption = adopt_trajectory(plan)
    assert adoption.document is None
    assert adoption.undecided
    assert adoption.note.startswith("agent/trajectory.json is not adopted: ")
    assert why in adoption.note
    assert KEY not in adoption.note


def test_bytes_that_are_no_text(plan):
    (plan.trial_dir / "agent" / "trajectory.json").write_bytes(b"\xff\xfe{}")
    assert adopt_trajectory(plan).undecided


def test_the_key_is_blanked_out(plan):
    document = copy.deepcopy(DOCUMENT)
    document["steps"][1]["message"] = f"use {KEY}"
    document["steps"][2]["tool_calls"][0]["arguments"] = {KEY: [KEY]}
    write(plan.trial_dir / "agent" / "trajectory.json", document)
    adoption = adopt_trajectory(plan)
    assert adoption.messages[1]["content"] == "use [redacted]"
    assert KEY not in json.dumps([adoption.document, adoption.messages])


@pytest.mark.parametrize("minor", range(9))
def test_older_versions(plan, minor):
    write(
        plan.trial_dir / "agent" / "trajectory.json",
        {**DOCUMENT, "schema_version": f"ATIF-v1.{minor}"},
    )
    assert adopt_trajectory(plan).document["schema_version"] == f"ATIF-v1.{minor}"


def test_links_are_not_followed(plan, tmp_path):
    write(tmp_path / "elsewhere" / "trajectory.json")
    (plan.trial_dir / "agent" / "trajectory.json").symlink_to(
        tmp_path / "elsewhere" / "trajectory.json"
    )
    adoption = adopt_trajectory(plan)
    assert adoption.document is None
    assert adoption.undecided
    (plan.trial_dir / "agent" / "trajectory.json").unlink()
    (plan.trial_dir / "steps").mkdir()
    (plan.trial_dir / "steps" / "agent").mkdir()
    (plan.trial_dir / "steps" / "a").mkdir()
    (plan.trial_dir / "steps" / "a" / "agent").symlink_to(tmp_path / "elsewhere")
    assert adopt_trajectory(plan).note == "the agent left no trajectory"


def test_what_is_no_file(plan):
    (plan.trial_dir / "agent" / "trajectory.json").mkdir()
    assert adopt_trajectory(plan).undecided
    (plan.trial_dir / "agent" / "trajectory.json").rmdir()
    os.mkfifo(plan.trial_dir / "agent" / "trajectory.json")
    assert "it is not a file" in adopt_trajectory(plan).note


def test_one_result_for_one_call_answers_it():
    document = copy.deepcopy(DOCUMENT)
    step = document["steps"][2]
    step["tool_calls"].pop()
    step["observation"]["results"] = [{"content": "out"}]
    step["message"] = ""
    messages = messages_from(document)
    assert messages[2]["content"] is None
    assert messages[3] == {"role": "tool", "tool_call_id": "a", "content": "out"}


def test_pictures():
    source = {"media_type": "image/png", "path": "https://x/a.png"}
    document = copy.deepcopy(DOCUMENT)
    document["steps"][1]["message"] = [
        {"type": "text", "text": "see"},
        {"type": "image", "source": source},
    ]
    assert trajectory_problems(document) == []
    assert messages_from(document)[1]["content"] == [
        {"type": "text", "text": "see"},
        {
            "type": "image_url",
            "image_url": {"url": "https://x/a.png"},
            "media_type": "image/png",
        },
    ]


def test_there_and_back():
    messages = [message for message in MESSAGES if message["content"] != "the screen"]
    document = build_trajectory(messages, rollout_id="r")
    assert trajectory_problems(document) == []
    assert messages_from(document) == messages


def test_arguments_that_were_no_object_stay_as_they_were():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    back = messages_from(build_trajectory(messages, rollout_id="r"))
    assert back == messages
