"""Groups of rollouts of one prompt, as trainers compare them.

Theory of operation: a feeder waits for a place, pulls a prompt, and starts its group; each of the
group's rollouts takes a place of those that all groups share. A group ends when all of its
rollouts have, when enough of them have brought a sample, or at its deadline; what is left of it is
cancelled, here and on the server, and the group goes into a channel with everything that ended.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, asynccontextmanager
from functools import partial

import attrs
import trio
from attrs import define, field

from rollout._checks import check_number, check_whole
from rollout._tasks import background_tasks
from rollout.client.bulk import Requests, Runner, each_of, run_many
from rollout.client.finished import FinishedRollout
from rollout.types import RolloutInitRequest, RolloutSample

__all__ = ["FirstSuccesses", "RolloutGroup", "first_successes", "run_groups"]

_OPEN_GROUPS = 2
"""How many times as many groups may be open as there are places for: some wait for stragglers."""


@define(eq=False, kw_only=True)
class RolloutGroup:
    """The rollouts of one prompt, each in exactly one of the two lists.

    Attributes:
        prompt: The request that theirs were made of.
        finished: Those that have ended, in order of completion.
        stragglers: The requests of those that were cancelled, because the deadline had passed
            or there were enough samples without them.
    """

    prompt: RolloutInitRequest
    finished: list[FinishedRollout] = field(factory=list)
    stragglers: list[RolloutInitRequest] = field(factory=list)

    @property
    def samples(self) -> list[RolloutSample]:
        """The samples of the successes, but for those that are marked for removal."""
        return [sample for ended in self.finished if (sample := _sample_of(ended)) is not None]

    @property
    def failures(self) -> list[FinishedRollout]:
        """Those that ended without such a sample; a failure does not count as reward 0."""
        return [ended for ended in self.finished if _sample_of(ended) is None]


def _sample_of(ended: FinishedRollout) -> RolloutSample | None:
    sample = ended.result.sample if ended.succeeded else None
    return None if sample is None or sample.remove_sample else sample


class FirstSuccesses(list[FinishedRollout]):
    """The successes that `RolloutClient.first_successes` found, in order of completion.

    Attributes:
        failures: Rollouts that had ended without success until then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[FinishedRollout] = []


@define(eq=False)
class _Groups:
    """One call of `run_groups`.

    Attributes:
        runner: What each group gets a copy of.
        size: How many rollouts a group has.
        enough: How many samples end a group.
        deadline_sec: How long a group may take, in seconds.
        places: The places for rollouts in flight.
        open: The places for groups that nobody has received yet.
        runners: Those of the groups that are under way.
    """

    runner: Runner
    size: int
    enough: float
    deadline_sec: float
    places: trio.Semaphore
    open: trio.Semaphore
    send: trio.MemorySendChannel[RolloutGroup]
    runners: set[Runner] = field(factory=set)

    async def feed(self, prompts: Requests) -> None:
        """Start groups as places become free; returns when the last of them has ended."""
        async with trio.open_nursery() as nursery:
            await self._start_all(prompts, nursery)
        # After an error it stays open, so that the block hears of the error rather than of the
        # end of the channel.
        self.send.close()

    async def _start_all(self, prompts: Requests, nursery: trio.Nursery) -> None:
        async with aclosing(each_of(prompts)) as pulled:
            while True:
                await self.open.acquire()
                await self.places.acquire()
                prompt = await anext(pulled, None)
                if prompt is None:
                    self.places.release()
                    return
                requests = [
                    attrs.evolve(prompt, rollout_id=f"{prompt.rollout_id}-{number}")
                    for number in range(self.size)
                ]
                nursery.start_soon(self._run, prompt, requests, nursery)

    async def _run(
        self, prompt: RolloutInitRequest, requests: list[RolloutInitRequest], all_: trio.Nursery
    ) -> None:
        """Run a group to its end; there is a place for its first rollout already."""
        group = RolloutGroup(prompt=prompt)
        left = {request.rollout_id: request for request in requests}
        runner = attrs.evolve(self.runner)
        self.runners.add(runner)

        async def run_one(request: RolloutInitRequest, *, has_place: bool) -> None:
            if not has_place:
                await self.places.acquire()
            try:
                ended = await runner.run(request)
            finally:
                self.places.release()
            del left[request.rollout_id]
            group.finished.append(ended)
            if len(group.samples) >= self.enough:
                nursery.cancel_scope.cancel()

        with trio.move_on_after(self.deadline_sec):
            async with trio.open_nursery() as nursery:
                for request in requests:
                    has_place = request is requests[0]
                    nursery.start_soon(partial(run_one, request, has_place=has_place))
        group.stragglers = list(left.values())
        await runner.cancel(runner.left())
        self.runners.remove(runner)
        try:
            await self.send.send(group)
        except trio.BrokenResourceError:
            all_.cancel_scope.cancel()  # the block has closed the channel: it wants no more
        self.open.release()


@asynccontextmanager
async def run_groups(
    runner: Runner,
    prompts: Requests,
    *,
    samples: int,
    max_in_flight: int,
    deadline_sec: float | None,
    min_samples: int | None,
) -> AsyncGenerator[trio.MemoryReceiveChannel[RolloutGroup], None]:
    """See `rollout.client.RolloutClient.run_groups`."""
    check_whole("samples", samples)
    check_whole("max_in_flight", max_in_flight)
    check_whole("min_samples", min_samples, none=True)
    check_number("deadline_sec", deadline_sec, above=0, none=True)
    send, receive = trio.open_memory_channel[RolloutGroup](0)
    groups = _Groups(
        runner,
        samples,
        math.inf if min_samples is None else min_samples,
        math.inf if deadline_sec is None else deadline_sec,
        trio.Semaphore(max_in_flight),
        trio.Semaphore(_OPEN_GROUPS * math.ceil(max_in_flight / samples)),
        send,
    )
    try:
        with receive:
            async with background_tasks(partial(groups.feed, prompts)):
                yield receive
    finally:
        send.close()
        await runner.cancel(
            {name: key for each in groups.runners for name, key in each.left().items()}
        )


async def first_successes(
    runner: Runner,
    requests: Iterable[RolloutInitRequest],
    k: int,
    *,
    max_in_flight: int | None,
) -> FirstSuccesses:
    """See `rollout.client.RolloutClient.first_successes`."""
    check_whole("k", k)
    check_whole("max_in_flight", max_in_flight, none=True)
    group = list(requests)
    found = FirstSuccesses()
    if not group:
        await trio.lowlevel.checkpoint()
        return found
    limit = max_in_flight or len(group)
    async with run_many(runner, group, max_in_flight=limit) as finished:
        async for ended in finished:
            if not ended.succeeded:
                found.failures.append(ended)
                continue
            found.append(ended)
            if len(found) == k:
                break
    return found
