"""The calls of a trajectory, with tokens, versions and the conversation that they belong to."""

from __future__ import annotations

import json

import pytest
from gateway.served import QUESTION, post, rig
from gateway.test_tokens import TURN, in_turn, vllm
from integrations.recording.test_recorder import Talk, model, user

from rollout.errors import TrajectoryError
from rollout.gateway import ModelGateway
from rollout.trajectory import build_trajectory, read_trajectory


def tokens_of(call):
    return call.prompt_token_ids, call.completion_token_ids, call.logprobs


async def test_the_calls_of_a_gateway_come_through_the_server(tmp_path, monkeypatch):
    """Two turns of one agent, a sub-agent between them, and an update of the weights."""
    monkeypatch.setenv("ROLLOUT_ARTIFACT_ROOT", str(tmp_path))

    async def agent(context):
        history = [QUESTION]
        await post(context, messages=history)
        await it.client.resume_policy(version=8)
        await post(context, messages=[{"role": "user", "content": "You are a helper."}])
        for _ in range(2):
            history += [{"role": "assistant", "content": "13"}, TURN]
            await post(context, messages=history)

    script = in_turn(
        vllm([1, 2], [3, 4]), vllm([9], [8]), vllm([1, 2, 3, 4, 5], [6]), vllm([1, 2, 3, 7], [8])
    )
    async with rig(agent, script, gateway=ModelGateway(capture="tokens")) as it:
        await it.client.resume_policy(version=7)
        result = await it.run()
        trajectory = await it.client.fetch_trajectory(result.rollout_id)
    calls = trajectory.calls
    assert [tokens_of(each) for each in calls] == [
        ([1, 2], [3, 4], [-0.03, -0.04]),
        ([9], [8], [-0.08]),
        ([1, 2, 3, 4, 5], [6], [-0.06]),
        ([1, 2, 3, 7], [8], [-0.08]),
    ]
    assert [(each.number, each.branch) for each in calls] == [(1, 0), (2, 1), (3, 0), (4, 0)]
    assert [each.conversation for each in calls] == [None, "main", None, None]
    versions = [(each.policy_version_start, each.policy_version_end) for each in calls]
    assert versions == [(7, 7), (8, 8), (8, 8), (8, 8)]
    assert [each.drift_at for each in calls] == [None, None, None, 3]
    assert all(each.captured for each in calls)
    assert calls[0].step["extra"]["finish_reason"] == "stop"
    assert trajectory.rollout_id == result.rollout_id
    assert trajectory.extra["metrics"]["token_drift"] == 1


async def document_of(talk, **sample):
    made = await talk.sample()
    return build_trajectory(made.trajectory_messages, rollout_id="r", sample=made, **sample)


async def test_a_reply_that_branches_share_counts_once():
    talk = Talk()
    talk.recorder.captures_tokens = True
    talk.ask(user("sub"), reply=model("x"))
    for text in ("y", "z"):
        talk.ask(user("sub"), model("x"), user("more"), reply=model(text))
    talk.end(talk.begin(user("a"), n=2), model("b"), model("b"))
    calls = read_trajectory(await document_of(talk)).calls
    assert [(each.number, each.step["message"]) for each in calls] == [
        (1, "x"),
        (2, "y"),
        (3, "z"),
        (4, "b"),
        (4, "b"),
    ]
    assert not any(each.captured for each in calls)


def test_calls_that_nobody_recorded_are_those_of_the_document():
    told = {"token_ids": [1], "logprobs": [-1.0], "prompt_token_ids": [2]}
    messages = [user("a"), model("old"), user("b"), {**model("c"), **told}]
    document = build_trajectory(messages, rollout_id="r", prompt=messages[:3])
    (call,) = read_trajectory(document).calls
    assert (call.number, tokens_of(call), call.captured) == (None, ([2], [1], [-1.0]), True)


@pytest.mark.parametrize(
    "fields",
    [
        {"branches": 1, "token_drift": {}},
        {"branches": [1, {}, {"messages": [{}, 3], "message_details": [{}]}]},
        {"branches": [{"messages": [{}], "message_details": [{"call": "x"}], "conversation": 3}]},
        {"token_drift": [{"call": [], "at": "x"}, {"call": 1, "at": True}, None]},
    ],
    ids=json.dumps,
)
def test_documents_of_others_may_hold_anything_there(fields):
    document = build_trajectory([user("a"), model("b", call=1)], rollout_id="r")
    document["extra"] = {"extra_fields": fields}
    (call,) = read_trajectory(document).calls
    assert (call.number, call.drift_at) == (1, None)


@pytest.mark.parametrize("document", [None, [], {"steps": []}, "x"])
def test_what_is_not_a_trajectory_is_refused(document):
    with pytest.raises(TrajectoryError, match="not a valid trajectory") as caught:
        read_trajectory(document)
    assert caught.value.problems
