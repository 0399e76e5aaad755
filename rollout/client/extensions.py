"""The extensions of a server, used where it offers them: batched admissions and the result feed.

The first admission goes by the single route, and its answer says what the server offers.
Admissions that come meanwhile wait for that answer a little, so that a thousand that start at
once do not all go the slow way. A server that offers nothing gets nothing but the four routes
of the protocol.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from rollout.client.answers import AdmissionAnswer, Admitted
from rollout.client.batching import AdmissionBatcher
from rollout.client.feed import ResultFeed
from rollout.client.polling import Poller
from rollout.client.wire import Wire
from rollout.types import EXTENSIONS, RolloutInitRequest, RolloutResultResponse

__all__ = ["ServerExtensions"]

BATCH, FEED, *_ = EXTENSIONS
_FIRST_ANSWER_SEC = 2.5
"""How long others wait for the first answer, so that they can be asked for in batches."""


class ServerExtensions:
    """The extensions of one server.

    Args:
        wire: The server.
        nursery: Where the feed and the batches run, once the server turns out to offer them.
    """

    def __init__(self, wire: Wire, nursery: trio.Nursery) -> None:
        self._wire = wire
        self._nursery = nursery
        self._feed = ResultFeed(wire)
        self._batcher = AdmissionBatcher(wire, self._feed)
        self._offered: frozenset[str] | None = None
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

    async def admit(
        self, request: RolloutInitRequest, body: bytes, on_sent: Callable[[], None]
    ) -> AdmissionAnswer:
        """Ask once for an admission, in a batch where that can be; see `Wire.admit`."""
        if self._first is not None:
            await self._wait_for_first()
        if self._offered is None:
            return await self._ask_first(request, body, on_sent)
        if BATCH in self._offered and self._batcher.usable:
            answer = await self._batcher.admit(request, body, on_sent)
            if answer is not None:
                return answer
        return await self._wire.admit(request, body, on_sent)

    async def _wait_for_first(self) -> None:
        """Wait for the answer that says what the server offers."""
        # The time counts from when all that start at once have started: on a busy machine, ten
        # thousand of them take longer than that, before anything else gets its turn.
        await trio.lowlevel.checkpoint()
        # No longer than half of the time that the caller has, so that it can still be asked for.
        left = trio.current_effective_deadline() - trio.current_time()
        with trio.move_on_after(max(0.0, min(_FIRST_ANSWER_SEC, left / 2))):
            while self._offered is None and self._first is not None:
                await self._first.wait()

    async def _ask_first(
        self, request: RolloutInitRequest, body: bytes, on_sent: Callable[[], None]
    ) -> AdmissionAnswer:
        mine = self._first is None
        if mine:
            self._first = trio.Event()
        try:
            answer = await self._wire.admit(request, body, on_sent)
        finally:
            if mine and self._first is not None:
                self._first.set()
                self._first = None
        if isinstance(answer, Admitted) and self._offered is None:
            self._use(answer.response.extensions)
        return answer

    def _use(self, extensions: list[str]) -> None:
        """Start what the server offers."""
        self._offered = frozenset(extensions)
        self._feed.usable = FEED in self._offered
        if self._first is not None:
            self._first.set()
        if self._offered & {BATCH, FEED}:
            try:
                self._nursery.start_soon(self._run, name="rollout feed")
            except RuntimeError:  # the client is just being left
                self._offered = frozenset()

    async def follow(self, poller: Poller) -> RolloutResultResponse:
        """Wait for a rollout's result; raises what `Poller.run` raises."""
        if self._offered is None:
            return await poller.run()
        return await self._feed.follow(poller)
