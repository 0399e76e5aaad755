"""What a workflow may hand back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from rollout._json.fit import fit
from rollout.errors import InvalidFieldError
from rollout.types import AgentWorkflowOutput, RolloutSample
from rollout.types.output import coerce_output


@given(messages=strategies.messages)
def test_a_message_list_becomes_an_output(messages):
    output = coerce_output(messages)
    assert output == AgentWorkflowOutput(messages=messages)
    assert output.messages is messages


def test_none_asks_for_the_sample_source():
    assert coerce_output(None) is None


@given(
    messages=st.none() | strategies.messages,
    metrics=st.dictionaries(st.text(max_size=3), strategies.numbers, max_size=3),
    info=strategies.json_objects,
)
def test_an_output_is_read_as_it_is(messages, metrics, info):
    output = AgentWorkflowOutput(messages=messages, metrics=metrics, info=info)
    assert coerce_output(output) == output


@pytest.mark.parametrize(
    "value", [math.nan, -math.inf, Decimal("NaN"), pytest.param(10**400, id="huge")]
)
def test_a_metric_that_is_not_finite_is_no_reason_to_lose_the_rest(value):
    output = AgentWorkflowOutput(messages=[], metrics={"a": value})
    assert coerce_output(output).metrics["a"] is value


@pytest.mark.parametrize(
    "value", ["text", b"text", 1, True, (), ({"role": "user"},), {"role": "user"}, {1}, object()]
)
def test_anything_else_is_a_type_error_that_says_what_came(value):
    with pytest.raises(TypeError, match=type(value).__name__):
        coerce_output(value)


@pytest.mark.parametrize("value", [["text"], [None], [[]], [{"role": "user"}, 1]])
def test_a_list_of_something_else_is_refused(value):
    with pytest.raises(InvalidFieldError, match=r"^messages must be a list of objects"):
        coerce_output(value)


def test_an_output_that_was_spoiled_in_place_is_refused():
    output = AgentWorkflowOutput(messages=[], metrics={"a": 1.0})
    output.metrics["a"] = "1"
    with pytest.raises(InvalidFieldError, match=r"^metrics\.a must be a number"):
        coerce_output(output)
    output = AgentWorkflowOutput(messages=[])
    output.messages.append("text")
    with pytest.raises(InvalidFieldError, match=r"^messages must be a list of objects"):
        coerce_output(output)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", "text"),
        ("messages", [1]),
        ("metrics", None),
        ("metrics", []),
        ("metrics", {"a": "1"}),
        ("metrics", {1: 1.0}),
        ("info", None),
        ("info", []),
    ],
)
def test_a_bad_field_is_refused_by_name(field, value):
    with pytest.raises(InvalidFieldError, match=f"^{field}") as caught:
        AgentWorkflowOutput(**{field: value})
    assert caught.value.field.partition(".")[0] == field
    with pytest.raises(InvalidFieldError, match=f"^{field}"):
        setattr(AgentWorkflowOutput(), field, value)


class Reply:
    """A message of an SDK: a model of pydantic, seen from here."""

    def __init__(self, **fields):
        self.fields = fields

    def model_dump(self, *, mode, exclude_none):
        assert mode == "json"
        return {k: v for k, v in self.fields.items() if not exclude_none or v is not None}


def test_a_message_object_of_an_sdk_becomes_a_dict():
    history = [{"role": "user"}, Reply(role="assistant", content="42", refusal=None)]
    plain = [{"role": "user"}, {"role": "assistant", "content": "42"}]
    assert coerce_output(history).messages == plain
    assert AgentWorkflowOutput(messages=history).messages == plain
    assert RolloutSample(messages=history).messages == plain
    assert fit({"tool_calls": [history[1]]}) == ({"tool_calls": [plain[1]]}, [])


class Tokens(NamedTuple):
    role: str


@dataclass
class Turn:
    role: str


@pytest.mark.parametrize(
    ("item", "advice"),
    [
        (Turn("user"), r"Turn: put its asdict\(\) there"),
        (Tokens("user"), r"Tokens: put its _asdict\(\) there"),
        (Mock(spec=["to_dict"]), "Mock: put a dict there"),
        ("text", "str: put a dict there"),
    ],
)
def test_another_object_is_named_by_index_and_type(item, advice):
    for make in (coerce_output, lambda value: RolloutSample(messages=value)):
        with pytest.raises(InvalidFieldError, match=f"but item 1 is of type {advice}$"):
            make([{"role": "user"}, item])


def test_a_metric_of_none_is_left_out():
    output = AgentWorkflowOutput(messages=[], metrics={"a": None, "b": 1})
    assert coerce_output(output).metrics == {"b": 1}


def test_fields_go_by_keyword_only_and_are_not_shared():
    with pytest.raises(TypeError):
        AgentWorkflowOutput([])
    assert AgentWorkflowOutput().metrics is not AgentWorkflowOutput().metrics
    assert AgentWorkflowOutput().messages is None
