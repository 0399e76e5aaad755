"""The result feed: many rollouts followed through one streamed response.

Theory of operation: one task keeps a feed open while there is anything to follow, hands its
lines to the pollers that wait for them, and renews all leases with one small request now and
then. A feed that breaks is opened again, with the retry rules of the single poll for each of
the rollouts: the request says what has been seen, and the server answers with the rest.
Where a feed cannot work at all, because the server or a gateway in between does not let it
through, every rollout is given back to its own poller, and only speed is lost.

What nobody follows any longer must not be renewed with the rest, or its lease would never
end. Nothing is sent for it: at the time of the next renewal the feed is opened anew, without.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import trio
from attrs import define, field, frozen

from rollout._logs import get_logger
from rollout._tasks import background_tasks, copy_error
from rollout.client.answers import Admitted
from rollout.client.polling import RETRYABLE, Poller
from rollout.client.wire import Wire
from rollout.codec import dump_json, parse_json, structure
from rollout.errors import InvalidBodyError, RolloutClientClosedError, RolloutProtocolError
from rollout.rules import is_terminal
from rollout.rules.retry import (
    GATEWAY_STATUS_CODES,
    RESULT_READ_GRACE_SEC,
    FailureKind,
    ResultRetrySchedule,
    shortened,
)
from rollout.types import RolloutResultResponse, RolloutStatus

__all__ = ["Expectation", "ExpectedAdmission", "Followed", "ResultFeed"]

logger = get_logger(__name__)

FEED_PATH = "/rollouts/feed"
RENEW_PATH = "/rollouts/renew"
_HELLO_SEC = 10.0
"""A feed says hello at once; a gateway that holds answers back does not let it through."""

_SHORT_LIFE_SEC = 1.0
_MOST_SHORT_LIVES = 5
"""So many feeds in a row may end as soon as they are open: a gateway may cut all of them off."""

_MOST_REFUSALS = 3
"""So many times in a row a gateway may answer in the server's place, before polls are tried."""

_IDLE_SEC = 30.0
_SHORTEST_RENEWAL_SEC = 0.01
_LONGEST_LINE = 256 * 1024 * 1024


class _FeedUnusableError(Exception):
    """The server, or a gateway before it, does not let a feed through."""


@define(eq=False, repr=False)
class Expectation:
    """An admission that is under way, and what a feed has reported of its rollout already.

    Attributes:
        rollout_id: The rollout.
        feed: The token of the feed that it was attached to, if it was.
    """

    rollout_id: str
    feed: str | None = None
    _early: RolloutResultResponse | None = field(default=None, init=False)
    _early_from: str | None = field(default=None, init=False)

    def record(self, result: RolloutResultResponse, feed: str | None) -> None:
        """Keep what the feed with that token reported."""
        if self._early is None or self._early_from != feed or not is_terminal(self._early.status):
            self._early, self._early_from = result, feed

    def early_result(self) -> RolloutResultResponse | None:
        """Return what its feed has reported. A line of another feed may mean another rollout."""
        return self._early if self.feed is not None and self._early_from == self.feed else None


@frozen
class ExpectedAdmission(Admitted):
    """An admission whose rollout a feed may have reported already.

    Attributes:
        expectation: What was reported of it.
    """

    expectation: Expectation = field(repr=False)


@define(eq=False, repr=False)
class Followed:
    """A rollout that somebody waits for.

    Attributes:
        poller: Keeps the state seen so far, and the lease.
        attached: Whether the open feed reports it.
        asked: Whether a feed was ever asked for it, so that failures of feeds concern it.
        retry_at: When its backoff is over.
        over: Set once there is a result, an error, or nothing more to expect from the feed.
    """

    poller: Poller
    attached: bool = False
    asked: bool = False
    retry_at: float = -math.inf
    result: RolloutResultResponse | None = None
    failure: Exception | None = None
    over: trio.Event = field(factory=trio.Event)
    _schedule: ResultRetrySchedule | None = field(default=None, init=False)

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self.poller.rollout_id

    @property
    def wait_sec(self) -> float:
        """How long the server holds a poll, in seconds; the lease is renewed as often."""
        return self.poller.admission.result_wait_timeout_sec

    @property
    def request_sec(self) -> float:
        """How long one full request may take, in seconds."""
        return self.wait_sec + RESULT_READ_GRACE_SEC

    @property
    def lease_sec(self) -> float:
        """How long the lease is, in seconds."""
        return self.poller.admission.polling_lease_timeout_sec

    def claim(self) -> dict[str, str]:
        """Return the rollout's entry in a request that opens a feed."""
        return {
            "rollout_id": self.rollout_id,
            "polling_lease_token": self.poller.admission.polling_lease_token,
            "seen": self.poller.seen.to_header(),
        }

    def renewed(self, sent_at: float) -> None:
        """Move the end of the lease, counted from when the request that renewed it was sent."""
        self.poller.lease_deadline = max(self.poller.lease_deadline, sent_at + self.lease_sec)

    def opened(self, sent_at: float) -> None:
        """Renew the lease by a feed that has opened, and forget the failures before it."""
        self.renewed(sent_at)
        self._schedule = None
        self.retry_at = -math.inf

    def delay_after(self, kind: FailureKind, now: float) -> float | None:
        """Count a failure; return the backoff before the next attempt, ``None`` to give up."""
        if self._schedule is None:
            self._schedule = ResultRetrySchedule(
                self.request_sec, self.poller.lease_deadline, self.poller.durable_sec
            )
        return self._schedule.delay_after(kind, now)

    def may_try(self, now: float) -> bool:
        """Whether another attempt still fits before the end of the lease."""
        return self._schedule is None or self._schedule.may_start(now)

    def fail(self, error: Exception) -> None:
        """Keep an error of the feed; a copy, since its other rollouts raise it too."""
        self.failure = copy_error(error)


@define(eq=False, repr=False)
class ResultFeed:
    """The feed of one client.

    Attributes:
        usable: Whether feeds work here, as far as is known.
        token: The token of the open feed, ``None`` while none is open.
    """

    _wire: Wire
    usable: bool = True
    token: str | None = None
    _followed: dict[str, Followed] = field(factory=dict, init=False)
    _expected: dict[str, list[Expectation]] = field(factory=dict, init=False)
    # Those that no open feed reports; they are why one is opened, or opened anew.
    _missing: dict[Followed, None] = field(factory=dict, init=False)
    _missed: trio.Event = field(factory=trio.Event, init=False)
    _opened: trio.Event = field(factory=trio.Event, init=False)
    _stream_scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _has_worked: bool = field(default=False, init=False)
    _opened_at: float | None = field(default=None, init=False)
    _short_lives: int = field(default=0, init=False)
    _refusals: int = field(default=0, init=False)
    _left_behind: bool = field(default=False, init=False)
    _joined: int = field(default=0, init=False)
    _renewal_sec: float = field(default=math.inf, init=False)

    # --- admissions under way -----------------------------------------------------------------

    def expect(self, rollout_id: str) -> Expectation:
        """Record what the feed reports of a rollout whose admission is still under way."""
        expectation = Expectation(rollout_id)
        self._expected.setdefault(rollout_id, []).append(expectation)
        return expectation

    def forget(self, expectation: Expectation) -> None:
        """Drop an expectation: nobody is going to follow that rollout."""
        expected = self._expected.get(expectation.rollout_id, [])
        if expectation in expected:
            expected.remove(expectation)
        if not expected:
            self._expected.pop(expectation.rollout_id, None)

    def leave_behind(self) -> None:
        """Note that the open feed may report a rollout that nobody is going to follow."""
        self._left_behind = True

    async def wait_until_open(self, timeout_sec: float) -> None:
        """Wait for a feed that is being opened, so that it can report the next batch."""
        await trio.lowlevel.checkpoint()
        if self.usable and self.token is None and self._missing:
            with trio.move_on_after(timeout_sec):
                await self._opened.wait()

    # --- following ----------------------------------------------------------------------------

    async def follow(self, poller: Poller) -> RolloutResultResponse:
        """Wait for the result of one rollout; raises what `Poller.run` raises.

        Args:
            poller: The rollout's poller; takes over where the feed cannot go on.

        Cancelling this sends nothing.
        """
        followed = Followed(poller)
        if isinstance(poller.admitted, ExpectedAdmission):
            expectation = poller.admitted.expectation
            self.forget(expectation)
            early = expectation.early_result()
            merged = None if early is None else poller.take(early)
            if merged is not None and is_terminal(merged.status):
                await trio.lowlevel.checkpoint()
                return merged
            followed.attached = self.token is not None and expectation.feed == self.token
            followed.asked = followed.attached
        if self.usable:
            try:
                await trio.lowlevel.checkpoint_if_cancelled()  # then nothing is sent for it
                self._add(followed)
                await followed.over.wait()
            finally:
                self._remove(followed)
        if followed.result is not None:
            return followed.result
        if followed.failure is not None:
            raise followed.failure
        return await poller.run()

    def _add(self, followed: Followed) -> None:
        before = self._followed.get(followed.rollout_id)
        if before is not None:
            # Its id is in use again, so its server has forgotten it. A poll will say so.
            self._end(before)
        self._followed[followed.rollout_id] = followed
        self._joined += 1
        self._renewal_sec = min(self._renewal_sec, followed.wait_sec)
        if not followed.attached:
            self._missing[followed] = None
            self._missed.set()
            self._missed = trio.Event()

    def _remove(self, followed: Followed) -> None:
        if self._followed.get(followed.rollout_id) is followed:
            del self._followed[followed.rollout_id]
        self._missing.pop(followed, None)
        self._left_behind = self._left_behind or followed.attached
        followed.attached = False

    def _end(
        self,
        followed: Followed,
        *,
        result: RolloutResultResponse | None = None,
        failure: Exception | None = None,
    ) -> None:
        """End following, with a result, an error, or neither: then the rollout is polled."""
        self._remove(followed)
        if result is not None:
            followed.result = result
        elif failure is not None:
            followed.fail(failure)
        followed.over.set()

    def _all(self) -> list[Followed]:
        return list(self._followed.values())

    # --- opening ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the feed; give every rollout back to its poller when this ends."""
        try:
            while self.usable:
                while not self._missing:
                    await self._missed.wait()
                await self._keep_open()
        except RolloutClientClosedError:
            logger.debug("the result feed ends: the HTTP client was closed")  # polls raise it
        except Exception:
            logger.exception("the result feed failed; polling instead")
        finally:
            self.usable = False
            self.token = None
            self._opened.set()
            self._give_back()

    def _give_back(self) -> None:
        for followed in self._all():
            self._end(followed)

    async def _keep_open(self) -> None:
        """Open feeds, one after the other, until none is needed or none can work."""
        while self._missing:
            kind = FailureKind.TRANSPORT
            failure: Exception
            try:
                await self._read_one()
                continue
            except RETRYABLE as error:
                failure = error
                if self._ends_at_once():
                    logger.info("each result feed ends as soon as it is open; polling instead")
                    self.usable = False
                    return
            except RolloutProtocolError as error:  # of a gateway
                failure, kind = error, FailureKind.GATEWAY
                self._refusals += 1
                if self._refusals > _MOST_REFUSALS:
                    logger.info("a gateway refuses the result feed (%s); polling instead", error)
                    self.usable = self._has_worked
                    self._give_back()
                    return
            except httpx.TransportError as error:
                failure = error
                for followed in self._all():
                    if followed.asked:
                        self._end(followed, failure=error)
                continue
            except _FeedUnusableError as error:
                logger.info("the result feed does not come through (%s); polling instead", error)
                self.usable = False
                return
            await self._back_off(kind, failure)

    def _ends_at_once(self) -> bool:
        """Count feeds that ended at once; whether there were too many without any result."""
        if self._opened_at is not None:
            self._short_lives += 1
            if trio.current_time() - self._opened_at >= _SHORT_LIFE_SEC:
                self._short_lives = 0
        return self._short_lives > _MOST_SHORT_LIVES

    async def _back_off(self, kind: FailureKind, failure: Exception) -> None:
        """Wait as the retry rules say; give up on rollouts that have no further attempt.

        The earliest backoff counts. Those whose own is not over yet have lost no attempt.
        """
        now = trio.current_time()
        draw = random.random()  # noqa: S311 - no secret
        concerned = [followed for followed in self._all() if followed.asked]
        for followed in concerned:
            if followed.retry_at > now:
                continue
            delay = followed.delay_after(kind, now)
            if delay is None:
                self._end(followed, failure=failure)
            else:
                followed.retry_at = now + shortened(delay, draw)
        concerned = [followed for followed in concerned if not followed.over.is_set()]
        earliest = min((followed.retry_at for followed in concerned), default=now)
        if concerned:
            logger.warning(
                "opening the result feed again in %.2f s after %s",
                earliest - now,
                type(failure).__name__,
            )
        await trio.sleep_until(earliest)
        for followed in concerned:
            if not followed.over.is_set() and not followed.may_try(trio.current_time()):
                self._end(followed, failure=failure)

    # --- one feed -----------------------------------------------------------------------------

    async def _read_one(self) -> None:
        """Open one feed and read it until it ends, idles out or has to be opened anew."""
        claimed = self._all()
        for followed in claimed:
            followed.asked = True
        body = dump_json({"leases": [followed.claim() for followed in claimed]})
        sent_at = trio.current_time()
        request_sec = max(followed.request_sec for followed in claimed)
        self._left_behind = False
        self._opened_at = None
        self._stream_scope = trio.CancelScope(deadline=sent_at + self._patience_sec(claimed))
        try:
            with self._stream_scope:
                async with (
                    self._wire.stream(FEED_PATH, body, read_timeout_sec=request_sec) as answer,
                    aclosing(_lines(answer.data)) as lines,
                ):
                    _check_status(answer.status_code)
                    self._greet(await anext(lines, b""), claimed, sent_at)
                    async with background_tasks(self._renew, self._watch):
                        await self._take_lines(lines)
        except httpx.StreamError:  # a transport that reads answers to their end
            raise _FeedUnusableError("it was not streamed") from None
        finally:
            was_open = self.token is not None
            self.token = None
            self._opened.set()
            self._opened = trio.Event()
            for followed in self._followed.values():
                followed.attached = False
                self._missing[followed] = None
        if self._stream_scope.cancelled_caught and not was_open:
            if self._has_worked:
                raise httpx.ReadTimeout("the feed did not open in time")
            raise _FeedUnusableError("no first line came")

    def _patience_sec(self, claimed: list[Followed]) -> float:
        """Return how long the first line may take.

        Where feeds have worked, as long as a poll may. Before, no longer than leaves time
        enough to poll instead.
        """
        if self._has_worked:
            return max(followed.request_sec for followed in claimed)
        return min(_HELLO_SEC, *(followed.lease_sec / 2 for followed in claimed))

    def _greet(self, first: bytes, claimed: list[Followed], sent_at: float) -> None:
        hello = _object(first) or {}
        token, refused = hello.get("feed"), hello.get("refused")
        if not isinstance(token, str) or not isinstance(refused, list):
            raise _FeedUnusableError("its first line is not that of a feed")
        unknown = {rollout_id for rollout_id in refused if isinstance(rollout_id, str)}
        self.token, self._has_worked = token, True
        self._refusals = 0
        self._opened_at = trio.current_time()
        self._stream_scope.deadline = math.inf
        self._opened.set()
        for followed in claimed:
            if followed.rollout_id in unknown:
                # A poll of its own says what is wrong with it.
                if not followed.over.is_set():
                    self._end(followed)
            elif self._followed.get(followed.rollout_id) is followed:
                followed.attached = True
                followed.opened(sent_at)
                self._missing.pop(followed, None)
            else:  # nobody follows it any longer
                self._left_behind = True

    async def _take_lines(self, lines: AsyncGenerator[bytes, None]) -> None:
        async for line in lines:
            if line.strip():  # else it is a heartbeat
                self._take_line(line)
        if self._followed:
            raise httpx.RemoteProtocolError("the server ended the feed")

    def _take_line(self, line: bytes) -> None:
        value = _object(line)
        if value is None:
            raise _FeedUnusableError("a line is not a JSON object")
        if "rollout_id" not in value:
            self._take_notice(value)
            return
        try:
            result = structure(value, RolloutResultResponse)
        except InvalidBodyError:
            raise _FeedUnusableError("a line is not a result") from None
        if result.status is RolloutStatus.UNKNOWN:
            raise _FeedUnusableError("a line has status 'unknown'")
        self._short_lives, self._opened_at = 0, None
        for expectation in self._expected.get(result.rollout_id, ()):
            expectation.record(result, self.token)
        followed = self._followed.get(result.rollout_id)
        if followed is None or not followed.attached:
            return
        merged = followed.poller.take(result)
        if is_terminal(merged.status):
            followed.poller.body = line
            followed.attached = False  # the server has let it go
            self._end(followed, result=merged)

    def _take_notice(self, value: dict[str, Any]) -> None:
        """Handle a line that is not a result; unknown ones are of later versions, and ignored."""
        taken_over = value.get("taken_over")
        for rollout_id in taken_over if isinstance(taken_over, list) else ():
            followed = self._followed.get(rollout_id) if isinstance(rollout_id, str) else None
            if followed is not None and followed.attached:
                # Whoever else holds its lease follows it through a feed, so here it is polled.
                followed.attached = False
                self._end(followed)

    async def _watch(self) -> None:
        """End the feed when it misses somebody, or when nobody has been there for a while."""
        while not self._missing:
            joined = self._joined
            missed = self._missed
            with trio.move_on_after(_IDLE_SEC):
                await missed.wait()
            if not self._followed and self._joined == joined:
                break
        self._stream_scope.cancel()

    async def _renew(self) -> None:
        """Renew all leases, as often as a poll would."""
        while True:
            await trio.sleep(max(self._renewal_sec, _SHORTEST_RENEWAL_SEC))
            if self._left_behind:
                self._stream_scope.cancel()
                return
            held = [followed for followed in self._followed.values() if followed.attached]
            sent_at = trio.current_time()
            await self._renew_once()
            for followed in held:
                followed.renewed(sent_at)

    async def _renew_once(self) -> None:
        try:
            with trio.fail_after(RESULT_READ_GRACE_SEC):
                answer = await self._wire.post(RENEW_PATH, dump_json({"feed": self.token}))
        except (httpx.TransportError, RolloutProtocolError, trio.TooSlowError) as error:
            # Opening a feed renews just as well, and has rules for failures.
            what = f"POST {RENEW_PATH} failed: {type(error).__name__}"
            raise httpx.RemoteProtocolError(what) from error
        if answer.status_code != httpx.codes.OK or "renewed" not in (_object(answer.content) or {}):
            raise httpx.RemoteProtocolError(f"POST {RENEW_PATH} answered {answer.status_code}")


def _check_status(status: int) -> None:
    if status in GATEWAY_STATUS_CODES:
        raise RolloutProtocolError(f"POST {FEED_PATH} answered {status}", status_code=status)
    if status != httpx.codes.OK:
        raise _FeedUnusableError(f"POST {FEED_PATH} answered {status}")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line)
    except InvalidBodyError:
        return None
    return value if isinstance(value, dict) else None


async def _lines(data: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Cut a stream of bytes into lines; what follows the last line break is dropped."""
    rest = bytearray()
    async for piece in data:
        first, *more = piece.split(b"\n")
        rest += first
        for following in more:
            yield bytes(rest)
            rest = bytearray(following)
        if len(rest) > _LONGEST_LINE:
            raise _FeedUnusableError("a line is too long")
