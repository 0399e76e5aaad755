"""Ask for the admission of many rollouts in one request.

Theory of operation: whoever wants an admission puts it into a queue. While one request is
under way the queue grows, and the next request takes all of it, so batches are as large as
the load is high and nobody waits for a timer. Each rollout has its own outcome; what the
single route would raise, its caller gets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import httpx
import trio
from attrs import define, field

from rollout.client.feed import ResultFeed
from rollout.client.wire import Wire
from rollout.codec import dump_json, parse_json
from rollout.errors import InvalidBodyError, RolloutError, RolloutProtocolError

__all__ = ["AdmissionBatcher", "BatchOutcome"]

BATCH_PATH = "/rollouts"
_MOST = 1024
_MOST_BYTES = 8 * 1024 * 1024
_FEED_SEC = 1.0
"""How long a batch waits for a feed that is being opened."""

_ACCEPTED = 202
_TOO_LARGE = 413
_NOT_OFFERED = frozenset({404, 405, _TOO_LARGE, 501})


@define
class BatchOutcome:
    """What became of one rollout of a batch.

    Attributes:
        status_code: The status that the single route would have answered with.
        body: The body that it would have had: the admission, or the detail.
        retry_after: How long to wait after 429, as the header has it.
        sent_at: When the request was sent.
        attached: Whether the open feed reports it from now on.
    """

    status_code: int
    body: dict[str, Any]
    retry_after: str | None
    sent_at: float
    attached: bool


@define(eq=False)
class _Item:
    """A rollout that waits for its admission.

    Attributes:
        body: The encoded admission request.
        on_sent: Called once the request with it is under way.
        over: Set once there is an outcome, a failure, or neither and nothing more to expect.
    """

    body: bytes
    on_sent: Callable[[], None]
    outcome: BatchOutcome | None = None
    failure: Exception | None = None
    over: trio.Event = field(factory=trio.Event)


class AdmissionBatcher:
    """Sends admissions in batches.

    Attributes:
        usable: Whether the server takes batches, as far as is known.
    """

    def __init__(self, wire: Wire, feed: ResultFeed) -> None:
        self.usable = True
        self._wire = wire
        self._feed = feed
        self._queue: dict[_Item, None] = {}
        self._queued = trio.Event()

    async def admit(self, body: bytes, on_sent: Callable[[], None]) -> BatchOutcome | None:
        """Have one rollout admitted; ``None`` if it has to go by the single route.

        Raises:
            RolloutProtocolError: The server answered with something else than outcomes.
            httpx.TransportError: The request failed; it may have arrived.

        Cancelled before it was sent, it never is.
        """
        item = _Item(body, on_sent)
        self._queue[item] = None
        self._queued.set()
        try:
            await item.over.wait()
        finally:
            self._queue.pop(item, None)
        if item.failure is not None:
            raise item.failure
        return item.outcome

    async def run(self) -> None:
        """Send what is queued; when this ends, the rest goes by the single route."""
        under_way: list[_Item] = []
        try:
            while self.usable:
                await self._queued.wait()
                await self._wait_for_feed()
                under_way = self._take()
                if under_way:
                    await self._send(under_way)
                else:
                    self._queued = trio.Event()
        finally:
            self.usable = False
            for item in (*under_way, *self._queue):
                item.over.set()

    async def _wait_for_feed(self) -> None:
        """Let a feed that is being opened come first, so that it can take the rollouts in."""
        if self._feed.usable and self._feed.token is None:
            with trio.move_on_after(_FEED_SEC):
                await self._feed.opened.wait()

    def _take(self) -> list[_Item]:
        taken: list[_Item] = []
        size = 0
        while self._queue and len(taken) < _MOST and size < _MOST_BYTES:
            item = next(iter(self._queue))
            del self._queue[item]
            size += len(item.body)
            taken.append(item)
        return taken

    async def _send(self, items: list[_Item]) -> None:
        token = self._feed.token
        ending = b"]}" if token is None else b'],"feed":' + dump_json(token) + b"}"
        body = b'{"rollouts":[' + b",".join(item.body for item in items) + ending
        for item in items:
            item.on_sent()
        sent_at = trio.current_time()
        try:
            response = await self._wire.post(BATCH_PATH, body)
            if response.status_code in _NOT_OFFERED:
                self.usable = response.status_code == _TOO_LARGE
            else:
                _distribute(response, items, sent_at)
        except (httpx.TransportError, RolloutError) as error:
            for item in items:
                item.failure = copy.copy(error)
        finally:
            for item in items:
                item.over.set()


def _distribute(response: httpx.Response, items: list[_Item], sent_at: float) -> None:
    """Give every item its outcome, or all of them the error that the answer is."""
    status = response.status_code
    if status != httpx.codes.OK:
        retry_after = response.headers.get("Retry-After")
        for item in items:
            item.outcome = BatchOutcome(status, {}, retry_after, sent_at, attached=False)
        return
    try:
        answer = parse_json(response.content)
        outcomes, attached = answer["outcomes"], answer["attached"] is True
        for item, outcome in zip(items, outcomes, strict=True):
            code = outcome["status_code"]
            item.outcome = BatchOutcome(
                code,
                outcome["admission"] if code == _ACCEPTED else {"detail": outcome["detail"]},
                _header(outcome.get("retry_after_sec")),
                sent_at,
                attached,
            )
    except (InvalidBodyError, KeyError, TypeError, ValueError):
        for item in items:
            item.outcome = None
            item.failure = RolloutProtocolError(
                f"POST {BATCH_PATH} answered with an invalid body", status_code=status
            )


def _header(retry_after_sec: Any) -> str | None:
    return None if retry_after_sec is None else str(retry_after_sec)
