"""The folder of a run: its lock, and the archive that older runs in it move to."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import filelock

from rollout._files import sync_folder
from rollout.errors import EvaluationDamagedError, EvaluationError, EvaluationLockedError
from rollout.evaluation.journal import EVENTS
from rollout.evaluation.manifest import MANIFEST

__all__ = [
    "INDEX",
    "METRICS",
    "REPORT",
    "SERVER_LOG",
    "TRAJECTORIES",
    "archive",
    "check_orphans",
    "locked",
]

INDEX = "index.jsonl"
METRICS = "metrics.json"
REPORT = "report.html"
SERVER_LOG = "server.log"
TRAJECTORIES = "trajectories"

_ARCHIVE = "archive"
_LOCK = ".lock"
# The manifest goes last, so that an archiving that was cut short can be told and finished.
_PARTS = (EVENTS, INDEX, METRICS, REPORT, SERVER_LOG, TRAJECTORIES, MANIFEST)


@contextmanager
def locked(folder: Path) -> Generator[None, None, None]:
    """Make the folder if need be, and keep other runs out of it for the length of the block.

    The lock ends with its process, however that ends. Blocking, but it never waits.

    Raises:
        EvaluationLockedError: Another run is going on there.
        EvaluationError: The folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / _LOCK, blocking=False, thread_local=False)
        lock.acquire()
    except filelock.Timeout:
        raise EvaluationLockedError(
            f"another evaluation is running in {folder}; wait for it, or choose another output"
        ) from None
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EvaluationError(f"{folder} cannot hold a run: {reason}") from None
    try:
        yield
    finally:
        lock.release()


def archive(folder: Path, name: str) -> Path | None:
    """Move what a run left in *folder* below ``archive/``; nothing is deleted.

    Returns:
        Where it went, ``None`` if there was nothing.

    Raises:
        EvaluationError: It cannot be moved.
    """
    parts = [folder / part for part in _PARTS if os.path.lexists(folder / part)]
    if not parts:
        return None
    try:
        target = folder / _ARCHIVE / name
        number = 1
        while target.exists():
            number += 1
            target = folder / _ARCHIVE / f"{name}-{number}"
        target.mkdir(parents=True)
        for part in parts:
            part.rename(target / part.name)
        sync_folder(folder)
    except OSError as error:
        raise EvaluationError(f"{folder} cannot be archived: {error}") from None
    return target


def check_orphans(folder: Path) -> None:
    """Refuse a folder with a journal and no manifest: it cannot be told what it belongs to.

    Raises:
        EvaluationDamagedError: It is such a folder.
    """
    if (folder / EVENTS).exists() and not (folder / MANIFEST).exists():
        raise EvaluationDamagedError(
            f"{folder} has a journal ({EVENTS}) but no {MANIFEST}; restore it, or start anew "
            "(--fresh keeps what is there in archive/)"
        )
