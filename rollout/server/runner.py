"""Run a rollout server on Hypercorn's trio worker, and stop it in stages."""

from __future__ import annotations

import gc
import logging
import math
import signal
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import hypercorn.trio
import trio
from hypercorn.config import Config

from rollout._groups import sole_error
from rollout._logs import get_logger
from rollout.errors import RolloutServerError
from rollout.server.app import RolloutServer
from rollout.server.forks import plain_children
from rollout.server.shutdown import ShutdownBudget

__all__ = ["serve"]

logger = get_logger(__name__)

KEEP_ALIVE_SEC = 75.0
"""How long an idle connection stays open; longer than any client of ours keeps one."""

_GRACE_SEC = 3.0
_BACKLOG = 4096
"""Connections that may wait to be accepted; a loop that starts thousands at once needs it."""

_LONGEST_REQUEST_HEAD = 128 * 1024

_NEW_OBJECTS = 5000
"""How many new objects the garbage collector waits for.

With many rollouts in flight, most of what Python's own 700 bring is still in use when it looks,
so that it takes a good part of all processor time to find nothing."""


async def serve(
    app: RolloutServer,
    *,
    bind: str = "127.0.0.1:8000",
    certfile: str | Path | None = None,
    keyfile: str | Path | None = None,
    keyfile_password: str | None = None,
    ca_certs: str | Path | None = None,
    shutdown: ShutdownBudget | None = None,
    handle_signals: bool = True,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve *app* until SIGTERM or SIGINT, then shut down in stages.

    Start it in a nursery to learn where it listens::

        urls = await nursery.start(partial(serve, app, bind="127.0.0.1:0"))

    While the stages run, admissions are answered with 503 and polls are still served. A
    second signal skips the drain, never the cleanup.

    Args:
        app: What `create_rollout_server` returned.
        bind: ``host:port``, ``[ipv6]:port`` or ``unix:path``; port 0 takes a free one.
        certfile: A PEM file with the certificate chain, for TLS; goes with *keyfile*.
        keyfile: A PEM file with its key.
        keyfile_password: The password of the key.
        ca_certs: A PEM file of authorities; clients must then present a certificate.
        shutdown: How long the stages may take.
        handle_signals: Whether to act on SIGTERM and SIGINT, which works in the main thread
            only; elsewhere, and with ``False``, stop it with `request_shutdown`.
        task_status: Told the URLs once they accept connections.

    Raises:
        RolloutServerError: The address cannot be bound, a TLS file cannot be used, the
            lifespan failed, the server was asked to stop while it started, or its own tasks
            failed while it was serving.

    Cancelling this cancels all executions at once; only the signals and `request_shutdown`
    lead through the stages.

    While it serves, Python's garbage collector looks for cycles less often, unless
    `gc.set_threshold` has it look even less or never.
    """
    if shutdown is not None:
        app.shutdown_stages.budget = shutdown
    config = _config(app, bind, certfile, keyfile, keyfile_password, ca_certs)
    _check_address(bind)
    stop_listening = trio.Event()
    started = trio.Event()
    try:
        async with AsyncExitStack() as stack:
            stack.enter_context(_seldom_collected())
            children = stack.enter_context(plain_children())
            received = await stack.enter_async_context(_signals(handle_signals))
            watchers = await stack.enter_async_context(trio.open_nursery())
            if received is not None:
                watchers.start_soon(_watch_signals, app, received)
            async with trio.open_nursery() as nursery:
                watchers.start_soon(_give_up_start, app, started, nursery.cancel_scope)
                urls = await nursery.start(
                    partial(
                        hypercorn.trio.serve,
                        app,
                        config,
                        shutdown_trigger=stop_listening.wait,
                    )
                )
                started.set()
                children.listening(urls)
                if app.failure is None:
                    task_status.started(urls)  # Hypercorn listens even after a failed startup
                await app.shutdown_requested.wait()
                await app.shutdown_stages.run()
                stop_listening.set()
            watchers.cancel_scope.cancel()
    except BaseException as error:
        _raise_plain(error, app, bind)
        raise
    if not started.is_set():
        raise RolloutServerError("the server was asked to stop before it had started")


def _raise_plain(error: BaseException, app: RolloutServer, bind: str) -> None:
    plain = sole_error(error)
    if app.failure is not None:
        raise RolloutServerError(
            f"the server failed: {type(app.failure).__name__}: {app.failure}"
        ) from app.failure
    if isinstance(plain, OSError):
        raise RolloutServerError(f"cannot listen on {bind}: {plain}") from plain
    if isinstance(plain, Exception) and plain is not error:
        raise plain


@contextmanager
def _seldom_collected() -> Generator[None, None, None]:
    before = gc.get_threshold()
    changed = 0 < before[0] < _NEW_OBJECTS
    if changed:
        gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        if changed and gc.get_threshold()[0] == _NEW_OBJECTS:
            gc.set_threshold(*before)


@asynccontextmanager
async def _signals(wanted: bool) -> AsyncGenerator[AsyncIterator[int] | None, None]:
    if wanted and threading.current_thread() is threading.main_thread():
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            yield received
    else:
        with nullcontext():
            yield None


async def _give_up_start(
    app: RolloutServer, started: trio.Event, starting: trio.CancelScope
) -> None:
    """Cancel a start that is under way when there is a reason to stop: nobody waits for it."""
    await app.shutdown_requested.wait()
    if not started.is_set():
        starting.cancel()


async def _watch_signals(app: RolloutServer, received: AsyncIterator[int]) -> None:
    async for number in received:
        if app.shutdown_requested.is_set():
            logger.warning(
                "received %s again: not waiting for work to finish", signal.Signals(number).name
            )
            app.shutdown_stages.skip_drain()
        else:
            logger.info("received %s: shutting down", signal.Signals(number).name)
            app.request_shutdown()


def _check_address(bind: str) -> None:
    """Find out that an address is taken before the lifespan has warmed anything up."""
    host, _, port = bind.rpartition(":")
    if bind.startswith(("unix:", "fd://")) or not port.isdigit():
        return
    host = host.strip("[]")
    try:
        with socket.create_server(
            (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ):
            pass
    except (OSError, OverflowError) as error:
        raise RolloutServerError(f"cannot listen on {bind}: {error}") from error


def _config(
    app: RolloutServer,
    bind: str,
    certfile: str | Path | None,
    keyfile: str | Path | None,
    keyfile_password: str | None,
    ca_certs: str | Path | None,
) -> Config:
    if (certfile is None) != (keyfile is None):
        raise RolloutServerError("TLS needs both a certfile and a keyfile")
    for name, path in (("certfile", certfile), ("keyfile", keyfile), ("ca_certs", ca_certs)):
        if path is not None and not Path(path).is_file():
            raise RolloutServerError(f"{name}: there is no file {path}")
    config = Config()
    config.bind = [bind]
    config.certfile = None if certfile is None else str(certfile)
    config.keyfile = None if keyfile is None else str(keyfile)
    config.keyfile_password = keyfile_password
    config.ca_certs = None if ca_certs is None else str(ca_certs)
    if ca_certs is not None:
        import ssl  # noqa: PLC0415 - only with client certificates

        config.verify_mode = ssl.VerifyMode.CERT_REQUIRED
    try:
        config.create_ssl_context()
    except (OSError, ValueError) as error:
        raise RolloutServerError(f"TLS: the certificate or key cannot be used: {error}") from error
    config.keep_alive_timeout = KEEP_ALIVE_SEC
    config.backlog = _BACKLOG
    config.alpn_protocols = ["http/1.1"]  # one stream a connection; a reset ends just that
    config.keep_alive_max_requests = 2**62
    config.graceful_timeout = _GRACE_SEC
    config.startup_timeout = math.inf
    config.shutdown_timeout = app.shutdown_stages.budget.total_sec + _GRACE_SEC
    config.h11_max_incomplete_size = _LONGEST_REQUEST_HEAD
    config.include_server_header = False
    config.accesslog = None
    http_log = get_logger("rollout.server.http")
    http_log.setLevel(logging.WARNING)  # its start message speaks of one process of many
    config.errorlog = http_log
    return config
