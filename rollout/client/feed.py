"""Follow many rollouts through one streamed response.

Theory of operation: one task keeps a feed open while there is anything to follow, hands its
lines to the pollers that wait for them, and renews all leases with one small request now and
then. A feed that breaks is opened again, with the retry rules of the single poll: what has
been seen is told in the request, and the server answers with the rest. Where a feed cannot
work at all, because the server or a gateway in between does not let it through, every rollout
is given back to its own poller, and nothing is lost but speed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import trio
from attrs import define, field

from rollout.client.polling import RETRYABLE, Poller
from rollout.client.wire import Wire
from rollout.codec import dump_json, parse_json, structure
from rollout.errors import InvalidBodyError, RolloutProtocolError
from rollout.rules import is_terminal
from rollout.rules.retry import (
    GATEWAY_STATUS_CODES,
    RESULT_READ_GRACE_SEC,
    FailureKind,
    ResultRetrySchedule,
)
from rollout.types import RolloutResultResponse

__all__ = ["ResultFeed"]

logger = logging.getLogger(__name__)

FEED_PATH = "/rollouts/feed"
RENEW_PATH = "/rollouts/renew"
_HELLO_SEC = 10.0
"""A feed says hello at once; a gateway that holds responses back does not let it through."""

_IDLE_SEC = 30.0
_LONGEST_LINE = 256 * 1024 * 1024


@define(eq=False)
class _Followed:
    """A rollout that somebody waits for.

    Attributes:
        poller: Knows what has been seen, and the lease.
        attached: Whether the open feed reports it.
        over: Set once there is a result, an error, or nothing more to expect from the feed.
    """

    poller: Poller
    attached: bool = False
    result: RolloutResultResponse | None = None
    failure: Exception | None = None
    over: trio.Event = field(factory=trio.Event)

    def claim(self) -> dict[str, str]:
        poller = self.poller
        return {
            "rollout_id": poller.rollout_id,
            "polling_lease_token": poller.admission.response.polling_lease_token,
            "seen": poller.seen.to_header(),
        }

    def renewed(self, sent_at: float) -> None:
        admission = self.poller.admission
        deadline = sent_at + admission.response.polling_lease_timeout_sec
        admission.lease_deadline = max(admission.lease_deadline, deadline)


class _FeedUnusableError(Exception):
    """The server, or a gateway before it, does not let a feed through."""


class ResultFeed:
    """The feed of one client.

    Args:
        wire: The server.

    Attributes:
        usable: Whether feeds work here, as far as is known.
        token: The token of the open feed, ``None`` while none is open.
        opened: Replaced for each feed; set once it is open, or will not be.
    """

    def __init__(self, wire: Wire) -> None:
        self.usable = True
        self.token: str | None = None
        self.opened = trio.Event()
        self._wire = wire
        self._followed: dict[str, _Followed] = {}
        self._expected: dict[str, RolloutResultResponse | None] = {}
        self._changed = trio.Event()
        self._stream_scope: trio.CancelScope | None = None
        self._was_open = False

    def expect(self, rollout_id: str) -> None:
        """Keep what the feed says of a rollout whose admission is still under way."""
        self._expected[rollout_id] = None

    def forget(self, rollout_id: str) -> None:
        """Keep it no longer: nobody is going to follow that rollout."""
        self._expected.pop(rollout_id, None)

    async def follow(self, poller: Poller, *, attached: bool) -> RolloutResultResponse:
        """Wait for the result of one rollout; raises what `Poller.run` raises.

        Args:
            poller: The rollout's poller; takes over where the feed cannot go on.
            attached: Whether its admission attached it to the open feed.
        """
        followed = _Followed(poller, attached and self.token is not None)
        early = self._expected.pop(poller.rollout_id, None)
        if early is not None and is_terminal(poller.take(early).status):
            await trio.lowlevel.checkpoint()
            return early
        if self.usable:
            self._followed[poller.rollout_id] = followed
            self._notify()
            try:
                await followed.over.wait()
            finally:
                if self._followed.get(poller.rollout_id) is followed:
                    del self._followed[poller.rollout_id]
        if followed.result is not None:
            return followed.result
        if followed.failure is not None:
            raise followed.failure
        return await poller.run()

    async def run(self) -> None:
        """Keep the feed; give every rollout back to its poller when this ends."""
        try:
            while self.usable:
                while not self._followed:
                    await self._changed.wait()
                await self._keep_open()
        finally:
            self.usable = False
            self.token = None
            self.opened.set()
            for followed in list(self._followed.values()):
                followed.over.set()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # --- opening ------------------------------------------------------------------------------

    async def _keep_open(self) -> None:
        """Open a feed, read it to its end, and see to what that end means."""
        schedule: ResultRetrySchedule | None = None
        while self._followed and self.usable:
            try:
                await self._read_one()
                schedule = None
                continue
            except _FeedUnusableError as error:
                logger.info("the result feed does not come through (%s); polling instead", error)
                self.usable = False
                return
            except RETRYABLE as error:
                failure: Exception = error
                kind = FailureKind.TRANSPORT
            except RolloutProtocolError as error:
                failure, kind = error, FailureKind.GATEWAY
            except httpx.TransportError as error:
                self._fail(failure=error)
                continue
            if self._was_open:
                schedule = None
            if schedule is None:
                schedule = ResultRetrySchedule(self._request_sec(), float("inf"))
            delay = schedule.delay_after(kind, trio.current_time())
            if delay is None:
                self._fail(failure=failure)
                schedule = None
                continue
            self._fail_where_no_retry_fits(delay, failure)
            await trio.sleep(delay)
            self._fail_where_no_retry_fits(0.0, failure)

    def _request_sec(self) -> float:
        waits = [f.poller.admission.response.result_wait_timeout_sec for f in self._all()]
        return max(waits, default=30.0) + RESULT_READ_GRACE_SEC

    def _all(self) -> list[_Followed]:
        return list(self._followed.values())

    def _fail(self, *, failure: Exception) -> None:
        for followed in self._all():
            self._end(followed, failure=failure)

    def _fail_where_no_retry_fits(self, delay: float, failure: Exception) -> None:
        """Give up on those whose lease would not outlast another request."""
        for followed in self._all():
            admission = followed.poller.admission
            request_sec = admission.response.result_wait_timeout_sec + RESULT_READ_GRACE_SEC
            own = ResultRetrySchedule(request_sec, admission.lease_deadline)
            if not own.may_start(trio.current_time(), delay_sec=delay):
                self._end(followed, failure=failure)

    def _end(
        self,
        followed: _Followed,
        *,
        result: RolloutResultResponse | None = None,
        failure: Exception | None = None,
    ) -> None:
        followed.result, followed.failure = result, failure
        self._followed.pop(followed.poller.rollout_id, None)
        followed.over.set()

    # --- one feed -----------------------------------------------------------------------------

    async def _read_one(self) -> None:
        """Open one feed and read it until it ends, idles out or has to be opened anew."""
        self._was_open = False
        claimed = self._all()
        body = dump_json({"leases": [followed.claim() for followed in claimed]})
        sent_at = trio.current_time()
        request_sec = self._request_sec()
        try:
            with trio.CancelScope() as self._stream_scope:
                async with (
                    self._wire.stream(FEED_PATH, body, read_timeout_sec=request_sec) as answer,
                    aclosing(_lines(answer.data)) as lines,
                ):
                    self._check_status(answer.status_code)
                    await self._greet(lines, claimed, sent_at)
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._renew)
                        nursery.start_soon(self._watch_followed)
                        await self._take_lines(lines)
                        nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            _, real = group.split(trio.Cancelled)
            if real is None or not isinstance(real, ExceptionGroup):
                raise
            raise real.exceptions[0] from None
        finally:
            self.token = None
            self.opened.set()
            self.opened = trio.Event()
            self._stream_scope = None
            for followed in self._followed.values():
                followed.attached = False

    def _check_status(self, status: int) -> None:
        if status == httpx.codes.OK:
            return
        if status in GATEWAY_STATUS_CODES:
            raise RolloutProtocolError(f"POST {FEED_PATH} answered {status}", status_code=status)
        raise _FeedUnusableError(f"POST {FEED_PATH} answered {status}")

    async def _greet(
        self, lines: AsyncGenerator[bytes, None], claimed: list[_Followed], sent_at: float
    ) -> None:
        first = b""
        with trio.move_on_after(_HELLO_SEC) as scope:
            first = await anext(lines, b"")
        if scope.cancelled_caught:
            raise _FeedUnusableError("no first line came")
        hello = _object(first)
        token, refused = hello.get("feed"), hello.get("refused")
        if not isinstance(token, str) or not isinstance(refused, list):
            raise _FeedUnusableError("its first line is none of a feed")
        self.token, self._was_open = token, True
        self.opened.set()
        for followed in claimed:
            if followed.poller.rollout_id in refused:
                # A poll of its own says what is wrong with it.
                self._end(followed)
            else:
                followed.attached = True
                followed.renewed(sent_at)

    async def _take_lines(self, lines: AsyncGenerator[bytes, None]) -> None:
        async for line in lines:
            if not line.strip():
                continue  # a heartbeat
            try:
                result = structure(parse_json(line), RolloutResultResponse)
            except InvalidBodyError as error:
                raise httpx.RemoteProtocolError(f"a line of the feed is invalid: {error}") from None
            followed = self._followed.get(result.rollout_id)
            if followed is None:
                if result.rollout_id in self._expected:
                    self._expected[result.rollout_id] = result
                continue
            merged = followed.poller.take(result)
            if is_terminal(merged.status):
                self._end(followed, result=merged)
        if self._followed:
            raise httpx.RemoteProtocolError("the server ended the feed")

    async def _watch_followed(self) -> None:
        """End the feed when it misses somebody, or when nobody has been there for a while."""
        while True:
            if any(not followed.attached for followed in self._followed.values()):
                break
            changed = self._changed
            with trio.move_on_after(float("inf") if self._followed else _IDLE_SEC) as idle:
                await changed.wait()
            if idle.cancelled_caught and not self._followed:
                break
        if self._stream_scope is not None:
            self._stream_scope.cancel()

    async def _renew(self) -> None:
        """Renew all leases, as often as a poll would."""
        while True:
            await trio.sleep(self._request_sec() - RESULT_READ_GRACE_SEC)
            if not self._followed:
                continue
            body = dump_json({"feed": self.token})
            held = [followed for followed in self._followed.values() if followed.attached]
            sent_at = trio.current_time()
            status = await self._wire.post_status(
                RENEW_PATH, body, timeout_sec=RESULT_READ_GRACE_SEC
            )
            if status != httpx.codes.OK:
                raise httpx.RemoteProtocolError(f"POST {RENEW_PATH} answered {status}")
            for followed in held:
                followed.renewed(sent_at)


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except InvalidBodyError:
        return {}
    return value if isinstance(value, dict) else {}


async def _lines(data: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Cut a stream of bytes into lines; what follows the last line break is dropped."""
    rest = b""
    async for piece in data:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > _LONGEST_LINE:
            raise httpx.RemoteProtocolError("a line of the feed is too long")
