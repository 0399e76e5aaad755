"""Admissions in batches: outcomes, failures, deadlines; nothing is ever asked for twice."""

from __future__ import annotations

from functools import partial

import httpx
import pytest
import trio
import trio.testing
from feed.scripted import (
    BATCH,
    FEED,
    SINGLE,
    ScriptedServer,
    broken,
    client_of,
    hello,
    json_answer,
    line,
    run,
    start,
    stream,
)

from rollout.client import (
    RolloutAdmissionTimeoutError,
    RolloutClientClosedError,
    RolloutProtocolError,
)
from rollout.client.answers import Admitted, Busy, Refused
from rollout.client.batching import AdmissionBatcher, _Batch, _Item
from rollout.client.feed import Expectation
from rollout.client.wire import Wire
from rollout.types import ADMISSION_KEYS, RolloutInitRequest, RolloutStatus


async def silence(_):
    await trio.sleep_forever()


async def outcome_of(client, rollout_id, into):
    """What becomes of an admission: its status, or the error."""
    try:
        handle = await start(client, rollout_id)
    except Exception as error:
        into[rollout_id] = error
    else:
        into[rollout_id] = handle
        handle.cancel()


async def ask(server, *rollout_ids, seconds=1000, **options):
    """Admit ``first`` alone, then the others at once; returns what became of these."""
    into = {}
    async with client_of(server, **options) as client:
        (await start(client, "first")).cancel()
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for rollout_id in rollout_ids:
                    nursery.start_soon(outcome_of, client, rollout_id, into)
    return into


async def test_those_that_come_together_go_together(autojump_clock):
    server = ScriptedServer()
    into = await ask(server, *"abcdef")
    assert {handle.rollout_id for handle in into.values()} == set("abcdef")
    assert len(server.times(SINGLE)) == 1
    asked = [item["rollout_id"] for body in server.bodies(BATCH) for item in body["rollouts"]]
    assert sorted(asked) == list("abcdef")
    assert len(server.times(BATCH)) == 1


async def test_those_that_come_with_the_first_wait_for_its_answer(autojump_clock):
    async def slow(body):
        await trio.sleep(2)
        return server.admitted(body)

    server = ScriptedServer(singles=[slow])
    into = {}
    async with client_of(server) as client, trio.open_nursery() as nursery:
        for n in range(50):
            nursery.start_soon(outcome_of, client, f"r{n}", into)
    assert len(into) == 50
    assert server.times(SINGLE) == [0]
    assert server.times(BATCH) == [2]


async def test_many_that_take_long_to_start_still_wait_for_the_first_answer(autojump_clock):
    async def begin(rollout_id):
        autojump_clock.jump(0.3)  # as a busy machine, in the middle of a step
        await outcome_of(client, rollout_id, into)

    server = ScriptedServer()
    into = {}
    async with client_of(server) as client, trio.open_nursery() as nursery:
        for n in range(50):
            nursery.start_soon(begin, f"r{n}")
    assert len(into) == 50
    assert len(server.times(SINGLE)) == 1


@pytest.mark.parametrize(("timeout_sec", "held_sec"), [(None, 2.5), (60, 2.5), (1, 0.5)])
async def test_a_first_answer_that_never_comes_holds_nobody_for_long(
    timeout_sec, held_sec, autojump_clock
):
    async def first_is_slow(body):
        if body["rollout_id"] == "r0":
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return server.admitted(body)

    server = ScriptedServer(singles=[first_is_slow])
    into = {}
    options = {"admission_timeout_sec": timeout_sec}
    async with client_of(server, **options) as client, trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, client, "r0", into)
        await trio.testing.wait_all_tasks_blocked()
        await outcome_of(client, "r1", into)
        assert trio.current_time() == held_sec
        assert into["r1"].rollout_id == "r1"
        nursery.cancel_scope.cancel()


async def test_what_the_server_offers_is_known_to_all_from_any_answer(autojump_clock):
    async def first_is_slow(body):
        await trio.sleep(4 if body["rollout_id"] == "r0" else 1)
        return server.admitted(body)

    server = ScriptedServer(singles=[first_is_slow], extensions=[])
    into = {}
    async with client_of(server) as client, trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, client, "r0", into)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(outcome_of, client, "r1", into)
        await trio.sleep(2)
        nursery.start_soon(outcome_of, client, "r2", into)
    assert len(into) == 3
    assert server.times(SINGLE) == [0, 2.5, 3.5]


async def test_a_first_answer_that_does_not_admit_lets_the_next_one_ask(autojump_clock):
    server = ScriptedServer()
    server.singles = [json_answer(429, {"detail": "full"}, Retry_After="7"), None]

    async def admit(body):
        await trio.sleep(1)
        return server.admitted(body)

    server.singles[1] = admit
    into = {}
    async with client_of(server) as client, trio.open_nursery() as nursery:
        for n in range(20):
            nursery.start_soon(outcome_of, client, f"r{n}", into)
    assert len(into) == 20
    assert server.times(SINGLE) == [0, 0]  # the second says what is offered
    assert server.times(BATCH) == [1, 7]


@pytest.mark.parametrize(
    "failure",
    [broken(), httpx.ReadTimeout("x"), httpx.ConnectError("x"), ValueError("a transport's own")],
    ids=type,
)
async def test_a_failure_reaches_every_caller_once_and_nothing_is_sent_again(
    failure, autojump_clock
):
    server = ScriptedServer(batches=[failure])
    into = await ask(server, *"abc")
    assert [type(error) for error in into.values()] == [type(failure)] * 3
    assert len({id(error) for error in into.values()}) == 3
    assert len(server.times(BATCH)) == 1
    assert len(server.times(SINGLE)) == 1


@pytest.mark.parametrize(
    "failure",
    [broken(), httpx.ReadTimeout("x"), httpx.ConnectError("x"), json_answer(503, {"detail": "x"})],
    ids=lambda failure: getattr(failure, "status_code", type(failure).__name__),
)
async def test_a_batch_without_an_answer_is_sent_again_where_the_server_knows_keys(
    failure, autojump_clock
):
    async def admit(body):
        await trio.lowlevel.checkpoint()
        return server.admitted(body)

    server = ScriptedServer(batches=[failure, failure, admit])
    server.extensions.append(ADMISSION_KEYS)
    into = await ask(server, *"abc")
    assert {handle.rollout_id for handle in into.values()} == set("abc")
    assert len(server.times(SINGLE)) == 1
    items = [item for body in server.bodies(BATCH) for item in body["rollouts"]]
    sent = {(item["rollout_id"], item["admission_key"]) for item in items}
    assert len(sent) == 3
    assert len(items) == 9
    assert server.times(BATCH)[-1] < 1


async def test_one_that_is_refused_waits_alone(autojump_clock):
    full = {"status_code": 429, "detail": "full", "retry_after_sec": 5}

    async def refuse_b(body):
        await trio.lowlevel.checkpoint()
        return json_answer(200, server.outcomes(body, b=full))

    async def admit(body):
        await trio.lowlevel.checkpoint()
        return server.admitted(body)

    server = ScriptedServer(batches=[refuse_b, admit])
    into = await ask(server, *"abc")
    assert all(handle.rollout_id == rollout_id for rollout_id, handle in into.items())
    asked = [[item["rollout_id"] for item in body["rollouts"]] for body in server.bodies(BATCH)]
    assert [sorted(ids) for ids in asked] == [["a", "b", "c"], ["b"]]
    assert server.times(BATCH) == [0, 5]


async def test_each_refusal_is_its_own(autojump_clock):
    others = {
        "a": {"status_code": 409, "detail": "active"},
        "b": {"status_code": 422, "detail": [{"loc": ["body", "x"], "msg": "no", "type": "t"}]},
        "c": {"status_code": 503, "detail": "closing"},
    }

    async def refuse(body):
        await trio.lowlevel.checkpoint()
        return json_answer(200, server.outcomes(body, **others))

    server = ScriptedServer(batches=[refuse])
    into = await ask(server, *"abcd")
    assert [into[name].status_code for name in "abc"] == [409, 422, 503]
    assert "active" in str(into["a"])
    assert "body.x: no" in str(into["b"])
    assert into["d"].rollout_id == "d"


@pytest.mark.parametrize("status", [404, 405, 413, 501])
async def test_where_no_batch_is_taken_each_goes_alone(status, autojump_clock):
    server = ScriptedServer(batches=[json_answer(status, {"detail": "no"})])
    into = {}
    async with client_of(server) as client:
        (await start(client, "first")).cancel()
        for some in ("ab", "cd"):
            async with trio.open_nursery() as nursery:
                for rollout_id in some:
                    nursery.start_soon(outcome_of, client, rollout_id, into)
    assert sorted(into) == [*"abcd"]
    assert all(handle.rollout_id == rollout_id for rollout_id, handle in into.items())
    assert len(server.times(BATCH)) == (2 if status == 413 else 1)  # a smaller one may do
    assert all(body.keys() == {"rollouts"} for body in server.bodies(BATCH))  # no feed is open
    assert len(server.times(SINGLE)) == 5


@pytest.mark.parametrize("status", [401, 400, 500, 503, 302])
async def test_a_batch_that_is_refused_as_a_whole_is_refused_to_each(status, autojump_clock):
    server = ScriptedServer(batches=[json_answer(status, {"detail": "for a reason"})])
    into = await ask(server, "a", "b")
    assert [error.status_code for error in into.values()] == [status] * 2
    assert all("for a reason" in str(error) for error in into.values())
    assert len(server.times(SINGLE)) == 1


ADMISSION = {
    "rollout_id": "a",
    "status": "queued",
    "polling_lease_token": "t",
    "result_wait_timeout_sec": 30,
    "polling_lease_timeout_sec": 120,
}


@pytest.mark.parametrize(
    "outcomes",
    [
        None,
        {},
        [],
        [1],
        [{}],
        [{"status_code": "202"}],
        [{"status_code": True}],
        [{"status_code": 202.0, "admission": ADMISSION}],
        [{"status_code": 99, "detail": ""}],
        [{"status_code": 10**9, "detail": ""}],
        [{"status_code": 202}],
        [{"status_code": 202, "admission": []}],
        [{"status_code": 202, "admission": {**ADMISSION, "rollout_id": "b"}}],
        [{"status_code": 202, "admission": {**ADMISSION, "polling_lease_token": "a\r\nb"}}],
        [{"status_code": 202, "admission": {**ADMISSION, "polling_lease_timeout_sec": 1}}],
        [{"status_code": 500, "detail": None, "retry_after_sec": "\u2603"}],
        [{"status_code": 202, "admission": ADMISSION}] * 2,
    ],
    ids=range(17),
)
async def test_invalid_outcomes_are_errors(outcomes, autojump_clock):
    server = ScriptedServer(batches=[json_answer(200, {"outcomes": outcomes, "attached": True})])
    into = await ask(server, "a")
    assert isinstance(into["a"], RolloutProtocolError)
    assert len(server.times(SINGLE)) == 1


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"<html>", b'{"outcomes":'])
async def test_an_invalid_body_is_an_error_for_each(content, autojump_clock):
    server = ScriptedServer(batches=[httpx.Response(200, content=content)])
    into = await ask(server, "a", "b")
    assert [error.status_code for error in into.values()] == [200, 200]
    assert {str(error) for error in into.values()} == {f"{BATCH} answered with an invalid body"}


def item_of(body=b"", on_sent=list):
    request = RolloutInitRequest(
        rollout_id="a", initial_messages=[], chat_completions_url="http://chat/v1"
    )
    return _Item(request, body, on_sent, Expectation("a"))


@pytest.mark.parametrize(("attached", "feed"), [(True, "f"), (False, None), (None, None)])
def test_an_answer_says_when_it_was_asked_for_and_which_feed_reports_it(attached, feed):
    outcomes = [{"status_code": 202, "admission": ADMISSION}, {"status_code": 429}]
    batcher = AdmissionBatcher(Wire("http://x", httpx.AsyncClient()), None)
    items = [item_of(), item_of()]
    answer = json_answer(200, {"outcomes": outcomes, "attached": attached})
    batcher._distribute(answer, items, 3.0, "f")
    assert isinstance(items[0].answer, Admitted)
    assert items[0].answer.sent_at == 3.0
    assert items[1].answer == Busy(None)
    assert items[0].answer.expectation is items[0].expectation
    assert [item.expectation.feed for item in items] == [feed, None]
    items = [item_of(), item_of()]
    batcher._distribute(json_answer(503, {"detail": "no"}), items, 4.0, "f")
    assert all(isinstance(item.answer, Refused) and item.answer.certain for item in items)
    assert [item.expectation.feed for item in items] == [None] * 2


@pytest.mark.parametrize(("sizes", "fit"), [([1, 1, 1, 1], 3), ([9, 1, 1], 2)])
def test_a_batch_takes_those_who_came_first_up_to_its_bounds(sizes, fit, monkeypatch):
    monkeypatch.setattr("rollout.client.batching._MOST", 3)
    monkeypatch.setattr("rollout.client.batching._MOST_BYTES", 10)
    batcher, sent = AdmissionBatcher(None, None), []
    items = [item_of(b"x" * size, partial(sent.append, n)) for n, size in enumerate(sizes)]
    batcher._queue.update(dict.fromkeys(items))
    batch = batcher._take()
    assert batch.items == items[:fit]
    assert (batch.callers, sent) == (fit, list(range(fit)))
    assert [item.batch for item in items] == [batch] * fit + [None] * (len(sizes) - fit)


async def test_a_request_is_cancelled_once_all_its_callers_have_left():
    batch = _Batch(callers=2)
    batch.leave()
    assert not batch.scope.cancel_called
    batch.leave()
    assert batch.scope.cancel_called


async def test_one_invalid_outcome_does_not_cost_the_others(autojump_clock):
    async def mixed(body):
        await trio.lowlevel.checkpoint()
        return json_answer(200, server.outcomes(body, b={"status_code": None}))

    server = ScriptedServer(batches=[mixed])
    into = await ask(server, *"abc")
    assert isinstance(into["b"], RolloutProtocolError)
    assert (into["a"].rollout_id, into["c"].rollout_id) == ("a", "c")


async def test_a_deadline_says_whether_a_request_was_under_way(autojump_clock):
    server = ScriptedServer(batches=[silence], feeds=[silence])
    into = {}
    async with client_of(server, admission_timeout_sec=3) as client:
        (await start(client, "first")).cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outcome_of, client, "a", into)
            await trio.sleep(0.1)
            client.admission_timeout_sec = 0.1
            nursery.start_soon(outcome_of, client, "b", into)
    assert isinstance(into["a"], RolloutAdmissionTimeoutError)
    assert "may have succeeded" in str(into["a"])
    assert isinstance(into["b"], RolloutAdmissionTimeoutError)
    assert "may have succeeded" not in str(into["b"])
    assert [len(body["rollouts"]) for body in server.bodies(BATCH)] == [1]


async def test_a_request_that_hangs_holds_up_no_other_and_ends_with_its_callers(autojump_clock):
    given_up = []

    async def hang(body):
        try:
            await trio.sleep_forever()
        finally:
            given_up.append((trio.current_time(), len(body["rollouts"])))

    async def admit(body):
        await trio.lowlevel.checkpoint()
        return server.admitted(body)

    server = ScriptedServer(batches=[hang, admit])
    into = {}
    async with client_of(server, admission_timeout_sec=3) as client, trio.open_nursery() as nursery:
        (await start(client, "first")).cancel()
        for name in ("lost", "lost too"):
            nursery.start_soon(outcome_of, client, name, into)
        await trio.sleep(0.1)
        for name in "abcdef":
            nursery.start_soon(outcome_of, client, name, into)
    assert [into[name].rollout_id for name in "abcdef"] == list("abcdef")
    assert isinstance(into["lost"], RolloutAdmissionTimeoutError)
    assert server.times(BATCH) == [0, 0.25]
    assert given_up == [(3, 2)]


async def test_one_that_is_cancelled_in_the_queue_is_never_sent(autojump_clock):
    async def slow(body):
        await trio.sleep(5)
        return server.admitted(body)

    server = ScriptedServer(batches=[slow])
    into = {}
    async with client_of(server) as client, trio.open_nursery() as nursery:
        (await start(client, "first")).cancel()
        nursery.start_soon(outcome_of, client, "a", into)
        await trio.sleep(0.1)
        nursery.start_soon(outcome_of, client, "c", into)
        with trio.move_on_after(0.1):
            await start(client, "b")
    asked = [[item["rollout_id"] for item in body["rollouts"]] for body in server.bodies(BATCH)]
    assert asked == [["a"], ["c"]]


async def test_a_client_that_is_left_never_sends_an_admission_again(autojump_clock):
    server = ScriptedServer(batches=[silence])
    into = {}
    async with trio.open_nursery() as nursery:
        async with client_of(server) as client:
            (await start(client, "first")).cancel()
            nursery.start_soon(outcome_of, client, "a", into)
            await trio.sleep(1)
        await trio.testing.wait_all_tasks_blocked()
    assert isinstance(into["a"], RolloutClientClosedError)
    message = "the client was closed while an admission was under way; it may have succeeded"
    assert str(into["a"]) == message
    assert len(server.times(SINGLE)) == 1


@pytest.mark.parametrize("extension", ["batch-admission", "result-feed"])
async def test_a_server_that_offers_one_of_the_two(extension, autojump_clock):
    server = ScriptedServer(
        extensions=[extension],
        feeds=[stream(hello(), line("success", "a")), stream(hello("2"), line("success", "b"))],
        polls=[json_answer(200, line("success", "a")), json_answer(200, line("success", "b"))],
    )
    async with client_of(server) as client:
        for rollout_id in "ab":
            assert (await run(client, rollout_id)).status is RolloutStatus.SUCCESS
        assert trio.current_time() == 0
    used = {called for _, called, _ in server.calls}
    if extension == "result-feed":
        assert used == {SINGLE, "POST /rollouts/feed"}
    else:
        assert used == {SINGLE, BATCH, "GET /rollout/a/result", "GET /rollout/b/result"}


async def test_a_batch_that_may_have_arrived_is_not_renewed_with_the_rest(autojump_clock):
    server = ScriptedServer(batches=[broken()], feeds=[stream(hello(), ...)])
    async with client_of(server) as client:
        first = await start(client, "first")
        await trio.sleep(1)  # the feed is open
        with pytest.raises(httpx.RemoteProtocolError):
            await start(client, "b")
        await trio.sleep(100)
        first.cancel()
    # The server may have attached it to the feed, so the next renewal is a feed without it.
    assert server.times(FEED) == [0, 30]
    assert [[lease["rollout_id"] for lease in body["leases"]] for body in server.bodies(FEED)] == [
        ["first"],
        ["first"],
    ]


async def test_one_that_is_cancelled_as_its_answer_comes_is_not_renewed_with_the_rest(
    autojump_clock,
):
    scope = trio.CancelScope()

    async def cancel_and_admit(body):
        scope.cancel()
        return httpx.Response(200, json=server.outcomes(body))

    server = ScriptedServer(batches=[cancel_and_admit], feeds=[stream(hello(), ...)])
    async with client_of(server) as client:
        first = await start(client, "first")
        await trio.sleep(1)
        with scope:
            await start(client, "b")
        assert scope.cancelled_caught
        await trio.sleep(100)
        first.cancel()
    assert server.times(FEED) == [0, 30]
