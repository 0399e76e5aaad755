"""JSON cannot share, so a small structure may be one that no disk could hold."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout._json.fit import fit
from rollout.codec import LARGEST_WEIGHT, MAX_JSON_DEPTH, dump_json, dump_request, parse_json
from rollout.errors import InvalidFieldError
from rollout.trajectory import build_trajectory
from rollout.types import RolloutInitRequest, RolloutSample

DOUBLINGS = {
    "list": lambda inner: [inner, inner],
    "tuple": lambda inner: (inner, inner),
    "dict": lambda inner: {"a": inner, "b": inner},
    "mapping": lambda inner: MappingProxyType({"a": inner, "b": inner}),
    "uneven": lambda inner: [inner, [inner]],
    "with something to drop": lambda inner: [inner, object(), inner],
}


def doubled(how, times):
    value = ["x"]
    for _ in range(times):
        value = DOUBLINGS[how](value)
    return value


def request_of(**fields):
    return RolloutInitRequest(
        **{
            "rollout_id": "r1",
            "initial_messages": [],
            "chat_completions_url": "http://chat.invalid",
            **fields,
        }
    )


@pytest.mark.parametrize("times", [60, 5 * MAX_JSON_DEPTH])
@pytest.mark.parametrize("how", DOUBLINGS)
def test_what_doubles_again_and_again_is_left_out_alone(how, times):
    fitted, dropped = fit({"before": 1.5, "huge": doubled(how, times), "after": [2]})

    assert {name: fitted[name] for name in ("before", "after")} == {"before": 1.5, "after": [2]}
    assert any(line.startswith("huge") for line in dropped)
    assert len(dump_json(fitted)) < LARGEST_WEIGHT


def test_it_is_said_of_each_item_that_is_too_large():
    huge = doubled("list", 60)
    assert fit({"a": huge, "b": 1}) == ({"b": 1}, ["a: too large"])
    assert fit([1, huge, {"in": huge}, 2]) == ([1, 2], ["[1]: too large", "[2]: too large"])


def test_long_texts_that_are_shared_count_in_each_place():
    text = "x" * (LARGEST_WEIGHT // 8)
    assert fit({"few": [text] * 7, "many": [text] * 8, "more": 1}) == (
        {"few": [text] * 7, "more": 1},
        ["many: too large"],
    )


def test_what_is_shared_a_little_is_written_in_each_place():
    value = doubled("list", 12)
    assert fit(value) == (value, [])


def test_what_is_lacking_in_several_places_is_said_of_each():
    shared = [[object()], 1]
    fitted, dropped = fit({"a": shared, "b": {"c": shared}})
    assert fitted == {"a": [[], 1], "b": {"c": [[], 1]}}
    assert dropped == ["a[0][0]: of type object", "b.c[0][0]: of type object"]


@settings(max_examples=100)
@given(
    parts=st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=10),
    depth=st.integers(1, 6),
)
def test_what_is_shared_is_fitted_as_if_it_were_not(parts, depth):
    """Each part holds some of those just before it, and is met in it before or after them."""
    shared, apart = [], []
    for part in parts:
        shared.append([shared[-n] for n in part if n <= len(shared)])
        apart.append([parse_json(dump_json(apart[-n])) for n in part if n <= len(apart)])
    for order in (slice(None), slice(None, None, -1)):
        fitted, dropped = fit(shared[order], max_depth=depth)
        assert fitted == fit(apart[order], max_depth=depth)[0]
        assert bool(dropped) == (fitted != shared[order])


@pytest.mark.parametrize("field", ["initial_messages", "metadata", "extra_fields"])
def test_a_request_that_is_too_large_is_refused_by_field(field):
    huge = {"x": doubled("list", 60)}
    with pytest.raises(InvalidFieldError, match=rf"^{field} is too large to be sent$"):
        dump_request(request_of(**{field: [huge] if field == "initial_messages" else huge}))


def test_a_request_that_shares_a_little_is_sent():
    value = {"x": doubled("dict", 8)}
    assert parse_json(dump_request(request_of(metadata=value)))["metadata"] == value


@pytest.mark.parametrize("levels", [2, 100_000])
def test_a_request_that_contains_itself_or_never_ends_has_no_json_form(levels):
    deep: list[object] = []
    if levels == 2:
        deep.append(deep)
    for _ in range(levels):
        deep = [deep]
    with pytest.raises(InvalidFieldError, match=r"^metadata has no JSON form"):
        dump_request(request_of(metadata={"x": deep}))


def test_a_trajectory_has_the_reward_of_a_sample_that_is_too_large():
    huge = doubled("list", 60)
    sample = RolloutSample(messages=[{"role": "user", "content": "hi", "x": huge}], reward=0.5)
    sample.extra_fields = {"huge": huge, "fine": 1}
    made = build_trajectory(sample.messages, rollout_id="r1", sample=sample)
    assert made["extra"]["reward"] == 0.5
    assert len(dump_json(made)) < LARGEST_WEIGHT
