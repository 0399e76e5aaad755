"""The asyncio loop of a bridge, from the inside: its thread, its errors, its clearing up."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["abandon_tasks", "close_executor", "log_loop_error", "run_loop", "sweep"]

REPORTED = ("task", "future", "handle", "protocol", "transport", "asyncgen")

logger = logging.getLogger("rollout.integrations.asyncio_bridge")


def run_loop(loop: asyncio.AbstractEventLoop, stop_expected: Callable[[], bool]) -> None:
    """Run the loop until it is stopped, whatever the code in it raises.

    `SystemExit` and `KeyboardInterrupt` out of a task that the user's code has spawned end
    asyncio's ``run_forever``. Other calls share this loop, so it goes on; whoever awaits that
    task gets the exception.
    """
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            logger.error(  # noqa: TRY400 - a traceback of the loop tells nothing
                "%r was raised outside of any call; the loop goes on", error
            )
            if not stop_expected():
                continue
        break


def log_loop_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what asyncio reports, instead of leaving it to print."""
    where = [f"{key}: {value!r}" for key, value in context.items() if key in REPORTED]
    logger.error("%s", "; ".join([context["message"], *where]), exc_info=context.get("exception"))


def leftovers(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    """Return the tasks of the loop that are not done."""
    return [task for task in asyncio.all_tasks(loop) if not task.done()]


async def sweep() -> None:
    """Cancel every other task of the loop and wait until none is left.

    Cancel it and run it again to cancel what is left once more.
    """
    loop = asyncio.get_running_loop()
    while tasks := [task for task in leftovers(loop) if task is not asyncio.current_task()]:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                loop.call_exception_handler(
                    {
                        "message": "a task that was left over failed while the bridge closed",
                        "exception": error,
                        "task": task,
                    }
                )


def abandon_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Say which tasks the end of the loop leaves in the middle of what they do."""
    for task in leftovers(loop):
        logger.error("%s has not ended with its bridge and is abandoned: %r", task.get_name(), task)
        # Said already; asyncio would say it again whenever the object happens to be destroyed.
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001


async def close_executor(executor: ThreadPoolExecutor) -> None:
    """Take no further work and wait for what runs. Cancelling this leaves it running."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def done() -> None:
        if not ended.done():
            ended.set_result(None)

    def wait() -> None:
        executor.shutdown(cancel_futures=True)
        try:
            loop.call_soon_threadsafe(done)
        except RuntimeError:  # the bridge gave up on it, and has said so
            logger.info("the default executor of a closed bridge has ended")

    # No thread of the executor, since that is what it waits for; and a daemon, since a tool
    # that never returns must not take this one along.
    threading.Thread(target=wait, name="asyncio-bridge-executor", daemon=True).start()
    await ended
