"""An admitted rollout on its server: its state, execution and observers."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Protocol

import trio
from attrs import define, field

from rollout._checks import check_number
from rollout._logs import get_logger
from rollout._telemetry import names
from rollout._telemetry.counts import ROLLOUT_SEC, Histogram
from rollout._telemetry.tracing import RolloutTrace
from rollout.backend.failures import format_exception
from rollout.backend.usercode import UserCall
from rollout.codec import format_timestamp
from rollout.context import RolloutContext
from rollout.errors import InvalidFieldError
from rollout.rules import RolloutRecord, ServingClock, is_terminal
from rollout.server.results import encode, encode_state, result_of
from rollout.server.state import Journal, KeptRollout
from rollout.types import (
    ExecutionOutcome,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutResultResponse,
    RolloutStatus,
)

__all__ = [
    "Entry",
    "EntryListener",
    "RegistryHooks",
    "RolloutCounts",
    "check_times",
    "crash_result",
    "log_failure",
    "token_digest",
]

logger = get_logger(__name__)

_COUNTED = frozenset({"admitted", "status", "finished"})
_PHASES = {
    RolloutStatus.QUEUED: "queue",
    RolloutStatus.RUNNING: "agent",
    RolloutStatus.GRADING: "grading",
}


def token_digest(token: str) -> bytes:
    """Return the SHA-256 digest of a lease token; the server keeps no token itself."""
    return hashlib.sha256(token.encode("utf-8", errors="surrogatepass")).digest()


def utc_now() -> datetime:
    """Return the wall-clock time."""
    return datetime.now(UTC)


@define
class RolloutCounts:
    """What a registry has counted since it was made.

    Attributes:
        active: The rollouts that have not ended, by status.
        admissions: The answers to admissions, by HTTP status.
        results: The rollouts that have ended, by status and category of the error, if any.
        queue_sec: The seconds from admissions to the starts of agents.
        run_sec: The seconds from there to the ends.
    """

    active: Counter[RolloutStatus] = field(factory=Counter)
    admissions: Counter[int] = field(factory=Counter)
    results: Counter[tuple[RolloutStatus, RolloutErrorCategory | None]] = field(factory=Counter)
    queue_sec: Histogram = field(factory=lambda: Histogram(ROLLOUT_SEC))
    run_sec: Histogram = field(factory=lambda: Histogram(ROLLOUT_SEC))


@define(kw_only=True)
class RegistryHooks:
    """Hooks of a registry for monitoring and simulation.

    Attributes:
        counts: What is counted.
        wall_clock: The time that `agent_started_at` is taken from; aware.
        observers: Called in order with the name of what has just happened to an entry:
            ``admitted``, ``execution-started``, ``status``, ``agent-started``, ``lease-renewed``,
            ``lease-refused``, ``stop-requested``, ``finished``, ``execution-ended``,
            ``forgotten``. They must return at once, and must not raise.
    """

    counts: RolloutCounts = field(factory=RolloutCounts)
    wall_clock: Callable[[], datetime] = utc_now
    observers: list[Callable[[str, Entry], None]] = field(factory=list)


class EntryListener(Protocol):
    """Follows entries; an entry has one listener at a time."""

    def mark(self, entry: Entry) -> None:
        """Note that an entry has changed."""

    def lose(self, entry: Entry) -> None:
        """Follow an entry no longer: another listener takes it over."""


@define(eq=False)
class Entry:
    """One admitted rollout. It is the `rollout.context.RolloutProgress` of its execution.

    Attributes:
        request: What the caller asked for; dropped once the execution is over.
        record: Its state.
        token_digest: The digest of the lease token; the token itself is not kept.
        request_digest: The keyed digest of a request with an admission key, ``None`` of others.
        call: The call of ``backend.execute``.
        polled_at: When the caller was last heard of (trio time).
        executing: Whether that call has not ended yet.
        changed: Set, and replaced, whenever a poll may have something to report, or the agent
            may start.
        encoding: Whether its end is being encoded, and comes when that is done.
        concluded: Whether its end is decided and encoded; it is published once it is kept.
        body: The encoded terminal result; maybe there a moment before it is published.
        disposition: What the first effective cancel request was answered with.
        retained_until: When the terminal result may be forgotten (serving time).
        clock: The registry's clock of serving time.
        hooks: The registry's hooks.
        feed: The open feed that reports its changes, if there is one.
        journal: Where it is kept beyond the process; ``None`` for a server without a state.
        number: Its number there.
        pending: Whether its admission is not kept yet; nobody has been told of it.
        refusal: Why its admission was not kept after all.
        stored: Whether its end is kept, so that it need not stay in memory.
        confirmed: Whether its caller lets the agent start; not before it says so, for a request
            with ``confirm_start``.
        context: The context of its execution, while that goes on.
        held: Whether the backend is called once the agent may start, and has not been yet.
        counted: As what it is counted among the active ones; ``None`` before and after that.
        traceparent: The span of who asked for it, as W3C writes it.
        trace: Its own span, where the program has OpenTelemetry.
        counted_at: When it was admitted, then when it left the queue (trio time).
    """

    request: RolloutInitRequest | None = field(repr=False)
    record: RolloutRecord
    token_digest: bytes = field(repr=False)
    request_digest: bytes | None = field(repr=False)
    call: UserCall
    polled_at: float
    clock: ServingClock = field(repr=False)
    executing: bool = True
    changed: trio.Event = field(factory=trio.Event, repr=False)
    encoding: bool = False
    concluded: bool = False
    body: bytes | None = field(default=None, repr=False)
    disposition: str | None = None
    retained_until: float = math.inf
    hooks: RegistryHooks = field(factory=RegistryHooks, repr=False)
    feed: EntryListener | None = field(default=None, repr=False)
    journal: Journal | None = field(default=None, repr=False)
    number: int = 0
    pending: bool = False
    refusal: Exception | None = None
    stored: bool = False
    confirmed: bool = True
    context: RolloutContext | None = field(default=None, repr=False)
    held: bool = False
    counted: RolloutStatus | None = None
    counted_at: float = 0.0
    traceparent: str | None = None
    trace: RolloutTrace | None = field(default=None, repr=False)
    _token: trio.lowlevel.TrioToken = field(factory=trio.lowlevel.current_trio_token, repr=False)

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self.record.rollout_id

    @property
    def secrets(self) -> list[str | None]:
        """Strings that must not be logged."""
        return [] if self.request is None else self.request.secrets

    def report_status(self, status: RolloutStatus) -> None:
        """Record a status report of the execution; callable from any thread."""
        self._in_loop(self._advance, RolloutStatus(status))

    def report_agent_started(self, at: datetime | None = None) -> None:
        """Record the agent's start, which makes a queued rollout running; from any thread.

        Args:
            at: When it started; aware. Now by default.
        """
        self._in_loop(self._start_agent, at)

    @property
    def agent_started_at(self) -> datetime | None:
        """When the agent started, as published."""
        return self.record.agent_started_at

    @property
    def start_pending(self) -> bool:
        """Whether the agent may not start yet: its start is not kept, or not confirmed."""
        return not (self.confirmed and self.record.start_kept)

    async def wait_start_kept(self) -> None:
        """Wait until the agent, whose start was reported, may start; in the server's loop."""
        while self.start_pending:
            await self.changed.wait()

    def confirm_start(self) -> bool:
        """Let an agent start that waits for this; return whether its start is confirmed."""
        record = self.record
        waits = record.told_start is not None and record.end is None and self.disposition is None
        if waits and not self.confirmed:
            self.confirmed = True
            self._wake()
        return self.confirmed

    def row(self) -> KeptRollout:
        """Return what is to be kept of it as it stands."""
        record = self.record
        started = record.agent_started_at
        return KeptRollout(
            self.number,
            self.rollout_id,
            self.token_digest,
            self.request_digest,
            None if started is None else format_timestamp(started),
            str(record.end.status) if self.concluded and record.end is not None else None,
            self.retained_until if self.concluded else None,
            self.body if self.concluded else None,
        )

    def settle(self, outcome: ExecutionOutcome) -> RolloutResultResponse:
        """Decide that the rollout ends with *outcome*, unless its end is decided already.

        The end is encoded, too. May be called in a thread that trio started, which then does
        the slow parts.
        """
        result, encoded = self.record.end, None
        if result is None:
            try:
                result = result_of(self.rollout_id, outcome, secrets=self.secrets)
                encoded = getattr(outcome, "encoded", None)
            except Exception as error:  # noqa: BLE001 - a sample may hold anything
                log_failure(self.rollout_id, "result", error, self.secrets)
                result = crash_result(self.rollout_id)
        if self._in_its_loop:
            decided = self._decide(result)
        else:
            decided = trio.from_thread.run_sync(self._decide, result)
        if (decided.status, decided.err_category) != (result.status, result.err_category):
            encoded = None  # its lease had ended before
        if self.body is None:
            with suppress(Exception):  # whoever publishes the result meets it again, and logs it
                self.body = encoded or encode(decided)
        return decided

    def _decide(self, result: RolloutResultResponse) -> RolloutResultResponse:
        return self.record.settle(result, self.clock.time(trio.current_time()))

    @property
    def _in_its_loop(self) -> bool:
        try:
            return trio.lowlevel.current_trio_token() is self._token
        except RuntimeError:  # not in a trio loop
            return False

    def _in_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the server's loop: at once, or scheduled from another thread.

        What a thread reports is taken before its end, since both go the same way.
        """
        if self._in_its_loop:
            function(*args)
        else:
            self._token.run_sync_soon(function, *args)

    def _advance(self, status: RolloutStatus) -> None:
        if self.record.advance(status):
            self.emit("status")
            self.notify()

    def _start_agent(self, at: datetime | None) -> None:
        started = self.record.mark_agent_started(at or self.hooks.wall_clock())
        if started and self.journal is not None:
            self.record.start_kept = False
            self.journal.put(self.row(), self._keep_start)
        elif self.record.start_kept:
            self._publish_start(started)

    def _keep_start(self, error: Exception | None) -> None:
        if error is None and not self.record.start_kept:
            self.record.start_kept = True
            self._publish_start(started=True)

    def _publish_start(self, started: bool) -> None:
        advanced = self.record.advance(RolloutStatus.RUNNING)
        if started:
            self.emit("agent-started")
        if advanced:
            self.emit("status")
        if advanced or started:
            self.notify()

    def emit(self, what: str) -> None:
        """Count an event, and call the observers with its name."""
        if what in _COUNTED:
            self._count()
            if self.trace is not None:
                self._follow(self.trace)
        for observe in self.hooks.observers:
            observe(what, self)

    def _count(self) -> None:
        """Count it as what it is now."""
        counts, before, now = self.hooks.counts, self.counted, trio.current_time()
        status, result = self.record.status, self.record.result
        if before is None:
            self.counted_at = now
        else:
            counts.active[before] -= 1
        if before is RolloutStatus.QUEUED and not is_terminal(status):
            counts.queue_sec.add(now - self.counted_at)
            self.counted_at = now
        self.counted = None if is_terminal(status) else status
        if self.counted is not None:
            counts.active[status] += 1
        elif result is not None:
            counts.results[status, result.err_category] += 1
            if before not in {None, RolloutStatus.QUEUED}:
                counts.run_sec.add(now - self.counted_at)

    def _follow(self, trace: RolloutTrace) -> None:
        """Have its trace in the phase in which it is now."""
        result = self.record.result
        if result is None:
            trace.enter(_PHASES[self.record.status])
            return
        sample, category = result.sample, result.err_category
        metrics = {} if sample is None else sample.metrics
        reward = None if sample is None else sample.reward
        trace.end(
            {
                names.STATUS: str(result.status),
                names.INPUT_TOKENS: metrics.get("prompt_tokens"),
                names.OUTPUT_TOKENS: metrics.get("completion_tokens"),
            },
            error=None if category is None else str(category),
            scores={} if reward is None else {"reward": reward},
        )

    def notify(self) -> None:
        """Wake waiting polls, and mark the entry in its feed."""
        self._wake()
        if self.feed is not None:
            self.feed.mark(self)

    def _wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def current_body(self) -> bytes:
        """Return the encoded response for the current state."""
        record = self.record
        if record.result is not None and self.body is not None:
            return self.body
        return encode_state(record.rollout_id, record.status, record.told_start)


def crash_result(rollout_id: str) -> RolloutResultResponse:
    """Return the result of a rollout whose end the server failed to produce."""
    return RolloutResultResponse(
        rollout_id=rollout_id,
        status=RolloutStatus.FAILURE,
        err_message="the server failed to finish this rollout",
        err_category=RolloutErrorCategory.INTERNAL_ERROR,
    )


def log_failure(
    rollout_id: str, what: str, error: BaseException, secrets: Sequence[str | None]
) -> None:
    """Log an error of the backend without the rollout's secrets."""
    if logger.isEnabledFor(logging.ERROR):
        logger.error(
            "rollout %s: the backend's %s failed\n%s",
            rollout_id,
            what,
            format_exception(error, secrets),
        )


def check_times(wait: float, lease: float, retention: float) -> None:
    """Check the three times of a server.

    Raises:
        InvalidFieldError: One is not finite or too small, or the lease does not exceed the wait.
    """
    check_number("result_wait_timeout_sec", wait, above=0)
    check_number("polling_lease_timeout_sec", lease, above=0)
    check_number("result_retention_sec", retention, least=0)
    if lease <= wait:
        raise InvalidFieldError("polling_lease_timeout_sec", "must exceed result_wait_timeout_sec")
