"""Cancel requests: selectors, dispositions, and that asking twice changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from server.faults import (
    admit,
    assert_serves,
    finished,
    in_process_http,
    poll,
    problem_at,
    run,
    served_http,
)
from support import Script, local_backend, make_app, prompt

from rollout.server.admission import MAX_CANCEL_IDS

pytestmark = pytest.mark.usefixtures("log_lines")

NO_SELECTION: list[Any] = [
    {},
    {"all": False},
    {"ids": None},
    {"prefix": None},
    {"ids": None, "prefix": None, "all": False},
    {"ids": ["a"], "prefix": "a"},
    {"ids": [], "prefix": "a"},
    {"ids": ["a"], "all": True},
    {"prefix": "a", "all": True},
    {"ids": ["a"], "prefix": "a", "all": True},
    {"id": "a"},
]
WRONG: dict[str, list[Any]] = {
    "ids": ["a", 7, True, {}, {"a": 1}, [1], [None], [["a"]], ["a", True]],
    "prefix": ["", 7, True, [], {}, ["a"]],
    "all": [None, 1, 0, "true", [], {}],
}


async def test_none_or_several_selectors_are_refused_and_cancel_nothing():
    async with served_http(make_app()) as http:
        rollout_id, headers = await admit(http, rollout_id="a", initial_messages=prompt(sleep=60))
        for body in NO_SELECTION:
            response = await http.post("/rollout/cancel", json=body)
            assert problem_at(response) == [["body"]], body
        assert (await poll(http, rollout_id, headers))["status"] == "running"
        await assert_serves(http)


@pytest.mark.parametrize("field", WRONG)
async def test_a_selector_of_the_wrong_type_is_named(field: str):
    async with in_process_http(make_app()) as http:
        for value in WRONG[field]:
            response = await http.post("/rollout/cancel", json={field: value})
            assert ["body", field] in problem_at(response), value


async def test_an_empty_list_selects_nothing_and_an_empty_prefix_is_refused(autojump_clock):
    async with in_process_http(make_app()) as http:
        await admit(http, rollout_id="a", initial_messages=prompt(sleep=60))
        response = await http.post("/rollout/cancel", json={"ids": []})
        assert (response.status_code, response.json()) == (200, {"dispositions": {}})
        response = await http.post("/rollout/cancel", json={"prefix": ""})
        assert problem_at(response) == [["body", "prefix"]]
        response = await http.post("/rollout/cancel", json={"ids": ["a"] * (MAX_CANCEL_IDS + 1)})
        assert problem_at(response) == [["body", "ids"]]
        assert (await http.get("/health")).json()["lifecycle"]["active_rollouts"] == 1


async def test_null_is_as_good_as_left_out():
    async with in_process_http(make_app()) as http:
        response = await http.post(
            "/rollout/cancel", json={"ids": ["a"], "prefix": None, "all": False}
        )
        assert response.json() == {"dispositions": {"a": "not_found"}}


async def test_unknown_and_repeated_ids(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(sleep=60))
        await poll(http, rollout_id, headers)
        response = await http.post(
            "/rollout/cancel",
            content=json.dumps({"ids": [rollout_id, "nobody", rollout_id, "", "\ud800", "a/b"]}),
        )
        assert response.json()["dispositions"] == {
            rollout_id: "cancelled_running",
            "nobody": "not_found",
            "": "not_found",
            "\ud800": "not_found",
            "a/b": "not_found",
        }
        assert (await finished(http, rollout_id, headers))["status"] == "cancelled"
        await assert_serves(http)


class Cleans(Script):
    """Takes a while to clean up once it is cancelled."""

    async def run(self, ctx: Any) -> Any:
        try:
            return await super().run(ctx)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)


@pytest.mark.parametrize("selector", [{"ids": ["x-1", "x-2"]}, {"prefix": "x-"}, {"all": True}])
async def test_queued_and_running_are_told_apart_and_asking_again_changes_nothing(
    selector: dict[str, Any], autojump_clock
):
    app = make_app(local_backend(Cleans, max_concurrent=1))
    async with in_process_http(app) as http:
        one = await admit(http, rollout_id="x-1", initial_messages=prompt(sleep=60))
        await poll(http, *one)
        two = await admit(http, rollout_id="x-2", initial_messages=prompt(sleep=60))
        expected = {"x-1": "cancelled_running", "x-2": "cancelled_queued"}
        response = await http.post("/rollout/cancel", json=selector)
        assert response.json() == {"dispositions": expected}
        assert app.registry.cancel(ids=["x-1"]) == {"x-1": "cancelled_running"}
        running, queued = await finished(http, *one), await finished(http, *two)
        assert (running["status"], queued["status"]) == ("cancelled", "cancelled")
        assert running["agent_started_at"]
        assert queued["agent_started_at"] is None
        response = await http.post("/rollout/cancel", json={"ids": ["x-1", "x-2"]})
        assert set(response.json()["dispositions"].values()) == {"not_found"}
        assert trio.current_time() < 60


async def test_asking_twice_in_one_moment_gives_the_same_answer(autojump_clock):
    app = make_app(local_backend(max_concurrent=1))
    async with in_process_http(app) as http:
        one = await admit(http, rollout_id="x-1", initial_messages=prompt(sleep=60))
        await poll(http, *one)
        await admit(http, rollout_id="x-2", initial_messages=prompt(sleep=60))
        await admit(http, rollout_id="y-1", initial_messages=prompt(sleep=60))
        first = app.registry.cancel(ids=["x-2", "x-1"])
        assert first == {"x-2": "cancelled_queued", "x-1": "cancelled_running"}
        again = app.registry.cancel(prefix="x")
        assert list(again.items()) == list(first.items())  # those that are queued come first
        assert app.registry.cancel(all_=True) == {**first, "y-1": "cancelled_queued"}


async def test_a_cancel_request_never_changes_a_result():
    async with in_process_http(make_app()) as http:
        rollout_id, headers = await admit(http)
        before = await finished(http, rollout_id, headers)
        await http.post("/rollout/cancel", json={"all": True})
        assert await poll(http, rollout_id, headers) == before
        await run(http)
