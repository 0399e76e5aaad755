"""Place what was written: it is made beside its target, and gets its name when it is whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rollout._files.atomic import reason_of, sync_folder
from rollout.errors import EvaluationError

__all__ = ["beside", "check_free", "exists", "place", "unusable"]


def check_free(target: Path, *, replace: bool) -> None:
    """Refuse a target that exists, unless it is a file and is to be replaced.

    Raises:
        EvaluationError: It cannot be written there.
    """
    if target.is_dir() and not target.is_symlink():
        raise EvaluationError(f"{target} is a folder; name a file with --output")
    if os.path.lexists(target) and not replace:
        raise exists(target)


def exists(what: Path | str) -> EvaluationError:
    """Build the error for something that exists and is not to be replaced."""
    return EvaluationError(f"{what} exists; name another place with --output, or use --replace")


@contextmanager
def beside(target: Path) -> Generator[Path, None, None]:
    """Make a folder next to *target* for the length of the block.

    Raises:
        EvaluationError: It cannot be made, or the block raised an `OSError`.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}-", dir=target.parent))
    except OSError as error:
        raise unusable(target, error) from None
    try:
        yield folder
    except OSError as error:
        raise unusable(target, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def place(made: Path, target: Path) -> None:
    """Give a file its name once it is on the disk.

    Raises:
        OSError: It cannot be synced or renamed.
    """
    made.chmod(0o600)
    with made.open("rb+") as file:
        os.fsync(file.fileno())
    made.replace(target)
    sync_folder(target.parent)


def unusable(target: Path, error: Exception) -> EvaluationError:
    """Build the error for a target that cannot be written."""
    return EvaluationError(f"{target} cannot be written: {reason_of(error)}")
