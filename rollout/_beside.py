"""Tasks beside a block, with errors that come out plain."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from rollout._groups import sole_error

__all__ = ["beside"]


@asynccontextmanager
async def beside(*tasks: Callable[[], Awaitable[object]]) -> AsyncGenerator[None, None]:
    """Run tasks for the length of the block; what still runs at its end is cancelled.

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
                yield
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
