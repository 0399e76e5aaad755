"""A thread of its own for one job after another, with fewer steps than a thread of trio's pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import outcome
import trio

from rollout._threads import clock_jumps

__all__ = ["JobThread"]

T = TypeVar("T")


class JobThread:
    """Runs one job at a time. The thread starts with the first one, and is a daemon.

    Args:
        name: Its name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._wake = threading.Lock()
        self._wake.acquire()
        self._job: tuple[Callable[[], Any], trio.lowlevel.TrioToken, trio.lowlevel.Task] | None
        self._job = None

    async def run(self, job: Callable[[], T]) -> T:
        """Call a function in the thread, and wait for it even when cancelled.

        Where the clock jumps, it is called in place, as by `rollout._threads.run_off_loop`.
        """
        if clock_jumps():
            await trio.lowlevel.checkpoint()
            return job()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        token, task = trio.lowlevel.current_trio_token(), trio.lowlevel.current_task()
        self._job = (job, token, task)
        self._wake.release()
        result: T = await trio.lowlevel.wait_task_rescheduled(_not_aborted)
        return result

    def end(self) -> None:
        """End the thread; no job is running."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._job = None
            self._wake.release()
            thread.join()  # which is idle; another one would wait for the same lock

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            if self._job is None:
                return
            job, token, task = self._job
            self._job = None
            token.run_sync_soon(trio.lowlevel.reschedule, task, outcome.capture(job))
            del job, token, task


def _not_aborted(_: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED
