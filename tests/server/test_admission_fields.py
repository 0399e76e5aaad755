"""Every field of an admission: missing, of the wrong type, at its border."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server.faults import (
    LLM_KEY,
    admission,
    assert_refused,
    assert_serves,
    in_process_http,
    problem_at,
    run,
    served_http,
)
from support import make_app, prompt

pytestmark = pytest.mark.usefixtures("log_lines")

REQUIRED = ("rollout_id", "initial_messages", "chat_completions_url")
NULLABLE = (
    "llm_api_key",
    "label",
    "metadata",
    "extra_fields",
    "agent_timeout_sec",
    "grader_timeout_sec",
    "run",
)

WRONG: dict[str, list[Any]] = {
    "rollout_id": [None, 7, True, [], {}, ["a"], "", ".", "..", "a/b", "a\\b", "a\0b", "/", "\0"],
    "initial_messages": [None, "hi", 7, True, {}, [1], ["hi"], [None], [[]], [{}, "hi"]],
    "chat_completions_url": [None, 7, True, [], {}, "", "file:///a", "http:///v1", "http://a\r\n"],
    "llm_api_key": ["", 7, False, True, [LLM_KEY], {"key": LLM_KEY}],
    "label": [42, 4.2, True, ["42"], {}],
    "metadata": ["{}", 7, True, [], [{}], [["a", 1]]],
    "extra_fields": ["{}", 7, True, [], [{}]],
    "grade": [None, 1, 0, "false", "true", "", [], {}, 1.0],
    "agent_timeout_sec": ["7", "", True, False, [7], {}, "NaN", "inf", 10**400, -(10**400)],
    "grader_timeout_sec": ["7", "", True, False, [7], {}, "NaN", "inf", 10**400],
    "run": ["", 7, True, [], {}, "r" * 257],
    "confirm_start": [None, 1, 0, "true", "", [], {}],
}

RIGHT: dict[str, list[Any]] = {
    "chat_completions_url": ["http://[::1]:80/v1", "HTTPS://user:pw@model.example/v1?a=b"],
    "llm_api_key": [None, "k", " ", "\u00fc", LLM_KEY * 1000],
    "label": [None, "", "\U0001f600", "x" * 100_000],
    "metadata": [None, {}, {"a": {"b": [None, True, 1.5, -1e308, 10**40]}}],
    "extra_fields": [None, {}, {"a": 1}],
    "grade": [True, False],
    "agent_timeout_sec": [None, 1e308, 10**300, 86400, 0.5],
    "grader_timeout_sec": [None, 1e308, 10**300, 86400],
    "run": [None, "r", " ", "\0", "\U0001f600" * 256],
    "confirm_start": [False],
}


@pytest.mark.parametrize("field", REQUIRED)
async def test_a_required_field_may_not_be_missing(field: str):
    body = admission()
    del body[field]
    async with in_process_http(make_app()) as http:
        response = await http.post("/rollout", json=body)
        assert problem_at(response) == [["body", field]]
        assert response.json()["detail"][0]["type"] == "missing"


@pytest.mark.parametrize("field", WRONG)
async def test_a_value_that_breaks_the_rule_is_named_and_never_repeated(field: str):
    async with served_http(make_app()) as http:
        for value in WRONG[field]:
            response = await http.post("/rollout", content=json.dumps(admission(**{field: value})))
            assert problem_at(response) == [["body", field]], value
        assert (await http.get("/health")).json()["lifecycle"]["active_rollouts"] == 0
        await assert_serves(http)


@pytest.mark.parametrize("field", RIGHT)
async def test_a_value_within_the_rule_runs(field: str):
    async with served_http(make_app()) as http:
        for value in RIGHT[field]:
            fields = {"label": "42", field: value}
            result = await run(http, **{"metadata": {}, **fields})
            assert result["status"] == "success", (value, result)
        await assert_serves(http)


async def test_everything_that_is_wrong_is_said_at_once():
    async with in_process_http(make_app()) as http:
        response = await http.post(
            "/rollout", json={"rollout_id": 7, "grade": "false", "agent_timeout_sec": "7"}
        )
        places = problem_at(response)
        assert sorted(place[1] for place in places) == [
            "agent_timeout_sec",
            "chat_completions_url",
            "grade",
            "initial_messages",
            "rollout_id",
        ]


async def test_what_may_be_null_may_be_left_out(autojump_clock):
    async with in_process_http(make_app()) as http:
        body = {key: value for key, value in admission().items() if key in REQUIRED}
        response = await http.post("/rollout", json={**body, "grade": False})
        assert response.status_code == 202
        nulls = dict.fromkeys(NULLABLE)
        response = await http.post("/rollout", json={**admission(), **nulls, "grade": False})
        assert response.status_code == 202


@pytest.mark.parametrize("limit", [0, -1, -1e308, 1e-300, -0.0])
async def test_a_timeout_that_is_over_before_it_begins_is_a_timeout(limit: float):
    async with in_process_http(make_app()) as http:
        result = await run(http, agent_timeout_sec=limit, initial_messages=prompt(sleep=60))
        assert (result["status"], result["err_category"]) == ("failure", "timeout")
        result = await run(http, grader_timeout_sec=limit, metadata={"grader": {"sleep": 60}})
        assert (result["status"], result["err_category"]) == ("failure", "timeout")
        assert result["sample"]["reward"] is None
        await assert_serves(http)


async def test_no_messages_at_all_are_for_the_workflow_to_judge():
    async with in_process_http(make_app()) as http:
        result = await run(http, initial_messages=[])
        assert (result["status"], result["err_category"]) == ("failure", "agent_error")
        await assert_serves(http)


async def test_a_graded_request_without_label_and_metadata_fails_before_the_agent_runs():
    async with in_process_http(make_app()) as http:
        result = await run(http, label=None)
        assert (result["status"], result["err_category"]) == ("failure", "validation_error")
        assert "neither a label nor metadata" in result["err_message"]
        assert result["agent_started_at"] is None


async def test_a_duplicate_is_refused_while_active_and_while_retained(autojump_clock):
    async with in_process_http(make_app()) as http:
        body = admission(initial_messages=prompt(sleep=0.01))
        assert (await http.post("/rollout", json=body)).status_code == 202
        assert_refused(await http.post("/rollout", json=body), 409)
        await run(http, rollout_id="retained")
        assert_refused(await http.post("/rollout", json=admission(rollout_id="retained")), 409)


async def test_chat_endpoints_can_be_bound_to_hosts(autojump_clock):
    app = make_app(allowed_chat_hosts=["Model.example", "10.0.0.7:9000", "[FD00::1]:8000"])
    async with in_process_http(app) as http:
        for url, status in {
            "https://model.example:1/v1": 202,
            "http://10.0.0.7:9000": 202,
            "http://10.0.0.7": 422,
            "http://[fd00::1]:8000/v1": 202,
            "http://[fd00::1]/v1": 422,
            "http://10.0.0.7:0": 422,
            "file://model.example:1/v1": 422,
            "http://model.example@other.example/v1": 422,
            "http://other.example/model.example": 422,
        }.items():
            body = admission(chat_completions_url=url)
            batch = await http.post("/rollouts", json={"rollouts": [body]})
            assert batch.json()["outcomes"][0]["status_code"] == status, url
            single = {**body, "rollout_id": "single " + body["rollout_id"]}
            assert (await http.post("/rollout", json=single)).status_code == status, url
        response = await http.post("/rollout", json=admission())
        assert problem_at(response) == [["body", "chat_completions_url"]]
