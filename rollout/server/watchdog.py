"""A watchdog thread that names the code which blocks the event loop.

A workflow that computes or sleeps without awaiting holds up every poll of every rollout. The
loop itself cannot notice it, so a thread watches a heartbeat that the loop keeps, and reads the
stack of the loop's thread when the heartbeat is late. `UserCall.run` stands on that stack for
code of a rollout and says whose it is, and the connection's handler for a request.

A late heartbeat alone blames nobody: the machine may be slow, or another thread may hold the
interpreter lock. What counts is how much the loop's thread has worked, or that it stays in the same
place, and then without the time by which this thread comes late itself. A task is named only if two
looks in a row find it, so that none of many short ones is.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import threading
import time
from types import CodeType, FrameType

import trio

from rollout._logs import get_logger
from rollout._telemetry.counts import LAG_SEC, Histogram
from rollout.backend.usercode import UserCall
from rollout.server.asgi import Call, RolloutHTTPConnection

__all__ = ["LoopWatchdog"]

logger = get_logger(__name__)

_LIBRARIES = tuple(
    {os.path.realpath(path) for name, path in sysconfig.get_paths().items() if "lib" in name}
)
_Place = tuple[FrameType, CodeType, int]
"""The outermost frame of a task, and the innermost code with its position."""

_USER_CALL: CodeType = UserCall.run.__code__
_REQUESTS: frozenset[CodeType] = frozenset(
    {Call.run.__code__, RolloutHTTPConnection.handle_request.__code__}
)


class LoopWatchdog:
    """Warns about code that blocks the event loop for longer than *threshold_sec* seconds.

    Attributes:
        lag_sec: By how many seconds the heartbeats were late.
    """

    def __init__(self, threshold_sec: float) -> None:
        self.lag_sec = Histogram(LAG_SEC)
        self.threshold_sec = threshold_sec
        self._beat = (0.0, 0.0)  # when, and how much time the loop's thread had worked by then
        self._thread_id = 0
        self._loop: CodeType | None = None
        self._clock: int | None = None

    @staticmethod
    def applies() -> bool:
        """Whether the running clock is real. Under trio's MockClock nothing takes time."""
        return not hasattr(trio.lowlevel.current_clock(), "autojump_threshold")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the heartbeat until cancelled; the thread ends with it."""
        self._thread_id = threading.get_ident()
        self._loop = _caller_of_tasks(sys._getframe())  # noqa: SLF001
        if hasattr(time, "pthread_getcpuclockid"):  # neither on macOS nor on Windows
            self._clock = time.pthread_getcpuclockid(self._thread_id)
        self._beat = time.monotonic(), time.thread_time()
        stopped = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(stopped,), name="rollout-watchdog", daemon=True
        )
        thread.start()
        try:
            task_status.started()
            while True:
                now = time.monotonic()
                self._beat = now, time.thread_time()
                await trio.sleep(self.threshold_sec / 4)
                self.lag_sec.add(max(time.monotonic() - now - self.threshold_sec / 4, 0.0))
        finally:
            stopped.set()

    def _watch(self, stopped: threading.Event) -> None:
        look_sec = self.threshold_sec / 4
        blocked_since: float | None = None
        where = ""
        beat = 0.0
        excused = 0.0
        seen: _Place | None = None
        worked = self._beat[1]
        asked = time.monotonic()
        while not stopped.wait(look_sec):
            now = time.monotonic()
            own_delay = max(0.0, now - asked - look_sec)
            asked = now
            before, (beat, at_beat) = beat, self._beat
            excused = own_delay + (excused if beat == before else 0.0)
            if blocked_since is not None and beat != blocked_since:
                logger.warning(
                    "the event loop was blocked for %.1f s by %s", beat - blocked_since, where
                )
                blocked_since = None
            waited = now - beat - excused
            # No look comes while a call holds the interpreter lock, but one right after it.
            held = own_delay
            if self._clock is not None:
                worked_before, worked = worked, time.clock_gettime(self._clock)
                held = worked - worked_before - look_sec
            frames = self._task_frames() if now - beat >= 2 * look_sec else []
            place = (frames[-1], frames[0].f_code, frames[0].f_lasti) if frames else None
            late = max(
                waited if self._clock is None else worked - at_beat,
                waited if place == seen else 0.0,
            )
            if frames and blocked_since is None and late >= self.threshold_sec:
                one_task = held >= look_sec or (seen is not None and seen[0] is frames[-1])
                where = describe_task(frames) if one_task else "many tasks, none of them for long"
                blocked_since = beat
                logger.warning(
                    "the event loop has been blocked for %.1f s by %s; polls and leases of all "
                    "rollouts wait for it (use trio.to_thread, or a plain def)",
                    late,
                    where,
                )
            seen = place

    def _task_frames(self) -> list[FrameType]:
        """Return the stack of the task that runs, innermost frame first; empty without one."""
        frames: list[FrameType] = []
        frame = sys._current_frames().get(self._thread_id)  # noqa: SLF001
        while frame is not None and frame.f_code is not self._loop:
            frames.append(frame)
            frame = frame.f_back
        in_task = frame is not None and frames and _is_async(frames[-1])
        return frames if in_task else []


def describe_task(frames: list[FrameType]) -> str:
    """Describe a stack, innermost frame first: the place, and the rollout or request."""
    place = next((f for f in frames if not _is_library(f.f_code.co_filename)), frames[0])
    at = f"{place.f_code.co_filename}:{place.f_lineno} in {place.f_code.co_name}"
    whose = next(filter(None, map(_whose, frames)), None)
    return f"{whose}, at {at}" if whose else f"code at {at}"


def _whose(frame: FrameType) -> str | None:
    """Return the rollout or the request that a frame stands for."""
    if frame.f_code is _USER_CALL:
        call = frame.f_locals["self"]
        if call.phase != "backend":
            return f"the {call.phase} of rollout {call.rollout_id}"
    elif frame.f_code in _REQUESTS:
        scope = frame.f_locals["self"].scope
        peer = (scope.get("client") or ["an unknown peer"])[0]
        return f"the request {scope['method']} {scope['path']} of {peer}"
    return None


def _caller_of_tasks(frame: FrameType) -> CodeType | None:
    """Return the code that runs the task of *frame*: trio's loop."""
    caller: FrameType | None = frame
    while caller is not None and _is_async(caller):
        caller = caller.f_back
    return None if caller is None else caller.f_code


def _is_async(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_COROUTINE)


def _is_library(filename: str) -> bool:
    if filename.startswith("<"):
        return True
    return os.path.realpath(filename).startswith(_LIBRARIES)
