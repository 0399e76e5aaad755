"""One worker as the front sees it: its client, its health, and the rollouts that it has.

Theory of operation: each rollout that is handed to a worker is an `Attempt`. Its agent starts on
the worker only once the front has confirmed the start, and the front decides that in one step, in
`Attempt.hear`, unless the attempt has been given up before. So of all attempts of a rollout one at
most is ever confirmed, and an attempt that is not confirmed can be given up whatever has become of
its worker. A worker has three tasks, whatever the number of its rollouts: one sends confirmations
and cancel requests, as many in one request as there are, one sends the state of the policy, and one
asks for the health.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol
from urllib.parse import quote

import httpx
import trio
from attrs import define, evolve, field, frozen

from rollout._checks import check_api_key, is_whole_from_one
from rollout._logs import get_logger, printable
from rollout._redaction import public_url
from rollout._tasks import background_tasks
from rollout.client.admission import Progress
from rollout.client.answers import Admitted
from rollout.client.client import RolloutClient
from rollout.client.http import check_url, own_http_client
from rollout.client.polling import Poller
from rollout.context import RolloutContext
from rollout.errors import InvalidFieldError, RolloutError, RolloutProtocolError
from rollout.rules import is_terminal
from rollout.rules.retry import GATEWAY_STATUS_CODES
from rollout.types import (
    DURABLE_RESULTS,
    CancelRolloutsRequest,
    RolloutInitRequest,
    RolloutResultResponse,
    RolloutStatus,
)

__all__ = ["Attempt", "Host", "WantedPolicy", "Worker", "WorkerAddress", "make_client"]

logger = get_logger(__name__)

UNIX = "unix:"
HEALTH_SEC = 1.0
"""How long between two looks at the health of a worker."""

SUSPECT_SEC = 10.0
"""A worker that has not answered for so long gives up what has not started."""

DEAD_SEC = 2.0
"""A worker at whose address nobody has listened for so long is dead, whatever it had with it."""

_REQUEST_SEC = 5.0
"""How long a worker may take for a confirmation, a cancel request or its health."""

_SOON_SEC = 0.1
"""How long until the first look at a worker that did not answer; the next ones come later."""

_LIVE_SEC = 30.0
"""How long the stream of a conversation may be silent."""

_RESEND_SEC = 0.5
_CLOSE_SEC = 2.0
_MOST_AT_ONCE = 4096
"""How many confirmations or cancels go into one request."""


def _url(_: Any, __: Any, value: Any) -> None:
    if not isinstance(value, str):
        raise InvalidFieldError("url", "must be a string", kind="type_error")
    if not value.startswith(UNIX):
        check_url(value)
    elif value == UNIX:
        raise InvalidFieldError("url", "must name a path after unix:")


def _name(_: Any, __: Any, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidFieldError("name", "must be a string that is not empty")


def _key(_: Any, __: Any, value: Any) -> None:
    check_api_key(value)


@frozen
class WorkerAddress:
    """Where a worker listens.

    Attributes:
        name: What logs, health and messages call it; no two workers of a pool share one.
        url: ``http://host:port``, ``https://host:port`` or ``unix:/path``.
        api_key: The worker's key; hidden from `repr`.

    Raises:
        InvalidFieldError: One of them cannot be used.
    """

    name: str = field(validator=_name)
    url: str = field(validator=_url, repr=public_url)
    api_key: str | None = field(default=None, validator=_key, repr=False)


def make_client(address: WorkerAddress) -> RolloutClient:
    """Make the client of a worker, which leaves its HTTP client to be closed by the caller."""
    url, path = address.url, None
    if url.startswith(UNIX):
        url, path = "http://localhost", url.removeprefix(UNIX)
    http = own_http_client(url, unix_path=path)
    return RolloutClient(url=url, http_client=http, api_key=address.api_key)


@define(eq=False)
class Attempt(Progress):
    """A rollout on one worker.

    Attributes:
        worker: Where.
        scope: Ends it on the front's side.
        context: The rollout as the front knows it.
        request: What the worker is asked for, once that is sent.
        confirmed: Whether the start of its agent is confirmed, or about to be.
        given_up: Why it cannot go on there; ``None`` while it can.
    """

    worker: Worker = field(kw_only=True)
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    context: RolloutContext = field(factory=RolloutContext)
    request: RolloutInitRequest | None = None
    confirmed: bool = False
    given_up: str | None = None

    def give_up(self, reason: str) -> None:
        """End it on the front's side: its worker cannot go on with it."""
        self.given_up = reason
        self.scope.cancel()

    def hear(self, result: RolloutResultResponse) -> None:
        """Pass on a status, and confirm the start of an agent that waits for it."""
        if self.scope.cancel_called:
            return
        if self.confirmed:
            if result.status is RolloutStatus.GRADING:
                self.context.report_status(result.status)
        elif result.agent_started_at is not None and not is_terminal(result.status):
            self.confirmed = True
            self.context.mark_agent_started(result.agent_started_at)
            self.worker.confirm(self)


@frozen(kw_only=True)
class WantedPolicy:
    """The state of the policy that the workers of a pool are to have.

    Attributes:
        paused: Whether calls wait.
        abort: Whether a pause cancels the calls in flight.
        version: The version of the weights; ``None`` while nobody has said one.
        asked: Whether somebody has asked the pool for this state.
        number: Counts the states.
    """

    paused: bool = False
    abort: bool = False
    version: int | None = None
    asked: bool = False
    number: int = 0

    def request(self) -> tuple[str, dict[str, Any]]:
        """Return the request that gives a worker this state: action and body."""
        if self.paused:
            return "pause", {"mode": "abort" if self.abort else "drain", "timeout_sec": 0}
        return "resume", {"version": self.version}

    def is_that_of(self, said: dict[str, Any]) -> bool:
        """Whether a worker that says so has this state; one that pauses learns no version."""
        version = self.version is None or self.paused or said.get("version") == self.version
        return version and said.get("paused") is self.paused

    def adopting(self, said: dict[str, Any]) -> WantedPolicy:
        """Return the state with what a worker has, if nobody has asked the pool for any.

        So a front that was started again goes on with the state that the one before it gave.
        """
        versions = [each for each in (self.version, said.get("version")) if each is not None]
        paused, version = self.paused or said.get("paused") is True, max(versions, default=None)
        if self.asked or (paused, version) == (self.paused, self.version):
            return self
        return evolve(self, paused=paused, version=version, number=self.number + 1)


class Host(Protocol):
    """What a worker needs of the pool that it is part of.

    Attributes:
        wanted_policy: The state of the policy that its workers are to have.
    """

    wanted_policy: WantedPolicy

    def check(self, worker: Worker, health: dict[str, Any]) -> str | None:
        """Return why a worker with this health cannot be used; ``None`` if it can."""

    def count(self, process_id: str, counts: Mapping[str, float]) -> None:
        """Take what the process of a worker has counted since it started."""

    def notify(self) -> None:
        """Note that a worker may have more room, or less, or has another state."""

    def want_policy(self, wanted: WantedPolicy) -> None:
        """Have all workers take a state."""


class Worker:
    """One worker of a pool. `rollout.pool.Workers.join` makes it.

    Args:
        address: Where it listens.
        client: Its client; entered and closed by `run`.
        host: The pool.

    Attributes:
        address: As above.
        attempts: The rollouts that take a place on it.
        process_id: Its process, as of the last health; ``None`` before the first.
        draining: Whether it gets nothing new.
        lost: Why it is gone; ``None`` while it is not.
        refusal: Why the pool does not use it; ``None`` if it does.
        trouble: Why it does not answer; ``None`` while it does.
        slots: How many rollouts it runs at a time, as of the last health; infinite without a bound.
        policy: The state of the policy that it has said last; ``None`` without a model gateway.
    """

    def __init__(self, address: WorkerAddress, client: RolloutClient, host: Host) -> None:
        self.address = address
        self.client = client
        self.attempts: dict[Attempt, None] = {}
        self.process_id: str | None = None
        self.draining = False
        self.lost: str | None = None
        self.refusal: str | None = None
        self.trouble: str | None = "it has not answered yet"
        self._host = host
        self.slots = math.inf
        self.policy: dict[str, Any] | None = None
        self._policy_number = 0
        self._policy_woken = trio.Event()
        self._accepting = True
        self._full = False
        self._durable = False
        self._dead = False
        self._warned = False
        self._answered_at = trio.current_time()
        self._refused_at = math.inf
        self._to_confirm: dict[Attempt, None] = {}
        self._to_cancel: dict[Attempt, None] = {}
        self._wake = trio.Event()
        self._look_now = trio.Event()
        self._answered = trio.Event()
        self._told = trio.Event()
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None

    def __repr__(self) -> str:
        return f"<Worker {self.name} {self.status}, {self.in_flight} in flight>"

    @property
    def name(self) -> str:
        """What it is called."""
        return self.address.name

    @property
    def status(self) -> str:
        """``up``, ``joining``, ``away``, ``refused``, ``draining``, ``closed`` or ``lost``.

        ``joining`` has not answered yet, ``away`` does not answer any more, and ``closed`` takes
        no rollouts, since it shuts down.
        """
        if self.lost is not None:
            return "lost"
        if self.draining:
            return "draining"
        if self.trouble is not None:
            return "joining" if self.process_id is None else "away"
        if self.refusal is not None:
            return "refused"
        return "up" if self._accepting else "closed"

    @property
    def room(self) -> float:
        """How many more rollouts it would start at once; infinite without a bound."""
        if self.status != "up" or self._full or not self.has_policy:
            return 0.0
        return self.slots - len(self.attempts)

    @property
    def capacity(self) -> float:
        """How many rollouts it runs at a time; infinite without a bound, 0 if it is not up."""
        return self.slots if self.status == "up" else 0

    @property
    def has_policy(self) -> bool:
        """Whether it has the present state of the policy, or needs none."""
        wanted = self._host.wanted_policy
        if self.policy is None or not wanted.number:
            return True
        return self._policy_number == wanted.number and wanted.is_that_of(self.policy)

    @property
    def in_flight(self) -> int:
        """How many rollouts take a place on it."""
        return len(self.attempts)

    def health(self) -> dict[str, Any]:
        """Return its part of the pool's health."""
        said: dict[str, Any] = {
            "name": self.name,
            "url": public_url(self.address.url),
            "status": self.status,
            "capacity": None if math.isinf(self.slots) else self.slots,
            "in_flight": self.in_flight,
        }
        reason = self.lost or self.trouble or self.refusal
        if reason is None and not self.has_policy:
            reason = "it does not have the present state of the policy yet"
        return said if reason is None else {**said, "reason": reason}

    # --- rollouts -----------------------------------------------------------------------------

    async def follow(self, attempt: Attempt, request: RolloutInitRequest) -> RolloutResultResponse:
        """Have the worker run a rollout; return its terminal result.

        A confirmed rollout is waited for as long as its lease may last on the worker, whatever
        becomes of the connection.

        Raises:
            RolloutError: The worker refuses it, has forgotten it, or answers something else.
            httpx.HTTPError: The worker cannot be reached.
        """
        attempt.request = request
        try:
            return await self.client._run(request, attempt, "raise")  # noqa: SLF001
        except (RolloutError, httpx.HTTPError) as error:
            if attempt.admission is None or not (attempt.confirmed and _may_pass(error)):
                raise
            self.doubt(error)
        until = trio.current_time() + attempt.admission.polling_lease_timeout_sec
        while True:
            with trio.move_on_at(until):
                while self.trouble is not None:
                    await self._answered.wait()
            try:
                return await self._resume(attempt)
            except (RolloutError, httpx.HTTPError) as error:
                if not _may_pass(error) or trio.current_time() >= until:
                    raise
                self.doubt(error)

    async def _resume(self, attempt: Attempt) -> RolloutResultResponse:
        assert attempt.admission is not None  # noqa: S101 - only who was admitted is followed
        admitted = Admitted(attempt.admission, trio.current_time())
        poller = Poller(self.client._wire, admitted, attempt.hear)  # noqa: SLF001
        extensions = self.client._extensions  # noqa: SLF001
        return await (poller.run() if extensions is None else extensions.follow(poller))

    @asynccontextmanager
    async def live_conversation(self, attempt: Attempt) -> AsyncGenerator[Any, None]:
        """Stream the conversation of a rollout from the worker.

        Raises:
            RolloutError: The worker does not have it.
            httpx.HTTPError: The worker cannot be reached.
        """
        name = "" if attempt.request is None else attempt.request.rollout_id
        path = f"/rollout/{quote(name, safe='')}/live"
        wire = self.client._wire  # noqa: SLF001
        async with wire.stream(path, None, read_timeout_sec=_LIVE_SEC) as answer:
            if answer.status_code != httpx.codes.OK:
                code = answer.status_code
                raise wire.reader("GET /rollout/{id}/live").error(code, f"with {code}")
            yield answer.data

    def confirm(self, attempt: Attempt) -> None:
        """Send the confirmation of an agent's start, once the front's own rollout may start."""
        if attempt.context.start_pending and self._nursery is not None:
            self._nursery.start_soon(self._confirm_later, attempt)
            return
        self._to_confirm[attempt] = None
        self._wake.set()

    async def _confirm_later(self, attempt: Attempt) -> None:
        await attempt.context.wait_start_kept()
        self._to_confirm[attempt] = None
        self._wake.set()

    def cancel(self, attempt: Attempt) -> None:
        """Send a cancel request."""
        if attempt.request is not None:
            self._to_cancel[attempt] = None
            self._wake.set()

    def end(self, attempt: Attempt, *, over: bool) -> None:
        """Give back the place of a rollout that the front follows no longer.

        Args:
            attempt: The rollout.
            over: Whether the worker has ended it, or never had it. Otherwise it is cancelled, and
                its place is free when the worker has answered that.
        """
        if attempt not in self.attempts:
            return
        self._to_confirm.pop(attempt, None)
        if over or attempt.admitted == "no" or self._dead or self.lost is not None:
            del self.attempts[attempt]
            self._to_cancel.pop(attempt, None)
            self._full = False
        else:
            attempt.scope.cancel()  # if it is not; nothing may be confirmed from here on
            self.cancel(attempt)

    def full(self) -> None:
        """Note that it refuses rollouts at the moment: until its next health, or one has ended."""
        self._full = True

    def doubt(self, error: Exception) -> None:
        """Note that a request failed: nothing new goes there until its health is answered."""
        if self.trouble is None:
            self.trouble = _reason(error)
            self._wake_flushed()
            self._look_now.set()
            logger.debug("worker %s: %s", self.name, self.trouble)

    # --- the policy ---------------------------------------------------------------------------

    def wake_policy(self) -> None:
        """Send it the state that is wanted, if it has another one."""
        self._policy_woken.set()
        self._policy_woken = trio.Event()

    async def read_policy(self) -> None:
        """Ask for its state; it is in doubt if it does not answer."""
        await self._ask_policy(None, None)

    async def _keep_policy(self) -> None:
        while True:
            while self.has_policy or self.trouble is not None or self.refusal is not None:
                await self._policy_woken.wait()
            wanted = self._host.wanted_policy
            if await self._ask_policy(*wanted.request()):
                self._policy_number = wanted.number
            self._host.notify()
            if wanted is self._host.wanted_policy and not self.has_policy:
                await trio.sleep(_RESEND_SEC)

    async def _ask_policy(self, action: str | None, body: dict[str, Any] | None) -> bool:
        """Send a request and note what it answers; return whether it does."""
        try:
            with trio.fail_after(_REQUEST_SEC):
                self.policy = await self.client._wire.policy(action, body)  # noqa: SLF001
        except (RolloutError, httpx.HTTPError, trio.TooSlowError) as error:
            self.doubt(error)
            return False
        return True

    # --- membership ---------------------------------------------------------------------------

    def drain(self, *, draining: bool = True) -> None:
        """Give it nothing new, or do so again."""
        self.draining = draining
        self._host.notify()

    def lose(self, reason: str) -> None:
        """Give up everything on it: it is gone."""
        if self.lost is not None:
            return
        self.lost = reason
        for attempt in list(self.attempts):
            attempt.give_up(reason)
        self._to_confirm.clear()
        self._to_cancel.clear()
        self._scope.cancel()
        self._wake_flushed()
        self._host.notify()

    async def flushed(self) -> None:
        """Wait until every cancel request was answered, or the worker does not answer."""
        while self._to_cancel and self.trouble is None:
            await self._told.wait()
        await trio.lowlevel.checkpoint()

    def _wake_flushed(self) -> None:
        self._told.set()
        self._told = trio.Event()

    # --- tasks --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep its client, until it is lost."""
        try:
            with self._scope:
                async with (
                    self.client,
                    background_tasks(self._send, self._keep_policy) as self._nursery,
                ):
                    await self._watch()
        finally:
            self._nursery = None
            with trio.move_on_after(_CLOSE_SEC, shield=True):
                await self.client.http_client.aclose()

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._to_cancel or self._to_confirm:
                try:
                    await self._send_cancels()
                    await self._send_confirmations()
                except (RolloutError, httpx.HTTPError, trio.TooSlowError) as error:
                    self.doubt(error)
                    await trio.sleep(_RESEND_SEC)

    async def _send_cancels(self) -> None:
        batch = list(self._to_cancel)[:_MOST_AT_ONCE]
        requests = [attempt.request for attempt in batch if attempt.request is not None]
        if not requests:
            return
        keys = {each.rollout_id: each.admission_key for each in requests if each.admission_key}
        request = CancelRolloutsRequest(
            ids=[each.rollout_id for each in requests], admission_keys=keys or None
        )
        with trio.fail_after(_REQUEST_SEC):
            await self.client._wire.cancel(request, timeout_sec=_REQUEST_SEC)  # noqa: SLF001
        for attempt in batch:
            self._to_cancel.pop(attempt, None)
            if attempt.scope.cancel_called:  # nobody waits for its result
                self.attempts.pop(attempt, None)
        self._wake_flushed()
        self._full = False
        self._host.notify()

    async def _send_confirmations(self) -> None:
        batch = list(self._to_confirm)[:_MOST_AT_ONCE]
        admissions = [
            attempt.admission
            for attempt in batch
            if attempt.admission is not None and not attempt.scope.cancel_called
        ]
        if admissions:
            with trio.fail_after(_REQUEST_SEC):
                codes = await self.client._wire.start(admissions)  # noqa: SLF001
            for rollout_id, code in codes.items():
                if code != httpx.codes.OK:  # its end is on its way, or was lost with the worker
                    logger.debug("worker %s: start of %s: %d", self.name, rollout_id, code)
        for attempt in batch:
            self._to_confirm.pop(attempt, None)

    async def _watch(self) -> None:
        pause_sec = _SOON_SEC
        while True:
            self._look_now = trio.Event()
            await self.look()
            pause_sec = _SOON_SEC if self.trouble is None else min(2 * pause_sec, HEALTH_SEC)
            with trio.move_on_after(HEALTH_SEC if self.trouble is None else pause_sec):
                await self._look_now.wait()
                await trio.sleep(_SOON_SEC)

    async def look(self) -> None:
        """Ask for its health, and take that, or the failure."""
        try:
            with trio.fail_after(_REQUEST_SEC):
                health = await self.client.health()
        except (RolloutError, httpx.HTTPError, trio.TooSlowError) as error:
            self._take_failure(error, trio.current_time())
        else:
            self._take_health(health, trio.current_time())
        self._host.notify()

    def _take_failure(self, error: Exception, now: float) -> None:
        self.trouble = _reason(error)
        self._wake_flushed()
        if not _nobody_listens(error):
            self._refused_at = math.inf
        elif math.isinf(self._refused_at):
            self._refused_at = now
        dead = self._dead = now - self._refused_at >= DEAD_SEC and not self._durable
        if not dead and now - self._answered_at < SUSPECT_SEC:
            return
        if not self._warned:
            self._warned = True
            logger.warning("worker %s does not answer: %s", self.name, self.trouble)
        for attempt in list(self.attempts):
            if (dead or not attempt.confirmed) and not attempt.scope.cancel_called:
                attempt.give_up(self.trouble)
        if dead:
            self._forget_cancelled()

    def _take_health(self, health: dict[str, Any], now: float) -> None:
        self._answered_at = now
        self._refused_at = math.inf
        self._dead = self._warned = False
        before = self.status
        slots: Any = _part(health, "concurrency").get("max_concurrent")
        # A front has no slots while none of its workers is up.
        self.slots = slots if slots == 0 or is_whole_from_one(slots) else math.inf
        refusal = self._host.check(self, health)
        if refusal is not None and refusal != self.refusal:
            logger.error("worker %s is refused: %s", self.name, refusal)
        process_id = health.get("process_id")
        if process_id != self.process_id:
            self.process_id = process_id if isinstance(process_id, str) else None
            self._forget_cancelled()
        self.refusal = refusal
        if refusal is None and self.process_id is not None:
            self._host.count(self.process_id, _part(health, "counts"))
        self.trouble = None
        self._take_policy(health)
        self._answered.set()
        self._answered = trio.Event()
        self._full = False
        extensions = health.get("extensions")
        self._durable = isinstance(extensions, list) and DURABLE_RESULTS in extensions
        self._accepting = _part(health, "lifecycle").get("accepting_rollouts") is not False
        if self.status != before:
            logger.info("worker %s is %s", self.name, self.status)

    def _take_policy(self, health: dict[str, Any]) -> None:
        policy = health.get("policy")
        self.policy = policy if isinstance(policy, dict) else None
        if self.policy is not None and self.refusal is None:
            wanted = self._host.wanted_policy
            adopted = wanted.adopting(self.policy)
            if adopted is not wanted:
                self._host.want_policy(adopted)
        self.wake_policy()

    def _forget_cancelled(self) -> None:
        """Free the places of rollouts that a process had which is gone."""
        for attempt in list(self._to_cancel):
            if attempt.scope.cancel_called:
                del self._to_cancel[attempt]
                self.attempts.pop(attempt, None)


def _part(health: dict[str, Any], name: str) -> dict[str, Any]:
    value = health.get(name)
    return value if isinstance(value, dict) else {}


def _may_pass(error: Exception) -> bool:
    """Whether a failure may be one of the connection alone."""
    if isinstance(error, RolloutProtocolError):
        return error.status_code in GATEWAY_STATUS_CODES
    return isinstance(error, httpx.TransportError)


def _nobody_listens(error: Exception) -> bool:
    """Whether the operating system at an address says that nobody listens there."""
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if isinstance(current, ConnectionRefusedError | FileNotFoundError):
            return True
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
        elif current is not None:
            pending.append(current.__cause__ or current.__context__)
    return False


def _reason(error: Exception) -> str:
    if _nobody_listens(error):
        return "nobody listens there"
    if isinstance(error, trio.TooSlowError):
        return f"no answer within {_REQUEST_SEC:g} s"
    text = printable(str(error))
    if isinstance(error, RolloutError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
