"""Messages of PydanticAI in chat form. Needs no framework, but for the way there."""

from __future__ import annotations

import pytest

from rollout.errors import InvalidFieldError
from rollout.integrations.pydantic_ai import as_chat, as_history
from rollout.trajectory import build_trajectory, trajectory_problems


def test_everything_in_messages_is_in_the_chat():
    image = {"url": "https://example.org/a.png", "kind": "image-url", "identifier": "i", "x": None}
    data = {"data": "AAEC", "media_type": "image/png", "kind": "binary"}
    messages = [
        {
            "kind": "request",
            "instructions": "Be kind.",
            "parts": [
                {"part_kind": "system-prompt", "content": "Be brief."},
                {"part_kind": "user-prompt", "content": ["And this?", image, data]},
            ],
        },
        {
            "kind": "response",
            "parts": [
                {"part_kind": "thinking", "content": "Hm."},
                {"part_kind": "text", "content": "I add."},
                {
                    "part_kind": "tool-call",
                    "tool_name": "add",
                    "args": {"a": 1},
                    "tool_call_id": "c1",
                },
                {"part_kind": "tool-call", "tool_name": "add", "args": "{}", "tool_call_id": "c2"},
            ],
            "usage": {"input_tokens": 5, "output_tokens": 3, "cache_read_tokens": 0},
            "model_name": "policy",
            "timestamp": "2026-01-01T00:00:00Z",
            "provider_response_id": "r1",
            "finish_reason": "tool_call",
        },
        {
            "kind": "request",
            "instructions": "Be kind.",
            "parts": [
                {
                    "part_kind": "tool-return",
                    "tool_name": "add",
                    "content": {"sum": 13},
                    "tool_call_id": "c1",
                    "outcome": "success",
                    "metadata": {"took": 1},
                },
                {
                    "part_kind": "tool-return",
                    "tool_name": "add",
                    "content": "again",
                    "tool_call_id": "c2",
                    "outcome": "retried",
                },
                {"part_kind": "retry-feedback", "content": "Try again."},
                {"part_kind": "capability-load-delta", "capability": "x"},
            ],
        },
        {
            "kind": "response",
            "parts": [
                {"part_kind": "text", "content": "See:"},
                {"part_kind": "file", "content": {"data": "AAEC"}},
            ],
        },
    ]
    chat = as_chat(messages)
    assert [each["role"] for each in chat] == [
        *["system", "system", "user", "assistant"],
        *["tool", "tool", "user", "user", "assistant"],
    ]
    assert [each["content"] for each in chat[:2]] == ["Be kind.", "Be brief."]
    assert chat[2]["content"] == [
        {"type": "text", "text": "And this?"},
        {"type": "image_url", "image_url": {"url": image["url"]}, "identifier": "i"},
        {"type": "binary", **data},
    ]
    reply = chat[3]
    assert (reply["content"], reply["reasoning_content"]) == ("I add.", "Hm.")
    assert [each["function"]["arguments"] for each in reply["tool_calls"]] == ['{"a": 1}', "{}"]
    assert (reply["model"], reply["response_id"]) == ("policy", "r1")
    assert chat[4]["content"] == '{"sum": 13}'
    assert (chat[4]["metadata"], chat[5]["outcome"]) == ({"took": 1}, "retried")
    assert chat[6]["content"] == "Try again."
    assert chat[7]["content"][0]["capability"] == "x"
    assert chat[8]["content"][1]["content"] == {"data": "AAEC"}
    document = build_trajectory(chat, rollout_id="r")
    assert trajectory_problems(document) == []
    assert document["final_metrics"]["total_completion_tokens"] == 3


def test_there_and_back():
    sdk = pytest.importorskip("pydantic_ai", reason='needs pip install "trio-rollout[pydantic-ai]"')
    function = {"name": "add", "arguments": '{"left": 6}'}
    chat = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And this?"},
                {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAEC"}},
            ],
        },
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "13"},
        {"role": "user", "content": "Sure?"},
    ]
    asked, history = as_history(sdk, chat)
    assert asked == "Sure?"
    dumped = sdk.ModelMessagesTypeAdapter.dump_python(history, mode="json")
    assert [each["kind"] for each in dumped] == ["request", "response", "request"]
    back = as_chat(dumped)
    assert [each["role"] for each in back] == ["system", "user", "assistant", "tool"]
    assert back[1]["content"][2]["data"] == "AAEC"
    for before, after in zip(chat[2:4], back[2:4], strict=True):
        assert before.items() <= after.items()


def test_texts_and_contents_pass_as_they_are():
    assert as_history(None, "Hello?") == ("Hello?", None)
    contents = ["Hello?", object()]
    assert as_history(None, contents) == (contents, None)


def test_what_has_no_content_is_refused():
    audio = {"type": "input_audio", "input_audio": {"data": "AAEC", "format": "wav"}}
    with pytest.raises(InvalidFieldError, match="input_audio"):
        as_history(None, [{"role": "user", "content": [audio]}])
