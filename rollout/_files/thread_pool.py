"""A small thread pool that works off a queue of blocking jobs for the event loop.

Waking a thread, and the loop for its result, costs more than a small file does. So a thread that
is awake takes one job after the other without the loop's help, and all results that are there
when the loop looks are delivered in one go. Threads are daemons and exit when the queue is empty.

Another thread starts when many jobs wait, or one for long. Few threads suit short jobs, because
of the interpreter lock.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import trio

__all__ = ["Job", "ThreadPool"]

_QUEUED_FOR_EACH = 4
"""How many jobs may wait for each thread before another one is called."""


class Job:
    """A blocking job for a thread.

    Args:
        function: Does it; must not raise.

    Attributes:
        ended: Whether a thread has finished it.
        dropped: Whether nobody waits for it any longer; a thread passes over it then.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self.ended = False
        self.dropped = False
        self._function = function
        self._delivered = trio.Event()

    async def wait(self) -> None:
        """Return once it has ended."""
        if self.ended:
            await trio.lowlevel.checkpoint()
            return
        await self._delivered.wait()


class ThreadPool:
    """Threads that work off a queue of jobs.

    Args:
        most: How many threads there are at most.

    Attributes:
        progress_at: When a job was last found to have ended (trio time).
    """

    def __init__(self, most: int) -> None:
        self.progress_at = -math.inf
        self._most = most
        self._queue: deque[tuple[Job, _Outbox]] = deque()
        self._lock = threading.Lock()
        self._threads = 0
        self._outbox: _Outbox | None = None

    @property
    def busy(self) -> bool:
        """Whether a thread is at work."""
        return self._threads > 0

    def submit(self, job: Job) -> None:
        """Queue a job; from the event loop.

        Raises:
            RuntimeError: No thread is running, and none can be started.
        """
        token = trio.lowlevel.current_trio_token()
        if self._outbox is None or self._outbox.token is not token:
            self._outbox = _Outbox(token, self._progress)
            self.progress_at = -math.inf  # each run has a clock of its own
        entry = (job, self._outbox)
        with self._lock:
            self._queue.append(entry)
            waiting = len(self._queue)
            if self._threads >= min(self._most, 1 + waiting // _QUEUED_FOR_EACH):
                return
            self._threads += 1
        try:
            self._start()
        except RuntimeError:
            with self._lock:
                if self._threads:
                    return  # those that there are will come to it
                self._queue.remove(entry)
            raise

    def reinforce(self) -> None:
        """Start one more thread, if the limit allows it: those at work may be stuck."""
        with self._lock:
            if not self._queue or self._threads >= self._most:
                return
            self._threads += 1
        with suppress(RuntimeError):  # no thread can be started
            self._start()

    def _start(self) -> None:
        try:
            trio.lowlevel.start_thread_soon(self._run, _ignore, "rollout files")
        except RuntimeError:
            with self._lock:
                self._threads -= 1
            raise

    def _progress(self) -> None:
        self.progress_at = trio.current_time()

    # --- in the threads -------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._threads -= 1
                    return
                job, outbox = self._queue.popleft()
                if job.dropped:
                    job.ended = True
                    continue
            job._function()  # noqa: SLF001 - one thing with the job
            job.ended = True
            outbox.put(job)


class _Outbox:
    """Jobs that have ended, on their way to one event loop."""

    def __init__(self, token: trio.lowlevel.TrioToken, progress: Callable[[], None]) -> None:
        self.token = token
        self._progress = progress
        self._ended: deque[Job] = deque()
        self._announced = False

    def put(self, job: Job) -> None:
        """Deliver a job; runs in a thread."""
        self._ended.append(job)
        if not self._announced:
            self._announced = True
            with suppress(trio.RunFinishedError):  # nobody waits any longer
                self.token.run_sync_soon(self._deliver)

    def _deliver(self) -> None:
        # In this order: what is put from here on is announced again.
        self._announced = False
        self._progress()
        while self._ended:
            self._ended.popleft()._delivered.set()  # noqa: SLF001 - one thing with the job


def _ignore(_: object) -> None:
    """Ignore what a thread returned."""
