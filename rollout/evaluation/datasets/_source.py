"""The bytes of a file: opened with care, hashed as they are read, watched for changes."""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from rollout.evaluation.datasets._place import Place

__all__ = ["CHUNK_BYTES", "FileStamp", "Source", "import_zstd"]

CHUNK_BYTES = 64 * 1024
"""How much is read at a time."""

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


class FileStamp(NamedTuple):
    """Metadata by which an unchanged file is known without reading it."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


class _Hashed:
    """A file that remembers the digest of what was read from it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._hash.update(data)
        return data

    def digest(self) -> str:
        while self.read(CHUNK_BYTES):
            pass
        return self._hash.hexdigest()


def import_zstd(place: Place) -> Any:
    """Import what unpacks zstd: the standard library has it from Python 3.14 on.

    Raises:
        DatasetError: It is not installed.
    """
    try:
        return import_module(_ZSTD_MODULE)
    except ImportError as error:
        raise place.file_error(
            'zstd needs an extra: pip install "trio-rollout[zstd]" '
            f"({type(error).__name__}: {error})"
        ) from None


class Source:
    """A dataset's file while it is open.

    Attributes:
        path: Its path.
        file: The file.
        opened: Its metadata when it was opened.

    Raises:
        DatasetError: It is missing, no regular file, or cannot be read.
    """

    def __init__(self, path: Path, place: Place) -> None:
        self.path = path
        self._place = place
        self.file = self._open()
        self._hashed = _Hashed(self.file)
        self.opened = self.stamp()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def _open(self) -> IO[Any]:
        flags = os.O_RDONLY
        # Without O_NONBLOCK, opening a FIFO would wait for its writer.
        for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
            flags |= getattr(os, name, 0)
        try:
            descriptor = os.open(self.path, flags)
        except FileNotFoundError:
            raise self._place.file_error("there is no such file") from None
        except OSError as error:
            if self.path.is_dir():
                raise self._place.file_error("is a folder, not a file") from None
            raise self._place.file_error(f"cannot be opened: {error.strerror or error}") from None
        except ValueError as error:
            raise self._place.file_error(f"cannot be opened: {error}") from None
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            raise self._place.file_error(
                "is a folder, not a file"
                if stat.S_ISDIR(mode)
                else "is not a regular file, and a dataset is read more than once"
            )
        return os.fdopen(descriptor, "rb")

    def stamp(self) -> FileStamp:
        """The current metadata of the file."""
        status = os.fstat(self.file.fileno())
        return FileStamp(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )

    def digest(self) -> str:
        """Read what is left and give the digest of all that was read, SHA-256 in hex."""
        try:
            return self._hashed.digest()
        except OSError as error:
            raise self._failed(error) from None

    def chunks(self) -> Iterator[bytes]:
        """The bytes, unpacked where they are packed by gzip or zstd.

        Raises:
            DatasetError: They cannot be read or unpacked.
        """
        stream: Any = self._hashed
        faults: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
        head: bytes = self.file.peek(4)[:4]  # type: ignore[attr-defined]
        suffix = self.path.suffix.lower()
        if head.startswith(_GZIP_MAGIC) or suffix == ".gz":
            stream = gzip.GzipFile(fileobj=stream, mode="rb")
        elif head == _ZSTD_MAGIC or suffix == ".zst":
            zstd = import_zstd(self._place)
            stream = zstd.ZstdFile(stream, mode="rb")
            faults = (*faults, zstd.ZstdError)
        while True:
            try:
                chunk = stream.read(CHUNK_BYTES)
            except faults as error:
                raise self._failed(error) from None
            if not chunk:
                return
            yield chunk

    def _failed(self, error: Exception) -> Exception:
        reason = getattr(error, "strerror", None) or error
        return self._place.error(f"cannot be read further: {reason}")
