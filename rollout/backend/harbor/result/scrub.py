"""Remove keys from the files of a folder, so that it may be kept.

Theory of operation: first the folder is made one that can be dealt with (links out of it, special
files and locked folders go). Then each name, link, attribute and file is searched, as bytes, for
what a `Redactor` looks for. Text has a key blanked out; whatever else holds one is deleted, and
nothing else is. Compressed files and zip archives are searched one level deep; what cannot be
opened stays, with a note.
"""

from __future__ import annotations

import bz2
import errno
import lzma
import os
import secrets as tokens
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from attrs import define, field

from rollout._files.trees import remove_tree, tame_tree
from rollout._json.text import utf8
from rollout._redaction import RedactedStream, Redactor

__all__ = ["ScrubReport", "scrub_folder"]

_MOST_BYTES = 64 << 30
"""How much is searched in one folder, unpacked data included."""

_MOST_UNPACKED = 1 << 30
"""How much of what is packed into one file, or one member of an archive."""

_MOST_LINES = 50
_LONGEST_NAME = 200
_PIECE = 1 << 20
_OPEN = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
)
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)

_ZIP = b"PK\x03\x04"
_INFLATED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_NOT_OPENED = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!": "rar",
}


class _HeldError(Exception):
    """A key cannot be blanked out here; the message says why."""


class _LimitError(Exception):
    """The limit of what is searched is reached."""


@define(kw_only=True)
class ScrubReport:
    """The report of a scrubbed folder.

    Attributes:
        cleaned: How many files and names had a key blanked out.
        deleted: What was deleted and why, a line each, without the key.
        unsearched: What nobody has looked into and why, likewise.
        reason: Why the folder is not known to be free of them; ``None`` if it is.
    """

    cleaned: int = 0
    deleted: list[str] = field(factory=list)
    unsearched: list[str] = field(factory=list)
    reason: str | None = None

    @property
    def verified(self) -> bool:
        """Whether the folder may be kept."""
        return self.reason is None

    def to_dict(self) -> dict[str, Any]:
        """Return it in JSON types, with a bounded number of lines."""
        found: dict[str, Any] = {
            "cleaned": self.cleaned,
            "deleted": _some(self.deleted),
            "verified": self.verified,
        }
        if self.unsearched:
            found["unsearched"] = _some(self.unsearched)
        return found if self.reason is None else found | {"reason": self.reason}


def _some(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"and {more} more"] if more > 0 else lines


def scrub_folder(folder: Path, secrets: Iterable[str | None]) -> ScrubReport:
    """Remove keys from a folder, in each form that a `Redactor` knows. Blocking.

    Args:
        folder: The folder, which nobody works in any more.
        secrets: The keys. Without one nothing is done.

    Returns:
        What was done. Only if it is ``verified`` may anything in the folder be kept.
    """
    keys = [key for key in secrets if key]
    scrub = _Scrub(folder, keys, Redactor(keys))
    if keys:
        try:
            scrub.run()
        except OSError as error:
            scrub.fail(f"the folder cannot be read: {error.strerror or type(error).__name__}")
    return scrub.report


@define
class _Scrub:
    """The scrubbing of one folder."""

    folder: Path
    keys: list[str]
    redactor: Redactor
    report: ScrubReport = field(factory=ScrubReport)
    left: int = field(factory=lambda: _MOST_BYTES)

    def run(self) -> None:
        """Clean the folder."""
        if not self.folder.is_dir() or self.folder.is_symlink():
            return
        if not tame_tree(self.folder, self._tell):
            self.fail("something in it cannot be removed")
        for path in _entries(self.folder):
            try:
                self._clean(path)
            except _HeldError as error:
                self._delete(path, str(error))
            except OSError as error:
                full = error.errno == errno.ENOSPC
                reason = "there is no room to write it anew" if full else error.strerror
                self._delete(path, reason or type(error).__name__)

    def fail(self, reason: str) -> None:
        """Mark the folder as not clean; the first reason stays."""
        self.report.reason = self.report.reason or self._said(reason)

    def _said(self, text: str) -> str:
        return self.redactor.text(utf8(text))

    def _tell(self, path: str, reason: str) -> None:
        self.report.deleted.append(self._said(f"{path}: {reason}"))

    def _shown(self, path: str) -> str:
        return os.path.relpath(path, self.folder)

    def _delete(self, path: str, reason: str) -> None:
        shown = self._shown(path)
        self._tell(shown, reason)
        if remove_tree(Path(path)):
            self.fail(f"{shown} cannot be removed")

    # One entry

    def _clean(self, path: str) -> None:
        if os.path.islink(path):  # noqa: PTH114 - any bytes
            if self.redactor.holds(os.fsencode(os.readlink(path))):  # noqa: PTH115 - the same
                raise _HeldError("the key is in where it leads")
        elif not os.path.isdir(path):  # noqa: PTH112 - the same
            with suppress(FileNotFoundError):
                self._clean_file(path)
        folder, _, name = path.rpartition(os.sep)
        clean = self.redactor.data(os.fsencode(name))
        if clean != os.fsencode(name):
            self._rename(path, os.path.join(folder, os.fsdecode(clean[:_LONGEST_NAME])))  # noqa: PTH118

    def _rename(self, path: str, stem: str) -> None:
        fresh, number = stem, 1
        while os.path.lexists(fresh):
            number += 1
            fresh = f"{stem} ({number})"
        os.rename(path, fresh)  # noqa: PTH104 - any bytes
        self.report.cleaned += 1

    def _clean_file(self, path: str) -> None:
        descriptor = os.open(path, _OPEN)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor has no path
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _HeldError("it is a special file")
            self._clean_attributes(descriptor)
            try:
                if self._holds(_pieces(file)):
                    self._write_anew(path, file)
                else:
                    self._search_packed(path, file)
            except _LimitError:
                raise _HeldError("there is too much to search") from None

    def _clean_attributes(self, descriptor: int) -> None:
        """Remove extended attributes that users may set, if a key is in them."""
        if not hasattr(os, "listxattr"):
            return
        try:
            names = os.listxattr(descriptor)
        except OSError:  # the file system has none
            return
        for name in names:
            if self.redactor.holds(os.fsencode(name) + b"\n" + os.getxattr(descriptor, name)):
                os.removexattr(descriptor, name)

    def _holds(self, pieces: Iterable[bytes]) -> bool:
        tail = b""
        for piece in pieces:
            self.left -= len(piece)
            if self.left < 0:
                raise _LimitError
            data = tail + piece
            if self.redactor.holds(data):
                return True
            tail = data[max(len(data) - self.redactor.longest, 0) :]
        return False

    def _write_anew(self, path: str, file: IO[bytes]) -> None:
        """Replace a text by a clean copy; other hard links to it stay."""
        fresh = os.path.join(os.path.dirname(path), f".{tokens.token_hex(8)}.clean")  # noqa: PTH118, PTH120
        try:
            stream = RedactedStream(self.keys)
            with open(os.open(fresh, _MAKE, 0o600), "wb") as target:  # noqa: PTH123 - as above
                for piece in _pieces(file):
                    if b"\0" in piece:
                        raise _HeldError("the key is in it, and it is not a text")  # noqa: TRY301
                    target.write(stream.feed(piece))
                target.write(stream.rest())
            with open(fresh, "rb") as written:  # noqa: PTH123 - any bytes
                if self._holds(_pieces(written)):
                    raise _HeldError("the key is in it, in several lines")  # noqa: TRY301
            found = os.fstat(file.fileno())
            os.chmod(fresh, stat.S_IMODE(found.st_mode))  # noqa: PTH101 - any bytes
            os.utime(fresh, ns=(found.st_atime_ns, found.st_mtime_ns))
            os.replace(fresh, path)  # noqa: PTH105 - any bytes
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(fresh)  # noqa: PTH108 - any bytes
            raise
        self.report.cleaned += 1

    def _search_packed(self, path: str, file: IO[bytes]) -> None:
        file.seek(0)
        head = file.read(6)
        kind = next((kind for mark, kind in _NOT_OPENED.items() if head.startswith(mark)), None)
        reason = None if kind is None else f"it cannot be opened ({kind})"
        try:
            for unpacked in _unpacked(file, head):
                if self._holds(_bounded(unpacked)):
                    raise _HeldError("the key is packed into it")  # noqa: TRY301
        except _HeldError:
            raise
        except Exception as error:  # noqa: BLE001 - torn, encrypted, or too much
            if isinstance(error, zlib.error) and head.startswith(b"x"):
                return  # a text, after all
            limit = isinstance(error, _LimitError)
            why = "too much is packed into it" if limit else type(error).__name__
            reason = f"it cannot be searched to its end ({why})"
        if reason is not None:
            self.report.unsearched.append(self._said(f"{self._shown(path)}: {reason}"))


def _bounded(pieces: Iterator[bytes]) -> Iterator[bytes]:
    left = _MOST_UNPACKED
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise _LimitError
        yield piece


def _pieces(file: IO[bytes] | bz2.BZ2File | lzma.LZMAFile) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(_PIECE):
        yield piece


def _unpacked(file: IO[bytes], head: bytes) -> Iterator[Iterator[bytes]]:
    """Yield what is in a compressed file or a zip archive, as pieces; nothing if it is neither."""
    if head.startswith(_ZIP):
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                with archive.open(member) as opened:
                    yield _pieces(opened)
    elif head.startswith(_INFLATED):
        yield _inflated(file)
    elif head.startswith(b"BZh"):
        file.seek(0)
        with bz2.BZ2File(file) as opened:
            yield _pieces(opened)
    elif head.startswith(b"\xfd7zXZ\0"):
        file.seek(0)
        with lzma.LZMAFile(file) as opened:
            yield _pieces(opened)


def _inflated(file: IO[bytes]) -> Iterator[bytes]:
    """Unpack gzip, one or more in a row, or zlib, as git keeps its objects."""
    engine = zlib.decompressobj(47)
    for piece in _pieces(file):
        fed = piece
        while fed:
            if engine.eof:
                engine = zlib.decompressobj(47)
            yield engine.decompress(fed, _PIECE)
            fed = engine.unconsumed_tail or engine.unused_data
    if not engine.eof:
        raise EOFError


def _entries(folder: Path) -> Iterator[str]:
    """Walk through a tree; what is in a folder comes before the folder."""
    for way, folders, files in os.walk(folder, topdown=False, onerror=_raise):
        for name in (*files, *folders):
            yield os.path.join(way, name)  # noqa: PTH118 - any bytes


def _raise(error: OSError) -> None:
    raise error
