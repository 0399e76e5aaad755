"""Many rollouts at once, with a bound on how many are in flight.

Theory of operation: a feeder pulls the next request only when a place is free, and starts a
task for it, or sets it aside if its group has no place; each task runs one rollout to its end,
puts its outcome into a channel, in order of completion, and hands its place on. The channel
holds as many outcomes as there are places, so a consumer that stops reading stops the feeder,
not the rollouts that run.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Sized,
)
from contextlib import aclosing, asynccontextmanager
from functools import partial

import attrs
import httpx
import trio
from attrs import define, field

from rollout._checks import check_whole
from rollout._logs import get_logger
from rollout._tasks import background_tasks
from rollout.client.admission import Progress
from rollout.client.finished import FinishedRollout, RolloutRetry
from rollout.errors import InvalidFieldError, RolloutError
from rollout.rules.retry import rerun_delay_sec, shortened
from rollout.types import RolloutInitRequest, RolloutResultResponse

__all__ = ["Requests", "Runner", "each_of", "run_many"]

logger = get_logger(__name__)

CANCEL_BUDGET_SEC = 10.0
_MOST_SET_ASIDE = 10_000
"""How many requests of full groups are kept while others are looked for; a list is there anyway."""


Requests = Iterable[RolloutInitRequest] | AsyncIterable[RolloutInitRequest]


@define(eq=False)
class _Places:
    """The places for rollouts in flight, in all and for each key, and who waits for one.

    Attributes:
        limit: How many there are in all.
        per_key: How many there are for each key.
        set_aside_limit: How many requests may wait for a place of their key.
    """

    limit: int
    per_key: int | None
    set_aside_limit: int
    taken: int = 0
    by_key: Counter[Hashable] = field(factory=Counter)
    waiting: dict[Hashable, deque[RolloutInitRequest]] = field(factory=dict)
    set_aside: int = 0
    changed: trio.Event = field(factory=trio.Event)

    async def wait_for_room(self) -> None:
        """Wait until a further request may be pulled."""
        while self.taken >= self.limit or self.set_aside >= self.set_aside_limit:
            await self.changed.wait()

    def add(self, key: Hashable, request: RolloutInitRequest) -> None:
        self.waiting.setdefault(key, deque()).append(request)
        self.set_aside += 1

    def take(self) -> tuple[Hashable, RolloutInitRequest] | None:
        """Take a place for a request that waits, if there is one that may have one."""
        if self.taken >= self.limit:
            return None
        for key, requests in self.waiting.items():
            if self.per_key is None or self.by_key[key] < self.per_key:
                request = requests.popleft()
                if not requests:
                    del self.waiting[key]
                self.set_aside -= 1
                self.taken += 1
                self.by_key[key] += 1
                return key, request
        return None

    def give_back(self, key: Hashable) -> None:
        self.taken -= 1
        self.by_key[key] -= 1
        if not self.by_key[key]:
            del self.by_key[key]

    def wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


@define(eq=False)
class Runner:
    """Runs requests to their ends, and knows which of them are on the server.

    Attributes:
        run_once: Runs one rollout, as `RolloutClient.run_rollout` does.
        cancel_ids: Cancels rollouts on the server, given the admission key of each id whose
            admission is under way, and ``None`` for the others.
        retry: Which rollouts are run again.
    """

    run_once: Callable[[RolloutInitRequest, Progress], Awaitable[RolloutResultResponse]]
    cancel_ids: Callable[[dict[str, str | None]], Awaitable[None]]
    retry: RolloutRetry | None
    _running: dict[Progress, RolloutInitRequest] = field(factory=dict, init=False)

    async def run(self, request: RolloutInitRequest) -> FinishedRollout:
        """Run one request to its end, with the attempts that it may have.

        Cancelling this sends nothing; `cancel` does, for those that are `left`.
        """
        ended = await self._attempt(request, request.rollout_id, 1)
        while self.retry is not None and self.retry.wants(ended):
            draw = random.random()  # noqa: S311 - no secret
            await trio.sleep(shortened(rerun_delay_sec(ended.attempts), draw))
            name = f"{request.rollout_id}-again-{ended.attempts}"
            ended = await self._attempt(request, name, ended.attempts + 1)
        return ended

    async def _attempt(
        self, request: RolloutInitRequest, rollout_id: str, number: int
    ) -> FinishedRollout:
        progress = Progress()
        outcome: RolloutResultResponse | Exception
        try:
            # Made anew, since it may have been changed in place.
            renamed = attrs.evolve(request, rollout_id=rollout_id)
            self._running[progress] = renamed
            outcome = await self.run_once(renamed, progress)
        except (RolloutError, httpx.HTTPError, httpx.InvalidURL) as error:
            outcome = error
        self._running.pop(progress, None)
        return FinishedRollout(
            request,
            outcome,
            admitted=progress.admitted,
            agent_started_at=progress.agent_started_at,
            attempts=number,
        )

    def left(self) -> dict[str, str | None]:
        """Return rollouts that have not ended, for `cancel_ids`."""
        left: dict[str, str | None] = {}
        for progress, request in self._running.items():
            if progress.admitted == "yes":
                left[request.rollout_id] = None
            elif progress.admitted == "unknown":  # unless another one has the id
                left.setdefault(request.rollout_id, request.admission_key)
        return left

    async def cancel(self, rollouts: dict[str, str | None]) -> None:
        """Cancel rollouts on the server, within a bounded time; never raises a request's error."""
        if not rollouts:
            return
        with trio.move_on_after(CANCEL_BUDGET_SEC, shield=True) as scope:
            try:
                await self.cancel_ids(rollouts)
            except (RolloutError, httpx.HTTPError) as error:
                logger.warning(
                    "%d rollout(s) could not be cancelled (%s); they end with their leases",
                    len(rollouts),
                    type(error).__name__,
                )
        if scope.cancelled_caught:
            logger.warning("cancelling %d rollout(s) took too long", len(rollouts))


@define(eq=False)
class _Bulk:
    """One call of `run_many`."""

    runner: Runner
    places: _Places
    key: Callable[[RolloutInitRequest], Hashable]
    send: trio.MemorySendChannel[FinishedRollout]

    async def feed(self, requests: Requests) -> None:
        """Start requests as places become free; returns when the last of them has ended."""
        async with trio.open_nursery() as nursery:
            await self._start_all(requests, nursery)
        # After an error it stays open, so that the block hears of the error rather than of the
        # end of the channel.
        self.send.close()

    async def _start_all(self, requests: Requests, nursery: trio.Nursery) -> None:
        async with aclosing(each_of(requests)) as pulled:
            while True:
                await self.places.wait_for_room()
                request = await anext(pulled, None)
                if request is None:
                    return
                self.places.add(self.key(request), request)
                self._start(nursery)

    def _start(self, nursery: trio.Nursery) -> None:
        while (taken := self.places.take()) is not None:
            nursery.start_soon(self._run, *taken, nursery)
        self.places.wake()

    async def _run(self, key: Hashable, request: RolloutInitRequest, nursery: trio.Nursery) -> None:
        ended = await self.runner.run(request)
        try:
            await self.send.send(ended)
        except trio.BrokenResourceError:
            # The block has closed the channel: it wants no more of them.
            nursery.cancel_scope.cancel()
            return
        self.places.give_back(key)
        self._start(nursery)


async def each_of(requests: Requests) -> AsyncGenerator[RolloutInitRequest, None]:
    """Yield the requests of a plain or an async iterable; close it within `aclosing`."""
    if not isinstance(requests, AsyncIterable):
        for request in requests:
            await trio.lowlevel.checkpoint()
            yield request
        return
    iterator = aiter(requests)
    try:
        async for request in iterator:
            yield request
    finally:
        if isinstance(iterator, AsyncGenerator):  # it may be left before its end
            await iterator.aclose()


@asynccontextmanager
async def run_many(
    runner: Runner,
    requests: Requests,
    *,
    max_in_flight: int,
    key: Callable[[RolloutInitRequest], Hashable] | None = None,
    max_in_flight_per_key: int | None = None,
) -> AsyncGenerator[trio.MemoryReceiveChannel[FinishedRollout], None]:
    """See `rollout.client.RolloutClient.run_rollouts`."""
    check_whole("max_in_flight", max_in_flight)
    check_whole("max_in_flight_per_key", max_in_flight_per_key, none=True)
    if max_in_flight_per_key is not None and key is None:
        raise InvalidFieldError("key", "is required with max_in_flight_per_key")
    send, receive = trio.open_memory_channel[FinishedRollout](max_in_flight)
    most = max(_MOST_SET_ASIDE, len(requests) if isinstance(requests, Sized) else 0)
    places = _Places(max_in_flight, max_in_flight_per_key, most)
    bulk = _Bulk(runner, places, key or (lambda _: None), send)
    try:
        # The block's own exception comes out as it is, and so does one of the requests'.
        # The receiver is closed last, so that no request finds nobody to send its outcome to.
        with receive:
            async with background_tasks(partial(bulk.feed, requests)):
                yield receive
    finally:
        send.close()
        await runner.cancel(runner.left())
