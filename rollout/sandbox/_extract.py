"""Unpack an untrusted archive from inside a sandbox onto the host.

Nothing in the archive decides where on the host something is written: every folder on the way is
opened without following links, links are made last and only kept if they stay within the target
folder, and what is neither file, folder nor link is left out.
"""

from __future__ import annotations

import os
import stat
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rollout.sandbox.errors import TransferError

__all__ = ["extract"]

CHUNK = 1024 * 1024
MAX_DEPTH = 256
MAX_MEMBERS = 200_000
"""Most files, folders and links of one archive, since a disk has a limited number of them."""

_MOST_LINES = 50
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def extract(
    archive: IO[bytes],
    target: Path,
    *,
    max_bytes: int,
    max_file_bytes: int,
    stop: threading.Event,
) -> list[str]:
    """Unpack into a folder; existing files are replaced.

    Blocks; call it in a thread.

    Args:
        archive: A tar archive without compression.
        target: The folder; made if it does not exist.
        max_bytes: Most that may be written. What would be more is left out.
        max_file_bytes: The largest size of a file, holes included, since readers read
            those too. A larger one is left out.
        stop: Set to give up early.

    Returns:
        What was left out, and why.

    Raises:
        TransferError: If the archive is broken.
    """
    target.mkdir(parents=True, exist_ok=True)
    skipped = _Skipped()
    links: list[tuple[list[str], str]] = []
    written = 0
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        reader: Any = _InPieces(archive)  # as much of a file as an archive is read with
        with tarfile.open(fileobj=reader, mode="r:") as tar:
            forget: Any = getattr(tar, "members", []).clear  # it would remember them all
            for number, member in enumerate(tar):
                forget()
                if stop.is_set():
                    return skipped.lines()
                if number >= MAX_MEMBERS:
                    skipped.add(member.name, f"as all that follows: more than {MAX_MEMBERS} files")
                    break
                parts = [part for part in member.name.split("/") if part not in {"", "."}]
                reason = _refuse(member, parts)
                if reason is not None:
                    skipped.add(member.name, reason)
                    continue
                size = sum(length for _, length in _map(member))
                if member.isreg() and member.size > max_file_bytes:
                    skipped.add(member.name, f"larger than {max_file_bytes} bytes")
                    continue
                if written + size > max_bytes:
                    skipped.add(member.name, f"more than {max_bytes} bytes in all")
                    continue
                written += size
                if member.issym():
                    links.append((parts, member.linkname))
                    continue
                try:
                    _write(tar, member, root, parts, stop)
                except OSError as error:
                    skipped.add(member.name, error.strerror or str(error))
        _link(root, target, links, skipped)
    except tarfile.TarError as error:
        raise TransferError(f"the archive out of the sandbox is broken: {error}") from error
    finally:
        os.close(root)
    return skipped.lines()


class _InPieces:
    """An archive read in bounded pieces: a header may claim any length."""

    def __init__(self, archive: IO[bytes]) -> None:
        self._archive = archive
        self.seek, self.tell, self.seekable = archive.seek, archive.tell, archive.seekable

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= CHUNK:
            raise TransferError("the archive out of the sandbox is broken: a header is too large")
        return self._archive.read(size)


class _Skipped:
    """Names and reasons of what was left out, up to a limit, and the number of the rest."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._more = 0

    def add(self, name: str, reason: str) -> None:
        if len(self._lines) < _MOST_LINES:
            self._lines.append(f"{name!r}: {reason}")
        else:
            self._more += 1

    def lines(self) -> list[str]:
        return [*self._lines, *([f"and {self._more} more"] if self._more else [])]


def _refuse(member: tarfile.TarInfo, parts: list[str]) -> str | None:
    if member.name.startswith("/") or ".." in parts:
        return "its name leads out of the folder"
    if len(parts) > MAX_DEPTH:
        return "too deep"
    if not (member.isreg() or member.isdir() or member.issym()):
        return "neither file, folder nor link"
    if not parts and not member.isdir():
        return "it has no name"
    if any(
        start < 0 or length < 0 or start + length > member.size for start, length in _map(member)
    ):
        return "its holes are not where they can be"
    return None


def _write(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    root: int,
    parts: list[str],
    stop: threading.Event,
) -> None:
    if member.isdir():
        with _folder(root, parts) as folder:
            if parts:
                os.fchmod(folder, (member.mode & 0o777) | 0o700)
        return
    with _folder(root, parts[:-1]) as folder:
        _clear(folder, parts[-1])
        descriptor = os.open(parts[-1], _FILE, 0o600, dir_fd=folder)
    with os.fdopen(descriptor, "wb") as file:
        content = tar.extractfile(member)
        for start, length in _map(member):
            file.seek(start)
            _copy(content, file, start, length, stop)
        file.truncate(member.size)
        file.flush()
        os.fchmod(descriptor, (member.mode & 0o777) | 0o600)
        os.utime(descriptor, (member.mtime, member.mtime))


def _map(member: tarfile.TarInfo) -> list[tuple[int, int]]:
    """Return the parts of a file that have content, as offsets and lengths; the rest are holes."""
    if not member.isreg():
        return []
    found: Any = member.sparse  # pairs, whatever typeshed says
    return [(0, member.size)] if found is None else list(found)


def _copy(
    content: IO[bytes] | None, file: IO[bytes], start: int, length: int, stop: threading.Event
) -> None:
    assert content is not None  # noqa: S101 - a file has some
    content.seek(start)
    while length > 0 and not stop.is_set():
        chunk = content.read(min(CHUNK, length))
        if not chunk:
            raise TransferError("the archive out of the sandbox is broken: it ends within a file")
        file.write(chunk)
        length -= len(chunk)


@contextmanager
def _folder(root: int, parts: list[str]) -> Iterator[int]:
    """Open a folder below another, making it where needed and never through a link."""
    current = os.dup(root)
    try:
        for part in parts:
            try:
                deeper = os.open(part, _FOLDER, dir_fd=current)
            except OSError:
                _clear(current, part)
                os.mkdir(part, 0o755, dir_fd=current)
                deeper = os.open(part, _FOLDER, dir_fd=current)
            os.close(current)
            current = deeper
        yield current
    finally:
        os.close(current)


def _clear(folder: int, name: str) -> None:
    """Remove an entry of that name, unless it is a folder."""
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(None, "a folder of this name is in the way")
    os.unlink(name, dir_fd=folder)


def _link(root: int, target: Path, links: list[tuple[list[str], str]], skipped: _Skipped) -> None:
    """Make the links, then remove those that lead out of the folder, until none does."""
    made: dict[str, list[str]] = {}
    for parts, destination in links:
        name = "/".join(parts)
        try:
            with _folder(root, parts[:-1]) as folder:
                _clear(folder, parts[-1])
                os.symlink(destination, parts[-1], dir_fd=folder)
        except OSError as error:
            skipped.add(name, error.strerror or str(error))
        else:
            made[name] = parts
    home = os.path.realpath(target)
    while True:
        # Another one of the same name may have made a folder of it since.
        made = {name: parts for name, parts in made.items() if os.path.islink(f"{home}/{name}")}  # noqa: PTH114
        leading_out = [name for name in made if not _stays(f"{home}/{name}", home)]
        if not leading_out:
            return
        for name in leading_out:
            *parents, last = made[name]
            with _folder(root, parents) as folder:
                os.unlink(last, dir_fd=folder)
            skipped.add(name, "a link out of the folder, or in a circle")


def _stays(path: str, home: str) -> bool:
    try:
        os.stat(path)  # noqa: PTH116 - a path in a circle is no path for pathlib
    except FileNotFoundError:
        pass
    except OSError:
        return False
    real = os.path.realpath(path)
    return real == home or real.startswith(home + "/")
