"""The execution backend whose workers are rollout servers.

Theory of operation: a rollout waits in a fair queue until a worker would start it at once, so the
queue is the front's own. Handing out is one step without awaiting, taken whenever a rollout comes
or ends, or a worker has more room. What happens then is in the rollout's own task: it follows an
attempt on one worker, and goes back to the head of the queue if the attempt came to nothing before
its agent started. `judge` decides that, and is pure.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, ClassVar

import httpx
import trio
from attrs import define, field

from rollout._checks import backend_settings, check_api_key, check_number, check_whole
from rollout._logs import get_logger
from rollout._tasks import background_tasks
from rollout.artifacts import ARTIFACT_ROOT_VARIABLE, ArtifactStore
from rollout.backend.base import ExecutionBackend
from rollout.backend.executions import Execution, Phase, failure, matching
from rollout.client.client import RolloutClient
from rollout.context import RolloutContext, get_rollout_context
from rollout.errors import (
    BackendConfigurationError,
    DuplicateRolloutError,
    InvalidFieldError,
    RolloutCapacityError,
    RolloutError,
    RolloutProtocolError,
)
from rollout.pool.addresses import ListedWorkers
from rollout.pool.policy import PoolPolicy
from rollout.pool.queue import FairQueue, most_room
from rollout.pool.source import Workers, WorkerSource
from rollout.pool.worker import Attempt, Worker, WorkerAddress, make_client
from rollout.types import (
    SERVER_RESTART,
    WORKER_LOST,
    ExecutionOutcome,
    ExecutionRequest,
    ExecutionResult,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutResultResponse,
    RolloutSample,
    RolloutStatus,
)

__all__ = ["PoolBackend"]

logger = get_logger(__name__)

_MOST_ATTEMPTS = 10
"""So many attempts may come to nothing before the rollout fails."""

_GOODBYE_SEC = 5.0
"""How long the shutdown waits until workers have heard of the last cancel requests."""

_UNUSABLE = frozenset({400, 413, 422})
"""Answers to an admission that another worker would give as well."""

_NOT_ITS_OWN = frozenset({RolloutErrorCategory.LEASE_EXPIRED, RolloutErrorCategory.INTERNAL_ERROR})
"""Failures of a rollout that has not started which are its worker's."""


@define(eq=False)
class _Rollout:
    """A rollout in the pool, from its admission to its end.

    Attributes:
        id: Its id.
        submitted_at: When it was admitted (trio time); the agent's deadline counts from here.
        run: The name of its run.
        attempt: The attempt that it was handed out for, or follows.
        turn: Set when it need not wait any longer.
        cancelled: Whether somebody asked for it to stop.
        executing: Whether `PoolBackend.execute` has it.
        avoided: The workers on which an attempt came to nothing.
        asked: The processes that know its id, once for each attempt.
        attempts: How many attempts came to nothing.
    """

    id: str
    submitted_at: float
    run: str | None = None
    attempt: Attempt | None = None
    turn: trio.Event | None = None
    cancelled: bool = False
    executing: bool = False
    avoided: list[Worker] = field(factory=list)
    asked: list[str | None] = field(factory=list)
    attempts: int = 0

    @property
    def status(self) -> RolloutStatus:
        """Where it stands, as far as a cancel request is concerned."""
        started = self.attempt is not None and self.attempt.confirmed
        return RolloutStatus.RUNNING if started else RolloutStatus.QUEUED

    def wake(self) -> None:
        if self.turn is not None:
            self.turn.set()


class PoolBackend(ExecutionBackend):
    """Runs rollouts on workers, which are rollout servers themselves.

    Args:
        workers: The URLs of workers that run already: ``http://host:port``, ``https://host:port``
            or ``unix:/path``. Of an ``http`` URL with a name as host, each address that the name
            has is a worker; the name is looked up again every few seconds. Or a source that
            starts or finds them.
        api_key: The key of the workers, for a list of URLs.
        max_queue_depth: How many rollouts may wait for a worker; more are refused at admission.
            ``None`` sets no bound.
        max_per_run: How many rollouts of one run may be on workers at a time; ``None`` for no cap.
        weights: The shares of runs by name, positive numbers; 1 for all others. Rollouts that
            wait are taken in turns over the runs that their requests name, in these proportions.
        artifact_root: The folder in which the workers keep the files of rollouts, if this process
            can read there, to hand out trajectories. By default the one in the environment
            variable ``ROLLOUT_ARTIFACT_ROOT``, if it is set.

    Raises:
        BackendConfigurationError: One of these cannot be used, or there is no worker in the list.

    An agent is started once at most, whatever is lost when. A rollout whose worker is lost runs
    on another worker if its agent had not started; otherwise it fails with the
    `rollout.types.WORKER_LOST` source.

    Attributes:
        application: What the workers serve; ``None`` before the first of them has answered.
    """

    reports_agent_start: ClassVar[bool] = True
    isolates_user_code: ClassVar[bool] = True
    keeps_files: ClassVar[bool] = True

    def __init__(
        self,
        workers: Sequence[str] | WorkerSource,
        *,
        api_key: str | None = None,
        max_queue_depth: int | None = None,
        max_per_run: int | None = None,
        weights: Mapping[str, float] | None = None,
        artifact_root: str | os.PathLike[str] | None = None,
    ) -> None:
        with backend_settings():
            check_whole("max_queue_depth", max_queue_depth, none=True)
            check_whole("max_per_run", max_per_run, none=True)
            for name, weight in (weights or {}).items():
                check_number(f"weights[{name!r}]", weight, above=0)
            key = check_api_key(api_key)
            if isinstance(workers, str) or not isinstance(workers, WorkerSource | Sequence):
                raise InvalidFieldError("workers", "must be a list of URLs, or a WorkerSource")
        if not isinstance(workers, WorkerSource):
            workers = ListedWorkers(workers, api_key=key)
        elif key is not None:
            raise BackendConfigurationError("api_key goes with a list of URLs, not with a source")
        self.max_queue_depth = max_queue_depth
        shared = artifact_root or os.environ.get(ARTIFACT_ROOT_VARIABLE)
        self.artifact_root = ArtifactStore(shared or False).root
        self._source = workers
        self._make_client: Callable[[WorkerAddress], RolloutClient] = make_client
        self._queue: FairQueue[_Rollout] = FairQueue(max_per_run=max_per_run, weights=weights)
        self._rollouts: dict[str, _Rollout] = {}
        self._workers: Workers | None = None
        self._policy: PoolPolicy | None = None

    # --- lifetime -----------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Run the source of the workers, and follow them, for the length of the block."""
        async with background_tasks() as nursery:
            self._workers = Workers(
                nursery,
                make_client=self._make_client,
                count_queued=lambda: len(self._queue),
                on_change=self._workers_changed,
            )
            self._policy = PoolPolicy(self._workers)
            nursery.start_soon(self._source.run, self._workers)
            try:
                yield
            finally:
                self._workers = None

    def _workers_changed(self) -> None:
        if self._workers is not None:
            self.application = self._workers.application
        self._hand_out()

    async def shutdown(self) -> None:
        """Let the workers hear of the last cancel requests; then the source ends its own."""
        with trio.move_on_after(_GOODBYE_SEC):
            async with trio.open_nursery() as nursery:
                for worker in list(self._workers or ()):
                    nursery.start_soon(worker.flushed)
        await self._source.shutdown()

    @property
    def policy_control(self) -> PoolPolicy | None:
        """What pauses and resumes the calls at the workers; ``None`` if they have no gateways."""
        policy = self._policy
        return policy if policy is not None and policy.supported else None

    # --- admission ----------------------------------------------------------------------------

    def has_capacity(self) -> bool:
        """Whether a worker has room, or there is a place in the queue."""
        if self.max_queue_depth is None:
            return True
        capacity = sum(worker.capacity for worker in self._workers or ())
        return len(self._rollouts) < capacity + self.max_queue_depth

    def reserve(self, rollout_id: str) -> bool:
        """Count a rollout from its admission on; see `ExecutionBackend.reserve`."""
        if rollout_id in self._rollouts or not self.has_capacity():
            return False
        self._rollouts[rollout_id] = _Rollout(rollout_id, trio.current_time())
        return True

    def release(self, rollout_id: str) -> None:
        """Forget a rollout."""
        self._rollouts.pop(rollout_id, None)

    def rollout_status(self, rollout_id: str) -> dict[str, Any] | None:
        """Return the status of a rollout that has been admitted and has not ended."""
        rollout = self._rollouts.get(rollout_id)
        return None if rollout is None else {"status": rollout.status}

    def worker_of(self, rollout_id: str) -> str | None:
        """Return the name of the worker that has a rollout; ``None`` while it waits for one."""
        rollout = self._rollouts.get(rollout_id)
        return None if rollout is None or rollout.attempt is None else rollout.attempt.worker.name

    def live_conversation(
        self, rollout_id: str
    ) -> AbstractAsyncContextManager[AsyncGenerator[bytes, None]] | None:
        """Return the conversation of a rollout as its worker streams it, if a worker has it."""
        rollout = self._rollouts.get(rollout_id)
        attempt = None if rollout is None else rollout.attempt
        return None if attempt is None else attempt.worker.live_conversation(attempt)

    def cancel_rollouts(
        self,
        ids: Sequence[str] | None = None,
        prefix: str | None = None,
        all: bool = False,
    ) -> dict[str, str]:
        """End what has not started, and have workers end the rest; asking twice changes nothing."""
        ids = matching(self._rollouts, ids, prefix, all)
        return {rollout_id: self._cancel(self._rollouts.get(rollout_id)) for rollout_id in ids}

    def _cancel(self, rollout: _Rollout | None) -> str:
        if rollout is None:
            return "not_found"
        attempt = rollout.attempt
        started = attempt is not None and attempt.confirmed
        if not rollout.cancelled:
            rollout.cancelled = True
            if attempt is None:
                rollout.wake()
            elif started:
                attempt.worker.cancel(attempt)
            else:
                attempt.scope.cancel()
        return "cancelled_running" if started else "cancelled_queued"

    def health(self) -> dict[str, Any]:
        """Return the counts of the queue and of the workers, and the state of each worker."""
        workers = list(self._workers or ())
        capacity = sum(worker.capacity for worker in workers)
        up = any(worker.status == "up" for worker in workers)
        return {
            "status": "ok" if up else "no worker is up",
            "concurrency": {
                "max_concurrent": None if math.isinf(capacity) else capacity,
                "queued": len(self._queue),
                "running": sum(worker.in_flight for worker in workers),
            },
            "max_queue_depth": self.max_queue_depth,
            "workers": [worker.health() for worker in workers],
            "counts": {} if self._workers is None else self._workers.counts,
            **self._source.health(),
        }

    # --- execution ----------------------------------------------------------------------------

    async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
        """Run one rollout on a worker; see `ExecutionBackend.execute`.

        Raises:
            DuplicateRolloutError: A rollout of that id is running here already.
        """
        context = get_rollout_context() or RolloutContext(rollout_id=request.id)
        reserved = self._rollouts.get(request.id)
        rollout = reserved or _Rollout(request.id, trio.current_time())
        if rollout.executing:
            raise DuplicateRolloutError(f"rollout {request.id} is running already")
        rollout.executing = True
        rollout.run = request.run
        self._rollouts[request.id] = rollout
        self._queue.push(rollout.run, rollout)
        try:
            return await self._execute(rollout, request, context)
        finally:
            self._leave(rollout)
            if reserved is None:
                self.release(request.id)

    async def _execute(
        self, rollout: _Rollout, request: ExecutionRequest, context: RolloutContext
    ) -> ExecutionOutcome:
        while True:
            self._hand_out()
            if rollout.attempt is None:
                await self._wait_turn(rollout, request)
            now = trio.current_time()
            ended = _ended_in_queue(rollout, request, now)
            if ended is not None or rollout.attempt is None:
                ended = ended or Execution(rollout.id, rollout.submitted_at).interrupted()
                return ExecutionOutcome(workflow=ended)
            outcome = await self._try(rollout, rollout.attempt, request, context, now)
            if outcome is not None:
                return outcome
            rollout.attempt = None
            self._queue.put_back(rollout.run, rollout)

    def _hand_out(self) -> None:
        """Hand out rollouts that wait while a worker has room."""
        workers = self._workers
        while workers is not None and self._queue:
            worker = most_room(workers)
            rollout = None if worker is None else self._queue.pop()
            if worker is None or rollout is None:
                return
            if rollout.avoided:
                worker = most_room(workers, rollout.avoided) or worker
            rollout.attempt = Attempt(worker=worker)
            worker.attempts[rollout.attempt] = None
            rollout.wake()

    async def _wait_turn(self, rollout: _Rollout, request: ExecutionRequest) -> None:
        """Wait until the rollout is handed out, is cancelled, or has no time left."""
        if self._workers is not None:
            self._workers.wake()
        if rollout.cancelled:
            await trio.lowlevel.checkpoint()
            return
        rollout.turn = trio.Event()
        limit = request.agent_timeout_sec
        with nullcontext() if limit is None else trio.move_on_at(rollout.submitted_at + limit):
            await rollout.turn.wait()

    async def _try(
        self,
        rollout: _Rollout,
        attempt: Attempt,
        request: ExecutionRequest,
        context: RolloutContext,
        now: float,
    ) -> ExecutionOutcome | None:
        """Follow a rollout on a worker; ``None`` if it is to go elsewhere."""
        worker = attempt.worker
        attempt.context = context
        result: RolloutResultResponse | None = None
        error: Exception | None = None
        with attempt.scope:
            try:
                asked = _admission(rollout, request, context, now, worker)
                result = await worker.follow(attempt, asked)
            except (RolloutError, httpx.HTTPError) as raised:
                error = raised
        verdict = judge(attempt, result, error, cancelled=rollout.cancelled)
        if attempt.admitted != "no" or _answers(error, httpx.codes.CONFLICT):
            rollout.asked.append(worker.process_id)  # it knows one of that id
        worker.end(attempt, over=result is not None or _answers(error, httpx.codes.NOT_FOUND))
        if isinstance(verdict, ExecutionOutcome):
            return verdict
        if verdict.busy:
            worker.full()
            return None
        if isinstance(error, httpx.TransportError):
            worker.doubt(error)
        rollout.attempts += 1
        rollout.avoided.append(worker)
        logger.info(
            "rollout %s: its agent was not started on worker %s: %s; it goes elsewhere",
            rollout.id,
            worker.name,
            verdict.reason,
        )
        if rollout.attempts < _MOST_ATTEMPTS:
            return None
        return _lost(
            f"no worker started its agent in {rollout.attempts} attempts; the last one, "
            f"{worker.name}: {verdict.reason}"
        )

    def _leave(self, rollout: _Rollout) -> None:
        """Give back what an execution has, whatever ended it; its worker is told to stop."""
        attempt = rollout.attempt
        if attempt is None:
            self._queue.discard(rollout.run, rollout)
        else:
            attempt.worker.end(attempt, over=False)
            self._queue.ended(rollout.run)
        self._hand_out()
        if self._workers is not None:
            self._workers.wake()


@define
class _Elsewhere:
    """The verdict that a rollout is to go to another worker.

    Attributes:
        reason: Why.
        busy: Whether its worker is just full or closed, which is no failure.
    """

    reason: str
    busy: bool = False


def judge(
    attempt: Attempt,
    result: RolloutResultResponse | None,
    error: Exception | None,
    *,
    cancelled: bool,
) -> ExecutionOutcome | _Elsewhere:
    """Decide what an attempt that is over means for its rollout.

    Args:
        attempt: The attempt.
        result: The terminal result that the worker gave, if any.
        error: The error that came instead, if any. Without either it was ended by its scope.
        cancelled: Whether somebody asked for the rollout to stop.
    """
    if attempt.confirmed:
        return _judge_started(attempt, result, error)
    if cancelled:
        interrupted = Execution(attempt.context.rollout_id, 0.0).interrupted()
        return ExecutionOutcome(workflow=interrupted)
    if result is None:
        return _judge_error(attempt, error)
    if result.err_category in _NOT_ITS_OWN or result.err_source == SERVER_RESTART:
        return _Elsewhere(result.err_message or "it gave no reason")
    if result.status is RolloutStatus.CANCELLED:
        return _Elsewhere("it was cancelled there")
    return _passed_on(attempt, result)


def _judge_started(
    attempt: Attempt, result: RolloutResultResponse | None, error: Exception | None
) -> ExecutionOutcome:
    name = attempt.worker.name
    if result is None:
        reason = _reason(attempt, error)
        return _lost(f"its agent had started on worker {name}, which was lost: {reason}")
    if result.err_category is RolloutErrorCategory.LEASE_EXPIRED:
        return _lost(
            f"its agent had started on worker {name}, which was cut off for longer than a lease"
        )
    return _passed_on(attempt, result)


def _judge_error(attempt: Attempt, error: Exception | None) -> ExecutionOutcome | _Elsewhere:
    reason = _reason(attempt, error)
    if isinstance(error, RolloutCapacityError):
        return _Elsewhere(reason, busy=True)
    invalid = failure(reason, RolloutErrorCategory.VALIDATION_ERROR)
    if isinstance(error, InvalidFieldError):
        return ExecutionOutcome(workflow=invalid)
    if isinstance(error, RolloutProtocolError) and attempt.admitted == "no":
        if error.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return _Elsewhere(reason, busy=True)
        if error.status_code in _UNUSABLE:
            return ExecutionOutcome(workflow=invalid)
    return _Elsewhere(reason)


def _answers(error: Exception | None, status_code: int) -> bool:
    """Whether an error is that answer of a worker."""
    return isinstance(error, RolloutProtocolError) and error.status_code == status_code


def _reason(attempt: Attempt, error: Exception | None) -> str:
    return attempt.given_up or str(error) or type(error).__name__


def _lost(message: str) -> ExecutionOutcome:
    lost = failure(message, RolloutErrorCategory.INTERNAL_ERROR)
    lost.err_source = WORKER_LOST
    return ExecutionOutcome(workflow=lost)


def _passed_on(attempt: Attempt, result: RolloutResultResponse) -> ExecutionOutcome:
    context, encoded = attempt.context, attempt.body
    if (result.rollout_id, result.agent_started_at) != (
        context.rollout_id,
        context.agent_started_at,
    ):
        encoded = None
    sample = result.sample
    if sample is not None and encoded is not None:  # which has all but what is shown of it here
        sample = RolloutSample(reward=sample.reward)
    passed_on = ExecutionResult(
        status=result.status,
        sample=sample,
        err_message=result.err_message,
        err_category=result.err_category,
        err_source=result.err_source,
    )
    if result.err_phase is None:
        return ExecutionOutcome(workflow=passed_on, encoded=encoded)
    agent = ExecutionResult(status=RolloutStatus.SUCCESS)
    return ExecutionOutcome(workflow=agent, grader=passed_on, encoded=encoded)


def _ended_in_queue(
    rollout: _Rollout, request: ExecutionRequest, now: float
) -> ExecutionResult | None:
    """Return the result of a rollout that was cancelled, or had no time left, while it waited."""
    limit = request.agent_timeout_sec
    if not rollout.cancelled and (limit is None or now < rollout.submitted_at + limit):
        return None
    execution = Execution(rollout.id, rollout.submitted_at)
    if rollout.cancelled:
        return execution.interrupted()
    phase = Phase("workflow", limit, rollout.submitted_at)
    phase.queued_sec = now - rollout.submitted_at
    return phase.interruption(execution, now)


def _admission(
    rollout: _Rollout,
    request: ExecutionRequest,
    context: RolloutContext,
    now: float,
    worker: Worker,
) -> RolloutInitRequest:
    """Make the request for an attempt; its agent gets the time that is left."""
    limit = request.agent_timeout_sec
    name = rollout.id
    if worker.process_id in rollout.asked:
        name = f"{name}-again-{len(rollout.asked)}"  # the process keeps the first id for a while
    return RolloutInitRequest(
        rollout_id=name,
        initial_messages=request.prompt,
        chat_completions_url=context.chat_completions_url,
        llm_api_key=context.api_key,
        label=request.label,
        metadata=request.metadata,
        grade=request.grade,
        agent_timeout_sec=None if limit is None else limit - (now - rollout.submitted_at),
        grader_timeout_sec=request.grader_timeout_sec,
        run=request.run,
        limits=request.limits,
        extra_fields=request.extra_fields,
        confirm_start=True,
    )
