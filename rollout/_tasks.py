"""Background tasks of a block, and single errors out of exception groups."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

__all__ = ["background_tasks", "copy_error", "sole_error"]


@asynccontextmanager
async def background_tasks(
    *tasks: Callable[[], Awaitable[object]],
) -> AsyncGenerator[trio.Nursery, None]:
    """Run tasks for the length of the block; what still runs at its end is cancelled.

    The nursery is for more of them.

    An exception of the block comes out as it is, with those of tasks as notes; without one,
    the exception of a task does. Several tasks that fail at once come out as a group.
    """
    leaving: BaseException | None = None
    error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(task)
            try:
                yield nursery
            except BaseException as raised:
                leaving = raised
                raise
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        error = _plain(group, leaving)
    if error is not None:
        # Outside of the handler, so that cause and context of a caller's error stay as they are.
        raise error


def _plain(
    group: BaseExceptionGroup[BaseException], leaving: BaseException | None
) -> BaseException:
    if leaving is None or _has_cancellation(leaving):
        return sole_error(group)
    rest = group.split(lambda error: error is leaving or isinstance(error, trio.Cancelled))[1]
    if rest is not None:
        leaving.add_note(f"meanwhile: {sole_error(rest)!r}")
    return leaving


def _has_cancellation(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(trio.Cancelled) is not None
    return isinstance(error, trio.Cancelled)


def sole_error(error: BaseException) -> BaseException:
    """Return the one real error of a group, or the group itself if it holds several.

    Cancellations do not count: a nursery adds them while it ends the siblings of what failed.
    """
    while isinstance(error, BaseExceptionGroup):
        _, real = error.split(trio.Cancelled)
        if real is None or len(real.exceptions) != 1:
            return error if real is None else real
        error = real.exceptions[0]
    return error


def copy_error(error: Exception) -> Exception:
    """Copy an error, so that its awaiters share no traceback, no context and no notes."""
    try:
        twin = copy.copy(error)
    except Exception:  # noqa: BLE001 - a transport of the user's own may raise what it likes
        return error
    if type(twin) is not type(error) or twin is error:
        return error
    twin.__cause__ = error.__cause__
    twin.__context__ = error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    if hasattr(error, "__notes__"):
        twin.__notes__ = list(error.__notes__)
    return twin
