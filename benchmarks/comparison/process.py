"""Child processes: started, spoken to in lines of JSON, watched, and always ended."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import trio
from attrs import define, field, frozen

T = TypeVar("T")

HERE = Path(__file__).parent.parent
START_SEC = 60.0
_STOP_SEC = 3.0
_SAMPLE_SEC = 0.05
_TAIL = 2000
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024


class ChildError(Exception):
    """A child process ended, or did not answer in time; the text has what it said last."""


@frozen
class Usage:
    """What a process has used so far: processor time in seconds, resident memory in KiB.

    The time of its child processes counts too, such as that of the one that writes files.
    """

    user_sec: float
    system_sec: float
    rss_kib: float

    @property
    def cpu_sec(self) -> float:
        return self.user_sec + self.system_sec


@define(eq=False)
class Child:
    """A child process that takes and answers lines of JSON.

    Attributes:
        name: For error messages.
        hello: The line that it printed when it was ready.
    """

    name: str
    process: trio.Process
    log: IO[bytes] = field(repr=False)
    hello: dict[str, Any] = field(factory=dict)
    _buffer: bytes = field(default=b"", repr=False)

    async def call(self, message: dict[str, Any], *, limit_sec: float) -> Any:
        """Send one message and return the answer.

        Raises:
            ChildError: There was none within the limit, or the process has ended.
        """
        assert self.process.stdin is not None
        try:
            await self.process.stdin.send_all(json.dumps(message).encode() + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ChildError(f"{self.name} has ended{self._last_words()}") from None
        return await self.answer(limit_sec)

    async def answer(self, limit_sec: float) -> Any:
        """Read one line.

        Raises:
            ChildError: There was none within the limit, or the process has ended.
        """
        assert self.process.stdout is not None
        with trio.move_on_after(limit_sec):
            while b"\n" not in self._buffer:
                data = await self.process.stdout.receive_some()
                if not data:
                    raise ChildError(f"{self.name} has ended{self._last_words()}")
                self._buffer += data
            line, _, self._buffer = self._buffer.partition(b"\n")
            return json.loads(line)
        raise ChildError(f"{self.name} did not answer in {limit_sec:g} s{self._last_words()}")

    def usage(self) -> Usage | None:
        """What it has used so far, where ``/proc`` tells."""
        proc = Path(f"/proc/{self.process.pid}")
        try:
            user, system = _ticks(proc)
            pages = int((proc / "statm").read_text().split()[1])
        except OSError:
            return None
        for listed in proc.glob("task/*/children"):
            with suppress(OSError):  # a thread, or a child, that has ended meanwhile
                for pid in listed.read_text().split():
                    more = _ticks(proc.parent / pid)
                    user, system = user + more[0], system + more[1]
        return Usage(user / _TICKS, system / _TICKS, pages * _PAGE_KIB)

    def _last_words(self) -> str:
        self.log.flush()
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - _TAIL))
        words = self.log.read().decode(errors="replace").strip()
        return f":\n{words}" if words else ""


def _ticks(proc: Path) -> tuple[int, int]:
    # The name in the second field may hold anything, so count from its end.
    stat = (proc / "stat").read_text().rpartition(")")[2].split()
    return int(stat[11]), int(stat[12])


@asynccontextmanager
async def started(
    name: str, command: Sequence[str], *, hello_sec: float = START_SEC
) -> AsyncGenerator[Child, None]:
    """Run a child process for the length of the block; yields it once it is ready.

    The child ends when its standard input does, so it ends too where this process is killed.
    Leaving the block closes that, waits a little, then terminates and kills.

    Raises:
        ChildError: It did not get ready.
    """
    with (
        tempfile.TemporaryFile() as log,
        tempfile.TemporaryDirectory(prefix="rollout-bench-", dir=IN_MEMORY) as kept,
    ):
        process = await trio.lowlevel.open_process(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            # Both systems keep a folder for each rollout; neither does it in the user's own.
            env=environment()
            | {"ROLLOUT_ARTIFACT_ROOT": kept, "_OSMOSIS_ROLLOUT_ARTIFACT_ROOT": kept},
            # An interrupt from the keyboard is for the parent, which ends its children.
            start_new_session=True,
        )
        child = Child(name, process, log)
        try:
            child.hello = await child.answer(hello_sec)
            yield child
        finally:
            await _end(process)


def environment() -> dict[str, str]:
    """The environment of a child: this folder to import from, and no proxy in the way."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return {**kept, "PYTHONPATH": str(HERE)}


IN_MEMORY = next((folder for folder in ("/dev/shm",) if os.access(folder, os.W_OK)), None)
"""Where files go that rollouts leave: it is not the disk that is measured."""


async def _end(process: trio.Process) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with trio.CancelScope(shield=True):
        await process.stdin.aclose()
        for step in (None, process.terminate, process.kill):
            if step is not None:
                step()
            with trio.move_on_after(_STOP_SEC):
                await process.wait()
                break
        await process.stdout.aclose()


@define
class Watch:
    """What a child used while it was watched."""

    before: Usage | None = None
    after: Usage | None = None
    peak_rss_kib: float = 0.0

    def to_json(self, prefix: str) -> dict[str, Any]:
        if self.before is None or self.after is None:
            return {}
        return {
            f"{prefix}_user_sec": self.after.user_sec - self.before.user_sec,
            f"{prefix}_system_sec": self.after.system_sec - self.before.system_sec,
            f"{prefix}_cpu_sec": self.after.cpu_sec - self.before.cpu_sec,
            f"{prefix}_idle_rss_kib": self.before.rss_kib,
            f"{prefix}_peak_rss_kib": self.peak_rss_kib,
        }

    def sample(self, child: Child) -> None:
        usage = child.usage()
        if usage is not None:
            self.after = usage
            self.peak_rss_kib = max(self.peak_rss_kib, usage.rss_kib)


async def watched(
    children: Sequence[Child], work: Callable[[], Awaitable[T]]
) -> tuple[T, list[Watch]]:
    """Run *work* and watch what children use meanwhile."""
    watches = [Watch(child.usage()) for child in children]

    def look() -> None:
        for watch, child in zip(watches, children, strict=True):
            watch.sample(child)

    async def keep_looking() -> None:
        while True:
            look()
            await trio.sleep(_SAMPLE_SEC)

    with ungrouped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_looking)
            result = await work()
            look()
            nursery.cancel_scope.cancel()
    return result, watches


@contextmanager
def ungrouped() -> Generator[None, None, None]:
    """Raise an error that came out of a nursery alone as it is."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if error is group:
            raise
        raise error from None
