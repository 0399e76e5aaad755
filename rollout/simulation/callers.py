"""The callers of a workload: each does with its rollout what its plan says."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import trio

from rollout.client import RolloutClient, RolloutHandle, RolloutHandleCancelled
from rollout.errors import RolloutError
from rollout.simulation.trace import Trace
from rollout.simulation.workload import Caller, RolloutPlan
from rollout.simulation.world import SimulatedWorld
from rollout.types import RolloutResultResponse

__all__ = ["run_workload"]

_EXPECTED_FAILURES = (httpx.TransportError, RolloutError)


async def run_workload(world: SimulatedWorld, plans: Sequence[RolloutPlan]) -> None:
    """Run every caller of a workload to its end, through one client of the world."""
    async with world.client() as client, trio.open_nursery() as nursery:
        for plan in plans:
            nursery.start_soon(_call, world, client, plan)


async def _call(world: SimulatedWorld, client: RolloutClient, plan: RolloutPlan) -> None:
    await trio.sleep(plan.arrival_sec)
    trace = world.trace
    trace.add("caller", "called", plan.rollout_id, caller=str(plan.caller))
    try:
        await _BEHAVIOURS[plan.caller](trace, client, plan)
    except RolloutHandleCancelled:
        trace.add("caller", "handle-was-cancelled", plan.rollout_id)
    except _EXPECTED_FAILURES as error:
        trace.add("caller", "call-failed", plan.rollout_id, error=type(error).__name__)


def _got(trace: Trace, plan: RolloutPlan, result: RolloutResultResponse) -> None:
    trace.add(
        "caller",
        "result",
        plan.rollout_id,
        state=str(result.status),
        category=None if result.err_category is None else str(result.err_category),
        started=None if result.agent_started_at is None else str(result.agent_started_at),
        reward=None if result.sample is None else result.sample.reward,
    )


async def _wait(trace: Trace, client: RolloutClient, plan: RolloutPlan) -> None:
    _got(trace, plan, await client.run_rollout(**plan.arguments()))


async def _admitted(trace: Trace, client: RolloutClient, plan: RolloutPlan) -> RolloutHandle:
    handle = await client.run_rollout_async(**plan.arguments())
    trace.add("caller", "has-handle", plan.rollout_id)
    return handle


async def _follow(trace: Trace, client: RolloutClient, plan: RolloutPlan) -> None:
    handle = await _admitted(trace, client, plan)
    async for status in handle.statuses():
        latest = handle.latest_result
        started = None if latest is None else latest.agent_started_at
        trace.add(
            "caller",
            "saw-status",
            plan.rollout_id,
            state=str(status),
            started=None if started is None else str(started),
        )
    _got(trace, plan, await handle)


async def _stop(trace: Trace, client: RolloutClient, plan: RolloutPlan) -> None:
    handle = await _admitted(trace, client, plan)
    await trio.sleep(plan.caller_sec)
    polling = handle.cancel()
    trace.add("caller", "handle-cancelled", plan.rollout_id, was_polling=polling)
    _got(trace, plan, await handle)


async def _cancel(trace: Trace, client: RolloutClient, plan: RolloutPlan) -> None:
    handle = await _admitted(trace, client, plan)
    await trio.sleep(plan.caller_sec)
    trace.add("caller", "cancels", plan.rollout_id, done=handle.done())
    try:
        answer = await client.cancel_rollout(plan.rollout_id)
    except _EXPECTED_FAILURES as error:
        trace.add("caller", "cancel-failed", plan.rollout_id, error=type(error).__name__)
    else:
        disposition = answer.dispositions.get(plan.rollout_id)
        trace.add("caller", "cancel-answered", plan.rollout_id, disposition=disposition)
    trace.add("caller", "keeps-polling", plan.rollout_id, polling=not handle.done())
    _got(trace, plan, await handle)


async def _vanish(trace: Trace, client: RolloutClient, plan: RolloutPlan) -> None:
    with trio.move_on_after(plan.caller_sec) as scope:
        await _wait(trace, client, plan)
    if scope.cancelled_caught:
        trace.add("caller", "vanished", plan.rollout_id)


async def _repeat(trace: Trace, client: RolloutClient, plan: RolloutPlan) -> None:
    await _wait(trace, client, plan)
    await trio.sleep(plan.caller_sec)
    trace.add("caller", "repeats", plan.rollout_id)
    with trio.move_on_after(30):
        await client.run_rollout(**plan.arguments())


_BEHAVIOURS = {
    Caller.WAIT: _wait,
    Caller.FOLLOW: _follow,
    Caller.STOP: _stop,
    Caller.CANCEL: _cancel,
    Caller.VANISH: _vanish,
    Caller.REPEAT: _repeat,
}
