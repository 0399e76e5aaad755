"""Files of rollouts, written for the event loop by a process of its own.

Theory of operation: a small file takes a few system calls. In a thread each of them hands the
interpreter lock back and forth with a busy event loop, which costs more than the calls; in the
loop's own thread, storage that hangs would stop it. So the files go through a pipe to a process
that shares no lock. While it writes one batch, the next one fills up, so the more rollouts end
the less each of them costs.

A system task of trio's owns the process: it starts with the first files and ends with the run.
"""

from __future__ import annotations

import marshal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import trio
from attrs import define, field

from rollout._files.rollouts import problem_of
from rollout._files.writer_process import LENGTH_BYTES

__all__ = ["Writer"]

_END_SEC = 1.0
"""How long the process may take to end before it is killed."""

_BOOT = """\
import sys, types
package = types.ModuleType("rollout")
package.__path__ = [sys.argv[1]]
sys.modules["rollout"] = package
from rollout._files.writer_process import main
main(sys.argv[2])
"""
"""Runs `rollout._files.writer_process` without loading the rest of the package."""


@define(eq=False)
class _Job:
    """Files of one rollout that are to be written.

    Attributes:
        ended: Set once nobody has to wait any longer.
        problems: What could not be done, and why; ``None`` while that is not known.
        again: Whether a process that died had it before.
    """

    rollout_id: str
    files: Mapping[str, bytes | None] = field(repr=False)
    ended: trio.Event = field(factory=trio.Event)
    problems: list[str] | None = None
    again: bool = False

    def end(self, *problems: str) -> None:
        self.problems = [*problems]
        self.ended.set()


class Writer:
    """Writes the files of rollouts below one root, within one run of trio at a time.

    Args:
        root: The root, as an absolute path.
        longest_wait_sec: How long the storage may take to answer.

    Attributes:
        hangs: Whether the storage took longer than that, and has not answered since.
        pid: The number of the process; ``None`` before it starts and after it ends.
    """

    def __init__(self, root: Path, longest_wait_sec: float) -> None:
        self.hangs = False
        self.pid: int | None = None
        self._root = root
        self._longest_wait_sec = longest_wait_sec
        self._running = False
        self._quiet_since = 0.0
        self._waiting: deque[_Job] = deque()
        self._sent: deque[_Job] = deque()
        self._sender = trio.lowlevel.ParkingLot()

    async def write(self, rollout_id: str, files: Mapping[str, bytes | None]) -> list[str] | None:
        """Write files, and wait until they are there, also when cancelled.

        Returns:
            What could not be done, and why; ``None`` if the storage has not answered in time. It
            may take longer while it answers others, unless this is cancelled.
        """
        job = _Job(rollout_id, files)
        if not self._sent and not self._waiting:
            self._quiet_since = trio.current_time()
        self._waiting.append(job)
        if self._running:
            self._sender.unpark()
        else:
            self._running = True
            trio.lowlevel.spawn_system_task(self._run)
        with suppress(trio.Cancelled):  # a scope for each rollout costs as much as all of the rest
            await job.ended.wait()
            return job.problems
        with trio.CancelScope(shield=True) as scope:
            scope.deadline = trio.current_time() + self._longest_wait_sec
            await job.ended.wait()
        return job.problems

    async def _run(self) -> None:
        try:
            while self._waiting:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch)
                    try:
                        await self._run_process()
                    except Exception as error:  # noqa: BLE001 - it would end the whole run
                        self._fail(f"the process that writes them failed: {problem_of(error)}")
                    nursery.cancel_scope.cancel()
        finally:
            self._fail("the run has ended")
            self._running = self.hangs = False

    def _fail(self, problem: str) -> None:
        for jobs in (self._sent, self._waiting):
            while jobs:
                jobs.popleft().end(problem)

    async def _watch(self) -> None:
        """Have nobody wait for storage that does not answer."""
        while True:
            await trio.sleep_until(self._quiet_since + self._longest_wait_sec)
            now = trio.current_time()
            if now < self._quiet_since + self._longest_wait_sec:
                continue
            self._quiet_since = now
            for job in (*self._sent, *self._waiting):
                self.hangs = True
                job.ended.set()

    async def _run_process(self) -> None:
        process = await trio.lowlevel.open_process(
            [
                sys.executable,
                *("-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}"),
                *("-c", _BOOT, str(Path(__file__).parent.parent), str(self._root)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt from the keyboard is for this process alone
        )
        self.pid = process.pid
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, process)
                await self._receive(process)
                nursery.cancel_scope.cancel()
        finally:
            self.pid = None
            with trio.CancelScope(shield=True):
                await _end(process)
        # It has died; the next one gets what it has not answered.
        while self._sent:
            job = self._sent.pop()
            if job.again:
                job.end("the process that writes them died")
            else:
                job.again = True
                self._waiting.appendleft(job)

    async def _send(self, process: trio.Process) -> None:
        pipe = process.stdin
        while pipe is not None:
            while self._sent or not self._waiting:
                await self._sender.park()
            jobs = [*self._waiting]
            self._waiting.clear()
            self._sent.extend(jobs)
            data = marshal.dumps([(str(job.rollout_id), dict(job.files)) for job in jobs])
            try:
                await pipe.send_all(len(data).to_bytes(LENGTH_BYTES, "big") + data)
            except trio.BrokenResourceError:
                return  # `_receive` comes to its end, too

    async def _receive(self, process: trio.Process) -> None:
        pipe, rest = process.stdout, b""
        while pipe is not None and (data := await pipe.receive_some()):
            *lines, rest = (rest + data).split(b"\n")
            self.hangs = False
            self._quiet_since = trio.current_time()
            for line in lines:
                self._sent.popleft().end(*(line.decode().split("\t") if line else ()))
            if not self._sent:
                self._sender.unpark()


async def _end(process: trio.Process) -> None:
    """End a process by the end of its input; kill it if that takes long."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            await pipe.aclose()
    with trio.move_on_after(_END_SEC):
        await process.wait()
        return
    process.kill()
    with trio.move_on_after(_END_SEC):  # a process in a system call that hangs does not die
        await process.wait()
