"""Folders that are in use, marked so that what a killed process left can be told from them.

A folder is claimed by a file in it with a lock, which the system lets go of when the process ends,
however it ends. A mark without a lock means that nobody will tidy up any more. Blocking.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rollout._files.trees import remove_tree
from rollout._json.text import utf8
from rollout._logs import get_logger

fcntl: Any
try:
    import fcntl
except ImportError:  # a platform without locks: nothing is ever taken for abandoned there
    fcntl = None

__all__ = ["MARK", "Claim", "abandoned", "sweep_claimed"]

logger = get_logger(__name__)

MARK = ".running"
"""The file that claims the folder that it is in."""

_MOST_NAMES = 20
_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class Claim:
    """The claim of this process to a folder."""

    def __init__(self, folder: Path) -> None:
        """Claim a folder that nobody has claimed.

        Raises:
            OSError: The mark cannot be made.
        """
        self._descriptor = os.open(folder / MARK, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        _lock(self._descriptor)

    def release(self) -> None:
        """Let go of it; the mark stays. May be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@contextmanager
def abandoned(folder: Path) -> Iterator[bool]:
    """Say whether a folder has a mark of this user's that nobody holds; hold it for the block."""
    descriptor = -1
    try:
        with suppress(OSError):
            descriptor = os.open(folder / MARK, _FLAGS)
        yield descriptor >= 0 and _is_own(descriptor) and _lock(descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def sweep_claimed(parent: Path, names: str) -> list[Path]:
    """Remove the folders of this user that nobody holds any more.

    Args:
        parent: Where they were made.
        names: A regular expression for their names.

    Returns:
        The removed ones.
    """
    removed = []
    for folder in sorted(parent.glob("*")):
        if not re.fullmatch(names, folder.name, re.ASCII):
            continue
        if folder.is_symlink() or not folder.is_dir():
            continue
        with abandoned(folder) as is_abandoned:
            problems = remove_tree(folder) if is_abandoned else []
        if problems:
            logger.warning("%s cannot be removed completely: %s", folder, utf8(problems[0]))
        elif is_abandoned:
            removed.append(folder)
    if removed:
        logger.warning(
            "removed %d folders in %s, of a process that was killed: %s",
            len(removed),
            parent,
            ", ".join(folder.name for folder in removed[:_MOST_NAMES]),
        )
    return removed


def _is_own(descriptor: int) -> bool:
    return not hasattr(os, "geteuid") or os.fstat(descriptor).st_uid == os.geteuid()


def _lock(descriptor: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has it, or this file system has no locks
        return False
    return True
