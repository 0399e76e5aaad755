"""Run an evaluation: n attempts for each row, durable as they end, resumable at any point.

Theory of operation: `evaluate` locks the folder, reads the dataset once to check and digest
it, and reads what an earlier process recorded. Then three kinds of task run: one streams the
rows from a thread, a feeder starts an attempt whenever there is a place for it, and each
attempt runs its rollout, writes its trajectory, waits until its record is on the disk, counts
itself, and hands the record to whoever iterates. The journal's writer lives outside of them,
so that a record whose attempt is cancelled meanwhile is still written.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio
from attrs import define, evolve, field

from rollout._groups import sole_error
from rollout.client import RolloutClient
from rollout.errors import EvaluationError, EvaluationStoppedError, RolloutError
from rollout.evaluation.attempts import Attempt, Credentials, keep_attempt, run_rollout
from rollout.evaluation.config import EvaluationConfig
from rollout.evaluation.datasets import Dataset, DatasetRow, open_dataset
from rollout.evaluation.decisions import (
    CircuitBreaker,
    Ledger,
    setup_retry_delay_sec,
    wants_setup_retry,
)
from rollout.evaluation.folder import (
    SERVER_LOG,
    TRAJECTORIES,
    archive,
    check_orphans,
    locked,
)
from rollout.evaluation.journal import Journal, recover
from rollout.evaluation.manifest import (
    MANIFEST,
    check_unchanged,
    describe_inputs,
    read_manifest,
    write_manifest,
)
from rollout.evaluation.metrics import EvaluationMetrics
from rollout.evaluation.outputs import summarize
from rollout.evaluation.records import AttemptOutcome, AttemptRecord
from rollout.evaluation.serverprocess import server_process

__all__ = ["EvaluationProgress", "EvaluationRun", "evaluate"]

logger = logging.getLogger(__name__)

_ROWS_AT_A_TIME = 64
_CANCEL_SEC = 10.0
_RUN_ID_BYTES = 4


@define
class EvaluationProgress:
    """How far a run is, all processes that worked on it together.

    Attributes:
        total: How many attempts it has in all.
        resumed: How many of them had ended before this process took over.
        in_flight: How many run now.
        outcomes: How many ended how; `cancelled` ones run again when the run is resumed.
        rewards: How many have a reward.
        reward_sum: The sum of the rewards.
        passed: How many passed.
        retries: How many rollouts were tried again for their setup, in this process.
    """

    total: int
    resumed: int = 0
    in_flight: int = 0
    outcomes: Counter[AttemptOutcome] = field(factory=Counter)
    rewards: int = 0
    reward_sum: float = 0.0
    passed: int = 0
    retries: int = 0

    @property
    def settled(self) -> int:
        """How many attempts have ended and stay so."""
        return self.outcomes.total() - self.outcomes[AttemptOutcome.CANCELLED]

    @property
    def mean_reward(self) -> float | None:
        """The mean of the rewards so far, ``None`` without one."""
        return self.reward_sum / self.rewards if self.rewards else None

    def add(self, record: AttemptRecord) -> None:
        """Count the record of an attempt."""
        self.outcomes[record.outcome] += 1
        self.passed += record.passed
        if record.reward is not None:
            self.rewards += 1
            self.reward_sum += record.reward


class EvaluationRun:
    """A run that is going on; `evaluate` makes it.

    Iterate over it for the records of this process in their order of completion. Nothing is
    started before its place is free, and a consumer that is slow slows the run down.

    Attributes:
        folder: Where everything is kept.
        manifest: What the run was started with.
        progress: How far it is.
        metrics: What came of it; ``None`` until the block of `evaluate` has been left.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        credentials: Credentials,
        dataset: Dataset,
        manifest: dict[str, Any],
        ledger: Ledger,
        progress: EvaluationProgress,
    ) -> None:
        self.folder = config.run.output
        self.manifest = manifest
        self.progress = progress
        self.metrics: EvaluationMetrics | None = None
        self._config = config
        self._credentials = credentials
        self._dataset = dataset
        self._ledger = ledger
        self._breaker = CircuitBreaker(config.run.breaker_failures)
        self._journal = Journal(self.folder)
        self._places = trio.CapacityLimiter(config.run.max_in_flight)
        self._started: set[str] = set()
        self._working = trio.CancelScope()
        self._send, self._receive = trio.open_memory_channel[AttemptRecord](
            config.run.max_in_flight
        )

    def __repr__(self) -> str:
        progress = self.progress
        return f"<EvaluationRun {self.folder} {progress.settled}/{progress.total}>"

    def __aiter__(self) -> AsyncIterator[AttemptRecord]:
        return self._receive.__aiter__()

    @property
    def complete(self) -> bool:
        """Whether every attempt has ended and none was cancelled."""
        return self.progress.settled >= self.progress.total

    # --- tasks --------------------------------------------------------------------------------

    async def work(self, client: RolloutClient) -> None:
        """Run what is not settled yet; returns once nothing is left, or the breaker tripped."""
        rows_in, rows_out = trio.open_memory_channel[DatasetRow](_ROWS_AT_A_TIME)
        with self._working:
            async with self._send, trio.open_nursery() as nursery, rows_out:
                nursery.start_soon(self._read_rows, rows_in)
                async for row in rows_out:
                    for number in range(self._ledger.n):
                        if self._ledger.settled(row.index, number):
                            continue
                        place = object()
                        await self._places.acquire_on_behalf_of(place)
                        nursery.start_soon(
                            self._attempt, client, row, number, place, self._send.clone()
                        )
                self._send.close()

    async def _read_rows(self, rows: trio.MemorySendChannel[DatasetRow]) -> None:
        async with rows:
            source = self._dataset.rows()
            while batch := await trio.to_thread.run_sync(_take, source, _ROWS_AT_A_TIME):
                for row in batch:
                    await rows.send(row)

    async def _attempt(
        self,
        client: RolloutClient,
        row: DatasetRow,
        number: int,
        place: object,
        send: trio.MemorySendChannel[AttemptRecord],
    ) -> None:
        async with send:
            self.progress.in_flight += 1
            try:
                while True:
                    record = await self._try(client, row, number)
                    await send.send(record)
                    if not record.superseded:
                        return
                    used = self._ledger.setup_retries(*record.key)
                    await trio.sleep(setup_retry_delay_sec(used - 1))
            finally:
                self.progress.in_flight -= 1
                self._places.release_on_behalf_of(place)

    async def _try(self, client: RolloutClient, row: DatasetRow, number: int) -> AttemptRecord:
        """Run one rollout of an attempt; return its record once that is on the disk."""
        retry = self._ledger.records(row.index, number)
        attempt = Attempt.fresh(self.manifest["run_id"], row, number, retry)
        self._started.add(attempt.rollout_id)
        ending = await run_rollout(client, self._config, self._credentials, attempt)
        self._started.discard(attempt.rollout_id)
        # What has ended is kept, whoever cancels what in the meantime.
        with trio.CancelScope(shield=True):
            record = await trio.to_thread.run_sync(
                keep_attempt, self._config, self._credentials, attempt, ending, self.folder
            )
            used = self._ledger.setup_retries(*record.key)
            if wants_setup_retry(record, used, self._config.run.retry_setup_failures):
                record = evolve(record, superseded=True)
                self.progress.retries += 1
            await self._journal.append(record)
        self._ledger.add(record)
        if not record.superseded:
            self.progress.add(record)
        if self._breaker.add(record):
            self._working.cancel()
        return record

    async def close(self, client: RolloutClient) -> None:
        """Cancel on the server what is in flight; bounded, whatever happens."""
        if not self._started:
            return
        await cancel_leftovers(client, self.manifest["run_id"], what=len(self._started))

    def check_stopped(self) -> None:
        """Say it if the circuit breaker stopped the run.

        Raises:
            EvaluationStoppedError: It did.
        """
        record = self._breaker.tripped
        if record is not None:
            raise EvaluationStoppedError(
                f"{self._breaker.limit} attempts in a row failed for a reason outside of agent "
                f"and grader, so the run was stopped; the last one: {record.err_category}: "
                f"{record.err_message}. When that is mended, resume with retry_failed "
                "(--retry-failed)"
            )

    async def keep(self, writer: trio.Nursery) -> None:
        """Run the journal's writer in *writer*, which outlives the attempts."""
        writer.start_soon(self._journal.write)
        await trio.lowlevel.checkpoint()


def _take(source: Iterator[DatasetRow], count: int) -> list[DatasetRow]:
    batch = []
    for row in source:
        batch.append(row)
        if len(batch) == count:
            break
    return batch


async def cancel_leftovers(client: RolloutClient, run_id: str, *, what: int | None = None) -> None:
    """Ask the server to cancel what it still runs for this run."""
    with trio.move_on_after(_CANCEL_SEC, shield=True) as scope:
        try:
            await client.cancel_rollouts(prefix=f"{run_id}-")
        except (RolloutError, httpx.HTTPError) as error:
            if what is not None:
                logger.warning(
                    "%d rollout(s) could not be cancelled on the server (%s); they end with "
                    "their leases",
                    what,
                    type(error).__name__,
                )
    if scope.cancelled_caught and what is not None:
        logger.warning("cancelling %d rollout(s) took too long", what)


# --- setting up -------------------------------------------------------------------------------


@define
class _Opened:
    manifest: dict[str, Any]
    ledger: Ledger
    progress: EvaluationProgress
    dataset: Dataset


def _open(config: EvaluationConfig, *, fresh: bool, retry_failed: bool) -> _Opened:
    """Check the inputs against the folder and read what is recorded there. Blocking."""
    folder = config.run.output
    dataset = open_dataset(config.dataset)
    scan = dataset.scan()
    inputs = describe_inputs(config, digest=scan.digest, rows=scan.rows, selected=scan.selected)
    now = datetime.now(UTC)
    if fresh:
        archive(folder, f"{now:%Y%m%dT%H%M%SZ}")
    check_orphans(folder)
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        check_unchanged(folder, manifest, inputs)
    else:
        run_id = f"{now:%Y%m%d}-{secrets.token_hex(_RUN_ID_BYTES)}"
        manifest = write_manifest(folder, inputs, run_id=run_id, created_at=now)
    try:
        (folder / TRAJECTORIES).mkdir(exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"{folder / TRAJECTORIES}: {error.strerror or error}") from None
    opened = _Opened(
        manifest=manifest,
        ledger=Ledger(config.run.n, retry_failed=retry_failed),
        progress=EvaluationProgress(total=scan.selected * config.run.n),
        dataset=dataset,
    )
    for record in recover(folder, manifest["run_id"]):
        replaced = opened.ledger.settled(*record.key)
        opened.ledger.add(record)
        if replaced is not None:
            opened.progress.outcomes[replaced] -= 1  # it had failed, so nothing else counted
        if opened.ledger.settled(*record.key):
            opened.progress.add(record)
    opened.progress.resumed = opened.progress.settled
    return opened


def credentials_of(config: EvaluationConfig) -> Credentials:
    """Read the keys that a config names.

    Raises:
        EvaluationError: A variable is not set.
    """

    def read(section: str, name: str | None) -> str | None:
        if name is None:
            return None
        value = os.environ.get(name, "")
        if not value.strip():
            raise EvaluationError(
                f"{section}.api_key_env: the environment variable {name} is not set"
            )
        return value

    return Credentials(
        server=read("server", config.server.api_key_env),
        chat=read("chat", config.chat.api_key_env),
    )


@asynccontextmanager
async def evaluate(
    config: EvaluationConfig, *, fresh: bool = False, retry_failed: bool = False
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

    Raises:
        DatasetError: The dataset cannot be read, or a row of it cannot be taken.
        EvaluationInputsChangedError: The folder holds a run with other inputs.
        EvaluationDamagedError: A file in the folder is damaged.
        EvaluationLockedError: Another process runs an evaluation there.
        EvaluationStoppedError: The circuit breaker stopped the run, or its server ended.
        EvaluationError: A key, the folder or the server's application is not usable.
        InvalidFieldError: A URL or a key cannot be used.

    Leaving the block early, by cancellation too, cancels what is in flight on the server and
    keeps what has ended; the same call goes on from there. Index and metrics are written
    whenever the block is left, the report when the run is complete.
    """
    credentials = credentials_of(config)
    lock = locked(config.run.output)
    await trio.to_thread.run_sync(lock.__enter__)
    try:
        opened = await trio.to_thread.run_sync(
            partial(_open, config, fresh=fresh, retry_failed=retry_failed)
        )
        run = EvaluationRun(
            config, credentials, opened.dataset, opened.manifest, opened.ledger, opened.progress
        )
        try:
            async with AsyncExitStack() as stack:
                if not run.complete:
                    client = await _connect(stack, config, credentials, run)
                    await stack.enter_async_context(_working(run, client))
                else:
                    run._send.close()  # noqa: SLF001 - nobody is going to send
                yield run
        finally:
            with trio.CancelScope(shield=True):
                run.metrics = await trio.to_thread.run_sync(summarize, run.folder)
        run.check_stopped()
        if run.complete:
            await trio.to_thread.run_sync(_report, run.folder)
    finally:
        lock.__exit__(None, None, None)


def _report(folder: Path) -> None:
    from rollout.evaluation.report import write_report  # noqa: PLC0415 - templates take a while

    write_report(folder)


async def _connect(
    stack: AsyncExitStack, config: EvaluationConfig, credentials: Credentials, run: EvaluationRun
) -> RolloutClient:
    """Start the run's server if it has one of its own, and open a client."""
    url = config.server.url
    if config.server.app is not None:
        environment = {} if config.chat.model is None else {"ROLLOUT_MODEL": config.chat.model}
        url = await stack.enter_async_context(
            server_process(config.server.app, log=run.folder / SERVER_LOG, environment=environment)
        )
    assert url is not None  # noqa: S101 - the config has one of both
    client = await stack.enter_async_context(
        RolloutClient(
            url=url,
            api_key=credentials.server,
            admission_timeout_sec=config.run.admission_timeout_sec,
        )
    )
    if run.progress.resumed and config.server.app is None:
        await cancel_leftovers(client, run.manifest["run_id"])
    return client


@asynccontextmanager
async def _working(run: EvaluationRun, client: RolloutClient) -> AsyncGenerator[None, None]:
    """Own the tasks of a run for the length of the block."""
    leaving: BaseException | None = None
    try:
        async with trio.open_nursery() as writer:
            await run.keep(writer)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run.work, client)
                    try:
                        yield
                    except BaseException as error:
                        leaving = error
                        raise
                    nursery.cancel_scope.cancel()
            finally:
                with trio.CancelScope(shield=True):
                    await run.close(client)
                writer.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        plain = leaving
        if plain is None or isinstance(plain, trio.Cancelled):
            plain = sole_error(group)
        raise plain from None
