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
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import trio

from rollout._checks import check_flag
from rollout._logs import get_logger
from rollout._tasks import background_tasks
from rollout.artifacts import ARTIFACT_ROOT_VARIABLE
from rollout.client import RolloutClient
from rollout.errors import EvaluationError, RolloutError
from rollout.evaluation.attempts import Credentials, check_usable
from rollout.evaluation.config import EvaluationConfig
from rollout.evaluation.folder.layout import ROLLOUTS, SERVER_LOG, locked
from rollout.evaluation.folder.outputs import summarize
from rollout.evaluation.opening import credentials_of, open_run
from rollout.evaluation.preflight import check_endpoint
from rollout.evaluation.progress import EvaluationProgress
from rollout.evaluation.run import EvaluationRun
from rollout.evaluation.server import server_process

__all__ = ["EvaluationProgress", "EvaluationRun", "evaluate"]

logger = get_logger(__name__)


@asynccontextmanager
async def evaluate(
    config: EvaluationConfig,
    *,
    fresh: bool = False,
    retry_failed: bool = False,
    check_model: bool = False,
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

    Raises:
        DatasetError: The dataset cannot be read, or a row of it cannot be taken.
        EvaluationInputsChangedError: The folder holds a run with other inputs.
        EvaluationDamagedError: A file in the folder is damaged.
        EvaluationLockedError: Another process runs an evaluation there.
        EvaluationStoppedError: The circuit breaker stopped the run, or its server ended.
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
    credentials = credentials_of(config)
    lock = locked(config.run.output)
    await trio.to_thread.run_sync(lock.__enter__)
    try:
        opened = await open_run(config, fresh=fresh, retry_failed=retry_failed)
        if check_model and opened.progress.settled < opened.progress.total:
            await check_endpoint(config, credentials)
        run = EvaluationRun(config, credentials, opened)
        async with _summarizing(run), AsyncExitStack() as stack:
            if run.complete:
                run.hand_over_nothing()
            else:
                client = await _connect(stack, config, credentials, run, resumed=opened.resumed)
                await stack.enter_async_context(_working(run, client))
            yield run
        run.check_stopped()
        if run.complete:
            await trio.to_thread.run_sync(_report, run.folder)
    finally:
        lock.__exit__(None, None, None)


def _report(folder: Path) -> None:
    from rollout.evaluation.report import write_report  # noqa: PLC0415 - templates take a while

    write_report(folder)


@asynccontextmanager
async def _summarizing(run: EvaluationRun) -> AsyncGenerator[None, None]:
    """Write index and metrics once the block is left, however that happens."""
    leaving: BaseException | None = None
    try:
        yield
    except BaseException as error:
        leaving = error
        raise
    finally:
        run.close()
        with trio.CancelScope(shield=True):
            try:
                run.metrics = await trio.to_thread.run_sync(summarize, run.folder)
            except EvaluationError as error:
                if leaving is None:
                    raise
                leaving.add_note(f"meanwhile: {error}")


def _server_environment(config: EvaluationConfig, folder: Path) -> dict[str, str]:
    """Return what the run's own server finds in its environment, on top of what is there."""
    environment = {} if config.chat.model is None else {"ROLLOUT_MODEL": config.chat.model}
    if ARTIFACT_ROOT_VARIABLE not in os.environ:
        environment[ARTIFACT_ROOT_VARIABLE] = str((folder / ROLLOUTS).absolute())
    return environment


async def _connect(
    stack: AsyncExitStack,
    config: EvaluationConfig,
    credentials: Credentials,
    run: EvaluationRun,
    *,
    resumed: bool,
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
                environment=_server_environment(config, run.folder),
                secrets=credentials.secrets,
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
        await client.health()
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
