"""The process that writes the files of rollouts; its parent is `rollout._files.writer`.

It reads batches of jobs from its standard input: their length in 8 bytes, then a `marshal` list of
pairs, each a rollout's id and its files' contents by name. For each job, in their order, it writes
a line to its standard output: what could not be done, separated by tabs.

It ends when its input does, so it outlives its parent by no more than the jobs it has begun. It
ignores signals that are sent to all processes of a terminal or a service, since its parent may
still have files to write then. It loads neither the rest of the package nor what is installed.
"""

from __future__ import annotations

import marshal
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rollout._files.rollouts import RolloutFolders

__all__ = ["LENGTH_BYTES", "main"]

LENGTH_BYTES = 8

_SILENT_SEC = 0.05
"""For how long it collects answers, to send them together."""


def main(root: str) -> None:
    """Write files below a root until the standard input ends."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    folders = RolloutFolders(Path(root))
    with open(0, "rb") as source:
        for jobs in _batches(source):
            answers, since = b"", time.monotonic()
            for rollout_id, files in jobs:
                answers += _line(folders.save(rollout_id, files))
                if time.monotonic() - since > _SILENT_SEC:
                    answers, since = _answer(answers), time.monotonic()
            _answer(answers)


def _batches(source: IO[bytes]) -> Iterator[Any]:
    while True:
        length = int.from_bytes(source.read(LENGTH_BYTES), "big")
        data = source.read(length)
        if not data or len(data) < length:  # the parent ended
            return
        yield marshal.loads(data)  # noqa: S302 - from the parent


def _line(problems: list[str]) -> bytes:
    return "\t".join(problems).replace("\n", " ").encode() + b"\n"


def _answer(lines: bytes) -> bytes:
    """Write lines to the standard output; return what is left of them."""
    try:
        while lines:
            lines = lines[os.write(1, lines) :]
    except BrokenPipeError:  # the parent ended
        os._exit(0)
    return lines
