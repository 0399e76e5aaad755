"""Updates of the weights: calls pause, resume, and are stamped with the version that answered."""

from __future__ import annotations

import httpx
import pytest
import trio
import trio.testing
from attrs import evolve
from gateway.sdks import needs_openai
from gateway.served import QUESTION, post, rig
from integrations.scripted import say, stall
from support import local_backend, make_app, served

from rollout.client import RolloutClient
from rollout.errors import InvalidFieldError, RolloutProtocolError
from rollout.gateway import ModelGateway
from rollout.gateway.policy import Policy
from rollout.trajectory import build_trajectory
from rollout.types import RolloutStatus


async def test_calls_are_stamped_with_the_versions_of_their_start_and_end():
    async def agent(context):
        history = [QUESTION]
        for number in range(2):
            await post(context, messages=history)
            history += [{"role": "assistant", "content": str(number)}, QUESTION]
            if not number:
                await it.client.pause_policy()
                await it.client.resume_policy(version=4)

    async with rig(agent, say("0"), say("1")) as it:
        assert await it.client.policy() == {"paused": False, "version": None, "calls_in_flight": 0}
        await it.client.resume_policy(version=3)
        result = await it.run()
        assert (await it.client.policy())["version"] == 4
    metrics = result.sample.metrics
    assert (metrics["policy_version_min"], metrics["policy_version_max"]) == (3, 4)
    document = build_trajectory(result.sample.messages, rollout_id="r", sample=result.sample)
    steps = [each["extra"] for each in document["steps"] if each["source"] == "agent"]
    assert [(each["policy_version_start"], each["policy_version_end"]) for each in steps] == [
        (3, 3),
        (4, 4),
    ]


async def test_without_versions_there_are_no_stamps():
    async def agent(context):
        await post(context)

    async with rig(agent, say("13")) as it:
        result = await it.run()
    assert not [name for name in result.sample.metrics if name.startswith("policy")]


async def test_a_drain_waits_for_the_calls_in_flight_and_holds_back_the_next():
    policy = Policy()
    order = []

    async def call(name, event):
        assert await policy.wait(60)
        with policy.sending() as scope:
            order.append(f"{name} sent")
            await event.wait()
        assert not policy.took_back(scope)
        order.append(f"{name} over")

    async def update():
        state = await policy.pause("drain", 60)
        assert state == {"paused": True, "version": None, "calls_in_flight": 0}
        order.append("updated")
        policy.resume(1)

    first, second = trio.Event(), trio.Event()
    second.set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call, "first", first)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(update)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(call, "second", second)
        await trio.testing.wait_all_tasks_blocked()
        assert order == ["first sent"]
        first.set()
    assert order.index("updated") < order.index("second sent")
    assert policy.version == 1


async def test_a_drain_gives_up_waiting_and_stays_paused(autojump_clock):
    policy = Policy()
    with policy.sending():
        assert await policy.pause("drain", 5) == {
            "paused": True,
            "version": None,
            "calls_in_flight": 1,
        }
        assert trio.current_time() == 5
    assert not await policy.wait(5)


async def test_an_aborted_call_is_sent_again_after_the_update():
    async def agent(context):
        response = await post(context)
        assert response.json()["choices"][0]["message"]["content"] == "13"

    async with rig(agent, stall(), say("13")) as it, trio.open_nursery() as nursery:
        await it.client.resume_policy(version=1)

        async def update():
            first = await it.endpoint.received()
            await first.stalled.wait()
            state = await it.client.pause_policy(mode="abort")
            assert (state["paused"], state["calls_in_flight"]) == (True, 0)
            await first.gone.wait()
            assert len(it.endpoint.requests) == 1
            await it.client.resume_policy(version=2)

        nursery.start_soon(update)
        result = await it.run()
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert result.sample.metrics["policy_version_min"] == 2
    assert result.sample.metrics["interrupted_calls"] == 1


@needs_openai
async def test_an_aborted_stream_that_has_begun_ends_with_an_error():
    def agent(context):
        openai = pytest.importorskip("openai")
        url, key = context.chat_completions_url, context.api_key
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            stream = client.chat.completions.create(model="m", messages=[QUESTION], stream=True)
            with pytest.raises(openai.APIError, match="paused"):
                for _ in stream:
                    pass

    step = evolve(say("one two three"), hold_after=1)
    async with rig(agent, step) as it, trio.open_nursery() as nursery:

        async def update():
            first = await it.endpoint.received()
            await first.stalled.wait()
            await it.client.pause_policy(mode="abort")
            await it.client.resume_policy()

        nursery.start_soon(update)
        result = await it.run()
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert len(it.endpoint.requests) == 1


async def test_a_call_waits_within_a_bound():
    got = []

    async def agent(context):
        got.append(await post(context))
        return []

    async with rig(agent, say("13"), gateway=ModelGateway(pause_wait_sec=0.05)) as it:
        await it.client.pause_policy()
        await it.run()
        assert it.endpoint.requests == []
    assert got[0].status_code == 503
    assert "paused" in got[0].json()["error"]["message"]


async def test_the_routes_have_the_key_of_the_server_and_check_what_they_get():
    async def agent(context):
        return []

    async with rig(agent, say(""), api_key="the-key-of-the-server") as it:
        async with httpx.AsyncClient(base_url=it.url, trust_env=False) as http:
            assert (await http.get("/policy")).status_code == 401
            assert (await http.post("/policy/pause", json={})).status_code == 401
            http.headers["Authorization"] = "Bearer the-key-of-the-server"
            for path, body, name in (
                ("pause", {"mode": "stop"}, "mode"),
                ("pause", {"timeout_sec": -1}, "timeout_sec"),
                ("pause", {"timeout_sec": None}, "timeout_sec"),
                ("resume", {"version": 1.5}, "version"),
                ("resume", {"version": -1}, "version"),
            ):
                response = await http.post(f"/policy/{path}", json=body)
                assert response.status_code == 422, body
                assert response.json()["detail"][0]["loc"] == ["body", name]
            assert (await http.post("/policy/pause", json=[])).status_code == 422
            assert (await http.get("/policy")).json()["paused"] is False


async def test_a_server_without_a_gateway_has_no_policy():
    async with served(make_app(local_backend())) as url, RolloutClient(url=url) as client:
        with pytest.raises(RolloutProtocolError, match="no model gateway"):
            await client.pause_policy()


def test_the_bound_of_the_wait_is_checked():
    with pytest.raises(InvalidFieldError, match="pause_wait_sec"):
        ModelGateway(pause_wait_sec=-1)
