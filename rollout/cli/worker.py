"""A rollout server in a thread, for a front that runs elsewhere."""

from __future__ import annotations

import queue
import threading
from contextlib import nullcontext
from functools import partial

import trio

from rollout._tasks import sole_error
from rollout.backend.failures import describe_exception, summarized
from rollout.cli.reference import load_app
from rollout.cli.remote import quiet_http
from rollout.cli.serve import summary
from rollout.server import RolloutServer, ShutdownBudget, serve

__all__ = ["WorkerThread"]

_BUDGET = ShutdownBudget(drain_sec=0, delivery_sec=0)
"""The front has waited and delivered before its workers shut down."""


class WorkerThread:
    """Serves an application in a thread, whatever process it is in.

    Args:
        reference: ``MODULE:APP`` or ``FILE.py:APP``, as this process finds it.
        key: The key of the front.
        bind: Where to listen.
        workers: How many workers the front may have.
        tracebacks: Whether the log gets those of agents and graders that fail, or lines.
    """

    def __init__(
        self, reference: str, key: str, bind: str, *, workers: int, tracebacks: bool
    ) -> None:
        self._reference = reference
        self._key = key
        self._bind = bind
        self._workers = workers
        self._tracebacks = tracebacks
        self._urls: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._error: str | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._app: RolloutServer | None = None

    def start(self) -> tuple[str | None, str | None]:
        """Start the thread, and wait until it listens; return its URL, or why it has failed."""
        threading.Thread(target=self._run, name="rollout server", daemon=True).start()
        return self._urls.get(), self._error

    def wait(self, timeout_sec: float) -> str | None:
        """Wait for the end of the server; return why it ended, ``None`` if it has not yet."""
        if not self._over.wait(timeout_sec):
            return None
        return self._error or "its server has shut down"

    def stop(self) -> None:
        """Ask the server to shut down, if it serves."""
        if self._token is not None and self._app is not None:
            self._token.run_sync_soon(self._app.request_shutdown)

    def _run(self) -> None:
        try:
            app = load_app(self._reference)
            app.become_worker(self._key, workers=self._workers)
            quiet_http()
            with nullcontext() if self._tracebacks else summarized(summary):
                trio.run(self._serve, app)
        except BaseException as error:  # noqa: BLE001 - a thread has nobody else to say it to
            self._error = describe_exception(sole_error(error))
        finally:
            self._over.set()
            self._urls.put(None)

    async def _serve(self, app: RolloutServer) -> None:
        async with trio.open_nursery() as nursery:
            urls: list[str] = await nursery.start(
                partial(serve, app, bind=self._bind, shutdown=_BUDGET, handle_signals=False)
            )
            self._app, self._token = app, trio.lowlevel.current_trio_token()
            self._urls.put(urls[0])
