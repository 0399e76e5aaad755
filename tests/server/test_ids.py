"""Rollout ids: whatever is admitted can be polled, cancelled and reported."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.faults import (
    admission,
    admit,
    assert_refused,
    assert_serves,
    problem_at,
    raw,
    request_bytes,
    result_path,
    run,
    served_http,
)
from support import CHAT_URL, make_app, prompt, served

from rollout.client import RolloutClient
from rollout.errors import InvalidFieldError
from rollout.types import POLLING_LEASE_HEADER, RolloutInitRequest

pytestmark = pytest.mark.usefixtures("log_lines")

STRANGE = [
    "a%2Fb",
    "a%2fb",
    "%",
    "%%",
    "%zz",
    "%00",
    "?",
    "a?b=c",
    "#",
    "a#b",
    " ",
    " a ",
    "a b",
    "+",
    "a+b&c=d;e",
    "...",
    ".a",
    "a.",
    "~",
    ":",
    "http:a",
    "cancel",
    "result",
    "<rollout_id>",
    "<string:a>",
    "*",
    '"',
    "'",
    "\t",
    "\n",
    "a\nb",
    "\r\n",
    "\x7f",
    "\x85",
    "\u2028",
    "\ufeff",
    "\ufffd",
    "\u00fc",
    "u\u0308",
    "\u4f60\u597d",
    "\U0001f600",
    "\u202e",
    "a" * 10_000,
    "%" * 10_000,
]
REFUSED = ["", ".", "..", "/", "a/b", "\\", "a\\b", "\0", "a\0", "\ud800", "a\udfff"]
TOO_LONG = ["a" * 40_000, "\u00fc" * 10_000, "\U0001f600" * 10_000, "%" * 11_000]


async def test_what_is_admitted_can_be_polled_and_cancelled():
    async with served_http(make_app()) as http:
        for rollout_id in STRANGE:
            result = await run(http, rollout_id=rollout_id)
            assert result["status"] == "success", rollout_id
            answer = await http.post("/rollout/cancel", json={"ids": [rollout_id]})
            assert answer.json() == {"dispositions": {rollout_id: "not_found"}}
        await assert_serves(http)


async def test_ids_that_differ_only_in_their_escapes_are_different_rollouts():
    async with served_http(make_app()) as http:
        _, headers = await admit(http, rollout_id="a%62")
        assert_refused(await http.get(result_path("ab"), headers=headers), 404)
        assert_refused(await http.get("/rollout/a%62/result", headers=headers), 404)
        assert (await http.get("/rollout/a%2562/result", headers=headers)).status_code == 200


@pytest.mark.parametrize("rollout_id", [*REFUSED, *TOO_LONG], ids=range(15))
async def test_what_cannot_be_polled_is_not_admitted(rollout_id: str):
    async with served_http(make_app()) as http:
        response = await http.post("/rollout", content=json.dumps(admission(rollout_id=rollout_id)))
        assert problem_at(response) == [["body", "rollout_id"]]
        assert len(response.content) < 1000
        await assert_serves(http)


async def test_the_client_polls_strange_ids_too():
    async with served(make_app()) as url, RolloutClient(url=url) as client:
        for rollout_id in STRANGE:
            result = await client.run_rollout(prompt(), CHAT_URL, rollout_id, label="42")
            assert result.rollout_id == rollout_id
            answer = await client.cancel_rollout(rollout_id)
            assert answer.dispositions == {rollout_id: "not_found"}


@pytest.mark.parametrize(
    "segment",
    ["%ff", "%c3%28", "%ed%a0%80", "%00", "%2e%2e", "..", ".", "%2f", "%5c", "a%2fb", "%", "%zz"],
)
async def test_a_path_that_no_id_has_is_not_found(segment: str):
    head = {POLLING_LEASE_HEADER: "x"}
    async with served_http(make_app()) as http:
        status, body = await raw(
            http.base_url, request_bytes("GET", f"/rollout/{segment}/result", headers=head)
        )
        assert status == 404
        assert set(json.loads(body)) == {"detail"}
        await assert_serves(http)


async def test_invalid_utf8_in_a_path_does_not_reach_the_rollout_that_looks_like_it():
    async with served_http(make_app()) as http:
        _, headers = await admit(http, rollout_id="\ufffd")
        status, _ = await raw(
            http.base_url, request_bytes("GET", "/rollout/%ff/result", headers=headers)
        )
        assert status == 404
        status, _ = await raw(
            http.base_url, request_bytes("GET", result_path("\ufffd"), headers=headers)
        )
        assert status == 200


async def test_bytes_beyond_ascii_in_a_request_line_are_refused():
    async with served_http(make_app()) as http:
        request = request_bytes("GET", "/rollout/\xff\xfe/result")
        assert (await raw(http.base_url, request))[0] == 400
        await assert_serves(http)


async def test_any_id_is_either_refused_or_runs_from_end_to_end():
    taken: set[str] = set()
    ids: list[str] = []

    @settings(
        max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(st.text(alphabet=st.characters(), min_size=0, max_size=20))
    def collect(text: str) -> None:
        ids.append(text)

    collect()
    async with served_http(make_app()) as http:
        for rollout_id in ids:
            if rollout_id in taken:
                continue
            taken.add(rollout_id)
            fields = admission(rollout_id=rollout_id)
            try:
                RolloutInitRequest(**fields)
            except InvalidFieldError:
                response = await http.post("/rollout", content=json.dumps(fields))
                assert problem_at(response) == [["body", "rollout_id"]]
            else:
                assert (await run(http, rollout_id=rollout_id))["status"] == "success"
