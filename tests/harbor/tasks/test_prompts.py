"""How a conversation becomes the instruction of a task."""

from __future__ import annotations

import pytest

from rollout.backend.harbor.tasks.prompts import fill_template, instruction_of
from rollout.errors import InvalidFieldError


def said(*messages):
    return instruction_of([{"role": role, "content": content} for role, content in messages])


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([("user", "Hi")], "Hi"),
        ([("user", "  indented\n\n")], "  indented"),
        ([("system", "Be kind."), ("user", "Hi")], "Be kind.\n\nHi"),
        ([("system", "A"), ("developer", "B"), ("user", "C"), ("user", "D")], "A\n\nB\n\nC\n\nD"),
        (
            [("system", "S"), ("user", "Q"), ("assistant", "A"), ("user", "R")],
            "S\n\nUser:\nQ\n\nAssistant:\nA\n\nUser:\nR",
        ),
        ([("user", "Q"), ("system", "Late")], "User:\nQ\n\nSystem:\nLate"),
        ([("user", "Q"), ("assistant", None), ("user", "R")], "User:\nQ\n\nUser:\nR"),
        ([("system", ""), ("user", "Q")], "Q"),
        ([("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], "a\nb"),
        ([("user", "half \ud83d")], "half \ufffd"),
    ],
)
def test_texts(messages, text):
    assert said(*messages) == text


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
         "initial_messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]},
         "initial_messages[0].content[1]"),
        ({"role": "user", "content": [{"type": "text"}]}, "initial_messages[0].content[0]"),
        ({"role": "user", "content": 7}, "initial_messages[0].content"),
        ({"role": "tool", "content": "x"}, "initial_messages[0].role"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
         "initial_messages[0].tool_calls"),
        ({"role": "user", "content": ""}, "initial_messages"),
        ({"role": "user", "content": None}, "initial_messages"),
    ],
)  # fmt: skip
def test_what_is_no_text(message, field):
    with pytest.raises(InvalidFieldError) as caught:
        instruction_of([message])
    assert caught.value.field == field


def test_no_messages():
    with pytest.raises(InvalidFieldError):
        instruction_of([])


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("", "P"),
        ("no place for it", "P"),
        ("a {{ prompt }} b {{prompt}}", "a P b P"),
        ("{{  prompt\n}}", "P"),
        ("{{ prompts }} {prompt}", "P"),
    ],
)
def test_templates(template, filled):
    assert fill_template(template, "P") == filled


def test_a_prompt_is_not_a_template():
    assert fill_template("{{ prompt }}", r"{{ prompt }} \g<0> \\") == r"{{ prompt }} \g<0> \\"
