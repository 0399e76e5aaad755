"""How a client that was entered talks to its server: request by request, or in bulk.

The first admission goes by the single route, and its answer says what the server offers.
Admissions that come meanwhile wait for that answer a little, so that a thousand that start at
once do not all go the slow way. A server that offers nothing gets nothing but the four routes
of the protocol.
"""

from __future__ import annotations

from collections.abc import Callable

import httpx
import trio

from rollout.client.batching import AdmissionBatcher, BatchOutcome
from rollout.client.feed import ResultFeed
from rollout.client.polling import Attempt, Poller, SingleAdmitter
from rollout.client.wire import Wire
from rollout.types import EXTENSIONS, RolloutInitRequest, RolloutInitResponse, RolloutResultResponse

__all__ = ["Link"]

BATCH, FEED = EXTENSIONS
_FIRST_ANSWER_SEC = 2.5
"""Long enough for a loop that starts ten thousand rollouts at once to come round."""


class Link:
    """The extensions of one server, used where they are offered.

    Args:
        wire: The server.
        nursery: Where the feed and the batches run, once the server turns out to offer them.
    """

    def __init__(self, wire: Wire, nursery: trio.Nursery) -> None:
        self._wire = wire
        self._nursery = nursery
        self._single = SingleAdmitter(wire)
        self._feed = ResultFeed(wire)
        self._batcher = AdmissionBatcher(wire, self._feed)
        self._extensions: frozenset[str] | None = None
        self._first: trio.Event | None = None
        self._scope = trio.CancelScope()

    async def _run(self) -> None:
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._feed.run)
                nursery.start_soon(self._batcher.run)

    def stop(self) -> None:
        """End the feed and the batches; what is left goes on without them."""
        self._scope.cancel()

    def _learn(self, extensions: list[str]) -> None:
        """Take what the server offers, once."""
        if self._extensions is not None:
            return
        self._extensions = frozenset(extensions)
        self._feed.usable = FEED in self._extensions
        if self._first is not None:
            self._first.set()
        if self._extensions & {BATCH, FEED}:
            try:
                self._nursery.start_soon(self._run, name="rollout feed")
            except RuntimeError:  # the client is just being left
                self._extensions = frozenset()

    async def attempt(
        self, request: RolloutInitRequest, body: bytes, on_sent: Callable[[], None]
    ) -> Attempt:
        """Ask once for an admission; see `rollout.client.polling.Admitter`."""
        # No longer than half of the time that the caller has, so that it can still be asked for.
        left = trio.current_effective_deadline() - trio.current_time()
        with trio.move_on_after(max(0.0, min(_FIRST_ANSWER_SEC, left / 2))):
            while self._extensions is None and self._first is not None:
                await self._first.wait()
        if self._extensions is None:
            return await self._ask_first(request, body, on_sent)
        if BATCH in self._extensions and self._batcher.usable:
            attempt = await self._ask_in_batch(request, body, on_sent)
            if attempt is not None:
                return attempt
        return await self._single.attempt(request, body, on_sent)

    async def _ask_in_batch(
        self, request: RolloutInitRequest, body: bytes, on_sent: Callable[[], None]
    ) -> Attempt | None:
        expectation = self._feed.expect(request.rollout_id)
        outcome: BatchOutcome | None = None
        try:
            outcome = await self._batcher.admit(body, on_sent)
        finally:
            if outcome is None or not outcome.accepted:
                self._feed.forget(expectation)
        if outcome is None:
            return None
        answer = outcome

        def read() -> RolloutInitResponse:
            try:
                admission = self._wire.read_admission(answer.response, request)
            except Exception:
                self._feed.forget(expectation)
                self._feed.leave_behind()
                raise
            expectation.lease = admission.polling_lease_token
            expectation.feed = answer.feed
            return admission

        return Attempt(answer.response, answer.sent_at, read)

    async def follow(self, poller: Poller) -> RolloutResultResponse:
        """Wait for a rollout's result; raises what `Poller.run` raises."""
        if self._extensions is None:
            return await poller.run()
        return await self._feed.follow(poller)

    async def _ask_first(
        self, request: RolloutInitRequest, body: bytes, on_sent: Callable[[], None]
    ) -> Attempt:
        mine = self._first is None
        if mine:
            self._first = trio.Event()
        try:
            answer = await self._single.attempt(request, body, on_sent)
        finally:
            if mine and self._first is not None:
                self._first.set()
                self._first = None
        if answer.response.status_code != httpx.codes.ACCEPTED:
            return answer
        admission = answer.read()
        self._learn(admission.extensions)
        return Attempt(answer.response, answer.sent_at, lambda: admission)
