"""Look for a key in files: as they are, and in what is packed into them.

Files are read in pieces, whatever their size. Archives, compressed files and databases are
opened, down to a certain depth and up to a certain size; what cannot be looked into is
reported as such, since nobody can say that it is clean.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import os
import re
import sqlite3
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from typing import IO, Any

from attrs import define, field, frozen

from rollout.backend.harbor.credential_forms import Forms
from rollout.backend.harbor.errors import UnverifiableError

__all__ = ["Limits", "Search", "Seen", "rewrite"]

_PIECE = 1 << 20
_HEAD = 512
_IN_MEMORY = 4 << 20
_CONTROL = re.compile(rb"[\x00-\x06\x0e-\x1a]")
_ZLIB_HEADERS = b"|".join(
    b"%b[%b]"
    % (
        re.escape(bytes([method])),
        b"".join(
            re.escape(bytes([flags]))
            for flags in range(256)
            if (method * 256 + flags) % 31 == 0 and not flags & 0x20
        ),
    )
    for method in range(0x08, 0x79, 0x10)
)
_STREAM = re.compile(rb"(?:\x1f\x8b\x08|" + _ZLIB_HEADERS + rb")", re.DOTALL)
_TRY = 512
"""What a look at a possible stream counts for, so that there is an end to looking."""

_AUTOMATIC = 47
"""zlib or gzip, whichever it is."""

_SQLITE = b"SQLite format 3\0"
_CLOSED = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!": "rar",
    b"\x1f\x9d": "compress",
    b"\x1f\xa0": "compress",
    b"\x37\x7f\x06\x82": "a database's log",
    b"\x37\x7f\x06\x83": "a database's log",
    b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7": "a database's journal",
}
_NO_TEXT = (b"%PDF", _SQLITE)


@frozen(kw_only=True)
class Limits:
    """How much is looked into.

    Attributes:
        file_bytes: The largest file.
        total_bytes: All files together.
        inside_bytes: What comes out of all archives together.
        depth: How many archives may be in each other.
    """

    file_bytes: int = 1 << 30
    total_bytes: int = 4 << 30
    inside_bytes: int = 1 << 30
    depth: int = 3


@define
class Seen:
    """What a file is like.

    Attributes:
        encodings: In which encodings a form of the key stands in it.
        zeros: Whether there are zero bytes in it.
    """

    encodings: set[str] = field(factory=set)
    zeros: bool = False


@define
class Search:
    """Looks for keys in the files of one folder.

    Attributes:
        forms: What to look for.
        limits: How far to go.
        left: How much may still come out of archives, in bytes.
    """

    forms: Forms
    limits: Limits = field(factory=Limits)
    left: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.left = self.limits.inside_bytes

    def look(self, file: IO[bytes]) -> Seen:
        """Look through a file that can be read from any place in it.

        Raises:
            UnverifiableError: A key is packed into it, or nobody can say.
        """
        return self._look(file, self.limits.depth)

    def can_blank(self, file: IO[bytes], seen: Seen) -> bool:
        """Whether blanking out what was seen leaves a text that is otherwise as it was."""
        if _head(file).startswith(_NO_TEXT):
            return False
        for encoding in seen.encodings:
            if encoding == "ascii":
                if seen.zeros:
                    return False
            elif not _is_text(file, encoding):
                return False
        return True

    def _look(self, file: IO[bytes], depth: int) -> Seen:
        seen = Seen()
        for start, data, fresh in _windows(file, self.forms.longest):
            for span in self.forms.spans(data, start):
                seen.encodings.add(span.encoding)
            seen.zeros = seen.zeros or b"\0" in data
            if _CONTROL.search(data):
                for match in _STREAM.finditer(data, fresh):
                    self._look_stream(file, start + match.start())
        self._look_inside(file, depth)
        return seen

    def _spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise UnverifiableError("too much is packed into it")

    def _look_stream(self, file: IO[bytes], position: int) -> None:
        """Look into a compressed stream that may begin at a place in a file."""
        self._spend(_TRY)
        file.seek(position)
        engine = zlib.decompressobj(_AUTOMATIC)
        tail = b""
        fed = b""
        while not engine.eof:
            fed = engine.unconsumed_tail or file.read(1 << 14)
            if not fed:
                return
            try:
                data = engine.decompress(fed, _PIECE)
            except zlib.error:
                return
            self._spend(len(data))
            data = tail + data
            if self.forms.holds(data):
                raise UnverifiableError("the key is packed into it")
            tail = data[max(len(data) - self.forms.longest, 0) :]

    def _look_inside(self, file: IO[bytes], depth: int) -> None:
        """Look into a file that is an archive as a whole."""
        head = _head(file)
        for mark, kind in _CLOSED.items():
            if head.startswith(mark):
                raise UnverifiableError(f"it cannot be looked into ({kind})")
        if head.startswith(_SQLITE):
            self._guard(self._look_database, file)
            return
        opened = _open_packed(file, head)
        if opened is None:
            return
        if depth == 0:
            raise UnverifiableError("it is packed too deeply")
        self._guard(self._look_members, opened, depth)

    def _guard(self, function: Any, *args: Any) -> None:
        try:
            function(*args)
        except UnverifiableError:
            raise
        except Exception as error:
            raise UnverifiableError(f"it cannot be read ({type(error).__name__})") from error

    def _look_members(self, members: Iterator[IO[bytes]], depth: int) -> None:
        for member in members:
            with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY) as copy:
                while data := member.read(_PIECE):
                    self._spend(len(data))
                    copy.write(data)
                if self._look(copy, depth - 1).encodings:
                    raise UnverifiableError("the key is packed into it")

    def _look_database(self, file: IO[bytes]) -> None:
        """Look at all values: a long one is in several pieces in its file."""
        file.seek(0)
        data = bytearray(file.read(64 * _PIECE + 1))
        if len(data) > 64 * _PIECE:
            raise UnverifiableError("it is too large a database")
        data[18:20] = b"\x01\x01"  # no log of writes belongs to it here
        with closing(sqlite3.connect(":memory:")) as database:
            database.deserialize(bytes(data))
            database.text_factory = bytes
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            for (name,) in tables.fetchall():
                quoted = name.decode().replace('"', '""')
                for row in database.execute(f'SELECT * FROM "{quoted}"'):  # noqa: S608 - quoted
                    for value in row:
                        if isinstance(value, bytes) and self.forms.holds(value):
                            raise UnverifiableError("the key is in it")


def rewrite(file: IO[bytes], target: IO[bytes], forms: Forms) -> None:
    """Copy a file, with a placeholder in the place of each form of a key."""
    file.seek(0)
    rest = b""
    position = 0
    ended = False
    while not ended:
        piece = file.read(max(_PIECE, 2 * forms.longest))
        ended = not piece
        data = rest + piece
        # What begins behind this may go on in the next piece.
        safe = len(data) if ended else max(len(data) - forms.longest, 0)
        done = 0
        for span in forms.spans(data, position):
            if span.start >= safe:
                break
            target.write(data[done : span.start])
            target.write(span.replacement)
            done = span.end
        safe = max(safe, done)
        target.write(data[done:safe])
        rest = data[safe:]
        position += safe


def _windows(file: IO[bytes], overlap: int) -> Iterator[tuple[int, bytes, int]]:
    """Read a file in pieces that overlap: where each begins, and where it has something new."""
    position = 0
    tail = b""
    while True:
        file.seek(position + len(tail))  # others may have read in between
        piece = file.read(max(_PIECE, 2 * overlap))
        if not piece:
            return
        data = tail + piece
        yield position, data, max(len(tail) - 2, 0)
        tail = data[max(len(data) - overlap, 0) :]
        position += len(data) - len(tail)


def _head(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(_HEAD)


def _is_text(file: IO[bytes], encoding: str) -> bool:
    file.seek(0)
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        while piece := file.read(_PIECE):
            if "\0" in decoder.decode(piece):
                return False
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _open_packed(file: IO[bytes], head: bytes) -> Iterator[IO[bytes]] | None:
    """Return what is in an archive or a compressed file; ``None`` if it is neither."""
    file.seek(0, os.SEEK_SET)
    if head.startswith(b"\x1f\x8b"):
        return iter([_as_bytes(gzip.GzipFile(fileobj=file, mode="rb"))])
    if head.startswith(b"BZh"):
        return iter([_as_bytes(bz2.BZ2File(file))])
    if head.startswith((b"\xfd7zXZ\0", b"\x5d\0\0")):
        return iter([_as_bytes(lzma.LZMAFile(file))])
    if head[257:262] == b"ustar":
        return _tar_members(file)
    if zipfile.is_zipfile(file) or head.startswith(b"PK\x03\x04"):
        return _zip_members(file)
    return None


def _as_bytes(file: Any) -> IO[bytes]:
    opened: IO[bytes] = file
    return opened


def _tar_members(file: IO[bytes]) -> Iterator[IO[bytes]]:
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            opened = archive.extractfile(member) if member.isreg() else None
            if opened is not None:
                yield opened


def _zip_members(file: IO[bytes]) -> Iterator[IO[bytes]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            with archive.open(member) as opened:
                yield opened
