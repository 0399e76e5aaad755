"""Workers on this machine: processes that serve one application, each on a private socket.

Theory of operation: each worker has a task that starts its process, has it join the pool once it
listens, and waits for its end, which the pool learns at once. A process gets the pool's key as the
first line of its stdin, a pipe that only the front holds open: it ends with the front, however that
ends. What it writes comes out on the front's stderr, line by line. `Starts` decides, from times
alone, when a process that has ended is started again, and `hopeless` when no start is worth it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

from rollout._checks import backend_settings, check_number, check_whole
from rollout._files.atomic import reason_of
from rollout._logs import get_logger, printable, with_worker
from rollout._server_process import first_line, killed_by, start_server
from rollout._tasks import background_tasks
from rollout.errors import RolloutServerError
from rollout.pool.source import Workers, WorkerSource
from rollout.pool.worker import UNIX, Worker, WorkerAddress

__all__ = [
    "LocalWorkers",
    "OutputLines",
    "OutputRecords",
    "Starts",
    "after_end",
    "hopeless",
    "until_silent",
]

logger = get_logger(__name__)

FIRST_DELAY_SEC = 0.5
LONGEST_DELAY_SEC = 15.0
STEADY_SEC = 10.0
"""A process that has listened for so long was no part of a crash loop."""

LOOP = 5
"""So many ends in a row are a crash loop."""

FAILED_STARTS = 3
FAILED_STARTS_LATER = 10
"""So many failed starts in a row of each worker end the server; more once a worker was up."""

_LOOK_SEC = 5.0
_STOP_SEC = 5.0
"""How long processes may take to end where no stage of a shutdown says it."""

_LAST_OUTPUT_SEC = 1.0
"""Time to read what a process wrote last; a child of it may hold the pipe open for longer."""

_LONGEST_LINE = 65_536
_LONGEST_WORDS = 500
_KEY_BYTES = 32


@define
class Starts:
    """The starts of one worker's process.

    Attributes:
        restarts: How often it was started again.
        streak: How many times in a row it ended without having been steady.
        failed: How many times in a row it ended before it listened.
        last_end: How it ended the last time.
        listening_since: Since when it listens (trio time); ``None`` while it does not.
    """

    restarts: int = 0
    streak: int = 0
    failed: int = 0
    last_end: str | None = None
    listening_since: float | None = None

    def listening(self, now: float) -> None:
        """Note that it listens."""
        self.listening_since = now
        self.failed = 0

    def ended(self, how: str, now: float) -> float:
        """Note that it has ended; return after how many seconds it is started again."""
        since, self.listening_since = self.listening_since, None
        if since is None:
            self.failed += 1
        elif now - since >= STEADY_SEC:
            self.streak = 0
        self.streak += 1
        self.restarts += 1
        self.last_end = how
        return min(math.ldexp(FIRST_DELAY_SEC, min(self.streak - 1, 10)), LONGEST_DELAY_SEC)


def hopeless(starts: Collection[Starts], *, was_up: bool) -> bool:
    """Whether no worker comes up: each has failed to start, too often in a row.

    Args:
        starts: Those of all workers.
        was_up: Whether one of them was up before, so that they can work.
    """
    limit = FAILED_STARTS_LATER if was_up else FAILED_STARTS
    return all(each.failed >= limit for each in starts)


def after_end(
    name: str,
    starts: Starts,
    everyone: Collection[Starts],
    *,
    end: str,
    reason: str,
    was_up: bool,
) -> float | None:
    """Note and log that a worker has ended; return after how many seconds it is started again.

    Args:
        name: The worker.
        starts: Its record.
        everyone: The records of all workers.
        end: How it ended, for the health.
        reason: The same for the log.
        was_up: Whether a worker was up before.

    Returns:
        ``None`` if no start is worth it, see `hopeless`.
    """
    delay_sec = starts.ended(end, trio.current_time())
    if hopeless(everyone, was_up=was_up):
        return None
    logger.warning("worker %s ended: %s; next start in %g s", name, reason, delay_sec)
    if starts.streak == LOOP:
        logger.error("worker %s is in a crash loop: %d ends in a row", name, LOOP)
    return delay_sec


class OutputLines:
    """Whole lines of a process's output, each with a prefix; very long ones come in pieces.

    Attributes:
        last: The last line that was not blank, without the prefix.
    """

    def __init__(self, prefix: str) -> None:
        self.last = ""
        self._prefix = prefix.encode()
        self._pending = b""

    def feed(self, data: bytes | bytearray) -> bytes:
        """Add bytes; return the lines that are complete."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _LONGEST_LINE:
            lines.append(self._pending)
            self._pending = b""
        return self._prefixed(lines)

    def rest(self) -> bytes:
        """Return the last line, if it was not complete."""
        pending, self._pending = self._pending, b""
        return self._prefixed([pending] if pending else [])

    def _prefixed(self, lines: Sequence[bytes]) -> bytes:
        for line in reversed(lines):
            if line.strip():
                words = line[:_LONGEST_WORDS].decode("utf-8", "replace").strip()
                self.last = printable(words.removeprefix("rollout: "))
                break
        return b"".join(b"%b%b\n" % (self._prefix, line) for line in lines)


class OutputRecords(OutputLines):
    """Whole lines of a process that logs JSON, each an object with its worker."""

    def __init__(self, worker: str) -> None:
        super().__init__("")
        self._worker = worker

    def _prefixed(self, lines: Sequence[bytes]) -> bytes:
        records = [with_worker(line, self._worker) for line in lines if line.strip()]
        if records:
            words = str(json.loads(records[-1])["message"])[:_LONGEST_WORDS]
            self.last = printable(words.removeprefix("rollout: "))
        return b"".join(b"%b\n" % record for record in records)


def _write_to_stderr(lines: bytes) -> None:
    with suppress(OSError, ValueError):  # as a log does when nobody reads it any more
        sys.stderr.buffer.write(lines)
        sys.stderr.buffer.flush()


@define(eq=False)
class _Process:
    """A process of a worker, and its output.

    Attributes:
        process: The process.
        lines: Its output.
        killed_because: Why the front has killed it, if it has.
    """

    process: trio.Process
    lines: OutputLines
    killed_because: str | None = None
    _copied: trio.Event = field(factory=trio.Event)

    async def copy(self) -> None:
        """Copy its output until the pipe ends; a full pipe would stop it."""
        assert self.process.stdout is not None  # noqa: S101 - it was asked for
        async for data in self.process.stdout:
            # In a thread, since a terminal that is held up must not hold up the front.
            lines = self.lines.feed(data)
            await trio.to_thread.run_sync(_write_to_stderr, lines, abandon_on_cancel=True)
        _write_to_stderr(self.lines.rest())
        self._copied.set()

    async def say(self, line: str) -> None:
        """Write a line to its stdin."""
        assert self.process.stdin is not None  # noqa: S101 - it was asked for
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # it has ended, or will
            await self.process.stdin.send_all(f"{line}\n".encode())

    async def close_stdin(self) -> None:
        """Ask it to shut down."""
        assert self.process.stdin is not None  # noqa: S101 - it was asked for
        await self.process.stdin.aclose()

    async def close(self) -> None:
        """Close the pipes."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                await pipe.aclose()

    def kill(self, because: str) -> None:
        """Kill it, with what its agents have started."""
        self.killed_because = self.killed_because or because
        _kill_group(self.process.pid)

    async def wait_copied(self) -> None:
        """Wait until its output is copied, for a moment at most."""
        with trio.move_on_after(_LAST_OUTPUT_SEC):
            await self._copied.wait()

    @property
    def end(self) -> str:
        """How it ended."""
        code = self.process.returncode
        return self.killed_because or killed_by(code or 0) or f"exit code {code}"

    @property
    def reason(self) -> str:
        """How it ended; where it ended by itself, with its last words."""
        if (self.process.returncode or 0) < 0 or not self.lines.last:
            return self.end
        return f"{self.end}, and its last line was: {self.lines.last}"

    async def stop(self, within_sec: float) -> None:
        """Shut it down within a time, or kill it; what it writes until then is copied."""
        await self.close_stdin()
        async with background_tasks(self.copy):
            with trio.move_on_after(within_sec):
                await self.process.wait()
            if self.process.returncode is None:
                logger.warning("a worker did not end in time and is killed: %d", self.process.pid)
                self.kill("it did not end in time and was killed")
                await self.process.wait()
            await self.wait_copied()


def _kill_group(pid: int) -> None:
    """Kill what is left of a worker's session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@define(eq=False)
class _Slot:
    """The place of one worker: a process after the other.

    Attributes:
        name: The worker's name.
        starts: The record of its processes.
        running: The process; ``None`` while it waits to be started.
    """

    name: str
    starts: Starts = field(factory=Starts)
    running: _Process | None = None

    def health(self) -> dict[str, Any]:
        listening = self.starts.listening_since is not None
        waits = "starting" if self.running is not None else "waiting to start"
        return {
            "name": self.name,
            "status": "listening" if listening else waits,
            "pid": None if self.running is None else self.running.process.pid,
            "restarts": self.starts.restarts,
            "last_end": self.starts.last_end,
        }


class LocalWorkers(WorkerSource):
    """Workers that are processes of this machine, started and watched by the pool.

    Each is ``rollout serve APP`` on a socket in a folder of this process's own, with a key of the
    pool's. A process that ends is started again, after a delay that grows with each end in a row.

    Args:
        app: What they serve: ``MODULE:APP`` or ``FILE.py:APP``.
        count: How many there are.
        options: Further options of ``rollout serve`` for each.
        silence_sec: A worker that has not answered for so long is killed and started again.
        json_logs: Whether they log JSON, as this process does; the lines get a field ``worker``.

    Raises:
        BackendConfigurationError: The count or the time cannot be used.

    If no worker comes up, the pool ends with a `rollout.errors.RolloutServerError`.
    """

    def __init__(
        self,
        app: str,
        count: int,
        *,
        options: Sequence[str] = (),
        silence_sec: float = 120.0,
        json_logs: bool = False,
    ) -> None:
        with backend_settings():
            check_whole("count", count)
            check_number("silence_sec", silence_sec, above=0)
        self._app = app
        self._options = [*options, "--log-format=json"] if json_logs else list(options)
        self._json_logs = json_logs
        self._silence_sec = silence_sec
        self._key = secrets.token_urlsafe(_KEY_BYTES)
        self._slots = [_Slot(str(number)) for number in range(1, count + 1)]
        self._was_up = False
        self._closing = trio.Event()
        self._over: trio.Event | None = None

    def health(self) -> dict[str, Any]:
        """Return the processes, and how often they were started again."""
        return {
            "restarts": sum(slot.starts.restarts for slot in self._slots),
            "processes": [slot.health() for slot in self._slots],
        }

    async def run(self, workers: Workers) -> None:
        """Keep the processes running until `shutdown`; cancelling this stops them.

        Raises:
            RolloutServerError: No worker comes up, or there can be no folder for their sockets.
        """
        self._over = trio.Event()
        try:
            folder = tempfile.TemporaryDirectory(prefix="rollout-", ignore_cleanup_errors=True)
        except OSError as error:
            raise RolloutServerError(
                f"there can be no folder for the workers' sockets: {reason_of(error)}"
            ) from None
        try:
            with folder as path:
                async with trio.open_nursery() as nursery:
                    for slot in self._slots:
                        nursery.start_soon(self._keep, slot, Path(path), workers)
        finally:
            self._over.set()

    async def shutdown(self) -> None:
        """Shut the processes down, and wait for their ends."""
        self._closing.set()
        for slot in self._slots:
            if slot.running is not None:
                await slot.running.close_stdin()
        if self._over is not None:
            await self._over.wait()

    async def _keep(self, slot: _Slot, folder: Path, workers: Workers) -> None:
        """Start the process of a worker, again and again."""
        while True:
            end, reason = await self._run(slot, folder / f"{slot.name}.sock", workers)
            if self._closing.is_set():
                return
            everyone = [each.starts for each in self._slots]
            delay_sec = after_end(
                slot.name, slot.starts, everyone, end=end, reason=reason, was_up=self._was_up
            )
            if delay_sec is None:
                raise RolloutServerError(
                    f"no worker comes up; the last of {slot.starts.failed} starts of worker "
                    f"{slot.name} ended before it listened: {reason}"
                )
            with trio.move_on_after(delay_sec):
                await self._closing.wait()
                return

    async def _run(self, slot: _Slot, path: Path, workers: Workers) -> tuple[str, str]:
        """Run a process to its end; return how it ended, for the health and for the log."""
        url = f"{UNIX}{path}"
        options = [f"--worker-of={len(self._slots)}", "--bind", url, *self._options]
        try:
            process, address = await start_server(self._app, options)
        except OSError as error:
            reason = f"it cannot be started: {reason_of(error)}"
            return reason, reason
        lines = (
            OutputRecords(slot.name) if self._json_logs else OutputLines(f"worker {slot.name}: ")
        )
        running = _Process(process, lines)
        slot.running = running
        try:
            async with address, background_tasks(running.copy):
                await running.say(self._key)
                if self._closing.is_set():
                    await running.close_stdin()
                if await first_line(address):
                    await self._serve(slot, running, url, workers)
                if await process.wait():
                    _kill_group(process.pid)  # what its agents have started
                await running.wait_copied()
                return running.end, running.reason
        finally:
            slot.running = None
            with trio.CancelScope(shield=True):
                if process.returncode is None:
                    await running.stop(0 if self._closing.is_set() else _STOP_SEC)
                await running.close()

    async def _serve(self, slot: _Slot, running: _Process, url: str, workers: Workers) -> None:
        """Have a process that listens join, until it has ended."""
        slot.starts.listening(trio.current_time())
        self._was_up = True
        worker = workers.join(WorkerAddress(slot.name, url, self._key))
        async with background_tasks(partial(self._watch, worker, running)):
            await running.process.wait()
        if self._closing.is_set():
            worker.drain()
        workers.lose(worker, running.end)

    async def _watch(self, worker: Worker, running: _Process) -> None:
        """Kill a process that does not answer any more."""
        running.kill(await until_silent(worker, self._silence_sec))


async def until_silent(worker: Worker, silence_sec: float) -> str:
    """Wait until a worker has not answered for so long; return why it has to be killed."""
    answered_at = trio.current_time()
    while True:
        await trio.sleep(_LOOK_SEC)
        now = trio.current_time()
        if worker.trouble is None or worker.process_id is None:  # it has never answered
            answered_at = now
        elif now - answered_at >= silence_sec:
            return f"it did not answer for {now - answered_at:.0f} s and was killed"
