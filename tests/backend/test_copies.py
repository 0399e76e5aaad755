"""The quick copy is a deep copy, whatever is copied."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import AgentWorkflowConfig, ConcurrencyConfig, GraderConfig
from rollout.backend.copies import deep_copy

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
trees = st.recursive(
    plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30
)
strange = st.recursive(
    plain | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(plain, inner) | st.tuples(inner, inner),
    max_leaves=30,
)


def containers(value):
    """The ids of the lists and dicts in a value, in the order of their place."""
    if isinstance(value, dict):
        return [id(value), *(i for item in value.values() for i in containers(item))]
    if isinstance(value, (list, tuple)):
        own = [id(value)] if isinstance(value, list) else []
        return own + [i for item in value for i in containers(item)]
    return []


@given(trees | strange)
def test_it_is_equal_and_shares_nothing_that_can_change(value):
    copied = deep_copy(value)
    assert copied == value
    assert repr(copied) == repr(copy.deepcopy(value))
    assert not set(containers(copied)) & set(containers(value))


def test_what_is_shared_stays_shared_and_what_contains_itself_does_too():
    item = {"role": "user"}
    twice = deep_copy([item, item])
    assert twice[0] is twice[1] is not item
    endless = []
    endless.append(endless)
    copied = deep_copy(endless)
    assert copied[0] is copied is not endless


def test_what_shares_its_parts_over_and_over_takes_no_time():
    value = []
    for _ in range(60):
        value = [value, value]
    copied = deep_copy(value)
    assert copied is not value
    assert copied[0] is copied[1]


def test_depth():
    deep = []
    for _ in range(150):
        deep = [deep]
    assert deep_copy(deep) == deep


@pytest.mark.parametrize("kind", [AgentWorkflowConfig, GraderConfig])
def test_configs(kind):
    config = kind(name="n", concurrency=ConcurrencyConfig(max_concurrent=3))
    copied = deep_copy(config)
    assert copied == config
    assert copied is not config
    assert vars(copied) == vars(copy.deepcopy(config))
    copied.name = "other"
    assert config.name == "n"


def test_configs_with_more_in_them():
    class Own(AgentWorkflowConfig):
        tools: list = []  # noqa: RUF012 - a config copies its default

    config = Own(name="n", tools=[{"a": 1}])
    config.note = ["set later"]
    for each in (config, AgentWorkflowConfig(name="n")):
        each.extra = {"more": [1]}
        copied = deep_copy(each)
        assert type(copied) is type(each)
        assert vars(copied) == vars(each)
        assert copied.extra is not each.extra
        assert copied.extra["more"] is not each.extra["more"]
    assert deep_copy(config).tools is not config.tools


def test_objects_are_copied_their_own_way():
    class Single:
        def __deepcopy__(self, memo):
            return self

    single = Single()
    copied = deep_copy({"one": single, "list": [single]})
    assert copied["one"] is copied["list"][0] is single
    assert deep_copy(None) is None
