"""Histories of ten thousand items: what each of them costs does not grow with their number."""

from __future__ import annotations

import pytest

from rollout.trajectory import build_trajectory, trajectory_problems

MANY = 10_000


def only_step(*messages):
    made = build_trajectory(messages, rollout_id="r1")
    assert trajectory_problems(made)[:1] == []
    (step,) = made["steps"]
    return step


def test_items_of_one_response_keep_all_their_keys_under_short_names():
    step = only_step(*({"type": "reasoning", "id": f"rs-{n}"} for n in range(MANY)))
    assert list(step["extra"].values()) == [f"rs-{n}" for n in range(MANY)]
    assert list(step["extra"])[:3] == ["id", "id_", "id__"]
    assert max(map(len, step["extra"])) < 20


def test_keys_that_look_like_those_that_are_made_up_are_kept():
    names = [f"id_{n}" for n in range(20)]
    step = only_step(
        dict.fromkeys(names, "own") | {"type": "reasoning"},
        *({"type": "reasoning", "id": n} for n in range(10)),
    )
    assert [step["extra"][name] for name in names] == ["own"] * 20
    assert [value for value in step["extra"].values() if value != "own"] == list(range(10))


def test_thoughts_of_one_response_are_joined_once():
    texts = [f"{n} {'because ' * 200}" for n in range(MANY)]
    step = only_step(
        *({"type": "reasoning", "summary": [{"type": "summary_text", "text": t}]} for t in texts)
    )
    assert step["reasoning_content"] == "\n\n".join(texts)


def test_a_thought_that_is_told_twice_is_kept_once():
    said = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    step = only_step(said, {"role": "assistant", "content": "yes", "reasoning_content": "hm"})
    assert step["reasoning_content"] == "hm"


@pytest.mark.parametrize("call_id", ["x", None])
def test_results_of_calls_that_nothing_tells_apart_go_to_them_in_order(call_id):
    calls = [
        {"id": call_id, "function": {"name": "f", "arguments": f'{{"n": {n}}}'}}
        for n in range(MANY)
    ]
    answers = [
        {"role": "tool", "tool_call_id": call_id, "name": "f", "content": str(n)}
        for n in range(MANY)
    ]
    step = only_step({"role": "assistant", "tool_calls": calls}, *answers)
    said = {
        result["source_call_id"]: result["content"] for result in step["observation"]["results"]
    }
    asked = {each["tool_call_id"]: each["arguments"]["n"] for each in step["tool_calls"]}
    assert {name: int(text) for name, text in said.items()} == asked
    assert len(asked) == MANY
