"""A rollout server in a process of its own, for the length of a run.

It runs in a process of its own, so that code of users that blocks, crashes or leaks does not
touch the run.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import IO

import trio
from attrs import define, field

from rollout._files.atomic import reason_of
from rollout._logs import get_logger
from rollout._redaction import RedactedStream
from rollout._server_process import first_line, killed_by, start_server
from rollout._tasks import background_tasks
from rollout.errors import EvaluationError, EvaluationStoppedError
from rollout.evaluation.process import ServerRecord

__all__ = ["SERVER_RECORD", "server_process"]

logger = get_logger(__name__)

SERVER_RECORD = "server.json"
"""The name of the server's record, beside its state."""

_OPTIONS = (
    *("--bind", "127.0.0.1:0", "--until-stdin-closes", "--quiet", "--verbose"),
    *("--drain-sec", "0", "--cleanup-sec", "5", "--forced-sec", "3"),
    *("--delivery-sec", "0", "--backend-sec", "5"),
)
_STOP_SEC = 15.0
_DRAIN_SEC = 1.0
"""Time to read what a server wrote last; a child of it may hold the pipe open for longer."""
_TAIL_BYTES = 4096


@asynccontextmanager
async def server_process(
    app: str,
    *,
    log: Path,
    state: Path,
    environment: dict[str, str],
    workers: int | str | None = None,
    secrets: Iterable[str | None] = (),
    without: str | None = None,
    echo: Callable[[str], None] | None = None,
) -> AsyncGenerator[str, None]:
    """Serve an application for the length of the block; yields its URL.

    Args:
        app: ``MODULE:APP`` or ``FILE.py:APP``.
        log: The file that gets what the server writes, less the secrets.
        state: The file in which it keeps its rollouts, whatever the application says. The record
            of the process is beside it.
        environment: Variables for it, on top of this process's own.
        workers: The value of ``--workers``; ``None`` to run everything in the one process.
        without: A variable of this process that it does not get, unless *environment* has it.
        secrets: What must not get into the log, see `rollout._redaction.Redactor`.
        echo: Gets each line of the log as well.

    Raises:
        EvaluationError: It does not start; the message has the last line that it wrote.
        EvaluationStoppedError: It ended while the block ran.

    Leaving the block, by cancellation too, stops it within 15 seconds and waits for it.
    """
    with _opened(log) as file:
        options = [*_OPTIONS, "--state", str(state)]
        if workers is not None:
            options.append(f"--workers={workers}")
        try:
            inherited = {name: value for name, value in os.environ.items() if name != without}
            process, address = await start_server(app, options, environment=inherited | environment)
        except OSError as error:
            reason = reason_of(error)
            raise EvaluationError(f"the rollout server cannot be started: {reason}") from None
        record = ServerRecord.of_process(process.pid)
        output = _Output(process, log, file, file.tell(), RedactedStream(secrets), echo)
        try:
            if record is not None:
                record.write(state.with_name(SERVER_RECORD))
            async with address, background_tasks(output.copy):
                url = await first_line(address)
                if not url:
                    await process.wait()
                    raise EvaluationError(f"the rollout server did not start: {await output.end()}")
                async with background_tasks(partial(_watch, output)):
                    yield url
        finally:
            with trio.CancelScope(shield=True):
                await _stop(output)


def _opened(log: Path) -> IO[bytes]:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        return open(os.open(log, flags, 0o600), "ab")  # noqa: PTH123 - opened with flags
    except OSError as error:
        raise EvaluationError(f"{log}: {error.strerror or error}") from None


@define
class _Output:
    """The output of a server, on its way into the log.

    Attributes:
        process: The server.
        log: The path of the log.
        begin: Where the log ended before.
    """

    process: trio.Process
    log: Path
    _file: IO[bytes]
    begin: int
    _redacted: RedactedStream
    _echo: Callable[[str], None] | None
    _copied: trio.Event = field(factory=trio.Event)

    async def copy(self) -> None:
        """Copy into the log until the pipe ends; a full pipe would stop the server."""
        assert self.process.stdout is not None  # noqa: S101 - it was asked for
        async for data in self.process.stdout:
            self._write(self._redacted.feed(data))
        self.finish()
        self._copied.set()

    def finish(self) -> None:
        """Write the last line, if it has no line break yet."""
        self._write(self._redacted.rest())

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            logger.warning("the output of the rollout server cannot be logged: %s", error)
        if self._echo is not None:
            for line in data.decode("utf-8", "replace").splitlines():
                self._echo(line)

    async def end(self) -> str:
        """Explain why the process ended."""
        with trio.move_on_after(_DRAIN_SEC):
            await self._copied.wait()
        code = self.process.returncode
        killed = None if code is None else killed_by(code)
        if killed is not None:
            return f"it was {killed} ({self.log} has what it wrote)"
        last = _last_line(self.log, self.begin) or "it wrote nothing"
        return f"{last} (exit code {code}; {self.log} has all that it wrote)"


async def _watch(output: _Output) -> None:
    await output.process.wait()
    raise EvaluationStoppedError(f"the rollout server of the run ended: {await output.end()}")


async def _stop(output: _Output) -> None:
    """Shut it down within its time, or kill it; what it prints until then is kept."""
    process = output.process
    assert process.stdin is not None  # noqa: S101 - it was asked for
    assert process.stdout is not None  # noqa: S101
    await process.stdin.aclose()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(output.copy)
        with trio.move_on_after(_STOP_SEC):
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
        await output.end()
        nursery.cancel_scope.cancel()
    output.finish()
    await process.stdout.aclose()


def _last_line(log: Path, begin: int) -> str:
    """Find the last line of the log that is not blank, after what earlier servers wrote."""
    with log.open("rb") as file:
        start = max(begin, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(start)
        first, *rest = [
            line.decode("utf-8", errors="replace").strip() for line in file.read().split(b"\n")
        ]
    # The first line of a tail has no beginning, so it counts only where there is no other.
    lines = rest if start > begin and any(rest) else [first, *rest]
    return next((line for line in reversed(lines) if line), "")
