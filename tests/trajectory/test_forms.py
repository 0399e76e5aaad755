"""The forms in which agents keep their history, and what becomes of each."""

from __future__ import annotations

import pytest

from rollout.trajectory import SCHEMA_VERSION, build_trajectory, token_totals, trajectory_problems
from rollout.types import RolloutSample


def document(*messages, **options):
    made = build_trajectory(messages, **{"rollout_id": "r1", **options})
    assert trajectory_problems(made) == []
    return made


def steps(*messages):
    return [
        {name: value for name, value in step.items() if name != "step_id"}
        for step in document(*messages)["steps"]
    ]


def call(call_id="c1", name="add", arguments='{"a": 1}'):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def asking(*calls, **more):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def answer(call_id="c1", content="2", **more):
    return {"role": "tool", "tool_call_id": call_id, "content": content, **more}


def test_the_document_around_the_steps():
    sample = RolloutSample(
        label="42", reward=0.5, remove_sample=True, metrics={"m": 1}, extra_fields={"e": [2]}
    )
    made = document(
        {"role": "user", "content": "hi"}, sample=sample, metadata={"row": 7}, extra={"more": 3}
    )
    assert made["schema_version"] == SCHEMA_VERSION == "ATIF-v1.8"
    assert made["session_id"] == made["trajectory_id"] == "r1"
    assert made["agent"]["name"] == "rollout"
    assert made["extra"] == {
        "reward": 0.5,
        "label": "42",
        "remove_sample": True,
        "metrics": {"m": 1},
        "extra_fields": {"e": [2]},
        "metadata": {"row": 7},
        "more": 3,
    }


def test_a_history_without_messages_has_one_empty_step():
    assert document()["steps"] == [{"step_id": 1, "source": "system", "message": ""}]


def test_roles():
    assert steps(
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c", "name": "Ann"},
        {"role": "assistant", "content": "d"},
        {"role": "critic", "content": "e"},
        {"content": "f"},
        {"type": "ai", "content": "g"},
    ) == [
        {"source": "system", "message": "a"},
        {"source": "system", "message": "b", "extra": {"role": "developer"}},
        {"source": "user", "message": "c", "extra": {"name": "Ann"}},
        {"source": "agent", "message": "d"},
        {"source": "system", "message": "e", "extra": {"role": "critic"}},
        {"source": "system", "message": "f"},
        {"source": "agent", "message": "g", "extra": {"role": "ai"}},
    ]


def test_calls_are_folded_with_their_results():
    asked, said = steps(
        asking(call("c1"), call("c2", "sub", "{}")),
        answer("c2", "0", name="sub"),
        answer("c1", [{"type": "text", "text": "2"}]),
        {"role": "assistant", "content": "done"},
    )
    assert asked["tool_calls"] == [
        {"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 1}},
        {"tool_call_id": "c2", "function_name": "sub", "arguments": {}},
    ]
    assert asked["observation"]["results"] == [
        {"source_call_id": "c2", "content": "0"},
        {"source_call_id": "c1", "content": "2"},
    ]
    assert said == {"source": "agent", "message": "done"}


def test_a_late_result_says_where_it_stood():
    asked, _ = steps(asking(call()), {"role": "user", "content": "well?"}, answer())
    assert asked["observation"]["results"] == [
        {"source_call_id": "c1", "content": "2", "extra": {"position": 2}}
    ]


@pytest.mark.parametrize("call_id", ["other", 7, None])
def test_a_result_without_its_call_is_a_step_of_its_own(call_id):
    _, orphan = steps(asking(call()), answer(call_id))
    assert orphan["source"] == "system"
    (result,) = orphan["observation"]["results"]
    assert "source_call_id" not in result
    assert result["content"] == "2"
    assert result.get("extra", {}).get("tool_call_id") == call_id


def test_ids_that_come_again():
    first, second = steps(
        asking(call(), call(arguments='{"a": 2}')), answer(content="x"), answer(content="y"),
        asking(call()), answer(content="z"), answer(content="again"),
    )  # fmt: skip
    ids = [each["tool_call_id"] for each in first["tool_calls"]]
    assert ids[0] == "c1" != ids[1]
    assert first["tool_calls"][1]["extra"] == {"tool_call_id": "c1"}
    assert [(r["source_call_id"], r["content"]) for r in first["observation"]["results"]] == [
        ("c1", "x"),
        (ids[1], "y"),
    ]
    assert [r["content"] for r in second["observation"]["results"]] == ["z", "again"]


@pytest.mark.parametrize(
    "raw", ["no JSON", "[1]", "7", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": 1e999}']
)
def test_a_text_of_arguments_that_is_no_object_is_kept_as_it_came(raw):
    (asked,) = steps(asking(call(arguments=raw)))
    assert asked["tool_calls"][0]["arguments"] == {"_raw": raw}


@pytest.mark.parametrize("raw", [[1], 7])
def test_arguments_that_are_neither_text_nor_object_are_kept_beside_the_call(raw):
    (asked,) = steps(asking(call(arguments=raw)))
    assert asked["tool_calls"][0]["arguments"] == {}
    assert asked["tool_calls"][0]["extra"] == {"arguments": raw}


def test_time_model_and_usage_may_stand_with_the_response_of_the_endpoint():
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    response = {"id": "x", "model": "policy", "usage": usage}
    (user, agent) = steps(
        {"role": "user", "content": "q", "extra": {"timestamp": 1_767_225_600}},
        {"role": "assistant", "content": "a", "extra": {"response": response, "cost": 0.5}},
    )
    assert user["timestamp"] == "2026-01-01T00:00:00Z"
    assert agent["model_name"] == "policy"
    assert agent["metrics"] == usage
    assert agent["extra"]["extra"] == {"response": {"id": "x"}, "cost": 0.5}


def test_a_message_may_say_when_it_was_complete():
    (agent,) = steps({"role": "assistant", "content": "a", "completed_at": 1_767_225_600})
    assert agent["timestamp"] == "2026-01-01T00:00:00Z"


def test_the_text_of_parts_of_an_unknown_kind_is_read():
    parts = [{"type": "verdict", "text": "yes", "score": 1}, {"type": "refusal", "refusal": "no"}]
    (agent,) = steps(
        {"role": "assistant", "content": [*parts, {"type": "reasoning", "text": "hm"}]}
    )
    assert [part["text"] for part in agent["message"]] == ["yes", "no"]
    assert agent["reasoning_content"] == "hm"
    assert agent["extra"]["content_parts"]["0"] == parts[0]


def test_old_function_calls():
    (asked,) = steps(
        {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "r"},
    )
    (made,) = asked["tool_calls"]
    assert (made["function_name"], made["arguments"]) == ("f", {})
    assert asked["observation"]["results"] == [
        {"source_call_id": made["tool_call_id"], "content": "r", "extra": {"role": "function"}}
    ]


def test_items_of_responses_form_one_step():
    asked, done = steps(
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "think"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "let me see", "annotations": []}],
        },
        {"type": "function_call", "call_id": "k", "name": "f", "arguments": '{"q": "x"}'},
        {"type": "function_call", "call_id": "l", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "k", "output": "one"},
        {"type": "function_call_output", "call_id": "l", "output": {"b": 2}},
        {"type": "function_call", "call_id": "m", "name": "h", "arguments": "{}"},
    )
    assert asked["reasoning_content"] == "think"
    assert asked["message"] == "let me see"
    assert [each["function_name"] for each in asked["tool_calls"]] == ["f", "g"]
    assert [each["content"] for each in asked["observation"]["results"]] == ["one", '{"b":2}']
    assert [each["function_name"] for each in done["tool_calls"]] == ["h"]


def test_times_of_items_of_one_response_are_all_kept():
    first, second = "2026-01-02T03:04:05Z", "2026-01-02T03:04:06Z"
    (step,) = steps(
        {"type": "reasoning", "summary": [], "created_at": first},
        {"type": "reasoning", "summary": [], "created_at": first},
        {"type": "function_call", "call_id": "k", "name": "f", "created_at": second},
    )
    assert step["timestamp"] == first
    assert step["extra"] == {"timestamp": second}


def test_blocks_of_anthropic():
    asked, extra, done = steps(
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "no", "is_error": True},
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "id": "u", "name": "g"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u"}]},
    )
    assert asked["reasoning_content"] == "hm"
    assert asked["message"] == "let me see"
    assert asked["extra"]["content_parts"]["0"]["signature"] == "s"
    assert asked["observation"]["results"] == [
        {"source_call_id": "t", "content": "no", "extra": {"is_error": True}}
    ]
    assert extra == {"source": "user", "message": "go on"}
    assert done["observation"]["results"] == [{"source_call_id": "u", "content": ""}]


def test_media():
    image, audio = "https://h.invalid/a.JPG?x=1", "https://h.invalid/b.mp3"
    inline = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    unknown = {"type": "image_url", "image_url": {"url": "https://h.invalid/c"}}
    (step,) = steps(
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": image}},
                {"type": "audio_url", "audio_url": {"url": audio}, "duration_sec": 2.5},
                inline,
                unknown,
            ],
        }
    )
    assert step["message"] == [
        {"type": "text", "text": "see"},
        {"type": "image", "source": {"media_type": "image/jpeg", "path": image}},
        {
            "type": "audio",
            "source": {"media_type": "audio/mpeg", "path": audio, "duration_sec": 2.5},
        },
    ]
    assert step["extra"]["content_parts"] == {"3": inline, "4": unknown}


@pytest.mark.parametrize(
    ("usage", "prompt", "completion", "cached"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}, 3, 4, None),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}}, 9, None, 5),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 5}}, 9, None, 5),
        (
            {
                "input_tokens": 2,
                "output_tokens": 1,
                "cache_read_input_tokens": 5,
                "cache_creation_input_tokens": 3,
            },
            10,
            1,
            5,
        ),
        ({"prompt_tokens": 3.0, "completion_tokens": -1}, 3, None, None),
        ({"prompt_tokens": "3", "completion_tokens": True}, None, None, None),
        ({"prompt_tokens": int("9" * 320), "completion_tokens": 2**53}, None, None, None),
    ],
)
def test_usage(usage, prompt, completion, cached):
    made = document({"role": "assistant", "content": "x", "usage": usage})
    metrics = made["steps"][0]["metrics"]
    assert metrics.get("prompt_tokens") == prompt
    assert metrics.get("completion_tokens") == completion
    assert metrics.get("cached_tokens") == cached
    assert token_totals(made) == (prompt, completion)


def test_what_the_prompt_brings_along_is_not_counted():
    asked = [
        {"role": "assistant", "content": "x", "usage": {"prompt_tokens": 1000}},
        {"role": "user", "content": "y"},
    ]
    said = {**asked[0], "usage": {"prompt_tokens": 15}}
    made = document(*asked, said, asked[0], prompt=asked)
    assert [step.get("is_copied_context") for step in made["steps"]] == [True, None, None, None]
    assert made["steps"][0]["metrics"] == {"prompt_tokens": 1000}
    assert token_totals(made) == (1015, None)
    assert token_totals(document(*asked, said, {**asked[0], "is_copied_context": True})) == (
        1015,
        None,
    )
    assert token_totals(document(*asked, said, prompt=asked)) == (15, None)


def test_metrics_of_calls_and_their_totals():
    first = {
        "role": "assistant",
        "content": "x",
        "model": "m",
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
        "cost": 0.25,
        "logprobs": {"content": [{"token": "x", "logprob": -0.5}]},
        "completion_token_ids": [7, 8],
        "created": 1_700_000_000,
        "reasoning_content": "hm",
        "reasoning_effort": "low",
    }
    second = {"role": "assistant", "content": "y", "usage": {"prompt_tokens": 5}, "logprobs": [-1]}
    made = document(first, second)
    step = made["steps"][0]
    assert step["model_name"] == made["agent"]["model_name"] == "m"
    assert step["timestamp"] == "2023-11-14T22:13:20Z"
    assert (step["reasoning_content"], step["reasoning_effort"]) == ("hm", "low")
    assert step["metrics"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cost_usd": 0.25,
        "completion_token_ids": [7, 8],
        "logprobs": [-0.5],
    }
    assert made["steps"][1]["metrics"] == {"prompt_tokens": 5, "logprobs": [-1]}
    assert made["final_metrics"] == {
        "total_prompt_tokens": 8,
        "total_completion_tokens": 4,
        "total_cost_usd": 0.25,
        "total_steps": 2,
    }


def test_costs_beyond_all_numbers_have_no_total():
    message = {"role": "assistant", "content": "x", "cost": 1e308}
    assert "total_cost_usd" in document(message)["final_metrics"]
    assert "total_cost_usd" not in document(message, message)["final_metrics"]


def test_what_only_agents_have_stays_with_other_steps_as_it_is():
    odd = {"usage": {"prompt_tokens": 1}, "model": "m", "tool_calls": [call()]}
    (step,) = steps({"role": "user", "content": "x", **odd})
    assert step == {"source": "user", "message": "x", "extra": odd}


def test_models_that_differ_are_named_by_their_steps_only():
    made = document(*({"role": "assistant", "content": "x", "model": name} for name in "ab"))
    assert "model_name" not in made["agent"]
    assert document(model_name="m")["agent"]["model_name"] == "m"
