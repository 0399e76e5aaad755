"""Name the code that blocks the event loop, from a thread that it cannot block.

A workflow that computes or sleeps without awaiting holds up every poll of every rollout. The
loop itself cannot tell, so a thread watches a heartbeat that the loop keeps, and reads the
stack of the loop's thread when the heartbeat is late. `UserCall.run` stands on that stack for
code of a rollout and says whose it is.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from types import CodeType, FrameType

import trio

from rollout._logs import get_logger
from rollout.backend.usercode import UserCall

__all__ = ["LoopWatchdog"]

logger = get_logger(__name__)

_LIBRARIES = tuple(
    {os.path.realpath(path) for name, path in sysconfig.get_paths().items() if "lib" in name}
)
_USER_CALL: CodeType = UserCall.run.__code__


class LoopWatchdog:
    """Warns about code that blocks the event loop for longer than *threshold_sec* seconds."""

    def __init__(self, threshold_sec: float) -> None:
        self.threshold_sec = threshold_sec
        self._beat = 0.0
        self._thread_id = 0

    @staticmethod
    def applies() -> bool:
        """Whether the running clock is real. Under trio's MockClock nothing takes time."""
        return not hasattr(trio.lowlevel.current_clock(), "autojump_threshold")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the heartbeat until cancelled; the thread ends with it."""
        self._thread_id = threading.get_ident()
        self._beat = time.monotonic()
        stopped = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(stopped,), name="rollout-watchdog", daemon=True
        )
        thread.start()
        try:
            task_status.started()
            while True:
                self._beat = time.monotonic()
                await trio.sleep(self.threshold_sec / 4)
        finally:
            stopped.set()

    def _watch(self, stopped: threading.Event) -> None:
        blocked_since: float | None = None
        where = ""
        while not stopped.wait(self.threshold_sec / 4):
            beat = self._beat
            if blocked_since is not None and beat != blocked_since:
                logger.warning(
                    "the event loop was blocked for %.1f s by %s", beat - blocked_since, where
                )
                blocked_since = None
            late = time.monotonic() - beat
            if blocked_since is None and late >= self.threshold_sec:
                blocked_since = beat
                where = describe_blocker(sys._current_frames().get(self._thread_id))  # noqa: SLF001
                logger.warning(
                    "the event loop has been blocked for %.1f s by %s; polls and leases of all "
                    "rollouts wait for it (use trio.to_thread, or a plain def)",
                    late,
                    where,
                )


def describe_blocker(frame: FrameType | None) -> str:
    """Say what a stack is busy with: a place in the code, and whose rollout it is."""
    innermost: FrameType | None = frame
    own: FrameType | None = None
    rollout = ""
    while frame is not None:
        if frame.f_code is _USER_CALL:
            call = frame.f_locals.get("self")
            if isinstance(call, UserCall) and call.phase != "backend":
                rollout = f"the {call.phase} of rollout {call.rollout_id}"
                break
        if own is None and not _is_library(frame.f_code.co_filename):
            own = frame
        frame = frame.f_back
    place = own or innermost
    if place is None:
        return "something that has ended by now"
    at = f"{place.f_code.co_filename}:{place.f_lineno} in {place.f_code.co_name}"
    return f"{rollout}, at {at}" if rollout else f"code at {at}"


def _is_library(filename: str) -> bool:
    if filename.startswith("<"):
        return True
    return os.path.realpath(filename).startswith(_LIBRARIES)
