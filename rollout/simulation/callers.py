"""The callers of a workload: each does with its rollout what its plan says.

Some of them are two processes with one lease token. What the second one does is recorded as
that of client 2, since the rules for polls hold for each process by itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import httpx
import trio
from attrs import evolve, frozen

from rollout.client import RolloutClient, RolloutHandle, RolloutHandleCancelled
from rollout.client.admission import admit
from rollout.client.answers import Admitted
from rollout.client.polling import Poller
from rollout.errors import RolloutError, RolloutProtocolError
from rollout.rules import SeenState
from rollout.simulation.workload import Caller, RolloutPlan
from rollout.simulation.world import SimulatedWorld
from rollout.types import RolloutInitRequest, RolloutResultResponse

__all__ = ["key_of", "run_workload"]


_EXPECTED_FAILURES = (httpx.TransportError, RolloutError)
_REPEAT_SEC = 30.0
_SEC_BETWEEN_INTRUSIONS = 20.0
_MOST_INTRUSIONS = 10
_WRONG_TOKEN = "not-the-token-of-this-rollout"  # noqa: S105 - it opens nothing


async def run_workload(
    world: SimulatedWorld,
    plans: Sequence[RolloutPlan],
    *,
    limit_sec: float,
    feed: bool = False,
) -> None:
    """Run every caller of a workload to its end.

    With *feed*, they use the extensions of the server where the network lets them.
    Callers that still wait after *limit_sec* are given up; that they do is in the trace.
    """
    own = world.transport.with_feed() if feed else world.transport
    other = own.of_another_client()
    scope = trio.CancelScope(deadline=trio.current_time() + limit_sec)
    try:
        async with world.client(transport=own) as first, world.client(transport=other) as second:
            with scope:
                async with trio.open_nursery() as nursery:
                    bulk = [plan for plan in plans if plan.caller is Caller.BULK]
                    if bulk:
                        nursery.start_soon(_BulkCaller(world, first, bulk).run)
                    for plan in plans:
                        if plan.caller is Caller.BULK:
                            continue
                        nursery.start_soon(_Caller(world, first, second, plan, feed).run)
            if scope.cancelled_caught:
                world.trace.add("world", "callers-given-up", after_sec=limit_sec)
                await first.aclose()
                await second.aclose()
    except ExceptionGroup:
        # Failed polls; the callers that were to be told are not there any more.
        if not scope.cancelled_caught:
            raise


@frozen
class _Caller:
    """One caller.

    Attributes:
        world: Where it lives.
        client: Its client.
        second: The client of its second process.
        plan: What it does.
        feed: Whether the network lets the extensions of the server through.
    """

    world: SimulatedWorld
    client: RolloutClient
    second: RolloutClient
    plan: RolloutPlan
    feed: bool = False

    async def run(self) -> None:
        await trio.sleep(self.plan.arrival_sec)
        self.record("called", caller=str(self.plan.caller))
        await self.attempt(_BEHAVIOURS[self.plan.caller], self)

    async def attempt(
        self, function: Callable[..., Awaitable[Any]], *args: Any, **about: Any
    ) -> None:
        """Await a function, and record an expected failure."""
        try:
            await function(*args)
        except RolloutHandleCancelled:
            self.record("handle-was-cancelled", **about)
        except _EXPECTED_FAILURES as error:
            self.record("call-failed", error=type(error).__name__, **about)

    def record(self, what: str, **detail: Any) -> None:
        self.world.trace.add("caller", what, self.plan.rollout_id, **detail)

    def got(self, result: RolloutResultResponse, **about: Any) -> None:
        self.record("result", **_seen(result), **about)

    def saw(self, result: RolloutResultResponse, **about: Any) -> None:
        self.record("saw-status", state=str(result.status), started=_started(result), **about)

    async def handle(self) -> RolloutHandle:
        handle = await self.client.run_rollout_async(**self.plan.arguments())
        self.record("has-handle")
        return handle

    async def admission(self, key: str | None = None) -> Admitted:
        """Return an admission that nobody polls yet."""
        request = RolloutInitRequest(**self.plan.arguments(), admission_key=key)
        if self.feed:
            # Nobody is going to follow it through a feed.
            ask, replay = self.client._wire.admit, self.client._replay  # noqa: SLF001
            return await admit(ask, request, timeout_sec=None, replay=replay)
        return await self.client._admit(request)  # noqa: SLF001 - two processes share a token

    async def cancel(self, key: str | None = None, *, done: bool = False) -> None:
        """Cancel the rollout on the server, by the key of its admission if there is one."""
        rollout_id = self.plan.rollout_id
        self.record("cancels", done=done)
        keys = None if key is None else {rollout_id: key}
        try:
            answer = await self.client.cancel_rollouts(ids=[rollout_id], admission_keys=keys)
        except _EXPECTED_FAILURES as error:
            self.record("cancel-failed", error=type(error).__name__)
        else:
            self.record("cancel-answered", disposition=answer.dispositions.get(rollout_id))

    async def poll(self, admitted: Admitted) -> None:
        """Poll with the first client."""
        poller = Poller(self.client._wire, admitted, self.saw)  # noqa: SLF001
        self.got(await poller.run())

    async def take_over(self, admitted: Admitted) -> None:
        """Poll with the second client, which was handed the token by the first."""
        deadline = admitted.lease_deadline - self.world.trace.started
        self.record("takes-over", client=2, deadline=deadline)

        def saw(result: RolloutResultResponse) -> None:
            self.saw(result, client=2)

        poller = Poller(self.second._wire, admitted, saw)  # noqa: SLF001
        self.got(await poller.run(), client=2)

    async def intrude(self, admitted: Admitted) -> None:
        """Poll with a wrong token, and with that of another rollout, until the time is up."""
        wire = self.second._wire  # noqa: SLF001
        over = trio.current_time() + self.plan.caller_sec
        for number in range(_MOST_INTRUSIONS):
            if trio.current_time() >= over:
                break
            token = _WRONG_TOKEN
            if number % 2:
                token = self.world.transport.token_of_another(self.plan.rollout_id) or token
            response = evolve(admitted.response, polling_lease_token=token)
            self.record("takes-over", client=2)
            try:
                await wire.result(response, seen=SeenState(), timeout_sec=40)
            except httpx.TransportError:
                self.record("intrusion-failed", client=2)
            except RolloutProtocolError as error:
                self.record("intruded", client=2, status=error.status_code)
            else:
                self.record("intruded", client=2, status=200)
            await trio.sleep(min(_SEC_BETWEEN_INTRUSIONS, max(0, over - trio.current_time())))


def _started(result: RolloutResultResponse | None) -> str | None:
    if result is None or result.agent_started_at is None:
        return None
    return str(result.agent_started_at)


def _seen(result: RolloutResultResponse) -> dict[str, Any]:
    return {
        "state": str(result.status),
        "category": None if result.err_category is None else str(result.err_category),
        "started": _started(result),
        "reward": None if result.sample is None else result.sample.reward,
    }


async def _wait(caller: _Caller) -> None:
    caller.got(await caller.client.run_rollout(**caller.plan.arguments()))


async def _follow(caller: _Caller) -> None:
    handle = await caller.handle()
    async for status in handle.statuses():
        caller.record("saw-status", state=str(status), started=_started(handle.latest_result))
    caller.got(await handle)


async def _stop(caller: _Caller) -> None:
    handle = await caller.handle()
    await trio.sleep(caller.plan.caller_sec)
    polling = handle.cancel()
    caller.record("handle-cancelled", was_polling=polling)
    caller.got(await handle)


async def _cancel(caller: _Caller) -> None:
    handle = await caller.handle()
    await trio.sleep(caller.plan.caller_sec)
    for _ in range(2):
        await caller.cancel(done=handle.done())
    caller.record("keeps-polling", polling=not handle.done())
    caller.got(await handle)


async def _vanish(caller: _Caller) -> None:
    with trio.move_on_after(caller.plan.caller_sec) as scope:
        await _wait(caller)
    if scope.cancelled_caught:
        caller.record("vanished")


async def _repeat(caller: _Caller) -> None:
    await _wait(caller)
    await trio.sleep(caller.plan.caller_sec)
    caller.record("repeats")
    with trio.move_on_after(_REPEAT_SEC):
        await caller.client.run_rollout(**caller.plan.arguments())


async def _rival(caller: _Caller) -> None:
    async def rival() -> None:
        await trio.sleep(caller.plan.caller_sec)
        caller.record("takes-over", client=2)
        with trio.move_on_after(_REPEAT_SEC):
            await caller.second.run_rollout(**caller.plan.arguments())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(caller.attempt, rival, client=2))
        await caller.attempt(_wait, caller)


async def _again(caller: _Caller) -> None:
    admission = await caller.admission()
    await caller.poll(admission)
    await trio.sleep(caller.plan.caller_sec)
    await caller.take_over(admission)


async def _pair(caller: _Caller) -> None:
    admission = await caller.admission()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(caller.attempt, caller.take_over, admission, client=2))
        await caller.attempt(caller.poll, admission)


async def _late(caller: _Caller) -> None:
    admission = await caller.admission()
    await trio.sleep(caller.plan.caller_sec)
    await caller.poll(admission)


async def _intrude(caller: _Caller) -> None:
    admission = await caller.admission()
    await caller.intrude(admission)
    await caller.poll(admission)


async def _overtake(caller: _Caller) -> None:
    key = secrets.token_hex()

    async def ask() -> None:
        await trio.sleep(caller.plan.caller_sec)
        await caller.poll(await caller.admission(key))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller.cancel, key)
        await caller.attempt(ask)


_BEHAVIOURS: dict[Caller, Callable[[_Caller], Awaitable[None]]] = {
    Caller.WAIT: _wait,
    Caller.FOLLOW: _follow,
    Caller.STOP: _stop,
    Caller.CANCEL: _cancel,
    Caller.VANISH: _vanish,
    Caller.REPEAT: _repeat,
    Caller.RIVAL: _rival,
    Caller.AGAIN: _again,
    Caller.PAIR: _pair,
    Caller.LATE: _late,
    Caller.INTRUDE: _intrude,
    Caller.OVERTAKE: _overtake,
}


_KEYS = 2


def key_of(rollout_id: str) -> int:
    """Return the key of a rollout, for a bound for each key."""
    return len(rollout_id) + ord(rollout_id[-1]) % _KEYS


@frozen
class _BulkCaller:
    """Runs plans with `RolloutClient.run_rollouts` or `RolloutClient.first_successes`.

    It draws whether it waits for all of them, leaves the block after a while, or wants the
    first successes, and with which bounds.
    """

    world: SimulatedWorld
    client: RolloutClient
    plans: Sequence[RolloutPlan]

    async def run(self) -> None:
        """Run them, and record what comes of it."""
        draw, first = self.world.generator, self.plans[0]
        await trio.sleep(min(plan.arrival_sec for plan in self.plans))
        how = draw.choice(("all", "leave", "first"))
        most = draw.choice((1, 2, 4))
        per_key = draw.choice((None, 1))
        ids = [plan.rollout_id for plan in self.plans]
        bounds: dict[str, int | None] = {"most": None, "per_key": None}
        if how != "first":
            bounds = {"most": most, "per_key": per_key}
        self._record("bulk-begins", "", ids=ids, how=how, **bounds)
        if how == "first":
            for rollout in await self.client.first_successes(self._requests(), min(most, len(ids))):
                self._record("chosen", rollout.request.rollout_id)
        else:
            leaves_sec = first.caller_sec if how == "leave" else float("inf")
            await self._run_all(most, per_key, leaves_sec)
        self._record("bulk-ends", ids=ids)

    async def _run_all(self, most: int, per_key: int | None, leaves_sec: float) -> None:
        async with self.client.run_rollouts(
            self._requests(),
            max_in_flight=most,
            key=lambda request: key_of(request.rollout_id),
            max_in_flight_per_key=per_key,
        ) as finished:
            with trio.move_on_after(leaves_sec) as scope:
                async for rollout in finished:
                    self._take(rollout.request.rollout_id, rollout.outcome)
            if scope.cancelled_caught:
                self._record("bulk-leaves", ids=[plan.rollout_id for plan in self.plans])

    def _requests(self) -> Iterator[RolloutInitRequest]:
        for plan in self.plans:
            self._record("called", plan.rollout_id, caller=str(plan.caller))
            yield RolloutInitRequest(**plan.arguments())

    def _take(self, rollout_id: str, outcome: RolloutResultResponse | Exception) -> None:
        if isinstance(outcome, Exception):
            self._record("call-failed", rollout_id, error=type(outcome).__name__)
        else:
            self._record("result", rollout_id, **_seen(outcome))

    def _record(self, what: str, rollout_id: str = "", **detail: Any) -> None:
        self.world.trace.add("caller", what, rollout_id, **detail)
