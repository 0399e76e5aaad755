"""A client whose caller can go to another server, and decides when an agent may start."""

from __future__ import annotations

import json

import httpx
import pytest
import trio
from client.fakes import FakeServer, admitted, bare_client, client_of, healthy, refused

from rollout.client import RolloutProtocolError
from rollout.client.admission import Progress
from rollout.errors import RolloutCapacityError
from rollout.types import EXTENSIONS, RolloutInitRequest, RolloutInitResponse, RolloutStatus

OFFERED = {"extensions": [*EXTENSIONS], "lease": 100.0}
OFFERS = healthy(extensions=[*EXTENSIONS], polling_lease_timeout_sec=100)


def request() -> RolloutInitRequest:
    return RolloutInitRequest(
        rollout_id="r", initial_messages=[], chat_completions_url="http://chat/v1", grade=False
    )


async def raised(server: FakeServer) -> tuple[Exception, Progress]:
    progress = Progress()
    with pytest.raises(Exception) as caught:
        await bare_client(server)._run(request(), progress, when_busy="raise")
    return caught.value, progress


@pytest.mark.parametrize("known", [False, True])
async def test_a_server_without_room_is_not_asked_again(autojump_clock, known):
    server = FakeServer(admissions=[admitted(**OFFERED), refused(429, Retry_After="5")])
    if not known:
        del server.admissions[0]
    async with client_of(server, feed=False) as client:
        if known:
            await client._run(request())
        progress = Progress()
        with pytest.raises(RolloutCapacityError, match="429"):
            await client._run(request(), progress, when_busy="raise")
    assert (progress.admitted, progress.admission) == ("no", None)
    assert trio.current_time() == 0


async def test_a_server_that_says_it_is_closing_is_not_asked_again(autojump_clock):
    server = FakeServer(admissions=[refused(503, "closing")], healths=[OFFERS])
    error, progress = await raised(server)
    assert isinstance(error, RolloutProtocolError)
    assert (error.status_code, progress.admitted, len(server.calls)) == (503, "no", 1)


async def test_a_server_that_cannot_be_reached_is_not_asked_again(autojump_clock):
    server = FakeServer(admissions=[httpx.ConnectError("x")], healths=[OFFERS])
    error, progress = await raised(server)
    assert isinstance(error, httpx.ConnectError)
    assert (progress.admitted, len(server.calls)) == ("no", 1)


@pytest.mark.parametrize("lost", [httpx.ReadError("x"), refused(502), refused(503, None)], ids=str)
async def test_a_server_that_may_have_admitted_it_is_asked_again(autojump_clock, lost):
    server = FakeServer(admissions=[lost, lost, admitted(**OFFERED)], healths=[OFFERS])
    progress = Progress()
    result = await bare_client(server)._run(request(), progress, when_busy="raise")
    assert result.status is RolloutStatus.SUCCESS
    assert progress.admission is not None
    assert progress.admission.rollout_id == "r"


async def test_a_server_that_had_not_admitted_it_after_all_is_left(autojump_clock):
    lost = httpx.ReadError("x")
    server = FakeServer(admissions=[lost, refused(429, Retry_After="5")], healths=[OFFERS])
    error, progress = await raised(server)
    assert isinstance(error, RolloutCapacityError)
    assert progress.admitted == "no"


async def test_a_gateway_without_room_proves_nothing_about_a_lost_request(autojump_clock):
    lost = httpx.ReadError("x")
    server = FakeServer(
        admissions=[lost, refused(429, None), admitted(**OFFERED)], healths=[OFFERS]
    )
    progress = Progress()
    await bare_client(server)._run(request(), progress, when_busy="raise")
    assert progress.admitted == "yes"


# --- the confirmation of starts ---------------------------------------------------------------


def admission(rollout_id: str) -> RolloutInitResponse:
    return RolloutInitResponse(
        rollout_id=rollout_id,
        status=RolloutStatus.QUEUED,
        polling_lease_token=f"token-of-{rollout_id}",
        result_wait_timeout_sec=1,
        polling_lease_timeout_sec=2,
    )


def outcomes(**codes: object) -> httpx.Response:
    each = [{"rollout_id": name, "status_code": code} for name, code in codes.items()]
    return httpx.Response(200, json={"outcomes": each})


async def test_starts_are_confirmed_in_one_request():
    server = FakeServer(admissions=[outcomes(a=200, b=409)])
    codes = await bare_client(server)._wire.start([admission("a"), admission("b")])
    assert codes == {"a": 200, "b": 409}
    (call,) = server.calls
    assert (call.method, call.path) == ("POST", "/rollouts/start")
    assert json.loads(call.body) == {
        "rollouts": [
            {"rollout_id": "a", "polling_lease_token": "token-of-a"},
            {"rollout_id": "b", "polling_lease_token": "token-of-b"},
        ]
    }


@pytest.mark.parametrize(
    "answer",
    [
        outcomes(),
        outcomes(a="200"),
        outcomes(a=True),
        outcomes(b=200),
        outcomes(a=200, b=200),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"outcomes": 7}),
        httpx.Response(200, json={"outcomes": [7]}),
        refused(404, "token-of-a"),
    ],
)
async def test_any_other_answer_is_an_error_that_repeats_no_token(answer):
    with pytest.raises(RolloutProtocolError) as caught:
        await bare_client(FakeServer(admissions=[answer]))._wire.start([admission("a")])
    assert "token-of-a" not in str(caught.value)
