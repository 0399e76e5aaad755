"""The bodies that travel: what their constructors take, refuse and hide."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone

import attrs
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import InvalidFieldError
from rollout.types import (
    POLLING_LEASE_HEADER,
    CancelRolloutsRequest,
    CancelRolloutsResponse,
    ExecutionRequest,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutInitResponse,
    RolloutLifecycle,
    RolloutResultResponse,
    RolloutSample,
    RolloutStatus,
)

NO_CHAT_URLS = [
    "",
    "chat/v1",
    "file:///etc/passwd",
    "ftp://chat/v1",
    "ftp://chat:21/v1",
    "file://chat:80/etc/passwd",
    "http://",
    "http:///v1",
    "https://user:password@/v1",
    "http://chat:port/v1",
    "http://[::1/v1",
    "http://chat/v1\r\nHost: other",
    "http://chat/v 1",
    "http://chat\\@other/v1",
    "\nhttp://chat/v1",
]
INIT = {"rollout_id": "r", "initial_messages": [], "chat_completions_url": "http://chat/v1"}
ADMISSION = {
    "rollout_id": "r",
    "status": "queued",
    "polling_lease_token": "token-hunter2",
    "result_wait_timeout_sec": 30.0,
    "polling_lease_timeout_sec": 120.0,
}
RESULT = {"rollout_id": "r", "status": "running"}
EXECUTION = {"id": "r", "prompt": []}
LIFECYCLE = {"accepting_rollouts": True, "active_rollouts": 0}

BAD_FIELDS = [
    (kind, valid, field, value)
    for kind, valid, fields in (
        (
            RolloutInitRequest,
            INIT,
            {
                "rollout_id": [None, 1, b"r"],
                "initial_messages": [None, "text", {}, (), [1], ["user"], [None]],
                "chat_completions_url": [None, 1, b"http://chat", *NO_CHAT_URLS],
                "llm_api_key": ["", 1, b"key", True],
                "label": [1, True, [], b"42"],
                "metadata": [1, "x", [], True],
                "extra_fields": [1, "x", [], True],
                "grade": [None, 1, 0, "false"],
                "agent_timeout_sec": ["7", True, math.nan, math.inf, -math.inf, 10**400, []],
                "grader_timeout_sec": ["7", False, math.nan, math.inf, -math.inf, 10**400, {}],
                "run": ["", 1, b"run", True, "r" * 257],
                "confirm_start": [None, 1, 0, "true"],
            },
        ),
        (
            RolloutInitResponse,
            ADMISSION,
            {
                "rollout_id": [None, 1],
                "status": [None, "nonsense", 1],
                "polling_lease_token": [None, "", 1, b"t"],
                "result_wait_timeout_sec": [None, "30", True, 0, -1, math.nan, math.inf, 10**400],
                "polling_lease_timeout_sec": [None, "30", True, 0, math.nan, math.inf, 30, 29.9],
            },
        ),
        (
            RolloutResultResponse,
            RESULT,
            {
                "rollout_id": [None, 1],
                "status": [None, "nonsense", 1, RolloutErrorCategory.TIMEOUT],
                "sample": [{}, "x", []],
                "err_message": [1, b"x", ValueError("x")],
                "err_category": ["nonsense", 1, RolloutStatus.FAILURE],
                "agent_started_at": ["2026-01-01T00:00:00Z", 0, datetime(2026, 1, 1)],  # noqa: DTZ001
            },
        ),
        (
            ExecutionRequest,
            EXECUTION,
            {
                "id": [None, 1, "", "a/b"],
                "prompt": [None, "text", {}, [1]],
                "label": [1, True],
                "metadata": [[], "x"],
                "grade": [None, 1, "true"],
                "agent_timeout_sec": ["7", True, math.nan, math.inf],
                "grader_timeout_sec": ["7", True, math.nan, math.inf],
                "run": ["", 1, b"run", "r" * 257],
            },
        ),
        (
            CancelRolloutsRequest,
            {},
            {"ids": ["r", ("r",), [1], [None], {}], "prefix": [1, b"x", []], "all": [None, 1, "x"]},
        ),
        (
            CancelRolloutsResponse,
            {"dispositions": {}},
            {"dispositions": [None, [], {"a": 1}, {1: "a"}]},
        ),
        (
            RolloutLifecycle,
            LIFECYCLE,
            {
                "accepting_rollouts": [None, 1, "true"],
                "active_rollouts": [None, -1, True, 1.0, "1"],
            },
        ),
    )
    for field, values in fields.items()
    for value in values
]


@pytest.mark.parametrize(
    ("kind", "valid", "field", "value"),
    BAD_FIELDS,
    ids=[f"{kind.__name__}.{field}={str(value)[:20]}" for kind, _, field, value in BAD_FIELDS],
)
def test_a_bad_field_is_refused_by_name(kind, valid, field, value):
    with pytest.raises(InvalidFieldError, match=f"^{field} ") as caught:
        kind(**{**valid, field: value})
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)
    instance = kind(**valid)
    with pytest.raises(InvalidFieldError, match=f"^{field} "):
        setattr(instance, field, value)


@pytest.mark.parametrize(
    ("kind", "valid"),
    [
        (RolloutInitRequest, INIT),
        (RolloutInitResponse, ADMISSION),
        (RolloutResultResponse, RESULT),
        (ExecutionRequest, EXECUTION),
        (CancelRolloutsResponse, {"dispositions": {}}),
        (RolloutLifecycle, LIFECYCLE),
    ],
)
def test_required_fields_are_required_and_by_keyword(kind, valid):
    with pytest.raises(TypeError):
        kind(*valid.values())
    for field in valid:
        with pytest.raises(TypeError, match=field):
            kind(**{name: value for name, value in valid.items() if name != field})


@given(rollout_id=strategies.rollout_ids)
def test_every_path_segment_is_an_id(rollout_id):
    assert RolloutInitRequest(**{**INIT, "rollout_id": rollout_id}).rollout_id == rollout_id
    assert ExecutionRequest(id=rollout_id, prompt=[]).id == rollout_id


@given(rollout_id=strategies.bad_rollout_ids)
def test_anything_else_is_not_an_id(rollout_id):
    with pytest.raises(InvalidFieldError, match=r"^rollout_id must"):
        RolloutInitRequest(**{**INIT, "rollout_id": rollout_id})
    with pytest.raises(InvalidFieldError, match=r"^id must"):
        ExecutionRequest(id=rollout_id, prompt=[])


@given(agent=strategies.timeouts, grader=strategies.timeouts)
def test_every_finite_number_is_a_timeout(agent, grader):
    request = RolloutInitRequest(**INIT, agent_timeout_sec=agent, grader_timeout_sec=grader)
    assert request.agent_timeout_sec == agent
    assert request.grader_timeout_sec == grader


def test_the_defaults_of_an_admission_request():
    request = RolloutInitRequest(**INIT)
    assert request.grade is True
    for name in (
        "label",
        "metadata",
        "extra_fields",
        "llm_api_key",
        "agent_timeout_sec",
        "grader_timeout_sec",
    ):
        assert getattr(request, name) is None


def test_secrets_stay_out_of_repr_and_errors():
    request = RolloutInitRequest(**INIT, llm_api_key="key-hunter2")
    assert "hunter2" not in repr(request)
    assert "hunter2" not in repr(attrs.evolve(request, label="x"))
    assert "hunter2" not in repr(RolloutInitResponse(**ADMISSION))
    with pytest.raises(InvalidFieldError) as caught:
        RolloutInitRequest(**INIT, llm_api_key=["hunter2"])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("status", list(RolloutStatus))
def test_a_status_may_be_given_by_name(status):
    result = RolloutResultResponse(rollout_id="r", status=status.value)
    assert result.status is status
    result.status = "queued"
    assert result.status is RolloutStatus.QUEUED


@pytest.mark.parametrize("category", list(RolloutErrorCategory))
def test_a_category_may_be_given_by_name(category):
    result = RolloutResultResponse(rollout_id="r", status="failure", err_category=category.value)
    assert result.err_category is category


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=2))])
def test_a_start_time_has_a_zone(zone):
    when = datetime(2026, 1, 1, tzinfo=zone)
    result = RolloutResultResponse(**RESULT, agent_started_at=when, sample=RolloutSample())
    assert result.agent_started_at == when


@given(
    ids=st.none() | st.lists(st.text(max_size=3), max_size=3),
    prefix=st.none() | st.text(min_size=1, max_size=3),
    all_=st.booleans(),
)
def test_selectors_are_counted(ids, prefix, all_):
    request = CancelRolloutsRequest(ids=ids, prefix=prefix, all=all_)
    assert request.selectors == sum([ids is not None, prefix is not None, all_])


def test_the_lease_header_is_that_of_the_protocol():
    assert POLLING_LEASE_HEADER == "X-Osmosis-Rollout-Lease"
