"""Places at upstreams: the tasks of calls wait for what `rollout.gateway.flow` decides."""

from __future__ import annotations

import math
from typing import Any

import trio
from attrs import define, field

from rollout.gateway.flow import Flow, Ticket
from rollout.gateway.retries import Outcome
from rollout.integrations.transport.recording import Endpoint

__all__ = ["Place", "flow_state"]


@define(eq=False)
class Place(Ticket[Endpoint]):
    """The place of one attempt to send a call."""

    _flow: Flow[Endpoint] = field(kw_only=True, alias="flow")
    _given: trio.Event = field(factory=trio.Event, init=False)

    def placed(self) -> None:
        """Wake the task that waits for it."""
        self._given.set()

    async def take(self) -> Endpoint:
        """Wait for the place, which has to be given back; return where to send the call.

        Cancelled, it leaves none.
        """
        await trio.lowlevel.checkpoint()
        self._flow.ask(self, trio.current_time())
        try:
            while self.upstream is None:
                with trio.move_on_at(self._flow.opens_at(trio.current_time())):
                    await self._given.wait()
                if self.upstream is None:
                    self._flow.advance(trio.current_time())
        except trio.Cancelled:
            self.give_back(None)
            raise
        return self.upstream.endpoint

    def give_back(self, outcome: Outcome | None) -> None:
        """Note how the call ended, ``None`` if it did not; its place goes to the next one."""
        self._flow.end(self, outcome, trio.current_time())


def flow_state(flow: Flow[Endpoint]) -> list[dict[str, Any]]:
    """Return the state of each upstream as JSON, without the secrets of addresses."""
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
        for each in flow.upstreams
    ]
