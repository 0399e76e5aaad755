"""What a workflow may hand back."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import InvalidFieldError
from rollout.types import AgentWorkflowOutput
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


@pytest.mark.parametrize("value", [math.nan, -math.inf, Decimal("NaN")])
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
        ("metrics", {"a": None}),
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


def test_fields_go_by_keyword_only_and_are_not_shared():
    with pytest.raises(TypeError):
        AgentWorkflowOutput([])
    assert AgentWorkflowOutput().metrics is not AgentWorkflowOutput().metrics
    assert AgentWorkflowOutput().messages is None
