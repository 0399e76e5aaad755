"""Exceptions of SIGALRM handlers are kept out of the event loop.

Python runs a signal handler wherever the main thread is. While a workflow waits, that is inside of
trio, and an exception there ends the server. So a handler that user code sets, in any of its tasks,
is wrapped when that code waits: what it raises then ends the call that has set it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from types import FrameType
from typing import Any

import trio
from attrs import define, field, frozen

__all__ = ["await_with_alarms"]

_ALARM: Any = getattr(signal, "SIGALRM", None)


@define(eq=False)
class _Owner:
    """A call of user code that may set a handler.

    Attributes:
        fail: Called, on the loop, with what a handler raises while the code waits.
        over: Whether the call has ended.
    """

    fail: Callable[[BaseException], None]
    over: bool = False
    token: trio.lowlevel.TrioToken = field(factory=trio.lowlevel.current_trio_token)


_owner: ContextVar[_Owner | None] = ContextVar("alarm_owner", default=None)


async def await_with_alarms(
    coroutine: Coroutine[Any, Any, Any], fail: Callable[[BaseException], None]
) -> Any:
    """Await *coroutine*, in a task that ends with it.

    Args:
        coroutine: User code.
        fail: Called, on the loop, with what a handler raises while the code waits.
    """
    if _ALARM is None or threading.current_thread() is not threading.main_thread():
        return await coroutine  # nobody can set a handler here
    watch = _current_watch.get()
    if watch is None:
        watch = _Watch()
        _current_watch.set(watch)
        trio.lowlevel.add_instrument(watch)
    owner = _Owner(fail)
    _owner.set(owner)  # for the tasks that the code starts, too
    try:
        return await coroutine
    finally:
        owner.over = True
        watch.wrap_handler(owner)


class _Watch(trio.abc.Instrument):
    """Looks after each step of user code whether that has set a handler."""

    def __init__(self) -> None:
        self._before = signal.getsignal(_ALARM)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        owner = task.context.get(_owner)
        if owner is not None:
            self.wrap_handler(owner)

    def wrap_handler(self, owner: _Owner) -> None:
        """Wrap the handler that *owner* has set, or takes over from a call that has ended."""
        handler: Any = signal.getsignal(_ALARM)
        if isinstance(handler, _Handler):
            if not handler.owner.over:
                return
            handler = handler.original
        elif handler is self._before:
            return
        if callable(handler):
            signal.signal(_ALARM, _Handler(owner, handler))


_current_watch: trio.lowlevel.RunVar[_Watch | None] = trio.lowlevel.RunVar("alarms", default=None)


@frozen(eq=False)
class _Handler:
    """A signal handler that user code has set, with the call that it belongs to."""

    owner: _Owner
    original: Callable[[int, FrameType | None], Any]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.original(number, frame)
        except BaseException as error:
            if _running() is self.owner and not self.owner.over:
                raise
            self.owner.token.run_sync_soon(self.owner.fail, error)


def _running() -> _Owner | None:
    """Return whose step is under way."""
    try:
        return trio.lowlevel.current_task().context.get(_owner)
    except RuntimeError:  # between two steps
        return None
