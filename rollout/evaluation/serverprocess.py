"""A rollout server of the run's own: started on a free port, gone when the run is.

It runs in a process of its own, so that code of users that blocks, crashes or leaks does not
touch the run. Its stdin is a pipe that only the run holds open: however the run ends, by
SIGKILL too, the pipe closes, and the server shuts down.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import IO

import trio

from rollout._beside import beside
from rollout.errors import EvaluationError, EvaluationStoppedError

__all__ = ["server_process"]

logger = logging.getLogger(__name__)

_ANNOUNCEMENT = b"listening on "
_OPTIONS = (
    *("--bind", "127.0.0.1:0", "--until-stdin-closes"),
    *("--drain-sec", "0", "--cleanup-sec", "5", "--forced-sec", "3"),
    *("--delivery-sec", "0", "--backend-sec", "5"),
)
_STOP_SEC = 15.0
_TAIL_BYTES = 4096


@asynccontextmanager
async def server_process(
    app: str, *, log: Path, environment: dict[str, str]
) -> AsyncGenerator[str, None]:
    """Serve an application for the length of the block; yields its URL.

    Args:
        app: ``MODULE:APP`` or ``FILE.py:APP``.
        log: The file that gets what the server writes.
        environment: Variables for it, on top of this process's own.

    Raises:
        EvaluationError: It does not start; the message has the last line that it wrote: to
            stderr, if there is one.
        EvaluationStoppedError: It ended while the block ran.

    Leaving the block, by cancellation too, stops it within 15 seconds and waits for it.
    """
    with _opened(log) as output:
        begin = output.tell()
        process = await _start(app, output, os.environ | environment)
        try:
            url = await _announced(process, output, log, begin)
            async with beside(
                partial(_copy, process, output), partial(_watch, process, log, begin)
            ):
                yield url
        finally:
            with trio.CancelScope(shield=True):
                await _stop(process, output)


def _opened(log: Path) -> IO[bytes]:
    try:
        return log.open("ab")
    except OSError as error:
        raise EvaluationError(f"{log}: {error.strerror or error}") from None


async def _start(app: str, output: IO[bytes], environment: dict[str, str]) -> trio.Process:
    # In a session of its own, so that Ctrl-C reaches the run alone, which then stops it. And with
    # `-u`, so that what it prints gets into the log when it prints it, not when it ends.
    try:
        return await trio.lowlevel.open_process(
            [sys.executable, "-u", "-m", "rollout.cli", "serve", app, *_OPTIONS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise EvaluationError(f"the rollout server cannot be started: {error}") from None


async def _announced(process: trio.Process, output: IO[bytes], log: Path, begin: int) -> str:
    """Read the line with which a server says where it listens."""
    assert process.stdout is not None  # noqa: S101 - it was asked for
    received = b""
    printed: set[str] = set()
    async for data in process.stdout:
        _write(output, data)
        received += data
        *lines, received = received.split(b"\n")
        printed.update(_text(line) for line in lines)
        for line in lines:
            if line.startswith(_ANNOUNCEMENT):
                return line.removeprefix(_ANNOUNCEMENT).split()[0].decode()
    printed.add(_text(received))
    await process.wait()
    # What came through the pipe may stand below the error, though it was printed before it.
    last = _last_line(log, begin, besides=printed) or _last_line(log, begin)
    raise EvaluationError(
        f"the rollout server did not start: {last or 'it wrote nothing'} "
        f"(exit code {process.returncode}; all of it is in {log})"
    )


async def _copy(process: trio.Process, output: IO[bytes]) -> None:
    """Put what an application prints into the log; a full pipe would stop it."""
    assert process.stdout is not None  # noqa: S101 - it was asked for
    async for data in process.stdout:
        _write(output, data)


def _write(output: IO[bytes], data: bytes | bytearray) -> None:
    try:
        output.write(data)
        output.flush()
    except OSError as error:
        logger.warning("what the rollout server prints cannot be kept: %s", error)


async def _watch(process: trio.Process, log: Path, begin: int) -> None:
    await process.wait()
    raise EvaluationStoppedError(
        f"the rollout server of the run ended (exit code {process.returncode}); {log} says "
        f"why: {_last_line(log, begin) or 'it wrote nothing'}"
    )


async def _stop(process: trio.Process, output: IO[bytes]) -> None:
    """Have it shut down in its own time, or end it; what it prints until then is kept."""
    assert process.stdin is not None  # noqa: S101 - it was asked for
    assert process.stdout is not None  # noqa: S101
    await process.stdin.aclose()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_copy, process, output)
        with trio.move_on_after(_STOP_SEC):
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
        nursery.cancel_scope.cancel()
    await process.stdout.aclose()


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").strip()


def _last_line(log: Path, begin: int, *, besides: Collection[str] = ()) -> str:
    """Find the last line of the log that is not blank, after what earlier servers wrote."""
    with log.open("rb") as file:
        start = max(begin, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(start)
        first, *rest = [_text(line) for line in file.read().split(b"\n")]
    # The first line of a tail has no beginning, so it counts only where there is no other.
    lines = rest if start > begin and any(rest) else [first, *rest]
    return next((line for line in reversed(lines) if line and line not in besides), "")
