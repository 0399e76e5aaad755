"""Run an evaluation: n attempts for each row, durable as they end, resumable at any point.

Theory of operation: `evaluate` locks the folder, reads the dataset once to check and digest
it, and reads what an earlier process recorded. Then three kinds of task run: one streams the
rows from a thread, a feeder starts an attempt whenever there is a place for it, and each
attempt runs its rollout, writes its trajectory, waits until its record is on the disk, counts
itself, and hands the record to whoever iterates. The journal's writer lives outside of them
and is not cancelled, so that a record whose attempt is cancelled meanwhile is still written.
"""

from __future__ import annotations

import os
import random
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Mapping,
)
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import trio
from attrs import define, evolve

from rollout._checks import check_flag, is_whole_from_one
from rollout._logs import get_logger
from rollout._redaction import SECRETS_VARIABLE
from rollout._tasks import background_tasks
from rollout.artifacts import ARTIFACT_ROOT_VARIABLE
from rollout.client import RolloutClient
from rollout.errors import EvaluationError, EvaluationStoppedError, RolloutError
from rollout.evaluation.attempts import (
    UNREACHABLE,
    Attempt,
    Credentials,
    Ending,
    check_usable,
    ending_of,
    keep_attempt,
    run_rollout,
)
from rollout.evaluation.config import MODEL_VARIABLE, EvaluationConfig
from rollout.evaluation.datasets import DatasetRow
from rollout.evaluation.environment import secrets_of
from rollout.evaluation.folder.journal import Journal
from rollout.evaluation.folder.layout import (
    ROLLOUTS,
    SERVER_LOG,
    TRAJECTORIES,
    drop_state,
    locked,
    make_state,
)
from rollout.evaluation.folder.outputs import summarize, write_outputs
from rollout.evaluation.forecast import Forecast
from rollout.evaluation.index import AttemptIndex
from rollout.evaluation.metrics import EvaluationMetrics
from rollout.evaluation.model import Model, open_model
from rollout.evaluation.opening import (
    EvaluationProgress,
    OpenedRun,
    check_endpoint,
    credentials_of,
    open_run,
)
from rollout.evaluation.records import AttemptRecord
from rollout.evaluation.rules import (
    CircuitBreaker,
    setup_retry_delay_sec,
    wants_setup_retry,
)
from rollout.evaluation.server import server_process
from rollout.evaluation.standstill import Standstill
from rollout.rules.retry import shortened
from rollout.types import MODEL_KEY

__all__ = ["EvaluationProgress", "EvaluationRun", "evaluate"]

logger = get_logger(__name__)

_ROWS_AT_A_TIME = 64
_ENDING_AT_A_TIME = 32
"""How many ends are written down at a time, so that they share syncs of the disk."""
_IN_FLIGHT = 16
"""How many attempts run at a time if neither the user nor the server says."""
_WORKERS_START_SEC = 60.0
_LOOK_SEC = 0.1
_CANCEL_SEC = 10.0
_UNDER_WAY_SEC = 0.25
_SERVER_ENDS_SEC = 2.0
_LONGEST_MESSAGE = 300
"""So much of what an attempt failed of is in the error that stops the run."""


@asynccontextmanager
async def evaluate(
    config: EvaluationConfig,
    *,
    fresh: bool = False,
    retry_failed: bool = False,
    check_model: bool = False,
    secrets: Mapping[str, str] | None = None,
    before_start: Callable[[Forecast], Awaitable[None]] | None = None,
    server_output: Callable[[str], None] | None = None,
) -> AsyncGenerator[EvaluationRun, None]:
    """Run an evaluation, or go on with one, for the length of the block.

    Example::

        async with evaluate(load_config("eval.toml")) as run:
            async for record in run:
                print(record.row, record.attempt, record.reward)
        print(run.metrics)

    The run's folder decides: if it holds a run with the same inputs, the attempts that ended
    stay as they are and the others run. Each record is on the disk before it is counted.

    Args:
        config: What to run.
        fresh: Move an earlier run in the folder to ``archive/`` and start anew.
        retry_failed: Run attempts again that are on record as failed.
        check_model: Ask the model for one token before anything is started.
        secrets: Values of secrets and keys that the config has by the names of their variables;
            the environment has those that are missing.
        before_start: Is awaited with a forecast before anything is started or moved, unless
            nothing is left to run. What it raises ends the run before it began.
        server_output: Gets each line that the run's own server writes, without secrets, when it
            is written to ``server.log``.

    Raises:
        DatasetError: The dataset cannot be read, or a row of it cannot be taken.
        EvaluationInputsChangedError: The folder holds a run with other inputs.
        EvaluationDamagedError: A file in the folder is damaged.
        EvaluationLockedError: Another process runs an evaluation there.
        EvaluationStoppedError: The circuit breaker stopped the run, its server ended, or the
            model's endpoint refuses the key.
        EvaluationError: A key, the folder or the server's application is not usable, or the model
            cannot be asked (`check_model`).
        InvalidFieldError: A URL or a key cannot be used.

    Leaving the block early, by cancellation too, cancels what is in flight on the server and
    keeps what has ended; the same call goes on from there. Index and metrics are written
    whenever the block is left, the report when the run is complete.
    """
    check_flag("fresh", fresh)
    check_flag("retry_failed", retry_failed)
    check_flag("check_model", check_model)
    own = secrets_of(config, secrets or {})
    credentials = credentials_of(config, secrets or {}, own)
    lock = locked(config.run.output)
    await trio.to_thread.run_sync(lock.__enter__)
    try:
        opened = await open_run(
            config, fresh=fresh, retry_failed=retry_failed, before_start=before_start
        )
        run = EvaluationRun(config, credentials, opened)
        async with AsyncExitStack() as stack:
            if not run.complete:
                run.model = await stack.enter_async_context(
                    open_model(config.chat, credentials.chat)
                )
                if check_model:
                    await check_endpoint(config, credentials, run.model)
            await stack.enter_async_context(_summarizing(run, opened.index))
            if run.complete:
                run.close_records()
            else:
                client = await _connect(
                    stack,
                    config,
                    credentials,
                    run,
                    secrets=own,
                    resumed=opened.resumed,
                    server_output=server_output,
                )
                await stack.enter_async_context(_working(run, client))
            yield run
        run.check_stopped()
        if run.complete:
            await trio.to_thread.run_sync(drop_state, run.folder)
            await trio.to_thread.run_sync(_report, run.folder, opened.index, run.metrics)
    finally:
        lock.__exit__(None, None, None)


def _report(folder: Path, index: AttemptIndex, metrics: EvaluationMetrics | None) -> None:
    from rollout.evaluation.report.page import write_page  # noqa: PLC0415 - templates take a while

    write_page(folder, index, metrics)


@asynccontextmanager
async def _summarizing(run: EvaluationRun, index: AttemptIndex) -> AsyncGenerator[None, None]:
    """Write index and metrics once the block is left, however that happens."""
    leaving: BaseException | None = None
    try:
        yield
    except BaseException as error:
        leaving = error
        raise
    finally:
        run.close()
        # After an error, which may be about the journal, what is on the disk counts.
        write = partial(write_outputs, run.folder, run.manifest, index)
        if leaving is not None:
            write = partial(summarize, run.folder)
        with trio.CancelScope(shield=True):
            try:
                run.metrics = await trio.to_thread.run_sync(write)
            except EvaluationError as error:
                if leaving is None:
                    raise
                leaving.add_note(f"meanwhile: {error}")


def _server_environment(
    config: EvaluationConfig, folder: Path, secrets: Mapping[str, str]
) -> dict[str, str]:
    """Return what the run's own server finds in its environment, on top of what is there."""
    environment = {**config.env, **secrets}
    if secrets:
        environment[SECRETS_VARIABLE] = ",".join(secrets)
    if config.chat.model is not None:
        environment[MODEL_VARIABLE] = config.chat.model
    if ARTIFACT_ROOT_VARIABLE not in os.environ | environment:
        environment[ARTIFACT_ROOT_VARIABLE] = str((folder / ROLLOUTS).absolute())
    return environment


async def _connect(
    stack: AsyncExitStack,
    config: EvaluationConfig,
    credentials: Credentials,
    run: EvaluationRun,
    *,
    secrets: Mapping[str, str],
    resumed: bool,
    server_output: Callable[[str], None] | None,
) -> RolloutClient:
    """Start the run's server if it has one of its own, and open a client.

    Raises:
        EvaluationError: The server does not start, is out of reach, or refuses the key.
    """
    url = config.server.url
    if config.server.app is not None:
        url = await stack.enter_async_context(
            server_process(
                config.server.app,
                log=run.folder / SERVER_LOG,
                workers=config.server.workers,
                state=await trio.to_thread.run_sync(make_state, run.folder),
                environment=_server_environment(config, run.folder, secrets),
                secrets=credentials.secrets,
                echo=server_output,
                without=config.chat.key_variable if config.chat.url is None else None,
            )
        )
    assert url is not None  # noqa: S101 - the config has one of both
    client = await stack.enter_async_context(
        RolloutClient(
            url=url,
            api_key=credentials.server,
            admission_timeout_sec=config.run.admission_timeout_sec,
        )
    )
    try:
        if config.run.max_in_flight is None:
            run.close()
            run.use_capacity(await _capacity(client, workers=config.server.workers is not None))
        else:
            await client.health()
        logger.info(
            "the rollout server is at %s; %d rollouts at a time", client.url, run.max_in_flight
        )
        if resumed and config.server.app is None:
            # What a process left there that was killed runs for nobody.
            await client.cancel_rollouts(prefix=f"{run.manifest['run_id']}-")
    except (RolloutError, httpx.HTTPError) as error:
        check_usable(error, client.url)
        text = str(error) or type(error).__name__
        raise EvaluationError(
            f"the rollout server at {client.url} does not answer: {text}"
        ) from error
    return client


async def _capacity(client: RolloutClient, *, workers: bool) -> int:
    """Ask a server how many rollouts it runs at a time.

    Args:
        client: The server's client.
        workers: Whether it has just started workers of its own, which count once they are up.
    """
    health = await client.health()
    with trio.move_on_after(_WORKERS_START_SEC):
        while workers and _workers_up(health) < len(health.get("processes", ())):
            await trio.sleep(_LOOK_SEC)
            health = await client.health()
    slots = health.get("concurrency")
    found = slots.get("max_concurrent") if isinstance(slots, dict) else None
    return found if isinstance(found, int) and is_whole_from_one(found) else _IN_FLIGHT


def _workers_up(health: dict[str, Any]) -> int:
    return sum(worker.get("status") == "up" for worker in health.get("workers", ()))


@asynccontextmanager
async def _working(run: EvaluationRun, client: RolloutClient) -> AsyncGenerator[None, None]:
    """Own the tasks of a run for the length of the block."""
    async with background_tasks(run.journal.write):
        try:
            async with background_tasks(partial(run.work, client)):
                yield
        finally:
            run.journal.close()
            with trio.CancelScope(shield=True):
                await run.cancel_in_flight(client)


class EvaluationRun:
    """A run that is going on; `evaluate` makes it.

    Iterate over it for the records of this process in their order of completion, those of
    rollouts that are tried again included (`AttemptRecord.superseded`). Nothing is started
    before its place is free, and a consumer that is slow slows the run down.

    Attributes:
        folder: Where everything is kept.
        manifest: What the run was started with.
        progress: How far it is.
        metrics: What came of it; ``None`` until the block of `evaluate` has been left.
        max_in_flight: How many attempts run at a time.
    """

    def __init__(
        self, config: EvaluationConfig, credentials: Credentials, opened: OpenedRun
    ) -> None:
        self.folder = config.run.output
        self.manifest: dict[str, Any] = opened.manifest
        self.progress = opened.progress
        self.metrics: EvaluationMetrics | None = None
        self.model = Model(config.chat.url or "", credentials.chat)
        self.journal = Journal(self.folder, synced_first=self.folder / TRAJECTORIES)
        self._config = config
        self._credentials = credentials
        self._dataset = opened.dataset
        self._index = opened.index
        self._leftover = opened.leftover
        self._retry_failed = opened.retry_failed
        self._order = opened.order
        self._stopping = opened.stopping
        self._open_again = opened.open_again
        self._breaker = CircuitBreaker(config.run.breaker_failures)
        self._asking = trio.Lock()
        # Rollouts that the server may have, and whether it has said so.
        self._started: dict[str, bool] = {}
        self._working = trio.CancelScope()
        self._standstill = Standstill()
        self._failure: Exception | None = None
        self.use_capacity(config.run.max_in_flight or _IN_FLIGHT)

    def use_capacity(self, max_in_flight: int) -> None:
        """Have as many attempts run at a time. For `evaluate`, before anything runs."""
        self.max_in_flight = max_in_flight
        self._running = trio.CapacityLimiter(max_in_flight)
        ending = max(max_in_flight, _ENDING_AT_A_TIME)
        self._ending = trio.CapacityLimiter(ending)
        # There is room for all that end at a time, so that a run that stops hands them over.
        self._send, self._receive = trio.open_memory_channel[AttemptRecord](ending)

    def __repr__(self) -> str:
        progress = self.progress
        return f"<EvaluationRun {self.folder} {progress.settled}/{progress.total}>"

    def __aiter__(self) -> AsyncIterator[AttemptRecord]:
        return self._receive.__aiter__()

    @property
    def complete(self) -> bool:
        """Whether every attempt has ended and none was cancelled, or the run knows enough."""
        return self.stopped_early or self.progress.settled >= self.progress.total

    @property
    def stopped_early(self) -> bool:
        """Whether the pass rate was known well enough (``until``) before all rows had run."""
        return self._stopping is not None and self._stopping.early

    @property
    def breaker_tripped(self) -> bool:
        """Whether the circuit breaker stopped the run."""
        return self._breaker.tripped is not None

    # --- for evaluate -------------------------------------------------------------------------

    async def work(self, client: RolloutClient) -> None:
        """Run what is not settled yet.

        Returns once nothing is left, the pass rate is known well enough, or the breaker tripped.

        Raises:
            EvaluationError: What made going on impossible: the dataset, the disk, the server.
        """
        try:
            with self._working:
                async with background_tasks(self._standstill.watch):
                    await self._feed(client)
        finally:
            # Also while the block is being left, which it often is because of this.
            if self._failure is not None:
                raise self._failure

    async def _feed(self, client: RolloutClient) -> None:
        rows_in, rows_out = trio.open_memory_channel[DatasetRow](_ROWS_AT_A_TIME)
        # Channels are closed without a checkpoint, where a cancellation would take the place
        # of the error that is on its way out.
        with self._send, rows_out:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_rows, rows_in)
                async for row in rows_out:
                    for number in self._open_attempts(row.index):
                        place = await self._enter()
                        nursery.start_soon(
                            self._attempt, client, row, number, place, self._send.clone()
                        )
                self._send.close()

    def _open_attempts(self, row: int) -> Iterator[int]:
        """Yield those attempts of a row that are not settled."""
        for number in range(self._config.run.n):
            if self._index.is_open(row, number, retry_failed=self._retry_failed):
                yield number

    async def cancel_in_flight(self, client: RolloutClient) -> None:
        """Cancel on the server what was in flight; bounded, whatever happens."""
        if not self._started:
            return
        prefix = f"{self.manifest['run_id']}-"
        with trio.move_on_after(_CANCEL_SEC) as scope:
            try:
                await client.cancel_rollouts(prefix=prefix)
                if not all(self._started.values()):
                    # A request for an admission may still be on its way.
                    await trio.sleep(_UNDER_WAY_SEC)
                    await client.cancel_rollouts(prefix=prefix)
            except (RolloutError, httpx.HTTPError) as error:
                if self._config.server.app is not None:
                    return  # it is gone, or ends in a moment, and its rollouts with it
                logger.warning(
                    "%d rollout(s) could not be cancelled on the server (%s); they end with "
                    "their leases",
                    len(self._started),
                    type(error).__name__,
                )
        if scope.cancelled_caught:
            logger.warning("cancelling %d rollout(s) took too long", len(self._started))

    def close(self) -> None:
        """Close the channel of records at both ends."""
        self._send.close()
        self._receive.close()

    def close_records(self) -> None:
        """End the iteration over records, when nothing is left to run."""
        self._send.close()

    def check_stopped(self) -> None:
        """Raise an error if the circuit breaker stopped the run.

        Raises:
            EvaluationStoppedError: It did.
        """
        record = self._breaker.tripped
        if record is not None:
            raise EvaluationStoppedError(
                f"{self._breaker.limit} attempts in a row failed for a reason outside of agent "
                f"and grader, so the run was stopped; the last one: {record.reason}: "
                f"{_shortened(record.err_message)}; once fixed, resume with retry_failed "
                "(--retry-failed)"
            )

    # --- tasks --------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        """Stop everything. The first reason counts, since others only follow from it."""
        if self._failure is None:
            self._failure = error
            self._working.cancel()

    async def _read_rows(self, rows: trio.MemorySendChannel[DatasetRow]) -> None:
        with rows:
            rows_of = self._dataset.rows
            if self._order is not None:
                order = [
                    row for row in self._order if next(self._open_attempts(row), None) is not None
                ]
                rows_of = partial(self._dataset.rows_in, order)
            source = cast("Generator[DatasetRow, None, None]", rows_of())
            with closing(source):
                try:
                    while batch := await trio.to_thread.run_sync(_take, source):
                        for row in batch:
                            await rows.send(row)
                except Exception as error:  # noqa: BLE001 - whatever it is, it comes out plain
                    self._fail(error)

    async def _attempt(
        self,
        client: RolloutClient,
        row: DatasetRow,
        number: int,
        place: _Place,
        send: trio.MemorySendChannel[AttemptRecord],
    ) -> None:
        with send:
            try:
                while True:
                    record = await self._try(client, row, number, place)
                    try:
                        send.send_nowait(record)  # also when the breaker has cancelled this
                    except trio.WouldBlock:
                        await send.send(record)
                    if not record.superseded:
                        return
                    used = self._index.setup_retries(*record.key)
                    draw = random.random()  # noqa: S311 - no secret
                    await trio.sleep(shortened(setup_retry_delay_sec(used - 1), draw))
            except Exception as error:  # noqa: BLE001 - whatever it is, it comes out plain
                self._fail(error)
            finally:
                self._leave(place)

    async def _try(
        self, client: RolloutClient, row: DatasetRow, number: int, place: _Place
    ) -> AttemptRecord:
        """Run one rollout of an attempt; return its record once that is on the disk."""
        retry = self._index.records(row.index, number)
        left = self._leftover.pop((row.index, number), None)
        if left is not None:
            attempt = Attempt(row=row, number=number, retry=retry, rollout_id=left.rollout_id)
            ending = ending_of(left, self._config, self._credentials, attempt)
        else:
            attempt = Attempt.fresh(self.manifest["run_id"], row, number, retry)
            ending = await self._run(client, attempt)
            await self._check_key(ending.record)
        if ending.record.err_category == UNREACHABLE and self._config.server.app is not None:
            # The run's own server is about to be found dead, and its end is no attempt's fault.
            await trio.sleep(_SERVER_ENDS_SEC)
        used = self._index.setup_retries(row.index, number)
        again = wants_setup_retry(ending.record, used, self._config.run.retry_setup_failures)
        if self._breaker.add(ending.record):
            self._working.cancel()
        # What has ended is kept, whoever cancels what in the meantime.
        with trio.CancelScope(shield=True):
            if not again:
                await self._move_on(place)
            record = await trio.to_thread.run_sync(
                keep_attempt, self._config, self._credentials, attempt, ending, self.folder
            )
            record = evolve(record, superseded=again)
            self._index.add(record, await self.journal.append(record))
            if record.superseded:
                self.progress.retries += 1
            else:
                self.progress.add(record)
                self._settle_row(record)
            return record
        raise AssertionError("nothing cancels that scope")

    async def _check_key(self, record: AttemptRecord) -> None:
        """Stop the run, without the record, if the model's endpoint refuses the key for good.

        The refusal of a single attempt may be about its row: a provider that moderates answers
        403 as well. So the endpoint is asked once more, and only its answer speaks for the key.

        Raises:
            EvaluationStoppedError: The endpoint refuses the key.
        """
        if record.err_source != MODEL_KEY or not self._breaker.limit:
            return
        async with self._asking:
            try:
                await check_endpoint(self._config, self._credentials, self.model)
            except EvaluationError:
                raise EvaluationStoppedError(
                    "the model's endpoint refuses the key, so the run was stopped, and no attempt "
                    f"that met this is on record: {_shortened(record.err_message)}"
                ) from None

    def _settle_row(self, record: AttemptRecord) -> None:
        """Stop the run if it knows enough with this record."""
        waiting = self._open_again.get(record.row, set())
        if record.counts:
            waiting.discard(record.attempt)
        if not waiting:
            self._open_again.pop(record.row, None)
        if self._stopping is not None:
            if self._stopping.advance(self._index, self._open_again):
                self._working.cancel()
            self.progress.half_width = self._stopping.sequence.half_width

    async def _run(self, client: RolloutClient, attempt: Attempt) -> Ending:
        def admitted() -> None:
            self._started[attempt.rollout_id] = True

        self._started[attempt.rollout_id] = False
        with self.model.for_rollout(attempt.rollout_id) as access:
            ending = await run_rollout(
                client,
                self._config,
                self._credentials,
                attempt,
                access,
                run_id=self.manifest["run_id"],
                standstill=self._standstill,
                on_admitted=admitted,
            )
        del self._started[attempt.rollout_id]
        return ending

    async def _enter(self) -> _Place:
        """Wait until one more rollout may run."""
        place = _Place(self._running)
        await self._running.acquire_on_behalf_of(place)
        self.progress.in_flight += 1
        return place

    async def _move_on(self, place: _Place) -> None:
        """Let another rollout run while this one's end is written down.

        Nobody who has come this far waits for a place to run, so this comes to an end.
        """
        await self._ending.acquire_on_behalf_of(place)
        self._leave(place)
        place.limiter = self._ending

    def _leave(self, place: _Place) -> None:
        if place.limiter is self._running:
            self.progress.in_flight -= 1
        place.limiter.release_on_behalf_of(place)


def _shortened(message: str | None) -> str:
    """Return what an attempt failed of, as a part of a sentence."""
    message = message or "no message"
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]}…"
    return message.removesuffix(".")


@define(eq=False)
class _Place:
    """The limiter in which an attempt has a place: of those that run, or that are written."""

    limiter: trio.CapacityLimiter


def _take(source: Iterator[DatasetRow]) -> list[DatasetRow]:
    batch = []
    for row in source:
        batch.append(row)
        if len(batch) == _ROWS_AT_A_TIME:
            break
    return batch
