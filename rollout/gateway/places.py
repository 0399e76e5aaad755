"""Places at upstreams: the tasks of calls wait for what `rollout.gateway.flow` decides."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import trio
from attrs import define, field

from rollout.gateway.flow import Bounds, Flow, Ticket
from rollout.gateway.retries import Outcome
from rollout.integrations.transport.recording import Endpoint

__all__ = ["Places"]


@define(eq=False)
class Place(Ticket[Endpoint]):
    """The place of one attempt to send a call."""

    _given: trio.Event = field(factory=trio.Event, init=False)

    def placed(self) -> None:
        """Notify the task that waits for it."""
        self._given.set()

    async def given(self) -> None:
        """Wait until there is one."""
        await self._given.wait()


class Places:
    """The places for calls at the upstreams of a policy.

    Args:
        endpoints: The upstreams.
        bounds: The bounds of the calls in flight to each.

    Attributes:
        flow: Decides.
    """

    def __init__(self, endpoints: Iterable[Endpoint], bounds: Bounds) -> None:
        self.flow = Flow(endpoints, bounds)

    async def take(self, place: Place) -> Endpoint:
        """Wait for a place, which has to be given back; return where to send the call.

        Cancelled, it leaves none.
        """
        await trio.lowlevel.checkpoint()
        self.flow.ask(place, trio.current_time())
        try:
            while place.upstream is None:
                with trio.move_on_at(self.flow.opens_at(trio.current_time())):
                    await place.given()
                if place.upstream is None:
                    self.flow.advance(trio.current_time())
        except trio.Cancelled:
            self.give_back(place, None)
            raise
        return place.upstream.endpoint

    def give_back(self, place: Place, outcome: Outcome | None) -> None:
        """End a call, ``None`` if it has no outcome; its place goes to the next one."""
        self.flow.end(place, outcome, trio.current_time())

    def state(self) -> list[dict[str, Any]]:
        """Return the state as JSON, without the secrets of addresses."""
        now = trio.current_time()
        return [
            {
                "url": each.endpoint.shown,
                "calls_in_flight": each.window.in_flight,
                "limit": int(each.window.limit) if each.window.limit < math.inf else None,
                "rollouts": each.rollouts,
                "failing": each.failures > 0,
                "held_sec": max(each.held_until - now, 0.0),
            }
            for each in self.flow.upstreams
        ]
