"""A run that is going on: its tasks, and what they share."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import closing
from typing import Any, cast

import httpx
import trio
from attrs import define, evolve

from rollout._logs import get_logger
from rollout._tasks import background_tasks
from rollout.client import RolloutClient
from rollout.errors import EvaluationStoppedError, RolloutError
from rollout.evaluation.attempts import UNREACHABLE, Attempt, Credentials, keep_attempt, run_rollout
from rollout.evaluation.config import EvaluationConfig
from rollout.evaluation.datasets import DatasetRow
from rollout.evaluation.decisions import (
    CircuitBreaker,
    setup_retry_delay_sec,
    wants_setup_retry,
)
from rollout.evaluation.folder.journal import Journal
from rollout.evaluation.folder.layout import TRAJECTORIES
from rollout.evaluation.metrics import EvaluationMetrics
from rollout.evaluation.opening import OpenedRun
from rollout.evaluation.records import AttemptRecord
from rollout.evaluation.standstill import Standstill
from rollout.rules.retry import shortened

__all__ = ["EvaluationRun"]

logger = get_logger(__name__)

_ROWS_AT_A_TIME = 64
_ENDING_AT_A_TIME = 32
"""How many ends are written down at a time, so that they share syncs of the disk."""
_CANCEL_SEC = 10.0
_UNDER_WAY_SEC = 0.25
_SERVER_ENDS_SEC = 2.0
_LONGEST_MESSAGE = 300
"""So much of what an attempt failed of is in the error that stops the run."""


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
    """

    def __init__(
        self, config: EvaluationConfig, credentials: Credentials, opened: OpenedRun
    ) -> None:
        self.folder = config.run.output
        self.manifest: dict[str, Any] = opened.manifest
        self.progress = opened.progress
        self.metrics: EvaluationMetrics | None = None
        self.journal = Journal(self.folder, beside=self.folder / TRAJECTORIES)
        self._config = config
        self._credentials = credentials
        self._dataset = opened.dataset
        self._ledger = opened.ledger
        self._breaker = CircuitBreaker(config.run.breaker_failures)
        self._running = trio.CapacityLimiter(config.run.max_in_flight)
        ending = max(config.run.max_in_flight, _ENDING_AT_A_TIME)
        self._ending = trio.CapacityLimiter(ending)
        # Rollouts that the server may have, and whether it has said so.
        self._started: dict[str, bool] = {}
        self._working = trio.CancelScope()
        self._standstill = Standstill()
        self._failure: Exception | None = None
        # There is room for all that end at a time, so that a run that stops hands them over.
        self._send, self._receive = trio.open_memory_channel[AttemptRecord](ending)

    def __repr__(self) -> str:
        progress = self.progress
        return f"<EvaluationRun {self.folder} {progress.settled}/{progress.total}>"

    def __aiter__(self) -> AsyncIterator[AttemptRecord]:
        return self._receive.__aiter__()

    @property
    def complete(self) -> bool:
        """Whether every attempt has ended and none was cancelled."""
        return self.progress.settled >= self.progress.total

    @property
    def breaker_tripped(self) -> bool:
        """Whether the circuit breaker stopped the run."""
        return self._breaker.tripped is not None

    # --- for evaluate -------------------------------------------------------------------------

    async def work(self, client: RolloutClient) -> None:
        """Run what is not settled yet; returns once nothing is left, or the breaker tripped.

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
        for number in range(self._ledger.n):
            if self._ledger.settled(row, number) is None:
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
        """Let nobody wait for records that do not come."""
        self._send.close()
        self._receive.close()

    def hand_over_nothing(self) -> None:
        """End the iteration, since nothing is going to run."""
        self._send.close()

    def check_stopped(self) -> None:
        """Say it if the circuit breaker stopped the run.

        Raises:
            EvaluationStoppedError: It did.
        """
        record = self._breaker.tripped
        if record is not None:
            message = record.err_message or "no message"
            if len(message) > _LONGEST_MESSAGE:
                message = f"{message[:_LONGEST_MESSAGE]}…"
            raise EvaluationStoppedError(
                f"{self._breaker.limit} attempts in a row failed for a reason outside of agent "
                f"and grader, so the run was stopped; the last one: {record.reason}: "
                f"{message.removesuffix('.')}; once fixed, resume with retry_failed "
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
            source = cast("Generator[DatasetRow, None, None]", self._dataset.rows())
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
                    used = self._ledger.setup_retries(*record.key)
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
        retry = self._ledger.records(row.index, number)
        attempt = Attempt.fresh(self.manifest["run_id"], row, number, retry)

        def admitted() -> None:
            self._started[attempt.rollout_id] = True

        self._started[attempt.rollout_id] = False
        ending = await run_rollout(
            client,
            self._config,
            self._credentials,
            attempt,
            standstill=self._standstill,
            on_admitted=admitted,
        )
        del self._started[attempt.rollout_id]
        if ending.record.err_category == UNREACHABLE and self._config.server.app is not None:
            # The run's own server is about to be found dead, and its end is no attempt's fault.
            await trio.sleep(_SERVER_ENDS_SEC)
        used = self._ledger.setup_retries(row.index, number)
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
            await self.journal.append(record)
            self._count(record)
            return record
        raise AssertionError("nothing cancels that scope")

    def _count(self, record: AttemptRecord) -> None:
        """Take note of a record that is on the disk."""
        self._ledger.add(record)
        if record.superseded:
            self.progress.retries += 1
        else:
            self.progress.add(record)

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


@define(eq=False)
class _Place:
    """What an attempt occupies: one of those to run, or one of those to be written down."""

    limiter: trio.CapacityLimiter


def _take(source: Iterator[DatasetRow]) -> list[DatasetRow]:
    batch = []
    for row in source:
        batch.append(row)
        if len(batch) == _ROWS_AT_A_TIME:
            break
    return batch
