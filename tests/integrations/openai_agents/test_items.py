"""Chat messages as items of the Agents SDK, and back. Needs no framework."""

from __future__ import annotations

import pytest

from rollout.errors import IntegrationError
from rollout.integrations.frameworks.adapters import Framework, _check, _number
from rollout.integrations.openai_agents import as_items
from rollout.integrations.recording.responses import items_as_messages
from rollout.trajectory import build_trajectory, trajectory_problems

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"left": 6}'}}


def test_a_chat_becomes_items():
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "And this?"}, IMAGE]},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "13"}]},
    ]
    assert as_items(chat) == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "And this?"},
                {
                    "type": "input_image",
                    "image_url": "https://example.org/a.png",
                    "detail": "auto",
                },
            ],
        },
        {"role": "assistant", "content": "Let me see."},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"left": 6}'},
        {"type": "function_call_output", "call_id": "c1", "output": "13"},
    ]


def test_replies_that_say_little_become_items():
    call = {"function": {"name": "add"}}
    assert as_items(
        [
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "assistant", "content": None, "tool_calls": [call, {}]},
        ]
    ) == [
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "No."}],
        },
        {"type": "function_call", "call_id": None, "name": "add", "arguments": None},
        {"type": "function_call", "call_id": None, "name": None, "arguments": None},
    ]


def test_items_and_texts_pass_as_they_are():
    items = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "item_reference", "id": "i1"},
    ]
    assert as_items(items) == items
    assert as_items("Hello?") == "Hello?"


def test_everything_in_items_is_in_the_chat():
    items = [
        {"role": "user", "content": "What is 6 + 7?"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"left": 6}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "no json"},
        {"type": "function_call_output", "call_id": "c1", "output": "13"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "a"}, {"type": "input_file", "id": "f"}],
        },
        {"type": "web_search_call", "id": "w1", "status": "completed"},
    ]
    chat = items_as_messages(items)
    assert [each.get("role") for each in chat] == ["user", "assistant", "tool", "tool", None]
    assert chat[1]["content"] == "I add."
    assert chat[1]["reasoning_content"] == "Hm."
    assert [call["id"] for call in chat[1]["tool_calls"]] == ["c1", "c2"]
    assert chat[3]["content"][1] == {"type": "input_file", "id": "f"}
    assert chat[4] == items[-1]
    assert trajectory_problems(build_trajectory(chat, rollout_id="r")) == []


@pytest.mark.parametrize(
    ("installed", "problem"),
    [
        ({}, "is not installed"),
        ({"trio": "0.1.5"}, "trio 0.1.5 is installed, but trio here needs >= 0.2 and < 1"),
        ({"trio": "1.0rc1"}, "needs >= 0.2 and < 1"),
        ({"trio": "0.30.0"}, "openai is not installed"),
        ({"trio": "0.30.0", "openai": "2.54.0"}, "openai 2.54.0 is installed"),
        ({"trio": "0.30.0", "openai": "3.0.1"}, None),
    ],
)
def test_a_wrong_version_is_said(monkeypatch, installed, problem):
    def version(name):
        from importlib.metadata import PackageNotFoundError

        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("rollout.integrations.frameworks.adapters.version", version)
    _check.cache_clear()
    framework = Framework("trio", "trio", "some-extra", ("0.2", "1"), ("3", "4"))
    if problem is None:
        assert framework.load().__name__ == "trio"
        return
    with pytest.raises(IntegrationError) as caught:
        framework.load()
    assert problem in str(caught.value)
    assert 'pip install "trio-rollout[some-extra]"' in str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1.2.3", (1, 2, 3)),
        ("2.0rc1", (2, 0)),
        ("3", (3,)),
        ("1.2.dev4", (1, 2)),
        ("4.5.6.7", (4, 5, 6)),
    ],
)
def test_numbers_of_versions(text, number):
    assert _number(text) == number
