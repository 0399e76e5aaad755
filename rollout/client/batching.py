"""Batched admissions: many rollouts in one request.

Theory of operation: admissions are queued. While one request is under way the queue grows, and
the next request takes all of it, so batches are as large as the load is high. A request that
takes long does not hold up the next one, and one whose callers have all left is cancelled. Each
rollout has an answer of its own, as the single route would give it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import httpx
import trio
from attrs import define, field

from rollout._tasks import copy_error
from rollout._telemetry.tracing import current_traceparent
from rollout.client.answers import AdmissionAnswer, Admitted, Refused
from rollout.client.feed import Expectation, ExpectedAdmission, ResultFeed
from rollout.client.wire import Wire
from rollout.codec import dump_json, parse_json
from rollout.errors import InvalidBodyError, RolloutClientClosedError, RolloutProtocolError
from rollout.types import RolloutInitRequest

__all__ = ["AdmissionBatcher"]

BATCH_PATH = "/rollouts"
_MOST = 1024
_MOST_BYTES = 8 * 1024 * 1024
_FEED_SEC = 1.0
"""How long a batch waits for a feed that is being opened."""
_NEXT_SEC = 0.25
"""How long a batch waits for the answer to the one before it."""

_TOO_LARGE = 413
_STATUS_CODES = range(200, 600)
_NOT_OFFERED = frozenset({404, 405, _TOO_LARGE, 501})


@define(eq=False, repr=False)
class _Item:
    """A rollout that waits for its admission.

    Attributes:
        request: The admission request.
        body: The same, encoded.
        on_sent: Called once the request with it is under way.
        expectation: Keeps what the feed reports of it meanwhile.
        traceparent: The span of its caller, if there is one.
        abandoned: Whether nobody waits for it any longer.
        batch: The request that it is part of, once that is under way.
        over: Set once there is an answer, a failure, or neither and nothing more to expect.
    """

    request: RolloutInitRequest
    body: bytes
    on_sent: Callable[[], None]
    expectation: Expectation
    traceparent: str | None = None
    abandoned: bool = False
    batch: _Batch | None = None
    answer: AdmissionAnswer | None = None
    failure: Exception | None = None
    over: trio.Event = field(factory=trio.Event)

    @property
    def may_be_renewed_in_vain(self) -> bool:
        """Whether an open feed may report the rollout though nobody is going to follow it."""
        if isinstance(self.answer, Admitted):
            return self.abandoned and self.expectation.feed is not None
        if isinstance(self.answer, Refused):
            return self.answer.error.status_code == httpx.codes.ACCEPTED
        return self.failure is not None


@define(eq=False, repr=False)
class _Batch:
    """One request, from the moment when it counts as sent.

    Attributes:
        items: The rollouts that it asks for.
        callers: How many still wait for its answer.
        scope: Cancels it.
        over: Set once each of its items is over.
    """

    items: list[_Item] = field(factory=list)
    callers: int = 0
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    over: trio.Event = field(factory=trio.Event)

    def leave(self) -> None:
        """Note that a caller has left; without callers the request is cancelled."""
        self.callers -= 1
        if not self.callers:
            self.scope.cancel()


class AdmissionBatcher:
    """Sends admissions in batches.

    Attributes:
        usable: Whether the server takes batches, as far as is known.
    """

    def __init__(self, wire: Wire, feed: ResultFeed) -> None:
        self.usable = True
        self._wire = wire
        self._feed = feed
        self._queue: OrderedDict[_Item, None] = OrderedDict()
        self._queued = trio.Event()

    async def admit(
        self, request: RolloutInitRequest, body: bytes, on_sent: Callable[[], None]
    ) -> AdmissionAnswer | None:
        """Have one rollout admitted; ``None`` if it has to go by the single route.

        Raises:
            RolloutProtocolError: The server did not answer with one outcome for each.
            httpx.TransportError: The request failed; it may have arrived.

        Cancelled before it was sent, it never is.
        """
        expectation = self._feed.expect(request.rollout_id)
        item = _Item(request, body, on_sent, expectation, current_traceparent())
        self._queue[item] = None
        self._queued.set()
        waited = False
        try:
            await item.over.wait()
            waited = True
        finally:
            self._queue.pop(item, None)
            if not waited:
                item.abandoned = True
                if item.batch is not None:
                    item.batch.leave()
                if item.over.is_set():
                    self._leave_behind([item])
            if not (waited and isinstance(item.answer, Admitted)):
                self._feed.forget(item.expectation)
        if item.failure is not None:
            raise item.failure
        return item.answer

    async def run(self) -> None:
        """Send queued items; when this ends, the rest goes by the single route."""
        async with trio.open_nursery() as nursery:
            try:
                while self.usable:
                    await self._queued.wait()
                    await self._feed.wait_until_open(_FEED_SEC)
                    batch = self._take()
                    if batch.items:
                        nursery.start_soon(self._send, batch)
                        with trio.move_on_after(_NEXT_SEC):
                            await batch.over.wait()
                    else:
                        self._queued = trio.Event()
            finally:
                self.usable = False
                for item in self._queue:
                    item.over.set()

    def _take(self) -> _Batch:
        """Make a batch of queued items; from now on it counts as sent."""
        batch = _Batch()
        size = 0
        while self._queue and len(batch.items) < _MOST and size < _MOST_BYTES:
            item, _ = self._queue.popitem(last=False)
            size += len(item.body)
            batch.items.append(item)
            batch.callers += 1
            item.batch = batch
            item.on_sent()
        return batch

    async def _send(self, batch: _Batch) -> None:
        items = batch.items
        token = self._feed.token
        more: dict[str, Any] = {} if token is None else {"feed": token}
        if any(item.traceparent for item in items):
            more["traceparents"] = [item.traceparent for item in items]
        ending = b"}" if not more else b"," + dump_json(more)[1:]
        body = b'{"rollouts":[' + b",".join(item.body for item in items) + b"]" + ending
        sent_at = trio.current_time()
        failure: Exception = RolloutClientClosedError(
            "the client was closed while an admission was under way; it may have succeeded"
        )
        known = False
        try:
            with batch.scope:
                response = await self._wire.post(BATCH_PATH, body)
                if response.status_code in _NOT_OFFERED:
                    self.usable = self.usable and response.status_code == _TOO_LARGE
                else:
                    self._distribute(response, items, sent_at, token)
                known = True
        except Exception as error:  # noqa: BLE001 - whatever it is, those who asked get it
            failure = error
        finally:
            for item in items:
                if not known:
                    # Never by the single route: the request may have arrived.
                    item.failure = copy_error(failure)
                item.over.set()
            batch.over.set()
            if token is not None:
                self._leave_behind(items)

    def _leave_behind(self, items: list[_Item]) -> None:
        """Notify the feed if it may report rollouts that nobody is going to follow."""
        if any(item.may_be_renewed_in_vain for item in items):
            self._feed.leave_behind()

    def _distribute(
        self, response: httpx.Response, items: list[_Item], sent_at: float, feed: str | None
    ) -> None:
        """Give every item its answer, or all of them the refusal that the response is.

        Raises:
            RolloutProtocolError: There is not one outcome for each.
        """
        if response.status_code != httpx.codes.OK:
            for item in items:
                reader = self._wire.admission_reader(item.request)
                item.answer = reader.admission(response, item.request, sent_at)
            return
        try:
            answer = parse_json(response.content)
        except InvalidBodyError:
            answer = None
        if not isinstance(answer, dict):
            answer = {}
        outcomes = answer.get("outcomes")
        if not isinstance(outcomes, list) or len(outcomes) != len(items):
            raise _invalid()
        for item, outcome in zip(items, outcomes, strict=True):
            if not _is_outcome(outcome):
                item.failure = _invalid()
                continue
            reader = self._wire.admission_reader(item.request)
            item.answer = reader.outcome(outcome, item.request, sent_at)
            if isinstance(item.answer, Admitted):
                item.expectation.feed = feed if answer.get("attached") is True else None
                item.answer = ExpectedAdmission(item.answer.response, sent_at, item.expectation)


def _is_outcome(value: Any) -> bool:
    code = value.get("status_code") if isinstance(value, dict) else None
    return isinstance(code, int) and code in _STATUS_CODES


def _invalid() -> RolloutProtocolError:
    return RolloutProtocolError(f"POST {BATCH_PATH} answered with an invalid body", status_code=200)
