"""Write files so that a reader, or a crash, never sees half of one. Blocking; use a thread."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["sync_folder", "write_atomic"]


def write_atomic(path: Path, data: bytes, *, sync: bool = True, dir_fd: int | None = None) -> None:
    """Replace the file at *path* with *data*, as a whole or not at all.

    A link or a special file at *path* is replaced itself, never followed.

    Args:
        path: The file; its folder exists. With *dir_fd* its name within that folder.
        data: What it is to hold.
        sync: Whether the data has to be on the disk before the file gets its name.
        dir_fd: A descriptor of the folder, so that no link can lead elsewhere.

    Raises:
        OSError: It cannot be written; what was there before still is.
    """
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(temporary, flags | getattr(os, "O_CLOEXEC", 0), 0o666, dir_fd=dir_fd)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor has no path
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        os.unlink(temporary, dir_fd=dir_fd)
        raise
    if sync and dir_fd is None:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk; nothing where folders cannot be synced."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
