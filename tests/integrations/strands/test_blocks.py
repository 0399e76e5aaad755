"""Chat messages as blocks of Strands, and back. Needs no framework."""

from __future__ import annotations

import json

import pytest

from rollout.errors import InvalidFieldError
from rollout.integrations.strands import as_blocks, as_chat, plain
from rollout.trajectory import build_trajectory, trajectory_problems


def call(name, arguments):
    function = {"name": "add", "arguments": arguments}
    return {"id": name, "type": "function", "function": function}


def test_a_chat_becomes_messages_that_take_turns():
    system, messages = as_blocks(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "And this?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAEC"}},
                ],
            },
            {
                "role": "assistant",
                "content": "I add.",
                "tool_calls": [call("c1", '{"left": 6}'), call("c2", "")],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "13"},
            {"role": "tool", "tool_call_id": "c2", "content": "14"},
            {"role": "user", "content": "Go on."},
        ]
    )
    assert system == "Be brief.\n\nBe kind."
    assert messages == [
        {
            "role": "user",
            "content": [
                {"text": "And this?"},
                {"image": {"format": "png", "source": {"bytes": b"\0\1\2"}}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"text": "I add."},
                {"toolUse": {"toolUseId": "c1", "name": "add", "input": {"left": 6}}},
                {"toolUse": {"toolUseId": "c2", "name": "add", "input": {}}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "toolResult": {
                        "toolUseId": "c1",
                        "status": "success",
                        "content": [{"text": "13"}],
                    }
                },
                {
                    "toolResult": {
                        "toolUseId": "c2",
                        "status": "success",
                        "content": [{"text": "14"}],
                    }
                },
                {"text": "Go on."},
            ],
        },
    ]


def test_messages_of_strands_pass_as_they_are():
    messages = [
        {"role": "user", "content": [{"text": "Hello?"}, {"cachePoint": {"type": "default"}}]}
    ]
    assert as_blocks(messages) == (None, messages)
    assert as_blocks("Hello?") == (None, "Hello?")
    assert as_blocks([{"text": "Hello?"}]) == (
        None,
        [{"role": "user", "content": [{"text": "Hello?"}]}],
    )


def test_what_has_no_block_is_refused():
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with pytest.raises(InvalidFieldError, match="image_url"):
        as_blocks([{"role": "user", "content": [image]}])


@pytest.mark.parametrize("given", ["{", "[" * 100_000])
def test_arguments_that_are_no_json_stay_as_they_are(given):
    _, (message,) = as_blocks(
        [{"role": "assistant", "content": None, "tool_calls": [call("c1", given)]}]
    )
    assert message["content"][0]["toolUse"]["input"] == given


def test_arguments_that_nest_without_end_are_left_to_the_sample():
    deep = {"bytes": b"a"}
    for _ in range(5000):
        deep = {"a": deep}
    copied, levels = plain(deep), 0
    while copied is not deep:
        copied, deep, levels = copied["a"], deep["a"], levels + 1
    assert levels == 128


def test_everything_in_messages_is_in_the_chat():
    image = {"image": {"format": "png", "source": {"bytes": b"\0\1\2"}}}
    kept = {"format": "png", "source": {"bytes": {"__bytes_encoded__": True, "data": "AAEC"}}}
    messages = plain(
        [
            {"role": "user", "content": [{"text": "And this?"}, image]},
            {
                "role": "assistant",
                "content": [
                    {"reasoningContent": {"reasoningText": {"text": "Hm."}}},
                    {"reasoningContent": {"reasoningText": {"text": "Hm?", "signature": "s"}}},
                    {"text": "I add."},
                    {"toolUse": {"toolUseId": "c1", "name": "add", "input": {"left": 6}}},
                ],
                "metadata": {"usage": {"inputTokens": 5, "outputTokens": 3, "totalTokens": 8}},
            },
            {
                "role": "user",
                "content": [
                    {
                        "toolResult": {
                            "toolUseId": "c1",
                            "status": "error",
                            "content": [{"text": "no"}, {"json": {"code": 3}}],
                        }
                    }
                ],
            },
        ]
    )
    json.dumps(messages)
    chat = as_chat(messages)
    assert [each["role"] for each in chat] == ["user", "assistant", "tool"]
    assert chat[0]["content"][1] == {"type": "image", "image": kept}
    assert chat[1]["reasoning_content"] == "Hm."
    assert chat[1]["content"][0]["reasoningContent"]["reasoningText"]["signature"] == "s"
    assert chat[1]["content"][1] == {"type": "text", "text": "I add."}
    assert json.loads(chat[1]["tool_calls"][0]["function"]["arguments"]) == {"left": 6}
    assert chat[1]["usage"]["prompt_tokens"] == 5
    assert chat[2]["status"] == "error"
    assert chat[2]["content"][1] == {"type": "json", "json": {"code": 3}}
    document = build_trajectory(chat, rollout_id="r")
    assert trajectory_problems(document) == []
    assert document["final_metrics"]["total_prompt_tokens"] == 5
