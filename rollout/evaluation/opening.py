"""Open a run: check its inputs, keys and model, and read the records of earlier processes."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import trio
from attrs import define, field

from rollout._checks import check_api_key
from rollout._endpoint_failures import endpoint_failure
from rollout._logs import get_logger
from rollout._redaction import (
    SECRETS_VARIABLE,
    environment_secrets,
    redact,
    url_secrets,
)
from rollout.errors import (
    DatasetError,
    EvaluationDamagedError,
    EvaluationError,
    IntegrationError,
    InvalidFieldError,
)
from rollout.evaluation.attempts import Credentials
from rollout.evaluation.config import EvaluationConfig
from rollout.evaluation.datasets import Dataset, DatasetScan, open_dataset
from rollout.evaluation.folder.journal import EVENTS, read_records, recover, score_again
from rollout.evaluation.folder.layout import (
    STATE,
    archive,
    check_orphans,
    drop_state,
    finish_archiving,
    tidy,
)
from rollout.evaluation.folder.manifest import (
    MANIFEST,
    check_unchanged,
    describe_inputs,
    new_manifest,
    read_manifest,
    same_inputs,
    write_manifest,
)
from rollout.evaluation.forecast import Forecast, forecast_run
from rollout.evaluation.index import AttemptIndex, IndexedAttempt
from rollout.evaluation.leftover import ended_ids, results_of, wait_released
from rollout.evaluation.model import Model
from rollout.evaluation.records import AttemptOutcome, AttemptRecord
from rollout.evaluation.sequential import Stopping, drawn_order, seed_of, selected_rows
from rollout.integrations.chat import chat
from rollout.types import RolloutResultResponse

__all__ = ["EvaluationProgress", "OpenedRun", "check_endpoint", "credentials_of", "open_run"]

logger = get_logger(__name__)

_RUN_ID_BYTES = 4
BeforeStart = Callable[[Forecast], Awaitable[None]]
_SEED_BITS = 32


@define
class OpenedRun:
    """A run that is ready to work.

    Attributes:
        manifest: What it was started with.
        index: Its attempts that are on record.
        progress: How far it is.
        dataset: Where its rows come from.
        resumed: Whether another process worked on it before.
        retry_failed: Whether attempts that failed are run again.
        leftover: Results that its own server has kept of attempts that are not on record.
        order: The selected rows in random order; ``None`` for the order of the file.
        stopping: Decides when it knows enough; ``None`` for a run of all rows.
        open_again: Of each row with failures that are run again, the attempts that these are.
    """

    manifest: dict[str, Any]
    index: AttemptIndex
    progress: EvaluationProgress
    dataset: Dataset
    resumed: bool
    retry_failed: bool
    leftover: dict[tuple[int, int], RolloutResultResponse] = field(factory=dict)
    order: list[int] | None = None
    stopping: Stopping | None = None
    open_again: dict[int, set[int]] = field(factory=dict)


async def open_run(
    config: EvaluationConfig,
    *,
    fresh: bool,
    retry_failed: bool,
    before_start: BeforeStart | None = None,
) -> OpenedRun:
    """Check the inputs against the folder, which is locked, and read what is recorded there.

    Args:
        config: What to run.
        fresh: Whether an earlier run in the folder is moved to ``archive/``.
        retry_failed: Whether attempts are run again that are on record as failed.
        before_start: Is awaited before that, or once the run is open if rollouts are left.

    Raises:
        DatasetError: The dataset cannot be read, or a row of it cannot be taken.
        EvaluationInputsChangedError: The folder holds a run with other inputs.
        EvaluationDamagedError: A file in the folder is damaged.
        EvaluationError: The folder cannot be used.

    Cancelling this while the dataset is scanned leaves a thread to end by itself; nothing
    was changed until then.
    """
    await wait_released(config.run.output / STATE)
    dataset = await trio.to_thread.run_sync(open_dataset, config.dataset)
    scan = await trio.to_thread.run_sync(dataset.scan, abandon_on_cancel=True)
    _check_gradable(config, scan)
    if fresh and before_start is not None:  # while nothing is moved yet
        await before_start(await _forecast(config, scan.selected * config.run.n))
    opened = await trio.to_thread.run_sync(_open, config, dataset, scan, fresh, retry_failed)
    left = opened.progress.total - opened.progress.settled - len(opened.leftover)
    decided = opened.stopping is not None and opened.stopping.decided
    if not fresh and before_start is not None and left and not decided:
        await before_start(await _forecast(config, left))
    return opened


async def _forecast(config: EvaluationConfig, rollouts: int) -> Forecast:
    return await trio.to_thread.run_sync(forecast_run, config, config.run.output, rollouts)


def _check_gradable(config: EvaluationConfig, scan: DatasetScan) -> None:
    """Refuse a dataset all of whose attempts a server would refuse to grade.

    Raises:
        DatasetError: No selected row has a label or metadata.
    """
    lacking = scan.selected - scan.gradable
    if lacking == scan.selected:
        raise DatasetError(
            config.dataset.location,
            "no selected row has a ground truth or metadata, so no attempt could be graded; map "
            "the column that has it with columns.ground_truth",
        )
    if lacking:
        logger.warning(
            "%d of %d rows have neither a ground truth nor metadata; their attempts will fail",
            lacking,
            scan.selected,
        )


def _open(
    config: EvaluationConfig, dataset: Dataset, scan: DatasetScan, fresh: bool, retry_failed: bool
) -> OpenedRun:
    folder = config.run.output
    inputs = describe_inputs(
        config,
        revision=dataset.revision,
        format=dataset.format,
        digest=scan.digest,
        rows=scan.rows,
        selected=scan.selected,
    )
    now = datetime.now(UTC)
    finish_archiving(folder)
    if fresh:
        archive(folder, f"{now:%Y%m%dT%H%M%SZ}")
    check_orphans(folder)
    resumed = (folder / MANIFEST).exists()
    if resumed:
        manifest = _resumed(folder, inputs)
    else:
        run_id = f"{now:%Y%m%d}-{secrets.token_hex(_RUN_ID_BYTES)}"
        _draw_seed(inputs)
        manifest = new_manifest(run_id, now, inputs)
        write_manifest(folder, manifest)
    tidy(folder)
    state = folder / STATE
    unrecorded = set() if config.server.app is None else ended_ids(state)
    index = AttemptIndex()
    for place, record in recover(folder, manifest["run_id"]):
        if record.attempt >= config.run.n:
            raise EvaluationDamagedError(
                f"{folder / EVENTS}: row {record.row} has an attempt {record.attempt}, but n is "
                f"{config.run.n}; the file was changed, so it is left as it is. Restore it, or "
                "start anew (--fresh keeps it in archive/)"
            )
        index.add(record, place)
        unrecorded.discard(record.rollout_id)
    progress = EvaluationProgress(total=scan.selected * config.run.n)
    open_again: dict[int, set[int]] = {}
    for attempt in index:
        if not index.is_open(attempt.row, attempt.attempt, retry_failed=retry_failed):
            progress.add(attempt)
        elif attempt.settled:
            open_again.setdefault(attempt.row, set()).add(attempt.attempt)
    progress.resumed = progress.settled
    leftover = dict(results_of(state, manifest["run_id"], unrecorded))
    if leftover:
        logger.info("%d attempt(s) ended after the process before did", len(leftover))
    seed, stopping = seed_of(manifest), Stopping.of(manifest)
    if stopping is not None:
        stopping.advance(index, open_again)
        progress.half_width = stopping.sequence.half_width
    return OpenedRun(
        manifest=manifest,
        index=index,
        progress=progress,
        dataset=dataset,
        resumed=resumed,
        retry_failed=retry_failed,
        leftover=leftover,
        order=None if seed is None else drawn_order(selected_rows(manifest), seed),
        stopping=stopping,
        open_again=open_again,
    )


def _draw_seed(inputs: dict[str, Any]) -> None:
    """Give a run that stops when it knows enough an order, if it has none."""
    if inputs["run"]["until"] is not None and inputs["run"]["seed"] is None:
        inputs["run"]["seed"] = secrets.randbits(_SEED_BITS)


def _resumed(folder: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of a run that goes on, brought to *inputs*."""
    manifest = read_manifest(folder)
    threshold = inputs["run"]["pass_threshold"]
    if inputs["run"]["seed"] is None:
        inputs["run"]["seed"] = manifest["run"].get("seed")
    _draw_seed(inputs)
    if next(read_records(folder), None) is not None:
        check_unchanged(folder, manifest, inputs)
        if threshold != manifest["run"]["pass_threshold"]:
            logger.info("attempts on record are scored again: they pass from %g on", threshold)
            score_again(folder, manifest["run_id"], threshold)
    # Otherwise nothing has ended with the old ones, so a config can be fixed without --fresh.
    if not same_inputs(manifest, inputs):
        drop_state(folder)
    elif inputs["run"] == manifest["run"]:
        return manifest
    manifest |= inputs
    write_manifest(folder, manifest)
    return manifest


def credentials_of(
    config: EvaluationConfig, given: Mapping[str, str], own: Mapping[str, str]
) -> Credentials:
    """Read the keys that a config names.

    Args:
        config: The config.
        given: Values of variables; the environment has those that are missing.
        own: The secrets of the run's own server.

    Raises:
        EvaluationError: A variable is not set, or what it holds cannot be sent as a key.
    """

    def read(section: str, name: str | None, *, required: bool = True) -> str | None:
        if name is None:
            return None
        value = given.get(name) or os.environ.get(name, "")
        if not value.strip():
            if not required:
                return None
            raise EvaluationError(
                f"{section}.api_key_env: the environment variable {name} is not set"
            )
        try:
            return check_api_key(value)
        except InvalidFieldError as error:
            raise EvaluationError(
                f"{section}.api_key_env: the value of {name} {error.reason}"
            ) from None

    chat = config.chat
    return Credentials(
        server=read("server", config.server.api_key_env),
        chat=read("chat", chat.key_variable, required=chat.api_key_env is not None),
        urls=tuple(
            secret
            for url in (chat.url, chat.api_base, config.server.url)
            for secret in url_secrets(url or "")
        ),
        more=tuple(environment_secrets({SECRETS_VARIABLE: ",".join(own), **own})),
    )


@define
class EvaluationProgress:
    """The progress of a run, all processes that worked on it together.

    Attributes:
        total: How many attempts it has in all.
        resumed: How many of them had ended before this process took over.
        in_flight: How many run now.
        outcomes: How many ended how; `cancelled` ones run again when the run is resumed.
        rewards: How many have a reward.
        reward_sum: The sum of the rewards.
        passed: How many passed.
        retries: How many rollouts were tried again for their setup, in this process.
        half_width: Half the width of the pass rate's confidence sequence, of a run with ``until``.
    """

    total: int
    resumed: int = 0
    in_flight: int = 0
    outcomes: Counter[AttemptOutcome] = field(factory=Counter)
    rewards: int = 0
    reward_sum: float = 0.0
    passed: int = 0
    retries: int = 0
    half_width: float | None = None

    @property
    def settled(self) -> int:
        """How many attempts have ended and stay so."""
        return self.outcomes.total() - self.outcomes[AttemptOutcome.CANCELLED]

    @property
    def mean_reward(self) -> float | None:
        """The mean of the rewards so far, ``None`` without one."""
        return self.reward_sum / self.rewards if self.rewards else None

    def add(self, ended: AttemptRecord | IndexedAttempt) -> None:
        """Count an attempt that has ended."""
        self.outcomes[ended.outcome] += 1
        self.passed += ended.passed
        if ended.reward is not None:
            self.rewards += 1
            self.reward_sum += ended.reward


logger = get_logger(__name__)

_ANSWER_SEC = 60.0
_NOT_FOUND = 404
_TOO_MANY = 429


async def check_endpoint(config: EvaluationConfig, credentials: Credentials, model: Model) -> None:
    """Ask the model for one token.

    An endpoint that takes this call for a wrong one is alive, and so is one that has too much to
    do, which is logged. Without a model's name, an unknown model says nothing.

    Raises:
        EvaluationError: Nobody listens or answers there, the key or the model is refused, or the
            endpoint is broken.
    """
    named = config.chat.model is not None
    try:
        with model.for_rollout("test-call") as access, access.here:
            await chat(
                [{"role": "user", "content": "Hello"}],
                model=config.chat.model or "policy",
                record=False,
                timeout_sec=_ANSWER_SEC,
                max_tokens=1,
            )
    except (IntegrationError, httpx.HTTPError, httpx.InvalidURL) as error:
        status = error.status_code if isinstance(error, IntegrationError) else None
        text = redact(str(error) or type(error).__name__, credentials.secrets)
        if status == _TOO_MANY:
            logger.warning("%s; the run starts anyway", text)
        elif endpoint_failure(error) is not None and (named or status != _NOT_FOUND):
            raise EvaluationError(
                f"a test call of the model {model.place} failed: {text}. Nothing was started; "
                "if only the rollout server can reach the model, start with --no-check"
            ) from error
