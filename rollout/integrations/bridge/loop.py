"""The asyncio loop of a bridge: its thread, its error log, and the end of its tasks."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from rollout._logs import Lines, get_logger

__all__ = ["LoopThread", "close_executor", "sweep"]

TURNS_BEFORE_STOP = 10
"""How many turns a loop makes between the end of its tasks and its own."""

REPORTED = ("task", "future", "handle", "protocol", "transport", "asyncgen")

logger = get_logger("rollout.integrations.asyncio_bridge")


class LoopThread:
    """The thread that runs the loop until `stop`.

    Args:
        name: The thread's name.
        debug: asyncio's debug mode; ``None`` leaves it to the environment.
        on_stopped: Called, in the thread, when code in the loop has stopped it. It goes on, so
            that tasks can still clean up.
        on_ended: Called, in the thread, when the loop is closed, with the reason.
    """

    def __init__(
        self,
        name: str,
        *,
        debug: bool | None,
        on_stopped: Callable[[str], None],
        on_ended: Callable[[str], None],
    ) -> None:
        self._on_stopped = on_stopped
        self._on_ended = on_ended
        self._stopping = False  # of the thread
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.executor = ThreadPoolExecutor(thread_name_prefix=name)
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(self.executor)
        self.loop.set_exception_handler(log_loop_error)
        if debug is not None:
            self.loop.set_debug(debug)

    def start(self) -> None:
        """Start it; the loop is closed if no thread can be started."""
        try:
            self._thread.start()
        except BaseException:
            self.loop.close()
            raise

    def stop(self) -> None:
        """Ask it to stop, from any thread."""
        with suppress(RuntimeError):  # it is closed already
            self.loop.call_soon_threadsafe(self._stop, TURNS_BEFORE_STOP)

    def join(self) -> None:
        """Wait for the thread, which must have called ``on_ended``."""
        self._thread.join()

    def where(self) -> Lines:
        """Return the stack of the thread, for a log."""
        frame = sys._current_frames().get(self._thread.ident or 0)  # noqa: SLF001
        return Lines("".join(traceback.format_stack(frame)) if frame else "nowhere")

    def _stop(self, turns: int) -> None:
        # What was cancelled, and transports that were closed, need a few turns to end.
        if turns:
            self.loop.call_soon(self._stop, turns - 1)
            return
        abandon_tasks(self.loop)
        self._stopping = True
        self.loop.stop()

    def _main(self) -> None:
        why = "the bridge is closed"
        try:
            self._run()
        except BaseException as error:  # there is nobody above who could log it
            why = f"the bridge's event loop failed: {error!r}"
            logger.exception("%s ends: its event loop failed", self._thread.name)
        try:
            self.loop.close()
        except Exception:
            logger.exception("the event loop of %s cannot be closed", self._thread.name)
        self._on_ended(why)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # Out of a task that user code has spawned. Whoever awaits it gets it too; the
                # other calls share this loop, so it goes on.
                logger.error(  # noqa: TRY400 - the traceback is asyncio's own
                    "%s: %r was raised outside of any call", self._thread.name, error
                )
            else:
                if not self._stopping:
                    why = "the bridge's event loop was stopped by code that ran in it"
                    logger.error("%s ends: %s", self._thread.name, why)
                    self._on_stopped(why)


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
    """Log the tasks that the end of the loop leaves unfinished."""
    for task in leftovers(loop):
        logger.error("%s has not ended with its bridge and is abandoned: %r", task.get_name(), task)
        # Said already; asyncio would say it again whenever the object happens to be destroyed.
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001


async def close_executor(executor: ThreadPoolExecutor) -> None:
    """Shut an executor down and wait for the jobs that run. Cancelling this leaves them running."""
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
