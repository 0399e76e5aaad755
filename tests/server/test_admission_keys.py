"""Admissions that are sent again, as they look from outside."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import trio
from feed.streaming import admit_many, open_feed
from hypothesis import given
from server.faults import (
    LLM_KEY,
    admission,
    assert_refused,
    finished,
    in_process_http,
    poll,
    problem_at,
    request_bytes,
    served_http,
)
from support import Script, connected, local_backend, make_app, prompt, served

from rollout import get_rollout_context
from rollout.codec import dump_request, parse_json, structure
from rollout.server.admission_keys import lease_token, request_digest
from rollout.simulation.strategies import requests
from rollout.types import EXTENSIONS, POLLING_LEASE_HEADER, RolloutInitRequest

pytestmark = pytest.mark.usefixtures("log_lines")

KEY = "admission-key-1b44"
RUNS: list[str] = []


class Counted(Script):
    """Notes the id of every run."""

    async def run(self, ctx: Any) -> Any:
        RUNS.append(get_rollout_context().rollout_id)
        return await super().run(ctx)


@pytest.fixture(autouse=True)
def runs():
    RUNS.clear()
    return RUNS


def counted_app(**options):
    return make_app(local_backend(Counted), **options)


def lease_of(answer):
    return {POLLING_LEASE_HEADER: answer.json()["polling_lease_token"]}


async def send(http, body):
    return await http.post("/rollout", content=json.dumps(body))


async def test_the_same_admission_gets_the_same_answer_while_it_runs_and_after(runs):
    body = admission(admission_key=KEY, initial_messages=prompt(sleep=0.2))
    async with served_http(counted_app()) as http:
        first = await send(http, body)
        assert first.status_code == 202
        assert (await send(http, body)).content == first.content
        result = await finished(http, body["rollout_id"], lease_of(first))
        again = await send(http, body)
        assert again.content == first.content
        assert await poll(http, body["rollout_id"], lease_of(again)) == result
    assert runs == [body["rollout_id"]]


@pytest.mark.parametrize(
    "other",
    [
        {"admission_key": KEY + "x"},
        {"admission_key": None},
        {"label": "43"},
        {"llm_api_key": LLM_KEY + "x"},
        {"initial_messages": prompt(answer="43")},
        {"metadata": {}},
        {"grade": False},
        {"agent_timeout_sec": 60},
        {"run": "other"},
        {"confirm_start": True},
    ],
    ids=str,
)
async def test_another_key_or_request_is_a_duplicate(other, autojump_clock):
    body = admission(admission_key=KEY)
    async with in_process_http(counted_app()) as http:
        assert (await send(http, body)).status_code == 202
        assert_refused(await send(http, {**body, **other}), 409)


async def test_a_key_does_not_open_a_rollout_that_has_none(autojump_clock):
    body = admission()
    async with in_process_http(counted_app()) as http:
        assert (await send(http, body)).status_code == 202
        assert_refused(await send(http, body), 409)
        assert_refused(await send(http, {**body, "admission_key": KEY}), 409)


async def test_fields_that_the_server_does_not_know_make_no_difference(autojump_clock):
    body = admission(admission_key=KEY)
    async with in_process_http(counted_app()) as http:
        first = await send(http, body)
        assert (await send(http, {"new": 1, **body})).content == first.content


async def test_one_key_for_two_rollouts_gives_two_tokens(autojump_clock):
    async with in_process_http(counted_app()) as http:
        one = await send(http, admission(admission_key=KEY))
        other = await send(http, admission(admission_key=KEY))
        assert lease_of(one) != lease_of(other)


async def test_two_servers_give_two_tokens(autojump_clock):
    body = admission(admission_key=KEY)
    tokens = []
    for _ in range(2):
        async with in_process_http(counted_app()) as http:
            tokens.append(lease_of(await send(http, body)))
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize("key", ["", 7, True, [], "k" * 257], ids=str)
async def test_a_key_is_a_text_of_bounded_length(key, autojump_clock):
    async with in_process_http(counted_app()) as http:
        answer = await send(http, admission(admission_key=key))
        assert problem_at(answer) == [["body", "admission_key"]]


async def test_any_text_will_do_as_a_key(autojump_clock):
    async with in_process_http(counted_app()) as http:
        for key in ("k", "k" * 256, " ", "\0", "\u00fc", "\ud800"):
            body = admission(admission_key=key)
            assert (await send(http, body)).content == (await send(http, body)).content


async def test_a_batch_and_the_single_route_know_the_same_admissions(runs):
    bodies = [admission(admission_key=f"{KEY}-{n}") for n in range(20)]
    async with served_http(counted_app()) as http:
        alone = await send(http, bodies[7])
        first = await http.post("/rollouts", json={"rollouts": bodies})
        again = await http.post("/rollouts", json={"rollouts": bodies[::-1]})
        assert first.json()["outcomes"] == again.json()["outcomes"][::-1]
        assert first.json()["outcomes"][7] == {"status_code": 202, "admission": alone.json()}
        mixed = [bodies[3], {**bodies[4], "label": "other"}, bodies[3]]
        outcomes = (await http.post("/rollouts", json={"rollouts": mixed})).json()["outcomes"]
        assert [outcome["status_code"] for outcome in outcomes] == [202, 409, 202]
        for outcome, body in zip(first.json()["outcomes"], bodies, strict=True):
            lease = {POLLING_LEASE_HEADER: outcome["admission"]["polling_lease_token"]}
            await finished(http, body["rollout_id"], lease)
    assert sorted(runs) == sorted(body["rollout_id"] for body in bodies)


async def test_a_connection_that_is_cut_off_leaves_nothing_that_a_retry_cannot_pick_up(runs):
    bodies = [admission(admission_key=KEY) for _ in range(40)]
    async with served(counted_app()) as url:
        for body in bodies:
            async with connected(url) as stream:
                await stream.send_all(request_bytes("POST", "/rollout", json.dumps(body).encode()))
        text = json.dumps({"rollouts": bodies}).encode()
        async with connected(url) as stream:
            await stream.send_all(request_bytes("POST", "/rollouts", text))
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            for body in bodies:
                answer = await send(http, body)
                assert answer.status_code == 202
                result = await finished(http, body["rollout_id"], lease_of(answer))
                assert result["status"] == "success"
    assert sorted(runs) == sorted(body["rollout_id"] for body in bodies)


async def test_an_admission_that_comes_again_renews_the_lease(autojump_clock):
    body = admission(admission_key=KEY, initial_messages=prompt(sleep=25))
    app = counted_app(result_wait_timeout_sec=1, polling_lease_timeout_sec=10)
    async with in_process_http(app) as http:
        first = await send(http, body)
        for _ in range(3):
            await trio.sleep(9)
            answer = await send(http, body)
        assert answer.content == first.content
        result = await finished(http, body["rollout_id"], lease_of(answer))
        assert result["status"] == "success"


async def test_an_admission_that_comes_again_after_its_lease_gets_how_it_ended(autojump_clock):
    body = admission(admission_key=KEY, initial_messages=prompt(sleep=25))
    app = counted_app(result_wait_timeout_sec=1, polling_lease_timeout_sec=10)
    async with in_process_http(app) as http:
        first = await send(http, body)
        await trio.sleep(11)
        assert (await send(http, body)).content == first.content
        result = await poll(http, body["rollout_id"], lease_of(first))
        assert result["err_category"] == "lease_expired"


@pytest.mark.parametrize(("key", "kept_sec"), [(KEY, 10), (None, 0)])
async def test_an_admission_can_be_sent_again_for_a_lease_however_short_the_retention(
    key, kept_sec, runs, autojump_clock
):
    body = admission(admission_key=key)
    app = counted_app(
        result_wait_timeout_sec=1, polling_lease_timeout_sec=10, result_retention_sec=0
    )
    async with in_process_http(app) as http:
        await send(http, body)
        ended_at = trio.current_time()
        await app.registry.wait_idle()
        if kept_sec:
            await trio.sleep_until(ended_at + kept_sec - 0.5)
            assert (await send(http, body)).status_code == 202
            assert runs == [body["rollout_id"]]
        await trio.sleep_until(ended_at + kept_sec + 1)
        assert (await send(http, body)).status_code == 202
        await app.registry.wait_idle()
    assert runs == [body["rollout_id"]] * 2


async def test_what_was_admitted_is_known_while_the_server_shuts_down(autojump_clock):
    body = admission(admission_key=KEY, initial_messages=prompt(sleep=5))
    app = counted_app()
    async with in_process_http(app) as http, trio.open_nursery() as nursery:
        first = await send(http, body)
        nursery.start_soon(app.shutdown_stages.run)
        await trio.sleep(1)
        assert_refused(await send(http, admission(admission_key=KEY)), 503)
        again = await send(http, body)
        assert again.content == first.content
        assert (await finished(http, body["rollout_id"], lease_of(again)))["status"] == "success"


async def test_a_feed_reports_what_is_admitted_again():
    body = admission(admission_key=KEY)
    async with served_http(counted_app()) as http:
        first = await send(http, body)
        await finished(http, body["rollout_id"], lease_of(first))
        async with open_feed(http) as feed:
            for _ in range(2):
                answer = await admit_many(http, [body], feed.token)
                assert answer["attached"] is True
                assert answer["outcomes"][0]["admission"] == first.json()
                assert (await feed.result())["status"] == "success"


async def test_the_extension_is_announced(autojump_clock):
    async with in_process_http(counted_app()) as http:
        assert "admission-keys" in (await http.get("/health")).json()["extensions"]
        assert "admission-keys" in (await send(http, admission())).json()["extensions"]
    assert "admission-keys" in EXTENSIONS


@given(request=requests())
def test_a_request_has_one_digest_however_it_is_made(request):
    read = structure(parse_json(dump_request(request)), RolloutInitRequest)
    again = structure(json.loads(dump_request(request)), RolloutInitRequest)
    assert request_digest(b"s", read) == request_digest(b"s", again)
    assert request_digest(b"s", read) != request_digest(b"t", read)


def test_a_token_depends_on_id_key_and_secret():
    tokens = {
        lease_token(secret, rollout_id, key)
        for secret in (b"s", b"t")
        for rollout_id in ("a", "ab")
        for key in ("c", "bc", "\ud800")
    }
    assert len(tokens) == 12
    assert all(len(token) == 43 and token.isascii() for token in tokens)


def test_a_request_shows_no_key():
    request = RolloutInitRequest(
        rollout_id="r",
        initial_messages=[],
        chat_completions_url="http://chat/v1",
        admission_key=KEY,
    )
    assert KEY not in repr(request)
    assert KEY in request.secrets


# --- cancelled before they arrive -------------------------------------------------------------


async def cancel(http, **body):
    answer = await http.post("/rollout/cancel", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["dispositions"]


async def test_a_cancel_that_overtakes_its_admission_wins(autojump_clock, runs):
    body = admission(rollout_id="r", admission_key=KEY)
    async with in_process_http(counted_app()) as http:
        for disposition in ("cancelled_queued", "not_found"):  # asking again changes nothing
            assert await cancel(http, ids=["r"], admission_keys={"r": KEY}) == {"r": disposition}
        first = await send(http, body)
        assert first.status_code == 202
        assert (await send(http, body)).content == first.content
        result = await poll(http, "r", lease_of(first))
        assert result["status"] == "cancelled"
        assert result["err_message"] == "cancelled before its admission arrived"
        assert_refused(await send(http, body | {"admission_key": KEY + "x"}), 409)
        assert_refused(await send(http, body | {"admission_key": None}), 409)
        await trio.sleep(121)
        assert (await send(http, body)).status_code == 202
        await finished(http, "r", lease_of(first))
    assert runs == ["r"]


async def test_a_cancel_with_a_key_stops_what_has_arrived(autojump_clock):
    async with in_process_http(make_app()) as http:
        body = admission(rollout_id="r", admission_key=KEY, initial_messages=prompt(sleep=60))
        lease = lease_of(await send(http, body))
        wanted = {"ids": ["r", "s"], "admission_keys": {"r": KEY}}
        assert await cancel(http, **wanted) == {"r": "cancelled_running", "s": "not_found"}
        result = await finished(http, "r", lease)
        assert (result["status"], result["err_message"]) == (
            "cancelled",
            "cancelled while its agent ran",
        )


@pytest.mark.parametrize("own", [KEY, None])
async def test_a_cancel_with_a_key_leaves_rollouts_with_another_one_alone(autojump_clock, own):
    async with in_process_http(make_app()) as http:
        body = admission(rollout_id="r", admission_key=own, initial_messages=prompt(sleep=60))
        lease = lease_of(await send(http, body))
        keys = {"r": KEY + "x"}
        assert await cancel(http, ids=["r"], admission_keys=keys) == {"r": "not_found"}
        assert (await finished(http, "r", lease))["status"] == "success"
        assert await cancel(http, ids=["r"], admission_keys=keys) == {"r": "not_found"}


async def test_a_shutdown_waits_for_nobody_who_was_cancelled_before_he_came(autojump_clock):
    app = make_app()
    async with in_process_http(app) as http:
        await cancel(http, ids=["r"], admission_keys={"r": KEY})
        assert app.registry.awaited() == {}
        await send(http, admission(rollout_id="r", admission_key=KEY))
        assert list(app.registry.awaited()) == ["r"]


@pytest.mark.parametrize(
    ("selector", "keys"),
    [
        ({"ids": ["r"]}, {"r": 1}),
        ({"ids": ["r"]}, [KEY]),
    ],
)
async def test_keys_of_a_cancel_request_are_an_object_of_strings(selector, keys, autojump_clock):
    async with in_process_http(make_app()) as http:
        answer = await http.post("/rollout/cancel", json={**selector, "admission_keys": keys})
        assert problem_at(answer) == [["body", "admission_keys"]]


@pytest.mark.parametrize("selector", [{"ids": ["s"]}, {"all": True}, {"prefix": "r"}])
async def test_keys_of_other_ids_cancel_nothing(selector, autojump_clock, runs):
    async with in_process_http(counted_app()) as http:
        await cancel(http, **selector, admission_keys={"r": KEY})
        lease = lease_of(await send(http, admission(rollout_id="r", admission_key=KEY)))
        assert (await finished(http, "r", lease))["status"] == "success"
