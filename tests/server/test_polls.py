"""Polls: lease headers, what is answered at once, pollers that go away."""

from __future__ import annotations

import socket
import struct
from typing import Any

import httpx
import pytest
import trio
from server.faults import (
    admit,
    assert_refused,
    assert_serves,
    finished,
    in_process_http,
    poll,
    problem_at,
    raw,
    read_answer,
    request_bytes,
    result_path,
    served_http,
)
from support import Script, connected, local_backend, make_app, prompt, receive_until_closed

from rollout.types import POLLING_LEASE_HEADER, SEEN_STATE_HEADER

pytestmark = pytest.mark.usefixtures("log_lines")

WAIT = 30.0


class Gated(Script):
    """Waits until the test opens the gate of its prompt; says when it has started."""

    gates: dict[str, trio.Event]
    started: dict[str, trio.Event]

    async def run(self, ctx: Any) -> Any:
        name = ctx.prompt[0].get("gate")
        if name is not None:
            self.started[name].set()
            await self.gates[name].wait()
        return await super().run(ctx)


def gated(*names: str) -> type[Gated]:
    """A workflow class with closed gates of these names."""
    events = {name: trio.Event() for name in names}
    started = {name: trio.Event() for name in names}
    return type("GatedHere", (Gated,), {"gates": events, "started": started})


# --- the lease header -------------------------------------------------------------------------


async def test_the_lease_header_must_be_that_of_the_rollout():
    async with served_http(make_app()) as http:
        one, good = await admit(http)
        _, other = await admit(http)
        token = good[POLLING_LEASE_HEADER]
        for headers in ({}, {POLLING_LEASE_HEADER: ""}):
            response = await http.get(result_path(one), headers=headers)
            assert problem_at(response) == [["header", POLLING_LEASE_HEADER.lower()]]
        for wrong in (
            "x",
            token[:-1],
            token + "x",
            token.swapcase(),
            f"Bearer {token}",
            "\xfc\xff",
            "x" * 10_000,
            other[POLLING_LEASE_HEADER],
        ):
            headers = [(POLLING_LEASE_HEADER.encode(), wrong.encode("latin-1"))]
            assert_refused(await http.get(result_path(one), headers=headers), 403)
        assert_refused(await http.get(result_path("nobody"), headers=good), 404)
        assert (await finished(http, one, good))["status"] == "success"
        await assert_serves(http)


async def test_a_wrong_token_renews_nothing(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(sleep=1000))
        await trio.sleep(100)
        wrong = {POLLING_LEASE_HEADER: "wrong"}
        assert_refused(await http.get(result_path(rollout_id), headers=wrong), 403)
        await trio.sleep(21)
        assert (await poll(http, rollout_id, headers))["err_category"] == "lease_expired"


async def test_the_header_name_in_another_case_is_the_same_header():
    async with served_http(make_app()) as http:
        rollout_id, headers = await admit(http)
        lower = {name.lower(): value for name, value in headers.items()}
        status, _ = await raw(
            http.base_url, request_bytes("GET", result_path(rollout_id), headers=lower)
        )
        assert status == 200


# --- what is answered at once -----------------------------------------------------------------


async def timed(http: httpx.AsyncClient, *args: Any) -> tuple[str, float]:
    """The status that a poll is answered with, and how long that took."""
    started = trio.current_time()
    answer = await poll(http, *args)
    return answer["status"], trio.current_time() - started


async def test_a_first_poll_of_what_runs_already_is_answered_at_once(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=100))
        await trio.sleep(1)
        assert await timed(http, *rollout) == ("running", 0)
        assert await timed(http, *rollout) == ("running", WAIT)
        await trio.sleep(60)
        status, took = await timed(http, *rollout)
        assert (status, took) == ("grading", 9) or (status, took) == ("success", 9)


async def test_a_queued_rollout_is_held_until_it_runs(autojump_clock):
    async with in_process_http(make_app(local_backend(max_concurrent=1))) as http:
        await admit(http, initial_messages=prompt(sleep=10))
        rollout = await admit(http, initial_messages=prompt(sleep=100))
        await trio.sleep(1)
        assert await timed(http, *rollout) == ("running", 9)


async def test_what_the_caller_has_seen_counts_more_than_what_was_answered(autojump_clock):
    """The answer to the first poll was lost."""
    async with in_process_http(make_app()) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(sleep=100))
        await trio.sleep(1)
        assert await timed(http, rollout_id, headers) == ("running", 0)
        for seen in ("queued", "QUEUED ", "queued;whatever", "running"):
            again = {**headers, SEEN_STATE_HEADER: seen}
            assert await timed(http, rollout_id, again) == ("running", 0), seen
        again = {**headers, SEEN_STATE_HEADER: "running;agent-started"}
        assert await timed(http, rollout_id, again) == ("running", WAIT)


@pytest.mark.parametrize("nonsense", ["", " ", ";", "done", "running,", "\xfc", "x" * 5000, "7"])
async def test_nonsense_about_what_was_seen_is_ignored(nonsense: str, autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(sleep=100))
        await trio.sleep(1)
        again = {**headers, SEEN_STATE_HEADER: nonsense.encode("latin-1")}
        assert await timed(http, rollout_id, again) == ("running", 0)
        assert await timed(http, rollout_id, again) == ("running", WAIT)


async def test_a_caller_that_claims_to_have_seen_the_end_gets_it_nevertheless(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(sleep=10))
        again = {**headers, SEEN_STATE_HEADER: "success;agent-started"}
        assert await timed(http, rollout_id, again) == ("success", 10)
        assert await timed(http, rollout_id, again) == ("success", 0)


async def test_two_pollers_of_one_rollout_both_see_everything(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(sleep=100))
        seen: list[list[str]] = [[], []]

        async def watch(statuses: list[str]) -> None:
            answer: dict[str, Any] = {"status": "queued", "agent_started_at": None}
            while answer["status"] not in {"success", "failure", "cancelled"}:
                state = answer["status"] + (";agent-started" if answer["agent_started_at"] else "")
                answer = await poll(http, rollout_id, {**headers, SEEN_STATE_HEADER: state})
                if [answer["status"]] != statuses[-1:]:
                    statuses.append(answer["status"])

        async with trio.open_nursery() as nursery:
            for statuses in seen:
                nursery.start_soon(watch, statuses)
        for statuses in seen:
            assert statuses[0] == "running"
            assert statuses[-1] == "success"
        assert trio.current_time() == 100


async def test_two_pollers_get_the_same_bytes(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(sleep=20))
        await poll(http, rollout_id, headers)
        answers: list[bytes] = []

        async def one() -> None:
            response = await http.get(result_path(rollout_id), headers=headers)
            while b'"success"' not in response.content:
                response = await http.get(result_path(rollout_id), headers=headers)
            answers.append(response.content)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            nursery.start_soon(one)
        assert answers[0] == answers[1]


# --- the very moment --------------------------------------------------------------------------


@pytest.mark.parametrize("poll_first", [True, False])
async def test_a_poll_in_the_very_moment_of_completion(poll_first: bool, autojump_clock):
    workflow = gated("a")
    async with in_process_http(make_app(local_backend(workflow))) as http:
        rollout = await admit(http, initial_messages=prompt(gate="a"))
        await workflow.started["a"].wait()
        await poll(http, *rollout)
        answers: list[str] = []

        async def one() -> None:
            answers.append((await finished(http, *rollout))["status"])

        async with trio.open_nursery() as nursery:
            if poll_first:
                nursery.start_soon(one)
                await trio.sleep(5)
                workflow.gates["a"].set()
            else:
                workflow.gates["a"].set()
                nursery.start_soon(one)
        assert answers == ["success"]
        assert trio.current_time() == (5 if poll_first else 0)


@pytest.mark.parametrize("early", [0.0, 1e-6])
async def test_a_poll_in_the_very_moment_of_expiry(early: float, autojump_clock):
    app = make_app()
    async with in_process_http(app) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(sleep=1000))
        await poll(http, rollout_id, headers)
        deadline = app.registry._entries[rollout_id].record.lease.deadline
        await trio.sleep_until(deadline - early)
        result = await poll(http, rollout_id, headers)
        if early:
            assert result["status"] == "running"
        else:
            assert result["err_category"] == "lease_expired"
        assert await poll(http, rollout_id, headers) is not None


async def test_a_poll_that_waits_while_the_wait_ends_in_the_moment_of_completion(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=WAIT))
        await poll(http, *rollout)
        result = await finished(http, *rollout)
        assert (result["status"], result["sample"]["reward"]) == ("success", 1.0)
        assert trio.current_time() == WAIT


# --- pollers that go away ---------------------------------------------------------------------


def reset(stream: trio.SocketStream) -> None:
    """Make the close of the stream an RST."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("how", ["close", "reset", "half-close", "half-close, then reset"])
async def test_a_poller_that_goes_away_changes_nothing(how: str):
    workflow = gated("a")
    async with served_http(make_app(local_backend(workflow))) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(gate="a"))
        await workflow.started["a"].wait()
        request = request_bytes("GET", result_path(rollout_id), headers=headers)
        seen_nothing = {**headers, SEEN_STATE_HEADER: "queued"}
        at_once = request_bytes("GET", result_path(rollout_id), headers=seen_nothing)
        for _ in range(3):
            async with connected(str(http.base_url)) as stream:
                await stream.send_all(at_once)
                await read_answer(stream)
                await stream.send_all(request)  # this one is held
                if "half" in how:
                    await stream.send_eof()
                    await receive_until_closed(stream)
                if "reset" in how:
                    reset(stream)
        health = (await http.get("/health")).json()
        assert health["lifecycle"]["active_rollouts"] == 1
        workflow.gates["a"].set()
        assert (await finished(http, rollout_id, headers))["status"] == "success"
        await assert_serves(http)


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_an_admission_that_breaks_off_in_mid_body_admits_nothing(how: str):
    async with served_http(make_app()) as http:
        for sent in (b"", b"{", b'{"rollout_id": "a", "initial_messages": []'):
            async with connected(str(http.base_url)) as stream:
                await stream.send_all(request_bytes("POST", "/rollout", sent, length=1000))
                if how == "half-close":
                    await stream.send_eof()
                    answer = await receive_until_closed(stream)
                    assert b" 202 " not in answer
                elif how == "reset":
                    reset(stream)
        health = (await http.get("/health")).json()
        assert health["lifecycle"]["active_rollouts"] == 0
        await assert_serves(http)


async def test_a_poll_answered_while_its_caller_is_gone_is_not_lost():
    workflow = gated("a")
    async with served_http(make_app(local_backend(workflow))) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(gate="a"))
        await workflow.started["a"].wait()
        async with connected(str(http.base_url)) as stream:
            request = request_bytes("GET", result_path(rollout_id), headers=headers)
            await stream.send_all(request)
            await read_answer(stream)
            await stream.send_all(request)
            reset(stream)
        workflow.gates["a"].set()
        for _ in range(3):
            result = await finished(http, rollout_id, headers)
            assert (result["status"], result["sample"]["reward"]) == ("success", 1.0)


async def test_a_poll_that_is_cancelled_at_any_moment_leaves_the_rollout_alone(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout = await admit(http, initial_messages=prompt(sleep=100))
        for moment in (0, 1e-9, 1, WAIT - 1e-9, WAIT):
            with trio.move_on_after(moment):
                await poll(http, *rollout)
        assert (await finished(http, *rollout))["status"] == "success"
        assert trio.current_time() == 100


async def test_many_pipelined_polls_on_one_connection_are_answered_in_order():
    async with (
        served_http(make_app(result_wait_timeout_sec=0.01)) as http,
        connected(str(http.base_url)) as stream,
    ):
        rollout_id, headers = await admit(http)
        await stream.send_all(request_bytes("GET", result_path(rollout_id), headers=headers) * 5)
        received = b""
        while received.count(b'"rollout_id"') < 5:
            piece = await stream.receive_some()
            assert piece
            received += piece
        assert received.count(b"HTTP/1.1 200") == 5
        await assert_serves(http)
