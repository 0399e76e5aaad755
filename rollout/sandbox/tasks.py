"""Finish what must not be left half done, whatever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["finish", "kill_and_wait"]

T = TypeVar("T")


async def finish(
    work: Coroutine[Any, Any, T], *, abandon: Callable[[T], Awaitable[None]] | None = None
) -> T:
    """Wait for work to its end. A cancellation is kept until then and raised afterwards.

    Args:
        work: What to do; it runs in a task of its own.
        abandon: Called with the result if a cancellation means that nobody else will get it.

    Raises:
        asyncio.CancelledError: If the caller was cancelled, even if the work failed.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    failed = task.cancelled() or task.exception() is not None
    if abandon is not None and not failed:
        await finish(_call(abandon, task.result()))
    raise cancelled


async def _call(abandon: Callable[[T], Awaitable[None]], value: T) -> None:
    await abandon(value)


async def kill_and_wait(process: asyncio.subprocess.Process) -> None:
    """Kill a process, if it still runs, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
