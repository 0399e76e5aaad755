"""What has to be in order before a run works: inputs, keys, and what is on record already."""

from __future__ import annotations

import os
import secrets
from datetime import UTC, datetime
from typing import Any

import trio
from attrs import define

from rollout._checks import check_api_key
from rollout._logs import get_logger
from rollout._redaction import url_secrets
from rollout.errors import (
    DatasetError,
    EvaluationDamagedError,
    EvaluationError,
    InvalidFieldError,
)
from rollout.evaluation.attempts import Credentials
from rollout.evaluation.config import EvaluationConfig
from rollout.evaluation.datasets import Dataset, DatasetScan, open_dataset
from rollout.evaluation.decisions import Ledger
from rollout.evaluation.folder.journal import EVENTS, read_records, recover
from rollout.evaluation.folder.layout import archive, check_orphans, finish_archiving, tidy
from rollout.evaluation.folder.manifest import (
    MANIFEST,
    check_unchanged,
    describe_inputs,
    new_manifest,
    read_manifest,
    same_inputs,
    write_manifest,
)
from rollout.evaluation.progress import EvaluationProgress

__all__ = ["OpenedRun", "credentials_of", "open_run"]

logger = get_logger(__name__)

_RUN_ID_BYTES = 4


@define
class OpenedRun:
    """A run that is ready to work.

    Attributes:
        manifest: What it was started with.
        ledger: Which attempts are settled.
        progress: How far it is.
        dataset: Where its rows come from.
        resumed: Whether another process worked on it before.
    """

    manifest: dict[str, Any]
    ledger: Ledger
    progress: EvaluationProgress
    dataset: Dataset
    resumed: bool


async def open_run(config: EvaluationConfig, *, fresh: bool, retry_failed: bool) -> OpenedRun:
    """Check the inputs against the folder, which is locked, and read what is recorded there.

    Raises:
        DatasetError: The dataset cannot be read, or a row of it cannot be taken.
        EvaluationInputsChangedError: The folder holds a run with other inputs.
        EvaluationDamagedError: A file in the folder is damaged.
        EvaluationError: The folder cannot be used.

    Cancelling this while the dataset is scanned leaves a thread to end by itself; nothing
    was changed until then.
    """
    dataset = await trio.to_thread.run_sync(open_dataset, config.dataset)
    scan = await trio.to_thread.run_sync(dataset.scan, abandon_on_cancel=True)
    _check_gradable(config, scan)
    return await trio.to_thread.run_sync(_open, config, dataset, scan, fresh, retry_failed)


def _check_gradable(config: EvaluationConfig, scan: DatasetScan) -> None:
    """Refuse a dataset all of whose attempts a server would refuse to grade.

    Raises:
        DatasetError: No selected row has a label or metadata.
    """
    lacking = scan.selected - scan.gradable
    if lacking == scan.selected:
        raise DatasetError(
            str(config.dataset.path),
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
        manifest = read_manifest(folder)
        if next(read_records(folder), None) is not None:
            check_unchanged(folder, manifest, inputs)
        # Otherwise nothing has ended with the old ones, so a config can be fixed without --fresh.
        if not same_inputs(manifest, inputs):
            manifest |= inputs
            write_manifest(folder, manifest)
    else:
        run_id = f"{now:%Y%m%d}-{secrets.token_hex(_RUN_ID_BYTES)}"
        manifest = new_manifest(run_id, now, inputs)
        write_manifest(folder, manifest)
    tidy(folder)
    ledger = Ledger(config.run.n, retry_failed=retry_failed)
    progress = EvaluationProgress(total=scan.selected * config.run.n)
    for record in recover(folder, manifest["run_id"]):
        if record.attempt >= config.run.n:
            raise EvaluationDamagedError(
                f"{folder / EVENTS}: row {record.row} has an attempt {record.attempt}, but n is "
                f"{config.run.n}; the file was changed, so it is left as it is. Restore it, or "
                "start anew (--fresh keeps it in archive/)"
            )
        replaced = ledger.settled(*record.key)
        ledger.add(record)
        if not record.counts:
            continue
        if replaced is not None:
            progress.outcomes[replaced] -= 1  # it had failed, so nothing else was counted
        if ledger.settled(*record.key) is not None:
            progress.add(record)
    progress.resumed = progress.settled
    return OpenedRun(
        manifest=manifest, ledger=ledger, progress=progress, dataset=dataset, resumed=resumed
    )


def credentials_of(config: EvaluationConfig) -> Credentials:
    """Read the keys that a config names.

    Raises:
        EvaluationError: A variable is not set, or what it holds cannot be sent as a key.
    """

    def read(section: str, name: str | None) -> str | None:
        if name is None:
            return None
        value = os.environ.get(name, "")
        if not value.strip():
            raise EvaluationError(
                f"{section}.api_key_env: the environment variable {name} is not set"
            )
        try:
            return check_api_key(value)
        except InvalidFieldError as error:
            raise EvaluationError(
                f"{section}.api_key_env: the value of {name} {error.reason}"
            ) from None

    return Credentials(
        server=read("server", config.server.api_key_env),
        chat=read("chat", config.chat.api_key_env),
        urls=(*url_secrets(config.chat.url), *url_secrets(config.server.url or "")),
    )
