"""End a server process whose tasks do not end.

A workflow in a worker thread that never returns, or a task that shields itself from its
cancellation, holds up trio's nurseries for good, and with them the exit of the process. The
staged shutdown gives such executions up and delivers results for them; this ends the process
once that is done. A thread keeps the time, and the signal itself starts it, so that a workflow that
blocks the event loop cannot hold up the exit for good either.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rollout._logs import get_logger
from rollout.cli.failures import EXIT_FORCED
from rollout.server import RolloutServer

__all__ = ["LastResort"]

logger = get_logger(__name__)

_STUCK_SEC = 1.0
"""Time for the last responses to leave, once executions were given up."""

_CLOSING_SEC = 60.0
"""Time for connections and the lifespan to end, on top of the budget of the stages."""


class LastResort:
    """Ends the process with `EXIT_FORCED` if the server does not return in time."""

    def __init__(self, app: RolloutServer) -> None:
        self._app = app
        self._timer: threading.Timer | None = None

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Disarm at the end of the block, which is where the server has returned."""
        try:
            yield
        finally:
            self._disarm()

    def start_with_signals(self) -> None:
        """Start the time with SIGTERM or SIGINT, ahead of whoever handles them by now."""
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if callable(handler):
                signal.signal(number, partial(self._received, handler))

    def _received(self, handler: Callable[[int, Any], Any], number: int, frame: Any) -> None:
        if self._timer is None:
            self._arm_for_shutdown()
        handler(number, frame)

    def _arm_for_shutdown(self) -> None:
        budget = self._app.shutdown_stages.budget
        self._arm(budget.total_sec + _CLOSING_SEC, "the shutdown does not end")

    async def watch(self) -> None:
        """Follow the shutdown and set the time accordingly."""
        stages = self._app.shutdown_stages
        await self._app.shutdown_requested.wait()
        self._arm_for_shutdown()
        await stages.run()
        if stages.stuck:
            reason = f"{len(stages.stuck)} execution(s) did not stop"
            self._arm(_STUCK_SEC, reason)
        else:
            self._arm(_CLOSING_SEC, "the lifespan or a connection does not end")

    def _arm(self, after_sec: float, reason: str) -> None:
        self._disarm()
        self._timer = threading.Timer(after_sec, _end_process, (reason,))
        self._timer.daemon = True
        self._timer.start()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _end_process(reason: str) -> None:
    logger.error("ending the process by force: %s", reason)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(EXIT_FORCED)
