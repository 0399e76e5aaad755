"""The callers of a workload that ask for many rollouts with one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import trio
from attrs import frozen

from rollout.client import RolloutClient
from rollout.simulation.workload import RolloutPlan
from rollout.simulation.world import SimulatedWorld
from rollout.types import RolloutInitRequest, RolloutResultResponse

__all__ = ["BulkCaller", "key_of"]

_KEYS = 2


def key_of(rollout_id: str) -> int:
    """Return the key of a rollout, for a bound for each key."""
    return len(rollout_id) + ord(rollout_id[-1]) % _KEYS


@frozen
class BulkCaller:
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
        bounds = (None, None) if how == "first" else (most, per_key)
        self.world.trace.add(
            "caller", "bulk-begins", ids=ids, how=how, most=bounds[0], per_key=bounds[1]
        )
        if how == "first":
            k = min(most, len(ids))
            found = await self.client.first_successes(self._requests(), k)
            for rollout in found:
                self._tell("chosen", rollout.request.rollout_id)
        else:
            leaves_sec = first.caller_sec if how == "leave" else float("inf")
            await self._run_all(most, per_key, leaves_sec)
        self.world.trace.add("caller", "bulk-ends", ids=ids)

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
                ids = [plan.rollout_id for plan in self.plans]
                self.world.trace.add("caller", "bulk-leaves", ids=ids)

    def _requests(self) -> Iterator[RolloutInitRequest]:
        for plan in self.plans:
            self._tell("called", plan.rollout_id, caller=str(plan.caller))
            yield RolloutInitRequest(**plan.arguments())

    def _take(self, rollout_id: str, outcome: RolloutResultResponse | Exception) -> None:
        if isinstance(outcome, Exception):
            self._tell("call-failed", rollout_id, error=type(outcome).__name__)
            return
        started = outcome.agent_started_at
        self._tell(
            "result",
            rollout_id,
            state=str(outcome.status),
            category=None if outcome.err_category is None else str(outcome.err_category),
            started=None if started is None else str(started),
            reward=None if outcome.sample is None else outcome.sample.reward,
        )

    def _tell(self, what: str, rollout_id: str, **detail: object) -> None:
        self.world.trace.add("caller", what, rollout_id, **detail)
