"""The output of a command, read from a pipe that other processes may hold open.

It is a pipe because scripts write to `/dev/stderr`, which truncates a file. Its end is not waited
for, since what a command leaves running (tmux, a server) holds it open: what was written before the
command ended is in the pipe by then. Later output is read and dropped, so that no process is
stopped by a full or a broken pipe.
"""

from __future__ import annotations

import asyncio
import os

__all__ = ["Output"]

CHUNK = 65536


class Output:
    """The reading end of one stream of a command; keeps its beginning and its end.

    Args:
        max_bytes: How much is kept at most. The middle is left out of more.

    Attributes:
        writer: The descriptor for the command; closed by `close_writer`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._half = max(1, max_bytes // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0
        self._recording = True
        self._loop = asyncio.get_running_loop()
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        # Another user inside opens it again by way of /dev/stdout.
        os.fchmod(self.writer, 0o666)
        self._loop.add_reader(self._reader, self._read)

    @property
    def is_open(self) -> bool:
        """Whether a process may still write."""
        return self._reader >= 0

    def close_writer(self) -> None:
        """Close the writing end; a command that has started has its own."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def collect(self) -> str:
        """Return what was written so far, decoded with replacement, and drop later output."""
        while self.is_open and self._read():
            pass
        self._recording = False
        if self._size > 2 * self._half:
            del self._tail[: -self._half]
        kept = self._head + self._tail
        if self._size <= len(kept):
            return kept.decode(errors="replace")
        left_out = f"\n[... {self._size - len(kept)} bytes left out ...]\n"
        head, tail = (half.decode(errors="replace") for half in (self._head, self._tail))
        return f"{head}{left_out}{tail}"

    def close(self) -> None:
        """Close both ends."""
        self.close_writer()
        if self._reader >= 0:
            self._loop.remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1

    def _read(self) -> bool:
        """Read once and return whether there may be more."""
        try:
            chunk = os.read(self._reader, CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.close()
            return False
        if self._recording:
            self._keep(chunk)
        return True

    def _keep(self, chunk: bytes) -> None:
        self._size += len(chunk)
        room = self._half - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]
