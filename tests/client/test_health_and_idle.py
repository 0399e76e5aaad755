"""health() and wait_idle()."""

from __future__ import annotations

import httpx
import pytest
import trio
from client.fakes import FakeServer, after, bare_client, healthy, refused, silence

from rollout.client import RolloutIdleTimeoutError, RolloutProtocolError
from rollout.errors import InvalidFieldError


async def test_health_returns_the_payload_as_it_is():
    server = FakeServer(healths=[healthy(3, slots={"free": 1})])
    payload = await bare_client(server).health()
    assert payload == {
        "status": "ok",
        "instance_id": "i",
        "process_id": "p1",
        "lifecycle": {"accepting_rollouts": True, "active_rollouts": 3},
        "slots": {"free": 1},
    }


@pytest.mark.parametrize("status", [202, 204, 302, 401, 404, 429, 500, 503])
async def test_health_raises_for_everything_but_200(status):
    server = FakeServer(healths=[refused(status, "no")])
    with pytest.raises(RolloutProtocolError, match="GET /health") as caught:
        await bare_client(server).health()
    assert caught.value.status_code == status
    assert len(server.calls) == 1


@pytest.mark.parametrize("body", ["", "ok", "[]", "null", "{", '{"a": NaN}'])
async def test_health_that_is_not_an_object(body):
    server = FakeServer(healths=[httpx.Response(200, text=body)])
    with pytest.raises(RolloutProtocolError, match="GET /health") as caught:
        await bare_client(server).health()
    assert caught.value.status_code == 200


async def test_health_raises_transport_errors_as_they_are():
    error = httpx.ConnectError("refused")
    with pytest.raises(httpx.ConnectError) as caught:
        await bare_client(FakeServer(healths=[error])).health()
    assert caught.value is error


# --- wait_idle ------------------------------------------------------------------------------


async def test_an_idle_server_is_idle_at_once(autojump_clock):
    payload = await bare_client(FakeServer()).wait_idle()
    assert payload["lifecycle"]["active_rollouts"] == 0
    assert trio.current_time() == 0


async def test_it_looks_at_every_interval_until_nothing_is_active(autojump_clock):
    server = FakeServer(healths=[healthy(3), healthy(1), healthy(1), healthy(0, extra="last")])
    payload = await bare_client(server).wait_idle(poll_interval_sec=2)
    assert payload["extra"] == "last"
    assert server.times("/health") == [0, 2, 4, 6]


async def test_the_default_is_120_seconds_at_one_second(autojump_clock):
    server = FakeServer(healths=[healthy(2)])
    with pytest.raises(
        RolloutIdleTimeoutError, match=r"120 s.*2 rollout\(s\) are active"
    ) as caught:
        await bare_client(server).wait_idle()
    assert isinstance(caught.value, TimeoutError)
    assert trio.current_time() == 120
    assert server.times("/health") == list(range(120))


@pytest.mark.parametrize(
    "trouble",
    [
        *[refused(status, "later") for status in (408, 429, 500, 502, 503, 504)],
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("slow"),
        httpx.ReadTimeout("slow"),
        httpx.PoolTimeout("full"),
        httpx.RemoteProtocolError("closed"),
    ],
    ids=lambda item: str(getattr(item, "status_code", None) or type(item).__name__),
)
async def test_trouble_is_waited_out(autojump_clock, trouble):
    server = FakeServer(healths=[trouble, healthy(1), trouble, healthy(0)])
    await bare_client(server).wait_idle()
    assert server.times("/health") == [0, 1, 2, 3]
    with pytest.raises(RolloutIdleTimeoutError) as caught:
        await bare_client(FakeServer(healths=[trouble])).wait_idle(timeout_sec=10)
    said = "later" if isinstance(trouble, httpx.Response) else type(trouble).__name__
    assert said in str(caught.value)


@pytest.mark.parametrize("status", [201, 204, 301, 400, 401, 403, 404, 501, 505])
async def test_other_refusals_raise_at_once(autojump_clock, status):
    server = FakeServer(healths=[healthy(1), refused(status, "no")])
    with pytest.raises(RolloutProtocolError) as caught:
        await bare_client(server).wait_idle()
    assert caught.value.status_code == status
    assert server.times("/health") == [0, 1]


async def test_a_server_that_never_answers_is_waited_for_until_the_time_is_up(autojump_clock):
    with pytest.raises(RolloutIdleTimeoutError, match="did not answer"):
        await bare_client(FakeServer(healths=[silence])).wait_idle(timeout_sec=7)
    assert trio.current_time() == 7


async def test_an_answer_after_the_time_does_not_count(autojump_clock):
    server = FakeServer(healths=[healthy(1), after(10, healthy(0))])
    with pytest.raises(RolloutIdleTimeoutError, match="1 rollout"):
        await bare_client(server).wait_idle(timeout_sec=5)
    assert trio.current_time() == 5


@pytest.mark.parametrize(
    "lifecycle",
    [
        None,
        [],
        {},
        {"accepting_rollouts": True},
        {"accepting_rollouts": True, "active_rollouts": -1},
        {"accepting_rollouts": True, "active_rollouts": "0"},
        {"accepting_rollouts": True, "active_rollouts": 0.0},
        {"accepting_rollouts": True, "active_rollouts": False},
    ],
)
async def test_a_server_without_a_valid_lifecycle_is_an_error(autojump_clock, lifecycle):
    server = FakeServer(healths=[healthy(lifecycle=lifecycle)])
    with pytest.raises(RolloutProtocolError, match="lifecycle") as caught:
        await bare_client(server).wait_idle()
    assert caught.value.status_code == 200
    assert trio.current_time() == 0


async def test_an_older_server_is_recognised_by_its_lifecycle(autojump_clock):
    server = FakeServer(healths=[httpx.Response(200, json={"status": "ok"})])
    with pytest.raises(RolloutProtocolError, match=r"no valid lifecycle.*too old"):
        await bare_client(server).wait_idle()


@pytest.mark.parametrize("process_id", [None, "", 7])
async def test_a_server_without_a_process_id_is_an_error(autojump_clock, process_id):
    with pytest.raises(RolloutProtocolError, match="no process_id"):
        await bare_client(FakeServer(healths=[healthy(process_id=process_id)])).wait_idle()


async def test_a_restart_is_noticed_though_the_new_process_is_idle(autojump_clock):
    server = FakeServer(healths=[healthy(2), httpx.ConnectError("down"), healthy(0, "p2")])
    with pytest.raises(RolloutProtocolError, match="restarted"):
        await bare_client(server).wait_idle()
    assert server.times("/health") == [0, 1, 2]


async def test_a_pinned_process(autojump_clock):
    server = FakeServer(healths=[healthy(1), healthy(0)])
    assert (await bare_client(server).wait_idle(process_id="p1"))["process_id"] == "p1"
    with pytest.raises(RolloutProtocolError, match="another process_id"):
        await bare_client(FakeServer()).wait_idle(process_id="p0")


@pytest.mark.parametrize("name", ["timeout_sec", "poll_interval_sec"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "1", None, 10**400])
async def test_times_must_be_positive_and_finite(name, value):
    server = FakeServer()
    with pytest.raises(InvalidFieldError, match=f"{name} must be a finite number above 0"):
        await bare_client(server).wait_idle(**{name: value})
    assert server.calls == []


async def test_a_cancellation_from_outside_is_the_callers_own(autojump_clock):
    with trio.move_on_after(3) as scope:
        await bare_client(FakeServer(healths=[healthy(1)])).wait_idle(timeout_sec=10)
    assert scope.cancelled_caught
    assert trio.current_time() == 3
