"""What the codec promises for every input, not only for the ones that somebody thought of."""

from __future__ import annotations

import json
import math
import numbers
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from types import MappingProxyType
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout._json import text as json_text
from rollout._json.fit import fit
from rollout.codec import (
    MAX_JSON_DEPTH,
    TOO_MANY,
    dump_json,
    dump_large_json,
    dump_request,
    nests_deeper,
    parse_json,
    structure,
    unstructure,
)
from rollout.errors import InvalidBodyError, InvalidFieldError
from rollout.types import (
    CancelRolloutsRequest,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutInitResponse,
    RolloutResultResponse,
    RolloutSample,
    RolloutStatus,
)

# Deadlines would measure the machine, not the code.
examples = settings(max_examples=40, deadline=None)

texts = st.text(alphabet=st.characters(), max_size=20)
floats = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers() | floats | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=20
)
objects = st.dictionaries(texts, values, max_size=4)
message_lists = st.lists(objects, max_size=4)
seconds = st.none() | floats | st.integers(min_value=-(10**300), max_value=10**300)
ids = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda text: text not in {".", ".."} and not set(text) & set("/\\\0")
)
moments = st.none() | st.datetimes(timezones=st.just(UTC))
requests = st.builds(
    RolloutInitRequest,
    rollout_id=ids,
    initial_messages=message_lists,
    chat_completions_url=st.sampled_from(["http://chat", "HTTPS://[::1]:9/v1?a=b", "http://ü/"]),
    llm_api_key=st.none() | st.text(alphabet=st.characters(), min_size=1),
    label=st.none() | texts,
    metadata=st.none() | objects,
    extra_fields=st.none() | objects,
    grade=st.booleans(),
    agent_timeout_sec=seconds,
    grader_timeout_sec=seconds,
)
samples = st.builds(
    RolloutSample,
    messages=message_lists,
    trajectory_messages=st.none(),
    label=st.none() | texts,
    reward=st.none() | floats,
    remove_sample=st.booleans(),
    metrics=objects,
    extra_fields=objects,
)
results = st.builds(
    RolloutResultResponse,
    rollout_id=ids,
    status=st.sampled_from(RolloutStatus),
    sample=st.none() | samples,
    err_message=st.none() | texts,
    err_category=st.none() | st.sampled_from(RolloutErrorCategory),
    agent_started_at=moments,
)


def either(function: Any, *args: Any) -> tuple[Any, Any]:
    """The value, or what is wrong. Any other exception is a failure of the test."""
    try:
        return function(*args), None
    except InvalidBodyError as error:
        return None, error.problems


@examples
@given(values)
def test_json_comes_back_as_it_went(value: Any):
    assert parse_json(dump_json(value)) == value


@examples
@given(requests)
def test_a_request_comes_back_as_it_went(request: RolloutInitRequest):
    assert structure(parse_json(dump_request(request)), RolloutInitRequest) == request


@examples
@given(results)
def test_a_result_comes_back_as_it_went(result: RolloutResultResponse):
    data = dump_json(unstructure(result))
    assert "trajectory_messages" not in (unstructure(result)["sample"] or {})
    assert data.isascii()
    assert structure(parse_json(data), RolloutResultResponse) == result


@examples
@given(st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-9, minutes=-30))])))
def test_a_moment_is_written_in_utc(when: datetime):
    try:
        in_utc = when.astimezone(UTC)
    except OverflowError:
        return
    result = RolloutResultResponse(
        rollout_id="a", status=RolloutStatus.RUNNING, agent_started_at=when
    )
    text = unstructure(result)["agent_started_at"]
    assert text.endswith("Z")
    assert datetime.fromisoformat(text) == in_utc


@examples
@given(st.binary(max_size=200))
def test_random_bytes_are_parsed_or_refused(data: bytes):
    value, problems = either(parse_json, data)
    assert problems or parse_json(dump_json(value)) == value


@examples
@given(st.text(alphabet='[]{}",:\\u01ue5.-tnN \n\x00\ud800', max_size=60))
def test_text_that_looks_like_json_is_parsed_or_refused(text: str):
    data = text.encode("utf-8", errors="surrogatepass")
    value, problems = either(parse_json, data)
    assert problems or (json.loads(data) == value and not nests_deeper(value, MAX_JSON_DEPTH))


LOOKS_LIKE_JSON = st.text(alphabet='[]{}",:\\u01ue5.-tnN \n\x00٣', max_size=60)


@examples
@given(st.one_of(LOOKS_LIKE_JSON.map(str.encode), values.map(dump_json), st.binary(max_size=50)))
def test_values_are_counted_without_another_result(data: bytes):
    value, problems = either(parse_json, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_MOST_AT_ONCE", 0)
        counted, counted_problems = either(partial(parse_json, max_values=10_000), data)
    assert (counted, bool(counted_problems)) == (value, bool(problems))
    assert type(counted) is type(value)


@examples
@given(values)
def test_a_large_value_is_written_as_any_other(value: Any):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_PIECE", 2)
        assert dump_large_json(value) == dump_json(value)


def test_the_values_of_a_body_have_a_bound_and_commas_within_strings_do_not_count():
    data = json.dumps([[1, 2.5], {"a": None}, ",[{" * 10, [], [[]]]).encode()
    assert parse_json(data, max_values=10) == json.loads(data)
    with pytest.raises(InvalidBodyError, match="holds more than 9 values") as caught:
        parse_json(data, max_values=9)
    assert [problem.type for problem in caught.value.problems] == [TOO_MANY]


@examples
@given(objects, st.sampled_from([RolloutInitRequest, CancelRolloutsRequest, RolloutResultResponse]))
def test_any_object_is_structured_or_refused(value: Any, kind: type):
    built, problems = either(structure, value, kind)
    assert problems or isinstance(built, kind)


@examples
@given(
    requests,
    st.sampled_from([item.name for item in attrs.fields(RolloutInitRequest)]),
    values,
)
def test_any_value_in_any_field_is_taken_as_it_is_or_named(
    request: RolloutInitRequest, name: str, value: Any
):
    body = {**json.loads(dump_request(request)), name: value}
    got, problems = either(structure, body, RolloutInitRequest)
    if problems:
        assert {problem.loc[0] for problem in problems} == {name}
    else:
        taken = getattr(got, name)
        assert taken == value
        assert isinstance(taken, bool) == isinstance(value, bool)


def test_the_depth_is_counted_exactly_and_not_within_strings():
    at_limit = b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH
    assert parse_json(at_limit)
    with pytest.raises(InvalidBodyError, match="deeper"):
        parse_json(b"[" + at_limit + b"]")
    text = '\\"[{' * 1000
    assert parse_json(json.dumps({text: text}).encode()) == {text: text}
    assert parse_json(b"[" + b",".join([b"[]"] * 1000) + b"]") == [[]] * 1000
    wide = b"[" * (MAX_JSON_DEPTH - 1) + b"[],[]" + b"]" * (MAX_JSON_DEPTH - 1)
    assert parse_json(wide)
    with pytest.raises(InvalidBodyError, match="deeper"):
        parse_json(wide.replace(b"[],[]", b"[],[[]]"))


@pytest.mark.parametrize(
    "text", ["2026-01-02t03:04:05z", "2026-01-02 03:04:05Z", "2026-01-02T04:04:05+01:00"]
)
def test_times_are_read_in_every_form_of_rfc_3339(text: str):
    body = {"rollout_id": "r", "status": "running", "agent_started_at": text}
    moment = structure(body, RolloutResultResponse).agent_started_at
    assert moment == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_a_trajectory_never_travels():
    said = [{"role": "user", "content": "hi"}]
    for sample in ({"messages": said}, {"messages": said, "trajectory_messages": said}):
        body = {"rollout_id": "r", "status": "success", "sample": sample}
        got = structure(body, RolloutResultResponse).sample
        assert got is not None
        assert (got.messages, got.trajectory_messages) == (said, None)


@pytest.mark.parametrize("end", [b"", b"\\", b'"'])
def test_a_megabyte_of_escaped_quotes_is_read_once(end: bytes):
    """Reading it again from each quote would take hours."""
    data = b"[" + b"{}," * 200 + b'"' + b'\\"' * 500_000 + end
    with pytest.raises(InvalidBodyError):
        parse_json(data)


def test_a_repeated_key_among_very_many_is_found_in_one_go():
    pairs = ",".join(f'"{number}":0' for number in range(200_000))
    with pytest.raises(InvalidBodyError, match="more than once") as caught:
        parse_json(f'{{{pairs},"199999":0}}'.encode())
    assert caught.value.problems[0].loc == ("199999",)


def test_a_refusal_never_repeats_a_value():
    body = {"rollout_id": ["hunter2"], "llm_api_key": ["hunter2"], "grade": "hunter2"}
    with pytest.raises(InvalidBodyError) as caught:
        structure(body, RolloutInitRequest)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"polling_lease_token": ""},
        {"polling_lease_token": None},
        {"result_wait_timeout_sec": 0},
        {"result_wait_timeout_sec": "30"},
        {"result_wait_timeout_sec": True},
        {"polling_lease_timeout_sec": 30},
        {"polling_lease_timeout_sec": 10**400},
        {"status": "done"},
        {"status": None},
    ],
)
def test_an_admission_that_the_protocol_does_not_allow_is_refused(changes: dict[str, Any]):
    good = {
        "rollout_id": "a",
        "status": "queued",
        "polling_lease_token": "t",
        "result_wait_timeout_sec": 30,
        "polling_lease_timeout_sec": 120.0,
    }
    assert structure(good, RolloutInitResponse).polling_lease_timeout_sec == 120
    with pytest.raises(InvalidBodyError):
        structure({**good, **changes}, RolloutInitResponse)


def test_a_request_that_json_cannot_carry_names_the_field():
    request = RolloutInitRequest(
        rollout_id="a", initial_messages=[{"a": object()}], chat_completions_url="http://chat"
    )
    with pytest.raises(InvalidFieldError, match="initial_messages"):
        dump_request(request)


# --- fit --------------------------------------------------------------------------------------


class Foreign:
    """A number of somebody else's; its methods do as they are told."""

    def __init__(self, as_float: Any = 0.5, as_index: Any = TypeError, as_bool: Any = True) -> None:
        self.as_float, self.as_index, self.as_bool = as_float, as_index, as_bool

    def _give(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, BaseException):
            raise value("told so")
        return value

    def __float__(self) -> float:
        return self._give(self.as_float)

    def __index__(self) -> int:
        return self._give(self.as_index)

    def __bool__(self) -> bool:
        return self._give(self.as_bool)

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return self is other


numbers.Real.register(Foreign)


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise LookupError


class Whole(int):
    def __int__(self) -> int:
        raise LookupError


class bool_:  # noqa: N801 - NumPy's name
    def __bool__(self) -> bool:
        return True


class Broken(dict):
    def items(self) -> Any:
        raise LookupError


outcomes = st.sampled_from(
    [0.5, math.nan, math.inf, 3, "text", None, 10**4299, LookupError, OverflowError, ValueError]
)
foreign = st.builds(Foreign, outcomes, outcomes, outcomes)
anything = st.recursive(
    scalars
    | st.floats()
    | st.binary(max_size=3)
    | st.decimals()
    | st.fractions()
    | st.complex_numbers()
    | st.datetimes()
    | foreign
    | st.builds(Text, texts)
    | st.builds(Whole, st.integers())
    | st.builds(bool_)
    | st.builds(object)
    | st.sampled_from(list(RolloutStatus))
    | st.just(10**4299)
    | st.just(Broken(a=1)),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(texts | st.integers() | st.booleans() | foreign | st.none(), inner)
        | st.dictionaries(texts, inner).map(MappingProxyType)
    ),
    max_leaves=20,
)


@examples
@given(anything, st.integers(min_value=0, max_value=5))
def test_what_is_fitted_can_always_be_written_and_read(value: Any, depth: int):
    for limit in (MAX_JSON_DEPTH, depth):
        fitted, dropped = fit(value, max_depth=limit)
        assert parse_json(dump_json(fitted)) == fitted
        assert all(isinstance(line, str) for line in dropped)


@examples
@given(values)
def test_what_is_json_already_stays_as_it_is(value: Any):
    assert fit(value) == (value, [])


def test_what_was_left_out_is_named_with_the_way_to_it():
    value = {"a": [1, math.nan, {"b": object()}], "c": {1, 2}, None: 0, 1: "x", "1": "y"}
    fitted, dropped = fit(value)
    assert fitted == {"a": [1, {}], "1": "x"}
    assert dropped == [
        "a[1]: a number that is not finite",
        "a[2].b: of type object",
        "c: of type set",
        "value: a key of type NoneType",
        "value: the same key as another one of type str",
    ]
    assert fit(object()) == (None, ["value: of type object"])


def test_what_contains_itself_ends():
    loop: list[Any] = [1]
    loop += [loop, {"again": loop}]
    fitted, dropped = fit(loop)
    assert fitted == [1, {}]
    assert dropped == ["[1]: a part of itself", "[2].again: a part of itself"]


def test_a_value_in_two_places_is_not_a_loop():
    shared = [1]
    assert fit({"a": shared, "b": [shared, shared]}) == ({"a": [1], "b": [[1], [1]]}, [])


@pytest.mark.parametrize("limit", [1, 5, MAX_JSON_DEPTH])
def test_fit_nests_exactly_as_deep_as_allowed(limit: int):
    value: Any = []
    for _ in range(limit - 1):
        value = [value]
    assert fit(value, max_depth=limit) == (value, [])
    fitted, dropped = fit([value], max_depth=limit)
    assert len(dropped) == 1
    assert fitted != [value]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
        (Foreign(0.5), 0.5),
        (Foreign(7.0, 7), 7),
        (Text("a"), "a"),
        (RolloutStatus.QUEUED, "queued"),
        (bool_(), True),
        ((1, 2), [1, 2]),
        (MappingProxyType({"a": 1}), {"a": 1}),
    ],
)
def test_foreign_values_become_plain_ones(value: Any, plain: Any):
    fitted, dropped = fit(value)
    assert (fitted, type(fitted), dropped) == (plain, type(plain), [])
