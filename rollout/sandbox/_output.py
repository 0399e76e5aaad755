"""What a command writes, read from a pipe that others may hold open.

A pipe and no file, since scripts write to `/dev/stderr`, which cuts off a file. Its end is not
waited for, since whatever a command leaves running (tmux, a server) holds it open: what was written
before the command ended is in the pipe by then. Later output is read and dropped, so that nobody
is stopped by a full or a broken pipe.
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
        writer: The descriptor for the command; closed by `started`.
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
        """Whether somebody may still write."""
        return self._reader >= 0

    def started(self) -> None:
        """Let go of the writing end; the command has its own by now, or will never start."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def collect(self) -> str:
        """What was written so far, decoded with replacement. Nothing is kept from here on."""
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
        self.started()
        if self._reader >= 0:
            self._loop.remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1

    def _read(self) -> bool:
        """Read once; whether there may be more."""
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
