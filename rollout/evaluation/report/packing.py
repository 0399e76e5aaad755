"""Pack what the page holds into blocks that a browser inflates when it needs them.

A run of thousands of attempts has hundreds of megabytes of conversations that hardly anybody
opens. They lie in the page as blocks of compressed JSON, a few dozen conversations each, so
that the page opens at once, stays small on disk, and needs nothing but itself. The columns of
the table are compressed as well, each as a whole.

While the page is made, all of it waits in temporary files, so that it takes no memory.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from typing import IO, Any

__all__ = ["Packer", "Stream"]

_BLOCK_CHARACTERS = 384 * 1024
_BLOCK_ENTRIES = 64
_LEVEL = 6
_GZIP = 31
"""What zlib calls a gzip stream with the largest window. Its head has no time in it, which
would make two reports of the same run differ."""
_COPY = 3 * 16 * 1024
"""Bytes that are copied at a time, three of which are four characters of Base64."""


class Stream:
    """A gzip stream in a temporary file, until it is copied into the page.

    Args:
        file: Where it waits, empty and open for both.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._gzip = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)

    def write(self, data: bytes) -> None:
        """Append *data*."""
        self._file.write(self._gzip.compress(data))

    def copy_to(self, target: IO[bytes]) -> None:
        """End the stream, and write it as Base64."""
        self._file.write(self._gzip.flush())
        self._file.seek(0)
        while data := self._file.read(_COPY):
            target.write(base64.b64encode(data))


class Packer:
    """Collects entries into blocks, each Base64 text of a gzip stream: a JSON array of entries.

    Args:
        file: Where they wait, empty and open for both.
        limit: Bytes of all blocks together from which on the packer is full.
    """

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._file = file
        self._limit = limit
        self._size = 0
        self._blocks = 0
        self._open: list[str] = []
        self._open_characters = 0

    @property
    def full(self) -> bool:
        """Whether the blocks have reached the limit."""
        return self._size >= self._limit

    def add(self, entry: dict[str, Any]) -> tuple[int, int]:
        """Take an entry in plain JSON types and return its block, and its place in there."""
        place = (self._blocks, len(self._open))
        # ASCII alone, so that lone surrogates survive.
        text = json.dumps(entry, separators=(",", ":"))
        self._open.append(text)
        self._open_characters += len(text)
        if self._open_characters >= _BLOCK_CHARACTERS or len(self._open) >= _BLOCK_ENTRIES:
            self._close_block()
        return place

    def copy_to(self, target: IO[bytes]) -> None:
        """Write the blocks as elements of the page."""
        self._close_block()
        self._file.seek(0)
        while data := self._file.read(_COPY):
            target.write(data)

    def _close_block(self) -> None:
        """Close the block that is open, if any."""
        if not self._open:
            return
        data = f"[{','.join(self._open)}]".encode("ascii")
        block = base64.b64encode(gzip.compress(data, compresslevel=_LEVEL, mtime=0))
        self._file.write(b'<script type="text/plain" id="block-%d">' % self._blocks)
        self._file.write(block)
        self._file.write(b"</script>\n")
        self._size += len(block)
        self._blocks += 1
        self._open, self._open_characters = [], 0
