"""Atomic writes: neither a reader nor a crash leaves half of a file. Blocking; use a thread.

They are for their user alone: prompts and answers are in them.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = [
    "is_leftover",
    "reason_of",
    "sync_folder",
    "write_atomic",
    "write_quickly",
    "writing_atomic",
]

_SUFFIX = ".tmp"
_TOKEN_BYTES = 8
_NEW_FILE = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
)
_NAME_CHARACTERS = 40
"""So few that the name stays below 255 bytes in every script."""


def write_atomic(path: Path, data: bytes, *, sync_name: bool = True) -> None:
    """Replace the file at *path* with *data*, as a whole or not at all.

    A link or a special file at *path* is replaced itself, never followed.

    Args:
        path: The file; its folder exists.
        data: Its content, which is on the disk before the file gets its name.
        sync_name: Whether the name has to be on the disk, too, which costs a sync of the
            folder. Without it a crash of the machine may leave what was there before.

    Raises:
        OSError: It cannot be written; what was there before still is.
    """
    with writing_atomic(path, sync_name=sync_name) as file:
        file.write(data)


@contextmanager
def writing_atomic(
    path: Path, *, sync: bool = True, sync_name: bool = True
) -> Generator[IO[bytes], None, None]:
    """Write a file piece by piece that appears at the end of the block, or not at all.

    Like `write_atomic`; with ``sync=False`` nothing is synced. An exception in the block leaves
    what was there.

    Raises:
        OSError: It cannot be written; what was there before still is.
    """
    temporary = path.with_name(_temporary(path.name))
    descriptor = os.open(temporary, _NEW_FILE, 0o600)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor has no path
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise
    if sync and sync_name:
        sync_folder(path.parent)


def write_quickly(folder: Path, name: str, data: bytes, dir_fd: int | None) -> None:
    """Replace a file as a whole, without syncing it and with the fewest system calls.

    Args:
        folder: Its folder.
        name: Its name there.
        data: Its content.
        dir_fd: A descriptor of the folder, which no renaming leads astray; ``None`` where the
            platform has none.

    Raises:
        OSError: It cannot be written; what was there before still is.
    """
    temporary = _temporary(name)
    if dir_fd is None:
        temporary, name = str(folder / temporary), str(folder / name)
    descriptor = os.open(temporary, _NEW_FILE, 0o600, dir_fd=dir_fd)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
        os.replace(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        os.unlink(temporary, dir_fd=dir_fd)
        raise


def _temporary(name: str) -> str:
    return f".{name[:_NAME_CHARACTERS]}.{os.urandom(_TOKEN_BYTES).hex()}{_SUFFIX}"


def is_leftover(name: str) -> bool:
    """Whether a file name is one of those that `write_atomic` writes to before it renames."""
    return name.startswith(".") and name.endswith(_SUFFIX)


def reason_of(error: BaseException) -> str:
    """Return the text of an error; of an `OSError` without its number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk, where the platform can."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
