"""The folder of a run: its lock, and the archive that older runs in it move to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from rollout._files.atomic import is_leftover, reason_of, sync_folder, write_atomic
from rollout._files.folders import PRIVATE, refuse_link
from rollout.errors import EvaluationDamagedError, EvaluationError, EvaluationLockedError
from rollout.evaluation.folder.journal import EVENTS
from rollout.evaluation.folder.manifest import MANIFEST

__all__ = [
    "INDEX",
    "METRICS",
    "REPORT",
    "ROLLOUTS",
    "SERVER_LOG",
    "STATE",
    "TRAJECTORIES",
    "archive",
    "check_orphans",
    "drop_state",
    "finish_archiving",
    "locked",
    "make_state",
    "tidy",
]

INDEX = "index.jsonl"
METRICS = "metrics.json"
REPORT = "report.html"
ROLLOUTS = "rollouts"
SERVER_LOG = "server.log"
STATE = "state/rollouts"
TRAJECTORIES = "trajectories"

_ARCHIVE = "archive"
_UNFINISHED = ".unfinished"
_LOCK = ".lock"
_STATE_FOLDER = "state"
_PARTS = (
    EVENTS,
    INDEX,
    METRICS,
    REPORT,
    ROLLOUTS,
    SERVER_LOG,
    _STATE_FOLDER,
    TRAJECTORIES,
    MANIFEST,
)


@contextmanager
def locked(folder: Path) -> Generator[None, None, None]:
    """Make the folder if need be, and keep other runs out of it for the length of the block.

    The lock ends with its process, however that ends. Blocking, but it never waits.

    Raises:
        EvaluationLockedError: Another run is going on there.
        EvaluationError: The folder cannot be made or written to.
    """
    try:
        folder.mkdir(PRIVATE, parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / _LOCK, mode=0o600, blocking=False, thread_local=False)
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

    Where that is cut short, `finish_archiving` goes on with it.

    Returns:
        Where it went, ``None`` if there was nothing.

    Raises:
        EvaluationError: It cannot be moved.
    """
    finish_archiving(folder)
    if not _parts(folder):
        return None
    number = 1
    try:
        target = folder / _ARCHIVE / name
        while os.path.lexists(target):
            number += 1
            target = folder / _ARCHIVE / f"{name}-{number}"
        _make(folder / _ARCHIVE)
        target.mkdir(PRIVATE)
        write_atomic(target / _UNFINISHED, b"")
        sync_folder(folder / _ARCHIVE)
        sync_folder(folder)
    except OSError as error:
        raise _not_archived(folder, error) from None
    _move(folder, target)
    return target


def finish_archiving(folder: Path) -> None:
    """Go on with an archiving that was cut short, so that no run continues half of another.

    Raises:
        EvaluationError: It cannot be moved.
    """
    for marker in sorted((folder / _ARCHIVE).glob(f"*/{_UNFINISHED}")):
        _move(folder, marker.parent)


def _parts(folder: Path) -> list[Path]:
    return [folder / part for part in _PARTS if os.path.lexists(folder / part)]


def _move(folder: Path, target: Path) -> None:
    try:
        for part in _parts(folder):
            part.rename(target / part.name)
        sync_folder(target)
        sync_folder(folder)
        (target / _UNFINISHED).unlink()
    except OSError as error:
        raise _not_archived(folder, error) from None


def _not_archived(folder: Path, error: OSError) -> EvaluationError:
    return EvaluationError(f"{folder} cannot be archived: {reason_of(error)}")


def tidy(folder: Path) -> None:
    """Make the folder of trajectories; remove what was being written when a process died.

    Raises:
        EvaluationError: The folder cannot be written to.
    """
    trajectories = folder / TRAJECTORIES
    try:
        _make(trajectories)
        if os.path.lexists(folder / ROLLOUTS):
            refuse_link(folder / ROLLOUTS)
        for place in (folder, trajectories):
            with os.scandir(place) as entries:
                leftovers = [entry.path for entry in entries if is_leftover(entry.name)]
            for path in leftovers:
                Path(path).unlink()
    except OSError as error:
        place = error.filename or trajectories
        raise EvaluationError(f"{place}: {error.strerror or error}") from None


def make_state(folder: Path) -> Path:
    """Make the place of the state of the run's own server; return its path.

    Raises:
        EvaluationError: It cannot be made.
    """
    try:
        _make(folder / _STATE_FOLDER)
    except OSError as error:
        raise EvaluationError(f"{folder / _STATE_FOLDER}: {reason_of(error)}") from None
    return folder / STATE


def drop_state(folder: Path) -> None:
    """Remove the state of the run's own server, if there is one, with all that it holds.

    Raises:
        EvaluationError: It cannot be removed.
    """
    try:
        shutil.rmtree(folder / _STATE_FOLDER)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise EvaluationError(f"{folder / _STATE_FOLDER}: {reason_of(error)}") from None


def _make(folder: Path) -> None:
    """Make a folder unless it is there; a link in its place is refused.

    Raises:
        OSError: It cannot be made, or is not a folder.
    """
    with suppress(FileExistsError):
        folder.mkdir(PRIVATE)
    refuse_link(folder)


def check_orphans(folder: Path) -> None:
    """Refuse a folder without a manifest that has what belongs to a run, or would be replaced.

    Raises:
        EvaluationDamagedError: It has a journal, and nothing says what run that belongs to.
        EvaluationError: It has a file by the name of one that a run writes anew.
    """
    if (folder / MANIFEST).exists():
        return
    if (folder / EVENTS).exists():
        raise EvaluationDamagedError(
            f"{folder} has a journal ({EVENTS}) but no {MANIFEST}; restore it, or start anew "
            "(--fresh keeps what is there in archive/)"
        )
    for name in (INDEX, METRICS, REPORT):
        if os.path.lexists(folder / name):
            raise EvaluationError(
                f"{folder} has no run, but a file {name}, which a run would replace; choose "
                "another output folder, or start anew (--fresh keeps what is there in archive/)"
            )
