"""Tasks that wait for places, on a clock that jumps."""

from __future__ import annotations

import random

import pytest
import trio
from attrs import define

from rollout.gateway.flow import Bounds, Caller, Flow
from rollout.gateway.places import Place, flow_state
from rollout.gateway.retries import Outcome, Retries
from rollout.integrations.transport.recording import Endpoint


@define(eq=False)
class Simulated:
    """An endpoint that answers so many calls at a time, refuses others, and may be down."""

    capacity: int
    up: bool = True
    in_flight: int = 0
    answered: int = 0
    refused: int = 0
    busy_sec: float = 0.0

    async def call(self, latency_sec):
        if not self.up:
            await trio.sleep(0.01)
            return Outcome(broken=True)
        if self.in_flight >= self.capacity:
            self.refused += 1
            await trio.sleep(0.05)
            return Outcome.of_status(429)
        self.in_flight += 1
        await trio.sleep(latency_sec)
        self.in_flight -= 1
        if not self.up:
            return Outcome(broken=True)
        self.answered += 1
        self.busy_sec += latency_sec
        return Outcome(answered=True, latency_sec=latency_sec, tokens=int(latency_sec * 50))


async def rollout(flow, calls, draw):
    """Make calls one after the other; return how many of them failed for good."""
    caller, failed = Caller(), 0
    for _ in range(calls):
        retries, latency_sec, delay = Retries(2, 30), draw.uniform(2, 16), 0.0
        while delay is not None:
            await trio.sleep(delay)
            place = Place(caller, flow=flow)
            endpoint = await place.take()
            retries.waited(place.waited_sec(trio.current_time()))
            outcome = await endpoint.call(latency_sec)
            place.give_back(outcome)
            if outcome.answered:
                break
            now = trio.current_time()
            moves = flow.moves(caller, now)
            delay = retries.delay_sec(outcome, now, moves=moves, draw=draw.random())
        failed += delay is None
        await trio.sleep(draw.expovariate(0.5))
    flow.leave(caller)
    return failed


async def together(flow, rollouts, calls):
    draw, failed = random.Random(7), []

    async def one():
        failed.append(await rollout(flow, calls, draw))

    async with trio.open_nursery() as nursery:
        for _ in range(rollouts):
            nursery.start_soon(one)
    return sum(failed)


@pytest.mark.parametrize("maximum", [None, 64])
async def test_an_endpoint_with_a_limit_of_its_own_is_kept_busy(maximum, autojump_clock):
    endpoint = Simulated(capacity=12)
    failed = await together(Flow([endpoint], Bounds(maximum=maximum)), 64, 5)
    assert endpoint.answered == 320 - failed
    assert failed <= 5
    assert endpoint.refused <= 130  # 52 of them at the start
    assert endpoint.busy_sec / trio.current_time() > 0.75 * 12


async def test_an_upstream_that_goes_down_and_comes_back_costs_no_call(autojump_clock):
    first, second = Simulated(capacity=99), Simulated(capacity=99)
    flow = Flow([first, second], Bounds(maximum=8))
    async with trio.open_nursery() as nursery:

        async def outage():
            await trio.sleep(30)
            first.up = False
            await trio.sleep(30)
            first.up = True
            answered.append(first.answered)

        answered = []
        nursery.start_soon(outage)
        assert await together(flow, 24, 8) == 0
    assert first.answered + second.answered == 24 * 8
    assert first.answered > answered[0] + 20
    assert {(each.rollouts, each.window.in_flight) for each in flow.upstreams} == {(0, 0)}


async def test_calls_that_are_held_back_go_on_by_themselves(autojump_clock):
    flow = Flow([Simulated(1)], Bounds())
    first = Place(Caller(), flow=flow)
    await first.take()
    first.give_back(Outcome.of_status(503, 7.0))
    await trio.sleep(1)
    place = Place(Caller(), flow=flow)
    await place.take()
    assert trio.current_time() == 7
    assert place.waited_sec(9.0) == 6


async def test_a_cancelled_wait_leaves_nothing_behind(autojump_clock):
    flow = Flow([Simulated(1)], Bounds(maximum=1))
    first = Place(Caller(), flow=flow)
    await first.take()
    with trio.move_on_after(3):
        await Place(Caller(), flow=flow).take()
    assert (trio.current_time(), flow.waiting) == (3, 0)

    async def cancelled_when_it_is_placed():
        with trio.CancelScope() as scope:
            scopes.append(scope)
            await Place(Caller(), flow=flow).take()

    scopes = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancelled_when_it_is_placed)
        await trio.testing.wait_all_tasks_blocked()
        scopes[0].cancel()
        first.give_back(None)
    assert flow.upstreams[0].window.in_flight == 0


async def test_the_state_has_no_secrets(autojump_clock):
    endpoint = Endpoint.of("http://me:pass-word@host/v1?key=secret-word", "sk-key")
    flow = Flow([endpoint], Bounds(maximum=3))
    place = Place(Caller(), flow=flow)
    await place.take()
    assert flow_state(flow) == [
        {
            "url": "http://host/v1",
            "calls_in_flight": 1,
            "limit": 3,
            "rollouts": 1,
            "failing": False,
            "held_sec": 0.0,
        }
    ]
