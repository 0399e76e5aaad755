"""Folders below a root, opened so that no link and no special file on the way is followed.

The root itself, and the way to it, may be links: whoever names it decides where it is.

Where the platform has descriptors of folders, everything is done relative to that of a rollout's
folder, which no renaming can lead astray. Elsewhere (Windows) each step is checked before it is
taken. Blocking.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import unicodedata
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout._files.atomic import write_quickly

__all__ = ["PRIVATE", "Folder", "folder_name", "make_root", "refuse_link"]

PRIVATE = 0o700
"""The permissions of the folders that are made: they are for their user alone."""

_DESCRIPTORS = {os.open, os.mkdir, os.unlink, os.rename} <= os.supports_dir_fd and hasattr(
    os, "O_DIRECTORY"
)
_READ = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_FILE = os.O_RDONLY
for _flag in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):  # not to wait for the writer of a FIFO
    _FILE |= getattr(os, _flag, 0)

_LONGEST_NAME = 200
"""In bytes. File systems take 255; programs that copy or pack folders add something."""

_PREFIX = 40
_RESERVED = re.compile(
    r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\$|conout\$)(\..*)?", re.IGNORECASE
)
_UNUSUAL = re.compile(r'[<>:"|?*/\\]')
_MADE = re.compile(r".*~[0-9a-f]{40}")


def folder_name(rollout_id: str, *, exact_case: bool = True) -> str:
    """Return the name of a rollout's folder: its id, if that is a valid name on every platform.

    Ids that are too long, hidden (a leading dot), reserved on Windows or hold characters that
    some file system refuses or changes get a readable beginning and a digest instead, so that
    two ids never share a folder.

    Args:
        rollout_id: The id, a single path segment.
        exact_case: Whether the file system tells names apart that differ only by case or by
            the composition of their characters.
    """
    if _usable(rollout_id, exact_case=exact_case):
        return rollout_id
    beginning = re.sub(r"[^a-z0-9_-]+", "-", rollout_id[:_PREFIX].lower()).strip("-")
    import hashlib  # noqa: PLC0415 - it takes longer to load than most ids need it

    digest = hashlib.sha256(rollout_id.encode("utf-8", "surrogatepass")).hexdigest()[:40]
    return f"{beginning or 'rollout'}~{digest}"


def _usable(name: str, *, exact_case: bool) -> bool:
    return (
        name.isprintable()
        and bool(name)
        and name[0] not in ". "
        and name[-1] not in ". "
        and not _UNUSUAL.search(name)
        and not _RESERVED.fullmatch(name)
        and not _MADE.fullmatch(name)
        and len(name.encode()) <= _LONGEST_NAME
        and unicodedata.is_normalized("NFC", name)
        and (exact_case or (name.isascii() and name == name.lower()))
    )


class Folder:
    """A root folder, or an open folder below it.

    Args:
        path: Where it is, for people and for users' code.
        descriptor: Its descriptor; ``None`` for a root, and where the platform has none for
            folders.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        self.path = path
        self.descriptor = descriptor

    @contextmanager
    def enter(
        self, name: str, *, make: bool, likely: bool = False
    ) -> Generator[Folder, None, None]:
        """Open the folder *name* in here for the length of the block.

        Args:
            name: A single path segment.
            make: Whether to make it if it is missing.
            likely: Whether it is probably there, which saves an attempt to make it.

        Raises:
            OSError: It is a link, a file, or anything else than a folder, or it is missing or
                cannot be made or opened.
        """
        if not _DESCRIPTORS:
            if make:
                self.make(name)
            path = self.path / name
            refuse_link(path)
            yield Folder(path)
            return
        if make and not likely:
            self.make(name)
        try:
            descriptor = self._open(name)
        except FileNotFoundError:
            if not make or not likely:
                raise
            self.make(name)
            descriptor = self._open(name)
        try:
            yield Folder(self.path / name, descriptor)
        finally:
            os.close(descriptor)

    def _place(self, name: str) -> Path:
        """Return a name in here as system calls with the descriptor take it."""
        return Path(name) if self.descriptor is not None else self.path / name

    def make(self, name: str) -> None:
        """Make the folder *name* in here, unless something has that name; makes a missing root.

        Raises:
            OSError: It cannot be made.
        """
        with suppress(FileExistsError):  # opening it fails if it is not a folder
            try:
                os.mkdir(self._place(name), PRIVATE, dir_fd=self.descriptor)
            except FileNotFoundError:
                if self.descriptor is not None:
                    raise
                make_root(self.path)
                (self.path / name).mkdir(PRIVATE)

    def _opened(self, name: str, flags: int) -> int:
        return os.open(self._place(name), flags | _NOFOLLOW, dir_fd=self.descriptor)

    def _open(self, name: str) -> int:
        try:
            return self._opened(name, _READ)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                raise _no_folder(self.path / name) from error
            raise

    def write(self, name: str, data: bytes) -> None:
        """Replace the file *name* in here as a whole.

        It is not synced: after a loss of power it may be missing or empty.

        Raises:
            OSError: It cannot be written.
        """
        write_quickly(self.path, name, data, self.descriptor)

    def read(self, name: str, largest: int) -> bytes:
        """Return the contents of the file *name* in here.

        Raises:
            OSError: It is missing, a link, no regular file or larger than *largest* bytes, or it
                cannot be read.
        """
        with open(self._opened(name, _FILE), "rb") as file:  # noqa: PTH123 - a descriptor
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file", str(self.path / name))
            if found.st_size > largest:
                raise OSError(errno.EFBIG, f"it is larger than {largest >> 20} MiB")
            return file.read(largest)

    def remove(self, name: str) -> None:
        """Remove the file *name*, if there is one.

        Raises:
            OSError: It cannot be removed.
        """
        try:
            os.unlink(self._place(name), dir_fd=self.descriptor)
        except FileNotFoundError:
            return

    def check_writable(self) -> None:
        """Check that files can be written here: write one and remove it.

        Raises:
            OSError: That does not work.
        """
        self.remove(self._probe())

    def _probe(self) -> str:
        """Write a file that is not there yet, and return its name."""
        name = f".{os.urandom(8).hex()}.probe"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(self._place(name), flags, 0o600, dir_fd=self.descriptor)
        try:
            os.write(descriptor, b"probe")
        finally:
            os.close(descriptor)
        return name

    def is_case_sensitive(self) -> bool:
        """Whether names that differ by case alone are different files here.

        Raises:
            OSError: No file can be written.
        """
        name = self._probe()
        try:
            return not (self.path / name.upper()).exists()
        finally:
            self.remove(name)


def make_root(path: Path) -> None:
    """Make the root folder, for this user alone, unless something is there.

    Raises:
        OSError: It cannot be made.
    """
    with suppress(FileExistsError):
        path.mkdir(PRIVATE, parents=True)


def refuse_link(path: Path) -> None:
    """Raise an error if a path is a link, or not a folder.

    Raises:
        OSError: It is one, or it is missing.
    """
    found = path.lstat()
    attributes = getattr(found, "st_file_attributes", 0)
    reparse = attributes & getattr(stat, "FILE_ATTRIBUTE_REPARSE_POINT", 0)
    if reparse or not stat.S_ISDIR(found.st_mode):
        raise _no_folder(path)


def _no_folder(path: Path) -> OSError:
    return NotADirectoryError(
        errno.ENOTDIR, "a link or a file is in the place of a folder", str(path)
    )
