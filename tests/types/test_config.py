"""Configs: users add fields by subclassing, and everything stays checked and copyable."""

from __future__ import annotations

import copy
import pickle
import typing
from typing import ClassVar

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import InvalidFieldError
from rollout.types import AgentWorkflowConfig, BaseConfig, ConcurrencyConfig, GraderConfig


class Plain(AgentWorkflowConfig):
    temperature: float = 0.7
    tools: list[str] = []  # noqa: RUF012 - copied for each instance, which is what is tested
    limits: ClassVar[dict[str, int]] = {"steps": 3}
    more_limits: typing.ClassVar[int] = 7
    unannotated = "not a field"
    checked: int = attrs.field(default=1, validator=attrs.validators.ge(1), converter=int)

    def double(self):
        return self.temperature * 2


@attrs.define
class Defined(AgentWorkflowConfig):
    temperature: float = 0.7
    tools: list[str] = attrs.field(factory=list)


@attrs.define(kw_only=True, slots=False)
class DefinedWithDict(AgentWorkflowConfig):
    temperature: float = 0.7
    tools: list[str] = attrs.Factory(list)


class TwoLevels(Plain):
    depth: int = 2
    temperature: float = 0.1


@attrs.define
class DefinedBelowPlain(Plain):
    depth: int = 2


class PlainBelowDefined(Defined):
    depth: int = 2


@attrs.define
class DefinedTwice(Defined):
    depth: int = 2


KINDS = [
    Plain,
    Defined,
    DefinedWithDict,
    TwoLevels,
    DefinedBelowPlain,
    PlainBelowDefined,
    DefinedTwice,
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@every_kind
def test_fields_have_defaults_and_take_keywords(kind):
    assert kind(name="n").tools == []
    assert kind(name="n").temperature == (0.1 if kind is TwoLevels else 0.7)
    config = kind(name="n", description="d", temperature=0.2, tools=["a"])
    assert (config.name, config.description) == ("n", "d")
    assert (config.temperature, config.tools) == (0.2, ["a"])
    assert config.concurrency == ConcurrencyConfig()
    if hasattr(config, "depth"):
        assert config.depth == 2
        assert kind(name="n", depth=5).depth == 5


@every_kind
def test_mutable_defaults_are_not_shared(kind):
    one, other = kind(name="one"), kind(name="other")
    one.tools.append("hammer")
    assert other.tools == []
    assert kind(name="third").tools == []


@every_kind
def test_the_name_is_required_and_unknown_fields_are_refused(kind):
    with pytest.raises(TypeError, match="name"):
        kind()
    with pytest.raises(TypeError, match="colour"):
        kind(name="n", colour="red")


@every_kind
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", None),
        ("name", 1),
        ("description", 1),
        ("concurrency", None),
        ("concurrency", 4),
        ("concurrency", {"max_concurrent": 4}),
    ],
)
def test_inherited_fields_are_checked_on_construction_and_assignment(kind, field, value):
    with pytest.raises(InvalidFieldError, match=f"^{field} must be") as caught:
        kind(**{"name": "n", field: value})
    assert caught.value.field == field
    config = kind(name="n")
    before = getattr(config, field)
    with pytest.raises(InvalidFieldError, match=f"^{field} must be"):
        setattr(config, field, value)
    assert getattr(config, field) == before


@every_kind
def test_copies_are_equal_and_independent(kind):
    config = kind(name="n", tools=["a"], concurrency=ConcurrencyConfig(max_concurrent=2))
    for other in (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        attrs.evolve(config, tools=["a"]),
    ):
        assert type(other) is kind
        assert other == config
        other.tools.append("b")
        assert config.tools == ["a"]
        with pytest.raises(InvalidFieldError):
            other.name = None


@every_kind
def test_repr_and_equality_cover_all_fields(kind):
    config = kind(name="n", tools=["a"])
    assert "name='n'" in repr(config)
    assert "tools=['a']" in repr(config)
    assert config != kind(name="n", tools=["b"])
    assert config != kind(name="m", tools=["a"])


@pytest.mark.parametrize("kind", [Plain, TwoLevels, DefinedBelowPlain])
def test_a_users_own_validator_and_converter_run(kind):
    config = kind(name="n", checked="3")
    assert config.checked == 3
    config.checked = "4"
    assert config.checked == 4
    with pytest.raises(ValueError, match="checked"):
        kind(name="n", checked=0)
    with pytest.raises(ValueError, match="checked"):
        config.checked = 0


def test_class_variables_and_bare_attributes_are_no_fields():
    assert {field.name for field in attrs.fields(Plain)} == {
        "name",
        "description",
        "concurrency",
        "temperature",
        "tools",
        "checked",
    }
    assert Plain.limits == {"steps": 3}
    assert Plain(name="n").unannotated == "not a field"
    assert Plain(name="n").double() == 1.4
    with pytest.raises(TypeError):
        Plain(name="n", limits={})


def test_a_required_field_of_ones_own():
    class Strict(GraderConfig):
        model: str

    assert Strict(name="n", model="m").model == "m"
    with pytest.raises(TypeError, match="model"):
        Strict(name="n")


def test_annotations_may_be_objects_instead_of_strings():
    namespace = {
        "__annotations__": {"depth": int, "limit": ClassVar[int], "bare": ClassVar},
        "__module__": __name__,
        "depth": 3,
        "limit": 1,
        "bare": 2,
    }
    kind = type("Made", (BaseConfig,), namespace)
    assert [field.name for field in attrs.fields(kind)] == ["name", "description", "depth"]
    assert kind(name="n").depth == 3


@pytest.mark.parametrize("default", [[1], {"a": [1]}, {1}, bytearray(b"x")], ids=repr)
def test_every_builtin_mutable_default_is_copied(default):
    kind = type(
        "Made",
        (BaseConfig,),
        {"__annotations__": {"value": type(default)}, "__module__": __name__, "value": default},
    )
    one, other = kind(name="n"), kind(name="n")
    assert one.value == other.value == default
    assert one.value is not other.value
    assert one.value is not default


def test_the_base_configs_are_no_workflow_configs():
    assert not issubclass(GraderConfig, AgentWorkflowConfig)
    assert issubclass(GraderConfig, BaseConfig)
    assert BaseConfig(name="n").description is None


# --- concurrency --------------------------------------------------------------------------------


@given(st.none() | st.integers(min_value=1))
def test_concurrency_takes_whole_numbers_from_one(value):
    assert ConcurrencyConfig(max_concurrent=value).max_concurrent == value


@pytest.mark.parametrize("value", [0, -1, True, False, 1.0, 1.5, "3", float("inf"), [], b"1"])
def test_concurrency_refuses_everything_else(value):
    with pytest.raises(
        InvalidFieldError, match=r"^max_concurrent must be a whole number from 1 up"
    ):
        ConcurrencyConfig(max_concurrent=value)
    with pytest.raises(InvalidFieldError, match="max_concurrent"):
        attrs.evolve(ConcurrencyConfig(max_concurrent=1), max_concurrent=value)


def test_concurrency_is_frozen_and_by_keyword_only():
    config = ConcurrencyConfig(max_concurrent=1)
    with pytest.raises(AttributeError):
        config.max_concurrent = 0
    with pytest.raises(TypeError):
        ConcurrencyConfig(4)
    assert hash(config) == hash(ConcurrencyConfig(max_concurrent=1))
