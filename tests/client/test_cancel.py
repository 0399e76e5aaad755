"""Cancel requests: one POST, five seconds."""

from __future__ import annotations

import json

import httpx
import pytest
import trio
from client.fakes import FakeServer, after, bare_client, client_of, refused, result, start
from support import CHAT_URL, in_process, make_app, prompt

from rollout.client import RolloutCancelTimeoutError, RolloutProtocolError
from rollout.errors import InvalidFieldError
from rollout.types import RolloutInitRequest, RolloutStatus


def dispositions(**ids):
    return httpx.Response(200, json={"dispositions": ids})


async def test_one_post_with_the_id():
    server = FakeServer(cancels=[dispositions(r="cancelled_running")])
    answer = await bare_client(server).cancel_rollout("r")
    assert answer.dispositions == {"r": "cancelled_running"}
    (call,) = server.calls
    assert (call.method, call.path) == ("POST", "/rollout/cancel")
    assert json.loads(call.body)["ids"] == ["r"]


@pytest.mark.parametrize(
    ("selector", "body"),
    [
        ({"ids": ["a", "b"]}, {"ids": ["a", "b"], "prefix": None, "all": False}),
        ({"ids": ("a",)}, {"ids": ["a"], "prefix": None, "all": False}),
        ({"ids": []}, {"ids": [], "prefix": None, "all": False}),
        ({"prefix": "run-"}, {"ids": None, "prefix": "run-", "all": False}),
        ({"all": True}, {"ids": None, "prefix": None, "all": True}),
    ],
)
async def test_selectors(selector, body):
    server = FakeServer()
    await bare_client(server).cancel_rollouts(**selector)
    assert json.loads(server.calls[0].body) == body


@pytest.mark.parametrize(
    "selector",
    [
        {},
        {"all": False},
        {"ids": ["a"], "prefix": "a"},
        {"ids": [], "all": True},
        {"prefix": ""},
        {"prefix": "a", "all": True},
        {"ids": "abc"},
        {"ids": [1]},
        {"ids": ["a", None]},
        {"prefix": 7},
    ],
)
async def test_selectors_that_cannot_be_used_are_not_sent(selector):
    server = FakeServer()
    with pytest.raises(InvalidFieldError):
        await bare_client(server).cancel_rollouts(**selector)
    assert server.calls == []


async def test_an_id_that_is_not_a_string_is_not_sent():
    server = FakeServer()
    with pytest.raises(InvalidFieldError, match="ids"):
        await bare_client(server).cancel_rollout(None)
    assert server.calls == []


async def test_five_seconds_in_all(autojump_clock):
    server = FakeServer(cancels=[after(4.9, dispositions()), after(5.1, dispositions())])
    client = bare_client(server)
    await client.cancel_rollout("r")
    assert trio.current_time() == pytest.approx(4.9)
    with pytest.raises(RolloutCancelTimeoutError, match="may have received it") as caught:
        await client.cancel_rollout("r")
    assert trio.current_time() == pytest.approx(9.9)
    assert isinstance(caught.value, TimeoutError)
    assert len(server.calls) == 2


async def test_waiting_for_a_connection_counts(autojump_clock):
    connections = trio.Semaphore(0)

    class Pool(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request):
            await connections.acquire()
            raise AssertionError("no connection was free")

    with pytest.raises(RolloutCancelTimeoutError):
        await bare_client(Pool()).cancel_rollout("r")
    assert trio.current_time() == 5


async def test_a_timeout_around_it_is_the_callers_own(autojump_clock):
    async def slow(_):
        await trio.sleep_forever()

    with trio.move_on_after(2) as scope:
        await bare_client(FakeServer(cancels=[slow])).cancel_rollout("r")
    assert scope.cancelled_caught
    assert trio.current_time() == 2


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("refused"), httpx.ReadError("reset"), httpx.ReadTimeout("slow")]
)
async def test_a_cancel_request_is_never_replayed(error):
    server = FakeServer(cancels=[error])
    with pytest.raises(type(error)):
        await bare_client(server).cancel_rollout("r")
    assert len(server.calls) == 1


@pytest.mark.parametrize("status", [202, 204, 302, 401, 422, 429, 500, 503])
async def test_refusals(status):
    server = FakeServer(cancels=[refused(status, "no")])
    with pytest.raises(RolloutProtocolError) as caught:
        await bare_client(server).cancel_rollout("r")
    assert caught.value.status_code == status
    assert len(server.calls) == 1


@pytest.mark.parametrize("body", ["", "{}", '{"dispositions": []}', '{"dispositions": {"r": 1}}'])
async def test_answers_that_break_a_rule(body):
    server = FakeServer(cancels=[httpx.Response(200, text=body)])
    with pytest.raises(RolloutProtocolError, match="POST /rollout/cancel") as caught:
        await bare_client(server).cancel_rollout("r")
    assert caught.value.status_code == 200


async def test_the_handle_goes_on_polling(autojump_clock):
    server = FakeServer(
        polls=[after(1, result("running")), after(9, result("cancelled"))],
        cancels=[dispositions(r="cancelled_running")],
    )
    async with client_of(server) as client:
        handle = await start(client)
        await handle.wait_for_running()
        await client.cancel_rollout(handle.rollout_id)
        assert not handle.done()
        assert (await handle).status is RolloutStatus.CANCELLED
    assert trio.current_time() == 10


async def test_an_admission_that_is_on_its_way_can_be_cancelled_by_its_key(autojump_clock):
    wanted = RolloutInitRequest(
        rollout_id="r",
        initial_messages=prompt(),
        chat_completions_url=CHAT_URL,
        label="42",
        admission_key="key-of-r",
    )
    async with in_process(make_app()) as client:
        answer = await client.cancel_rollouts(ids=["r"], admission_keys={"r": "key-of-r"})
        assert answer.dispositions == {"r": "cancelled_queued"}
        async with client.run_rollouts([wanted], max_in_flight=1) as finished:
            assert (await finished.receive()).result.status is RolloutStatus.CANCELLED


async def test_a_cancel_request_names_keys_only_where_there_are_any():
    server = FakeServer()
    async with client_of(server) as client:
        await client.cancel_rollouts(ids=["r"])
        await client.cancel_rollouts(ids=["r"], admission_keys={"r": "k"})
        with pytest.raises(InvalidFieldError, match="admission_keys"):
            await client.cancel_rollouts(ids=["r"], admission_keys={"r": 1})
    bodies = [json.loads(call.body) for call in server.calls]
    assert [body.get("admission_keys") for body in bodies] == [None, {"r": "k"}]
    assert "admission_keys" not in bodies[0]
