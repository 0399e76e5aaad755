"""The rollouts of one server process: executions, leases, retention, cancellation.

Theory of operation: every admitted rollout has an `Entry` around the pure
`rollout.rules.RolloutRecord`. Its execution is a task in the registry's own nursery, started
at admission, so no request and no disconnect has a hold on it. Whatever changes an entry does
so without awaiting, hence a handler that is cancelled at any checkpoint leaves it whole.
Polls wait for the entry's `changed` event.

With a state, an admission, the start of an agent and an end are put in a journal, and what
follows from them (the execution, the agent, an answer) waits until they are kept. A result that
is kept need not stay in memory: its entry leaves it once the result was fetched, and is made
anew for a poll that comes later.
"""

from __future__ import annotations

import contextvars
import hmac
import itertools
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from datetime import datetime
from functools import partial

import trio
from attrs import evolve

from rollout._logs import get_logger
from rollout._telemetry import names
from rollout._telemetry.tracing import RolloutTrace
from rollout.artifacts import ArtifactStore
from rollout.backend.base import ExecutionBackend
from rollout.backend.usercode import UserCall
from rollout.errors import (
    AdmissionsClosedError,
    DuplicateRolloutError,
    FieldProblem,
    InvalidBodyError,
    InvalidLeaseError,
    RolloutCapacityError,
    RolloutServerError,
    StateUnavailableError,
    UnknownRolloutError,
)
from rollout.gateway import ModelGateway
from rollout.rules import PollingLease, RolloutRecord, SeenState
from rollout.rules.status import TERMINAL_STATUSES
from rollout.server.admission_keys import cancelled_digest, lease_token, request_digest
from rollout.server.deadlines import Deadlines
from rollout.server.entry import (
    Entry,
    RegistryHooks,
    check_times,
    crash_result,
    log_failure,
    token_digest,
)
from rollout.server.execution import run_backend
from rollout.server.results import encode
from rollout.server.state import Journal, KeptRollout, StateStore, ended_by_restart
from rollout.types import (
    DURABLE_RESULTS,
    EXTENSIONS,
    RolloutInitRequest,
    RolloutLifecycle,
    RolloutResultResponse,
    RolloutStatus,
)
from rollout.types._fields import url_host

__all__ = ["RolloutRegistry"]

logger = get_logger(__name__)

_TOKEN_BYTES = 32
_TICKS_PER_LEASE = 120
_SEC_BETWEEN_POLLS = 5.0
_DISPOSITIONS = frozenset({"cancelled_queued", "cancelled_running"})


class RolloutRegistry:
    """Admits, executes, reports, cancels, expires and forgets rollouts.

    Args:
        backend: Where they run.
        result_wait_timeout_sec: How long a poll is held, in seconds.
        polling_lease_timeout_sec: How long a rollout outlives the silence of its caller.
        result_retention_sec: How long a terminal result stays readable; that of a rollout with
            an admission key for at least the length of a lease, in which its caller may still
            send the admission again.
        secret: What lease tokens are derived with from admission keys; random by default.

    Attributes:
        accepting: Whether admissions are open.
        chat_hosts: The hosts, or ``host:port``, that chat URLs may name; ``None`` for any.
        files: Where the files of rollouts are kept whose backend keeps none; ``None``: nowhere.
        gateway: What the agents of rollouts call their model through; ``None``: its own endpoint.
        hands_limits_on: Whether the backend hands requests with limits on to such servers.
        hooks: Observers and a wall clock, both replaceable before the first admission.
        on_release: Called when no poll is held any longer.
        store: What keeps rollouts beyond the process; ``None`` keeps nothing. May be set before
            `running`.
        secret: As above; with a state the one in it.

    Raises:
        InvalidFieldError: A time is not finite or too small, or the lease does not exceed the
            wait.
    """

    def __init__(
        self,
        *,
        backend: ExecutionBackend,
        result_wait_timeout_sec: float,
        polling_lease_timeout_sec: float,
        result_retention_sec: float,
        secret: bytes | None = None,
    ) -> None:
        check_times(result_wait_timeout_sec, polling_lease_timeout_sec, result_retention_sec)
        self.backend = backend
        self.result_wait_timeout_sec = float(result_wait_timeout_sec)
        self.polling_lease_timeout_sec = float(polling_lease_timeout_sec)
        self.result_retention_sec = float(result_retention_sec)
        self.secret = secret or secrets.token_bytes(_TOKEN_BYTES)
        self.accepting = False
        self.chat_hosts: frozenset[str] | None = None
        self.files: ArtifactStore | None = None
        self.gateway: ModelGateway | None = None
        self.hands_limits_on = False
        self.hooks = RegistryHooks()
        self.on_release: list[Callable[[], None]] = []
        self.store: StateStore | None = None
        self._journal: Journal | None = None
        self._numbers = itertools.count(1)
        self._entries: dict[str, Entry] = {}
        self._active = 0
        self._idle = trio.Event()
        self._delivered = trio.Event()
        tick_sec = self.polling_lease_timeout_sec / _TICKS_PER_LEASE
        self._deadlines = Deadlines(tick_sec, self._due)
        self._clock = self._deadlines.clock
        self._nursery: trio.Nursery | None = None
        self._context = contextvars.Context()
        self._polls_closed = False

    # --- lifetime -----------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Run executions for the length of the block; cancel those that are left at its end.

        Raises:
            RolloutServerError: The state cannot be used.
        """
        async with self._kept(), trio.open_nursery() as nursery:
            self._nursery = nursery
            self._context = contextvars.copy_context()
            nursery.start_soon(self._deadlines.watch)
            if self._journal is not None:
                nursery.start_soon(self._journal.run)
            self.accepting = True
            try:
                yield
            finally:
                self.accepting = False
                self._nursery = None
                self.release_polls()
                nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def _kept(self) -> AsyncGenerator[None, None]:
        """Use the state for the length of the block, and end what was in flight in it."""
        store = self.store
        if store is None:
            yield
            return
        restored = await store.open()
        try:
            self.secret = restored.secret
            self._numbers = itertools.count(restored.next_number)
            # Serving time goes on where it stood: what is kept has not aged meanwhile.
            self._clock.stalled_sec = trio.current_time() - restored.time
            until = restored.time + max(self.result_retention_sec, self.polling_lease_timeout_sec)
            ended = [ended_by_restart(row, until) for row in restored.in_flight]
            if ended:
                try:
                    await store.commit(ended, restored.time)
                except StateUnavailableError as error:
                    raise RolloutServerError(str(error)) from error
                logger.warning("%d rollout(s) were in flight when the last server died", len(ended))
            self._journal = Journal(store, self._serving_time)
            yield
        finally:
            with trio.CancelScope(shield=True):
                if self._journal is not None:
                    await self._journal.close()
                await store.close()

    def _serving_time(self) -> float:
        return self._clock.time(trio.current_time())

    @property
    def extensions(self) -> tuple[str, ...]:
        """What is announced beyond the protocol."""
        return EXTENSIONS if self.store is None else (*EXTENSIONS, DURABLE_RESULTS)

    @property
    def trouble(self) -> str | None:
        """Why the state keeps nothing at the moment; ``None`` while it does, and without one."""
        return None if self._journal is None else self._journal.trouble

    @property
    def commits(self) -> Mapping[str, int]:
        """How many commits of the state there were, by ``kept`` and ``failed``."""
        return {} if self._journal is None else self._journal.commits

    @property
    def serving(self) -> bool:
        """Whether polls are held and feeds are opened: from the start until polls are released."""
        return self._nursery is not None and not self._polls_closed

    def release_polls(self) -> None:
        """Answer every waiting poll with the current state, and hold no further one."""
        self._polls_closed = True
        for released in self.on_release:
            released()
        for entry in self._entries.values():
            entry.notify()

    @property
    def lifecycle(self) -> RolloutLifecycle:
        """Whether admissions are open, and how many rollouts are not final yet."""
        accepting = self.accepting and self.trouble is None
        return RolloutLifecycle(accepting_rollouts=accepting, active_rollouts=self._active)

    @property
    def active_ids(self) -> list[str]:
        """The ids of the rollouts whose execution has not ended."""
        return [entry.rollout_id for entry in self._entries.values() if entry.executing]

    async def wait_idle(self) -> None:
        """Return once no execution is left. Cancelling this leaves them alone."""
        while self._active:
            await self._idle.wait()
        await trio.lowlevel.checkpoint()

    async def wait_delivered(self) -> None:
        """Return once every caller that still polls has been given its terminal result.

        A caller counts as polling for a few seconds after its last poll, which is the time
        that it may take to come back with the next one.
        """
        while awaited := self.awaited():
            with trio.move_on_at(max(awaited.values())):
                await self._delivered.wait()
        await trio.lowlevel.checkpoint()

    def awaited(self) -> dict[str, float]:
        """Return the results that callers have yet to fetch: until when to wait for each, by id."""
        now = trio.current_time()
        until = {
            entry.rollout_id: math.inf
            if entry.feed is not None
            else entry.polled_at + _SEC_BETWEEN_POLLS
            for entry in self._entries.values()
            if entry.concluded and not entry.record.delivered
        }
        return {rollout_id: at for rollout_id, at in until.items() if at > now}

    # --- admission ----------------------------------------------------------------------------

    @property
    def takes_limits(self) -> bool:
        """Whether requests may name limits of the model calls."""
        return self.gateway is not None or self.hands_limits_on

    def admit(
        self,
        request: RolloutInitRequest,
        *,
        now: float | None = None,
        traceparent: str | None = None,
    ) -> tuple[Entry, str]:
        """Admit a rollout and start its execution, all in one step.

        A request with an admission key that was admitted before is answered as it was then,
        and renews the lease.

        With a state, the execution starts when the admission is kept, whatever becomes of the
        caller. Nobody may be told before that: wait for `settled`, then look at the entry's
        `refusal`.

        Args:
            request: The rollout.
            now: When its lease starts (trio time), if not at this moment. Rollouts that are
                admitted together share one, so that their leases end together.
            traceparent: The span of its caller, as W3C writes it.

        Returns:
            The entry, and the polling lease token, which is not kept.

        Raises:
            AdmissionsClosedError: The server is shutting down or has not started.
            StateUnavailableError: The state cannot keep it now.
            InvalidBodyError: Its chat endpoint is on a host that is not allowed here.
            DuplicateRolloutError: The id is active or retained, with another key or request.
            RolloutCapacityError: The backend has no place for it.
        """
        now = trio.current_time() if now is None else now
        if request.admission_key is None:
            token, digest = secrets.token_urlsafe(_TOKEN_BYTES), None
        else:
            token = lease_token(self.secret, request.rollout_id, request.admission_key)
            digest = request_digest(self.secret, request)
        before = self._entries.get(request.rollout_id)
        if before is not None and self._repeats(request, digest, before):
            self.renew(before, now)
            before.record.reported = SeenState()  # as the answer says once more
            return before, token
        nursery = self._nursery
        if not self.accepting or nursery is None:
            raise AdmissionsClosedError("the rollout server is not accepting rollouts")
        self._check_chat_host(request)
        if request.limits is not None and not self.takes_limits:
            msg = "need a model gateway, which this server does not have"
            raise InvalidBodyError([FieldProblem(("limits",), msg, "not_allowed")])
        if before is not None:
            raise DuplicateRolloutError("rollout_id is active, or its result is still retained")
        journal = self._journal
        if journal is not None and journal.trouble is not None:
            raise StateUnavailableError(journal.trouble)
        if not self._reserve(request):
            raise RolloutCapacityError("the rollout queue is full; retry later")
        lease = PollingLease.starting(self._clock.time(now), self.polling_lease_timeout_sec)
        entry = Entry(
            request=request,
            record=RolloutRecord(request.rollout_id, lease),
            token_digest=token_digest(token),
            request_digest=digest,
            call=UserCall(request.rollout_id, "backend"),
            polled_at=now,  # its caller is there, and about to poll
            clock=self._clock,
            hooks=self.hooks,
            journal=journal,
            confirmed=not request.confirm_start,
            traceparent=traceparent,
        )
        self._entries[request.rollout_id] = entry
        self._active += 1
        if journal is None:
            self._begin(entry, nursery)
        else:
            entry.number = next(self._numbers)
            entry.pending = True
            journal.put(entry.row(), partial(self._admitted, entry), once=True)
        return entry, token

    def _repeats(self, request: RolloutInitRequest, digest: bytes | None, before: Entry) -> bool:
        """Whether a request is the one that was admitted, or cancelled before it arrived."""
        kept, key = before.request_digest, request.admission_key
        if kept is None or digest is None or key is None:
            return False
        cancelled = cancelled_digest(self.secret, request.rollout_id, key)
        return hmac.compare_digest(kept, digest) or hmac.compare_digest(kept, cancelled)

    async def settled(self) -> None:
        """Wait until it is known of all admissions and cancellations whether they are kept."""
        if self._journal is not None:
            await self._journal.flushed()

    def _begin(self, entry: Entry, nursery: trio.Nursery) -> None:
        self._deadlines.add(entry.record.lease.deadline, entry)
        if entry.request is not None:
            known = {names.CONVERSATION_ID: entry.rollout_id, names.RUN: entry.request.run}
            agent = self.backend.application
            entry.trace = RolloutTrace.begin(agent, known, entry.traceparent)
        entry.emit("admitted")
        # A fresh copy of the registry's own context: that of the request would live as long
        # as the rollout does, with the request's body in it.
        self._context.copy().run(nursery.start_soon, self._execute, entry)

    def _admitted(self, entry: Entry, error: Exception | None) -> None:
        """Start the execution of a rollout whose admission is kept, or undo its admission."""
        if error is None:
            entry.pending = False
            self._entries[entry.rollout_id] = entry
            if self._nursery is not None and not entry.concluded:
                self._begin(entry, self._nursery)
                return
        else:
            entry.refusal = error
            if self._entries.get(entry.rollout_id) is entry:
                del self._entries[entry.rollout_id]
            self._leave()
        entry.executing = False
        self._release(entry)
        entry.request = None

    def _check_chat_host(self, request: RolloutInitRequest) -> None:
        if self.chat_hosts is None:
            return
        host, port = url_host(request.chat_completions_url) or ("", 0)
        if host not in self.chat_hosts and f"{host}:{port}" not in self.chat_hosts:
            msg = "names a host that this server does not allow"
            raise InvalidBodyError([FieldProblem(("chat_completions_url",), msg, "not_allowed")])

    def _reserve(self, request: RolloutInitRequest) -> bool:
        try:
            return bool(self.backend.reserve(request.rollout_id))
        except Exception as error:  # noqa: BLE001 - a backend is not ours
            log_failure(request.rollout_id, "reserve", error, request.secrets)
            raise AdmissionsClosedError(
                "the execution backend failed to take the rollout"
            ) from None

    # --- execution ----------------------------------------------------------------------------

    async def _execute(self, entry: Entry) -> None:
        entry.emit("execution-started")
        try:
            if entry.request is not None:
                with nullcontext() if entry.trace is None else entry.trace.current():
                    await run_backend(self.backend, entry, entry.request, self.gateway, self.files)
        finally:
            entry.executing = False
            self._release(entry)
            entry.request = entry.context = None
            self._end(entry, "cancelled")
            entry.emit("execution-ended")
            if entry.record.result is not None:
                self._leave()
            self._unload(entry)

    def _leave(self) -> None:
        """Note that one of the active rollouts is over."""
        self._active -= 1
        if not self._active:
            self._idle.set()
            self._idle = trio.Event()

    def _release(self, entry: Entry) -> None:
        try:
            self.backend.release(entry.rollout_id)
        except Exception as error:  # noqa: BLE001 - a backend is not ours
            log_failure(entry.rollout_id, "release", error, entry.secrets)

    def _end(self, entry: Entry, message: str) -> None:
        """Publish the end of a rollout: as it was settled, else as cancelled."""
        if entry.concluded:
            self._forget_if_over(entry)
            return
        cancelled = RolloutResultResponse(
            rollout_id=entry.rollout_id, status=RolloutStatus.CANCELLED, err_message=message
        )
        self._conclude(entry, cancelled)

    def _conclude(self, entry: Entry, result: RolloutResultResponse) -> None:
        """Decide the end of a rollout, unless that is settled, and publish it once it is kept."""
        time = self._serving_time()
        end = entry.record.settle(result, time)
        try:
            entry.body = entry.body or encode(end)
        except Exception as error:  # noqa: BLE001 - no result may take the server down
            log_failure(entry.rollout_id, "result", error, entry.secrets)
            end = evolve(
                crash_result(entry.rollout_id), agent_started_at=entry.record.agent_started_at
            )
            entry.record.settled = end
            entry.body = encode(end)
        entry.concluded = True
        retention_sec = self.result_retention_sec
        if entry.request_digest is not None:
            retention_sec = max(retention_sec, entry.record.lease.timeout_sec)
        entry.retained_until = time + retention_sec
        if entry.journal is None:
            self._published(entry)
        else:
            entry.journal.put(entry.row(), partial(self._end_kept, entry))

    def _end_kept(self, entry: Entry, error: Exception | None) -> None:
        """Publish an end that is kept, or that cannot be kept now."""
        entry.stored = error is None
        if entry.record.result is None and entry.refusal is None:
            self._published(entry)
            if not entry.executing:
                self._leave()
        self._unload(entry)

    def _published(self, entry: Entry) -> None:
        record = entry.record
        record.finish(record.end or crash_result(entry.rollout_id), self._serving_time())
        until = entry.retained_until
        if entry.journal is not None:  # it leaves the memory before
            until = min(until, self._serving_time() + record.lease.timeout_sec)
        self._deadlines.add(until, entry)
        entry.emit("finished")
        if record.result is not None:
            record.result.sample = None  # the bytes are all that is needed of it from here on
        entry.notify()
        logger.debug("rollout %s: %s", entry.rollout_id, record.status)

    def abandon(self) -> list[str]:
        """Publish an end for executions that cannot be stopped; return their ids."""
        stuck = [entry for entry in self._entries.values() if entry.executing]
        for entry in stuck:
            self._end(entry, "the server shut down and the execution did not stop in time")
        return [entry.rollout_id for entry in stuck]

    # --- polls --------------------------------------------------------------------------------

    async def wait_for_result(self, rollout_id: str, token: str, seen: SeenState | None) -> bytes:
        """Answer a poll, once there is something new or the wait is over.

        Args:
            rollout_id: Which rollout.
            token: The lease token; a valid one renews the lease at once.
            seen: What the caller says it has seen; else what was last reported counts.

        Returns:
            The encoded `RolloutResultResponse`.

        Raises:
            UnknownRolloutError: There is no such rollout.
            InvalidLeaseError: The token is not its token; nothing was renewed.
            StateUnavailableError: Its result cannot be read now.

        Cancelling this (a disconnect) changes nothing but the lease, which stays renewed.
        """
        if self._journal is not None and rollout_id in await self.recall({rollout_id: token}):
            raise InvalidLeaseError("invalid polling lease")
        entry = self._leased(rollout_id, token)
        record = entry.record
        self.renew(entry, trio.current_time())
        baseline = seen or record.reported
        await trio.lowlevel.checkpoint()
        if not record.has_news(baseline) and not self._polls_closed:
            with trio.move_on_after(self.result_wait_timeout_sec):
                while not record.has_news(baseline) and not self._polls_closed:
                    await entry.changed.wait()
        self.answered(entry)
        return entry.current_body()

    async def ended(self, rollout_id: str, token: str) -> RolloutResultResponse | None:
        """Return the result of a rollout, for who proves its lease; nothing is renewed.

        Returns:
            The result, without its sample if it was kept; ``None`` if its execution has not ended.

        Raises:
            UnknownRolloutError: There is no such rollout.
            InvalidLeaseError: The token is not its token.
            StateUnavailableError: Its result cannot be read now.
        """
        absent = self._absent(rollout_id)
        if self._journal is not None and rollout_id in await self.recall({rollout_id: token}):
            raise InvalidLeaseError("invalid polling lease")
        entry = self._leased(rollout_id, token)
        if absent:
            self._unload(entry, fetched=False)
        return None if entry.executing else entry.record.result

    def _leased(self, rollout_id: str, token: str) -> Entry:
        """Return an entry for who proves its lease.

        Raises:
            UnknownRolloutError: There is no such rollout.
            InvalidLeaseError: The token is not its token.
        """
        entry = self._entries.get(rollout_id)
        if entry is None:
            raise UnknownRolloutError("unknown rollout_id")
        if not hmac.compare_digest(entry.token_digest, token_digest(token)):
            raise InvalidLeaseError("invalid polling lease")
        return entry

    def confirm_start(self, rollout_id: str, token: str) -> bool:
        """Let the agent of a rollout start that was admitted with ``confirm_start``.

        Nothing is renewed. Asking again changes nothing.

        Returns:
            Whether the agent may start, or might have done so before; ``False`` if it does not
            wait for this, not yet or no longer, and has not been allowed to start.

        Raises:
            UnknownRolloutError: There is no such rollout.
            InvalidLeaseError: The token is not its token.
        """
        return self._leased(rollout_id, token).confirm_start()

    def answered(self, entry: Entry, state: SeenState | None = None) -> None:
        """Note that a state was sent to the holder of the lease: *state*, or the current one."""
        entry.polled_at = max(entry.polled_at, trio.current_time())
        entry.record.answered(state)
        if entry.record.delivered:
            self.recheck_delivery()
            self._unload(entry)

    def recheck_delivery(self) -> None:
        """Wake `wait_delivered` to recheck its callers."""
        self._delivered.set()
        self._delivered = trio.Event()

    def find(self, rollout_id: str) -> Entry | None:
        """Return the entry of a rollout, if it is in memory; for who has the server's key."""
        return self._entries.get(rollout_id)

    def proven(self, rollout_id: str, token: str) -> Entry | None:
        """Return the entry if the token is that of its lease; nothing is renewed."""
        entry = self._entries.get(rollout_id)
        if entry is None or not hmac.compare_digest(entry.token_digest, token_digest(token)):
            return None
        return entry

    def renew(self, entry: Entry, now: float) -> bool:
        """Renew the lease of a rollout from *now* (trio time); ``False`` if it has ended.

        Then the rollout ends as `lease_expired`, if it had not been noticed before. Leases that
        one request renews share one *now*, so that they end together: else the first to end
        would free their slots for those that are about to.
        """
        entry.polled_at = now
        if entry.record.renew(self._clock.time(now)):
            entry.emit("lease-renewed")
            return True
        entry.emit("lease-refused")
        self._expire(entry, now)
        return False

    # --- cancellation -------------------------------------------------------------------------

    def cancel(
        self,
        *,
        ids: Iterable[str] | None = None,
        prefix: str | None = None,
        all_: bool = False,
        admission_keys: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Ask matching executions to stop; return a disposition for each id.

        Their results follow when the cleanup is over. Asking again changes nothing. A rollout
        whose id is in *admission_keys* with another key than its own is left alone.
        """
        if ids is None:
            ids = self.selected(prefix=prefix, all_=all_)
        dispositions: dict[str, str] = {}
        for rollout_id in ids:
            entry = self._entries.get(rollout_id)
            key = None if admission_keys is None else admission_keys.get(rollout_id)
            if entry is None or entry.record.result is not None or not self._has_key(entry, key):
                dispositions[rollout_id] = "not_found"
            else:
                dispositions[rollout_id] = self._request_stop(entry)
        return dispositions

    def _has_key(self, entry: Entry, key: str | None) -> bool:
        """Whether a rollout was admitted with a key; any rollout counts if that is ``None``."""
        if key is None:
            return True
        token = lease_token(self.secret, entry.rollout_id, key)
        return hmac.compare_digest(entry.token_digest, token_digest(token))

    async def cancel_ahead(self, admission_keys: Mapping[str, str]) -> dict[str, str]:
        """Cancel rollouts whose admissions have not arrived: they do not start when they do.

        Args:
            admission_keys: The keys by rollout id. Ids that are known here are left alone, but
                for a rollout with that key that arrives meanwhile.

        For as long as a lease, such an admission is answered as if it had come first, and its
        rollout is cancelled. With a state, a restart changes nothing about it: wait for `settled`
        before you answer.

        Returns:
            A disposition for each id that is not left alone.

        Raises:
            StateUnavailableError: The state cannot be read.
        """
        missing = [name for name in admission_keys if name not in self._entries]
        rows = [] if self.store is None or not missing else await self.store.find(missing)
        now = trio.current_time()
        time = self._clock.time(now)
        until = time + self.polling_lease_timeout_sec
        known = {row.rollout_id for row in rows if row.until is None or row.until > time}
        arrived = [rollout_id for rollout_id in admission_keys if rollout_id in self._entries]
        dispositions = self.cancel(ids=arrived, admission_keys=admission_keys)
        for rollout_id, key in admission_keys.items():
            if rollout_id in known or rollout_id in self._entries or self._nursery is None:
                continue
            result = RolloutResultResponse(
                rollout_id=rollout_id,
                status=RolloutStatus.CANCELLED,
                err_message="cancelled before its admission arrived",
            )
            row = KeptRollout(
                number=next(self._numbers),
                rollout_id=rollout_id,
                token_digest=token_digest(lease_token(self.secret, rollout_id, key)),
                request_digest=cancelled_digest(self.secret, rollout_id, key),
                status=str(result.status),
                until=until,
                body=encode(result),
            )
            entry = self._load(row, until, now)
            entry.polled_at = -math.inf  # a shutdown waits for nobody to fetch it
            dispositions[rollout_id] = "cancelled_queued"
            if self._journal is not None:
                entry.stored = False
                self._journal.put(row, partial(self._end_kept, entry))
        return dispositions

    def selected(self, *, prefix: str | None, all_: bool) -> list[str]:
        """Return the ids that are selected, those that are queued first.

        Who stops them in this order sees none of them start in a slot that another one leaves.
        """
        found = [
            entry
            for entry in self._entries.values()
            if all_ or (prefix is not None and entry.rollout_id.startswith(prefix))
        ]
        found.sort(key=lambda entry: entry.record.status is not RolloutStatus.QUEUED)
        return [entry.rollout_id for entry in found]

    def stop_all(self, *, force: bool = False) -> None:
        """Ask every execution to stop, also those whose result is out; *force* cancels them."""
        for entry in list(self._entries.values()):
            if entry.executing:
                self._request_stop(entry)
                if force:
                    entry.call.cancel()

    def _request_stop(self, entry: Entry) -> str:
        if entry.disposition is not None:
            return entry.disposition
        entry.emit("stop-requested")
        queued = entry.record.status is RolloutStatus.QUEUED
        entry.disposition = "cancelled_queued" if queued else "cancelled_running"
        if entry.held:  # the backend does not know it yet
            entry.call.cancel()
            return entry.disposition
        try:
            answer = self.backend.cancel_rollouts(ids=[entry.rollout_id]).get(entry.rollout_id)
            if answer == "not_found" and self._ended_in_backend(entry):
                # Its result is on the way; cancelling the delivery would lose it.
                entry.disposition = answer
                return answer
        except Exception as error:  # noqa: BLE001 - a backend is not ours
            log_failure(entry.rollout_id, "cancel_rollouts", error, entry.secrets)
            answer = None
        if isinstance(answer, str) and answer in _DISPOSITIONS:
            entry.disposition = answer
        else:
            entry.call.cancel()
        return entry.disposition

    def _ended_in_backend(self, entry: Entry) -> bool:
        state = self.backend.rollout_status(entry.rollout_id)
        return state is not None and state.get("status") in TERMINAL_STATUSES

    # --- time ---------------------------------------------------------------------------------

    def _due(self, entry: Entry, now: float) -> None:
        """Act on a deadline of an entry: its lease has ended, or its retention is over."""
        lease = entry.record.lease
        if entry.record.result is not None:
            self._forget_if_over(entry)
            self._unload(entry, fetched=False)
            if entry.journal is not None and self._entries.get(entry.rollout_id) is entry:
                time = self._clock.time(now) + lease.timeout_sec
                self._deadlines.add(time, entry)  # it is in use still, or cannot be kept now
        elif lease.deadline > self._clock.time(now):
            self._deadlines.add(lease.deadline, entry)  # it was renewed
        else:
            self._expire(entry, now)

    def _expire(self, entry: Entry, now: float) -> None:
        ending = entry.encoding or entry.concluded
        if not ending and entry.record.lease.expired(self._clock.time(now)):
            logger.warning("rollout %s: its polling lease expired", entry.rollout_id)
            self._conclude(entry, entry.record.expiry())
            if entry.executing:
                self._request_stop(entry)

    def _forget_if_over(self, entry: Entry) -> None:
        over = entry.retained_until <= self._clock.time(trio.current_time())
        if over and not entry.executing and self._entries.get(entry.rollout_id) is entry:
            del self._entries[entry.rollout_id]
            entry.emit("forgotten")

    # --- memory -------------------------------------------------------------------------------

    def _unload(self, entry: Entry, *, fetched: bool = True) -> None:
        """Drop an entry whose end is kept, from memory alone.

        Args:
            entry: The entry.
            fetched: Whether its caller has to have its result already.
        """
        if (
            entry.stored
            and not entry.executing
            and entry.feed is None
            and (entry.record.delivered or not fetched)
            and self._entries.get(entry.rollout_id) is entry
        ):
            del self._entries[entry.rollout_id]

    async def recall(self, tokens: Mapping[str, str]) -> set[str]:
        """Read results that are kept but not in memory, for who proves their leases.

        Args:
            tokens: The lease tokens by rollout id.

        Returns:
            The ids of those that were not read because the token is wrong.

        Raises:
            StateUnavailableError: The state cannot be read.
        """
        wrong: set[str] = set()
        missing = [rollout_id for rollout_id in tokens if self._absent(rollout_id)]
        if self.store is None or not missing:
            return wrong
        rows = await self.store.find(missing)
        now = trio.current_time()
        for row in rows:
            if not self._absent(row.rollout_id):
                continue
            if row.until is None or row.until <= self._clock.time(now):
                continue
            if hmac.compare_digest(row.token_digest, token_digest(tokens[row.rollout_id])):
                self._load(row, row.until, now)
            else:
                wrong.add(row.rollout_id)
        return wrong

    async def recall_admitted(self, request: RolloutInitRequest) -> bool:
        """Say whether a request with an admission key was admitted before; read its result then.

        Raises:
            StateUnavailableError: The state cannot be read.
        """
        if request.admission_key is None:
            return False
        token = lease_token(self.secret, request.rollout_id, request.admission_key)
        await self.recall({request.rollout_id: token})
        entry = self._entries.get(request.rollout_id)
        return entry is not None and entry.stored

    def _absent(self, rollout_id: str) -> bool:
        entry = self._entries.get(rollout_id)
        # One whose admission is not kept yet may turn out to have the id of one that is.
        return entry is None or entry.pending

    def _load(self, row: KeptRollout, until: float, now: float) -> Entry:
        """Make the entry of a result anew, for as long as a lease."""
        lease = PollingLease.starting(self._clock.time(now), self.polling_lease_timeout_sec)
        status = RolloutStatus(row.status or "")
        entry = Entry(
            request=None,
            record=RolloutRecord(row.rollout_id, lease, status),
            token_digest=row.token_digest,
            request_digest=row.request_digest,
            call=UserCall(row.rollout_id, "backend"),
            polled_at=now,
            clock=self._clock,
            hooks=self.hooks,
            journal=self._journal,
            executing=False,
            concluded=True,
            body=row.body,
            retained_until=until,
            stored=self.store is not None,
        )
        at = row.agent_started_at
        entry.record.result = RolloutResultResponse(
            rollout_id=row.rollout_id,
            status=status,
            agent_started_at=None if at is None else datetime.fromisoformat(at),
        )
        self._entries[row.rollout_id] = entry
        self._deadlines.add(min(lease.deadline, until), entry)
        return entry
