"""Samples: a reward is a plain finite number or nothing, whatever it is set from."""

from __future__ import annotations

import copy
import math
import numbers
import pickle
from decimal import Decimal
from fractions import Fraction

import attrs
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from rollout import GraderContext
from rollout.errors import InvalidFieldError
from rollout.types import RolloutErrorCategory, RolloutSample, RolloutStatus


def by_construction(reward):
    return RolloutSample(reward=reward)


def by_assignment(reward):
    sample = RolloutSample(reward=0.25)
    try:
        sample.reward = reward
    except InvalidFieldError:
        assert sample.reward == 0.25
        raise
    return sample


def by_set_reward(reward):
    context = GraderContext(sample=RolloutSample())
    context.set_reward(reward)
    return context.sample


def by_evolve(reward):
    return attrs.evolve(RolloutSample(reward=0.25), reward=reward)


ways = pytest.mark.parametrize(
    "way", [by_construction, by_assignment, by_set_reward, by_evolve], ids=lambda way: way.__name__
)


@ways
@given(reward=strategies.numbers)
def test_a_reward_becomes_a_plain_float(way, reward):
    sample = way(reward)
    assert type(sample.reward) is float
    assert sample.reward == float(reward)


@ways
@given(reward=strategies.no_numbers)
def test_nothing_else_becomes_a_reward(way, reward):
    with pytest.raises(InvalidFieldError, match="reward must be a finite number") as caught:
        way(reward)
    assert caught.value.field == "reward"
    assert caught.value.kind == "finite_number"


@ways
def test_a_reward_can_be_taken_back(way):
    assert way(None).reward is None


class Scalar:
    """Like a NumPy scalar: registered as a number, no subclass of float."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        return self.value


class Tensor:
    """Like a zero-dimensional tensor: unwraps with ``item()``."""

    def __init__(self, value):
        self.value = value

    def item(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Mute:
    """Says that it is a number, and has no value."""


numbers.Real.register(Scalar)
numbers.Real.register(Mute)


@ways
@pytest.mark.parametrize(
    "reward", [Scalar(0.5), Tensor(0.5), Tensor(Scalar(0.5)), Fraction(1, 2), Decimal("0.5")]
)
def test_foreign_scalars_are_unwrapped(way, reward):
    assert way(reward).reward == 0.5
    assert type(way(reward).reward) is float


@ways
@pytest.mark.parametrize(
    "reward",
    [
        Scalar(math.nan),
        Scalar(math.inf),
        Scalar("0.5"),
        Mute(),
        Tensor(math.nan),
        Tensor("0.5"),
        Tensor([0.5]),
        Tensor(None),
        Tensor(ValueError("only one element tensors can be converted")),
        Tensor(IndexError("too many indices")),
        Tensor(ZeroDivisionError()),
    ],
    ids=lambda reward: f"{type(reward).__name__}-{getattr(reward, 'value', '')!r}",
)
def test_foreign_things_without_a_finite_value_are_refused(way, reward):
    with pytest.raises(InvalidFieldError, match="reward must be a finite number"):
        way(reward)


def test_an_error_does_not_show_the_value():
    with pytest.raises(InvalidFieldError) as caught:
        RolloutSample(reward="hunter2")
    assert str(caught.value) == "reward must be a finite number, not str"


@pytest.mark.parametrize("subclass", ["plain", "decorated"])
def test_a_subclass_keeps_the_rule(subclass):
    class Mine(RolloutSample):
        pass

    kind = attrs.define(kw_only=True)(Mine) if subclass == "decorated" else Mine
    sample = kind(reward=1)
    with pytest.raises(InvalidFieldError):
        sample.reward = math.nan
    with pytest.raises(InvalidFieldError):
        kind(reward=math.inf)
    assert sample.reward == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", "text"),
        ("messages", b"bytes"),
        ("messages", None),
        ("messages", {"role": "user"}),
        ("messages", [1]),
        ("messages", ["user"]),
        ("trajectory_messages", "text"),
        ("trajectory_messages", [1]),
        ("label", 42),
        ("label", True),
        ("remove_sample", 1),
        ("remove_sample", None),
        ("remove_sample", "false"),
        ("metrics", None),
        ("metrics", []),
        ("extra_fields", None),
        ("extra_fields", "x"),
    ],
)
def test_every_field_is_checked_and_named(field, value):
    with pytest.raises(InvalidFieldError, match=f"^{field} must be") as caught:
        RolloutSample(**{field: value})
    assert caught.value.field == field
    sample = RolloutSample()
    with pytest.raises(InvalidFieldError, match=f"^{field} must be"):
        setattr(sample, field, value)


def test_fields_go_by_keyword_only():
    with pytest.raises(TypeError):
        RolloutSample([])
    with pytest.raises(TypeError):
        RolloutSample(rewards=1.0)


@given(messages=strategies.messages)
def test_the_trajectory_is_a_snapshot(messages):
    before = copy.deepcopy(messages)
    sample = RolloutSample(messages=messages)
    messages.append({"role": "late"})
    for message in messages:
        message["content"] = "changed"
    assert sample.trajectory_messages == before
    assert sample.messages is messages


def test_a_trajectory_of_ones_own_or_none_is_kept():
    own = [{"role": "system"}]
    assert RolloutSample(trajectory_messages=own).trajectory_messages is own
    assert RolloutSample(messages=own, trajectory_messages=None).trajectory_messages is None


def test_the_trajectory_survives_evolve_copies_and_pickle():
    sample = RolloutSample(messages=[{"role": "user"}], reward=1, metrics={"a": 1})
    sample.messages[0]["role"] = "changed"
    for other in (
        attrs.evolve(sample, reward=0.5),
        copy.copy(sample),
        copy.deepcopy(sample),
        pickle.loads(pickle.dumps(sample)),
    ):
        assert other.trajectory_messages == [{"role": "user"}]
        assert other.metrics == {"a": 1}


def test_messages_that_cannot_be_copied_are_kept_all_the_same():
    class Stubborn:
        def __deepcopy__(self, memo):
            raise RuntimeError("hunter2")

    messages = [{"content": "x"}, {"content": Stubborn()}]
    sample = RolloutSample(messages=messages, reward=1.0)
    assert sample.trajectory_messages == messages
    assert sample.trajectory_messages is not sample.messages


def test_the_trajectory_stays_out_of_repr_and_comparison():
    one = RolloutSample(trajectory_messages=[{"role": "hidden"}])
    assert "hidden" not in repr(one)
    assert one == RolloutSample()


@given(st.sampled_from([*RolloutStatus, *RolloutErrorCategory]))
def test_the_vocabularies_are_strings(member):
    assert member == member.value
    assert str(member) == member.value == member.name.lower()


def test_the_vocabularies_are_those_of_the_protocol():
    assert list(RolloutStatus) == [
        "queued",
        "running",
        "grading",
        "success",
        "failure",
        "cancelled",
        "unknown",
    ]
    assert list(RolloutErrorCategory) == [
        "timeout",
        "lease_expired",
        "validation_error",
        "http_error",
        "agent_error",
        "internal_error",
    ]
