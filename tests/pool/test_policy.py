"""Updates of the weights over a pool: its front pauses and resumes the gateways of its workers."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx
import pytest
import trio
import trio.testing
from attrs import evolve
from feed.streaming import StreamingTransport
from gateway.served import KEY, QUESTION, post, workflow_of
from integrations.scripted import say, scripted_endpoint
from pool.helpers import TIMES, Agents, all_up, ask, machines, net, start, worker_app
from support import in_process, local_backend, make_app

from rollout.client import RolloutClient
from rollout.errors import RolloutProtocolError
from rollout.gateway import ModelGateway
from rollout.pool import PoolBackend
from rollout.pool.worker import WantedPolicy
from rollout.types import RolloutStatus

RUNNING = {"paused": False, "version": None, "calls_in_flight": 0}
ALL_OF_2 = {"total": 2, "current": 2}


def worker(agents=None, **options):
    gateway = ModelGateway(advertise_url="http://127.0.0.1:1")
    return worker_app(agents, gateway=gateway, **TIMES, **options)


def policy_of(machine):
    return machine.transport.app.__self__.gateway.policy


@asynccontextmanager
async def calls(*policies):
    """A call in flight at each of some gateways, until the event is set or it is aborted."""

    async def call(policy, task_status):
        with policy.sending():
            task_status.started()
            await over.wait()

    over = trio.Event()
    async with trio.open_nursery() as nursery:
        for policy in policies:
            await nursery.start(lambda task_status, policy=policy: call(policy, task_status))
        yield over
        over.set()


async def test_the_front_of_workers_pauses_them_all_and_passes_the_version_on():
    """The wire, with the calls of two agents at two workers."""

    async def agent(context):
        for history in ([QUESTION], [QUESTION, {"role": "assistant", "content": "0"}, QUESTION]):
            assert (await post(context, messages=history)).status_code == 200
            await answered.send(context.rollout_id)
            await resumed.wait()

    async def rollout(client, number):
        result = await client.run_rollout(
            [QUESTION], endpoint.url, f"r{number}", llm_api_key=KEY, grade=False
        )
        metrics = result.sample.metrics
        assert (metrics["policy_version_min"], metrics["policy_version_max"]) == (3, 4)

    answered, heard = trio.open_memory_channel(4)
    resumed = trio.Event()
    gateways = [ModelGateway(), ModelGateway()]
    steps = [say("0"), say("0"), say("1"), say("1")]
    async with net() as servers, scripted_endpoint(*steps) as endpoint:
        workers = [
            await servers.serve(
                make_app(local_backend(workflow_of(agent), max_concurrent=1), gateway=gateway)
            )
            for gateway in gateways
        ]
        backend = PoolBackend([each.url for each in workers])
        front = await servers.serve(make_app(backend, api_key="key"))
        with trio.fail_after(60):
            async with (
                RolloutClient(url=front.url, api_key="key") as client,
                trio.open_nursery() as nursery,
            ):
                await all_up(backend, 2)
                state = await client.resume_policy(version=3)
                assert state == {**RUNNING, "version": 3, "workers": ALL_OF_2}
                for number in range(2):
                    nursery.start_soon(rollout, client, number)
                assert {await heard.receive(), await heard.receive()} == {"r0", "r1"}
                state = await client.pause_policy()
                assert (state["paused"], state["calls_in_flight"]) == (True, 0)
                assert [each.policy.paused for each in gateways] == [True, True]
                resumed.set()
                state = await client.resume_policy(version=4)
                assert state["workers"] == ALL_OF_2
                assert [each.policy.version for each in gateways] == [4, 4]
                assert (await client.policy())["version"] == 4
                assert (await client.health())["policy"]["version"] == 4


async def test_a_drain_waits_for_the_calls_of_all_workers(autojump_clock):
    async with machines(worker(), worker()) as (client, _, found):
        policies = [policy_of(each) for each in found]
        async with calls(*policies, policies[0]) as over:
            assert (await client.policy())["calls_in_flight"] == 3
            began = trio.current_time()
            state = await client.pause_policy(timeout_sec=7)
            assert (state["calls_in_flight"], trio.current_time() - began) == (3, 7)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.pause_policy)
                await trio.sleep(20)
                over.set()
        assert trio.current_time() - began < 29
        assert all(each.paused for each in policies)


async def test_an_abort_reaches_the_calls_of_all_workers_also_after_a_drain(autojump_clock):
    async with machines(worker(), worker()) as (client, _, found):
        began = trio.current_time()
        async with calls(*map(policy_of, found)), trio.open_nursery() as nursery:
            nursery.start_soon(client.pause_policy)
            await trio.sleep(5)
            state = await client.pause_policy(mode="abort")
        assert (state["calls_in_flight"], state["workers"]) == (0, ALL_OF_2)
        assert trio.current_time() - began < 7


async def test_a_resume_ends_the_wait_of_a_pause(autojump_clock):
    async with machines(worker(), worker()) as (client, _, found):
        async with calls(policy_of(found[0])), trio.open_nursery() as nursery:
            nursery.start_soon(client.pause_policy)
            await trio.sleep(5)
            assert not (await client.resume_policy(version=1))["paused"]
        assert trio.current_time() < 10
        assert [policy_of(each).version for each in found] == [1, 1]


async def test_a_pause_goes_on_without_whoever_asked_for_it(autojump_clock):
    async with machines(worker(), worker()) as (client, _, found):
        found[1].transport.hold = trio.Event()
        with trio.move_on_after(0.5):
            await client.pause_policy()
        found[1].transport.hold.set()
        found[1].transport.hold = None
        await trio.sleep(10)
        assert all(policy_of(each).paused for each in found)
        assert (await client.policy())["workers"] == ALL_OF_2


async def test_a_worker_that_was_away_gets_the_state_before_it_gets_rollouts(autojump_clock):
    agents = Agents()
    async with machines(worker(agents, slots=1), worker(agents, slots=1)) as (client, backend, two):
        second = two[1]
        second.cut()
        began = trio.current_time()
        state = await client.pause_policy()
        assert state["workers"] == {"total": 2, "current": 1}
        assert trio.current_time() - began < 10  # it has no rollouts, so nobody waits for it
        await client.resume_policy(version=5)
        handles = [await start(client, name, hold=name) for name in ("a", "b")]
        await agents.until_started("a")
        # It comes back, but is not told.
        original, refused = second.transport.app, trio.Event()

        async def without_the_policy(scope, receive, send):
            if scope["path"].startswith("/policy"):
                refused.set()
                await trio.sleep_forever()
            await original(scope, receive, send)

        second.transport.app = without_the_policy
        second.mend()
        await refused.wait()
        await trio.sleep(3)
        (it,) = (each for each in backend.health()["workers"] if each["name"] == second.name)
        assert "present state of the policy" in it["reason"]
        assert not agents.started["b"]
        second.transport.app = original
        await agents.until_started("b")
        assert policy_of(second).version == 5
        agents.go_on.set()
        for handle in handles:
            assert (await handle).status is RolloutStatus.SUCCESS


async def test_a_worker_with_rollouts_that_does_not_answer_is_waited_for(autojump_clock):
    agents = Agents()
    async with machines(worker(agents)) as (client, _, (machine,)):
        handle = await start(client, "r", hold="r")
        await agents.until_started("r")
        machine.cut()
        began = trio.current_time()
        state = await client.pause_policy(timeout_sec=20)
        assert trio.current_time() - began >= 20
        assert state == {**RUNNING, "paused": True, "workers": {"total": 1, "current": 0}}
        assert not policy_of(machine).paused
        machine.mend()
        assert (await client.pause_policy())["workers"] == {"total": 1, "current": 1}
        assert policy_of(machine).paused
        agents.go_on.set()
        assert (await handle).status is RolloutStatus.SUCCESS


async def test_a_worker_that_is_started_again_is_paused_again(autojump_clock):
    first, second = worker(), worker()
    async with machines(first) as (client, _, (machine,)):
        await client.resume_policy(version=2)
        await client.pause_policy()
        machine.scope.cancel()
        async with second.serving():
            machine.transport.app = second.asgi_app
            machine.transport.break_streams()
            await trio.sleep(5)
            assert second.gateway.policy.paused
            await client.resume_policy()
            assert (second.gateway.policy.paused, second.gateway.policy.version) == (False, 2)
            assert (await ask(client, "r")).status is RolloutStatus.SUCCESS


async def test_a_front_that_is_started_again_goes_on_with_the_state_of_its_workers(autojump_clock):
    paused, other = worker(), worker()
    paused.gateway.policy.resume(3)
    other.gateway.policy.resume(4)
    await paused.gateway.policy.pause("drain", 0)
    async with machines(paused, other) as (client, _, _):
        state = await client.policy()
        assert state == {**RUNNING, "paused": True, "version": 4, "workers": ALL_OF_2}
        assert other.gateway.policy.paused
        # What somebody has asked this front for counts from then on, whatever a worker says.
        await client.resume_policy(version=2)
        assert [each.gateway.policy.version for each in (paused, other)] == [2, 2]
        other.gateway.policy.resume(9)
        await trio.sleep(5)
        assert [each.gateway.policy.version for each in (paused, other)] == [2, 2]


async def test_workers_without_a_gateway_have_no_policy(autojump_clock):
    async with machines(worker_app(**TIMES)) as (client, _, _):
        with pytest.raises(RolloutProtocolError, match="no model gateway"):
            await client.pause_policy()
        assert "policy" not in await client.health()


async def test_what_has_no_gateway_among_the_workers_counts_for_nothing(autojump_clock):
    async with machines(worker(), worker_app(**TIMES)) as (client, _, _):
        assert (await client.pause_policy())["workers"] == {"total": 1, "current": 1}


async def test_a_front_whose_workers_have_not_answered_yet_keeps_the_state_for_them(autojump_clock):
    app = worker()
    async with app.serving(), trio.open_nursery() as nursery:
        transport = StreamingTransport(app.asgi_app, nursery)
        transport.down = httpx.ConnectError("not yet")
        backend = PoolBackend(["http://127.0.0.1:80"])
        backend._make_client = lambda address: RolloutClient(
            url=address.url, http_client=httpx.AsyncClient(transport=transport)
        )
        async with in_process(make_app(backend)) as client:
            state = await client.resume_policy(version=1)
            assert state == {**RUNNING, "version": 1, "workers": {"total": 1, "current": 0}}
            transport.down = None
            await all_up(backend, 1)
            assert (await client.policy())["workers"] == {"total": 1, "current": 1}
            assert app.gateway.policy.version == 1


async def test_a_front_of_fronts_reaches_the_workers_of_each():
    apps = [worker(), worker(), worker()]
    async with net() as servers:
        urls = [(await servers.serve(app)).url for app in apps]
        inner = await servers.serve(make_app(PoolBackend(urls[:2])))
        backend = PoolBackend([inner.url, urls[2]])
        front = await servers.serve(make_app(backend))
        async with RolloutClient(url=front.url) as client, calls(apps[1].gateway.policy):
            await all_up(backend, 2)
            state = await client.pause_policy(timeout_sec=0)
            assert (state["calls_in_flight"], state["workers"]) == (1, {"total": 3, "current": 3})
            assert (await client.pause_policy(mode="abort"))["calls_in_flight"] == 0
            await client.resume_policy(version=7)
    assert [(app.gateway.policy.paused, app.gateway.policy.version) for app in apps] == [
        (False, 7)
    ] * 3


@pytest.mark.parametrize(
    ("own", "said", "adopted"),
    [
        ({}, {"paused": False, "version": None}, (False, None)),
        ({}, {"paused": True, "version": 0}, (True, 0)),
        ({"version": 3}, {"paused": False, "version": 1}, (False, 3)),
        ({"asked": True}, {"paused": True, "version": 1}, (False, None)),
    ],
)
def test_what_is_adopted_of_a_worker(own, said, adopted):
    wanted = WantedPolicy(**own)
    new = wanted.adopting(said)
    assert (new.paused, new.version) == adopted
    assert (new is wanted) == ((wanted.paused, wanted.version) == adopted)
    assert evolve(new, number=0) == evolve(wanted, paused=adopted[0], version=adopted[1])
