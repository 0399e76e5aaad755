"""Keep what a handler of SIGALRM raises out of the event loop.

Python runs a signal handler wherever the main thread is. While a workflow waits, that is inside of
trio, and an exception there ends the server. So a handler that user code sets is wrapped when that
code waits: what it raises then ends the call that has set it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import FrameType
from typing import Any

import trio
from attrs import frozen

__all__ = ["await_with_alarms"]

_ALARM: Any = getattr(signal, "SIGALRM", None)


async def await_with_alarms(
    coroutine: Coroutine[Any, Any, Any], fail: Callable[[BaseException], None]
) -> Any:
    """Await *coroutine*.

    Args:
        coroutine: User code.
        fail: Called, on the loop, with what a handler raises while the code waits.
    """
    if _ALARM is None or threading.current_thread() is not threading.main_thread():
        return await coroutine  # nobody can set a handler here
    return await _Steps(coroutine, fail)


class _Steps:
    """Runs a coroutine step by step.

    Attributes:
        runs: Whether a step is under way.
        over: Whether the last one was.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], fail: Callable[[BaseException], None]
    ) -> None:
        self.runs = False
        self.over = False
        self._coroutine = coroutine
        self._fail = fail
        self._token = trio.lowlevel.current_trio_token()
        self._before = signal.getsignal(_ALARM)

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            self.runs = self.over = True
            try:
                message = resume()
                self.over = False
            except StopIteration as end:
                return end.value
            finally:
                self._wrap_handler()
                self.runs = False
            try:
                value = yield message
            except BaseException as error:  # noqa: BLE001 - it goes on into the coroutine
                resume = partial(self._coroutine.throw, error)
            else:
                resume = partial(self._coroutine.send, value)

    def fail(self, error: BaseException) -> None:
        """Take what a handler raised between two steps."""
        self._token.run_sync_soon(self._fail, error)

    def _wrap_handler(self) -> None:
        handler: Any = signal.getsignal(_ALARM)
        if isinstance(handler, _Handler):
            if not handler.steps.over:
                return
            handler = handler.original
        elif handler is self._before:
            return
        if callable(handler):
            signal.signal(_ALARM, _Handler(self, handler))


@frozen
class _Handler:
    """A signal handler that user code has set, and whose it is."""

    steps: _Steps
    original: Callable[[int, FrameType | None], Any]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.original(number, frame)
        except BaseException as error:
            if self.steps.runs:
                raise
            self.steps.fail(error)
