"""Run a rollout server: listen, serve connections, and stop in stages."""

from __future__ import annotations

import gc
import signal
import socket
import ssl
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from rollout._checks import check_flag
from rollout._files.atomic import reason_of
from rollout._logs import get_logger
from rollout._tasks import background_tasks, sole_error
from rollout.errors import RolloutServerError
from rollout.gateway import ModelGateway
from rollout.server.app import DEFAULT_MAX_REQUEST_BYTES, RolloutServer, serve_agent_call
from rollout.server.authentication import RefusalLog
from rollout.server.binding import BACKLOG, address_of, bound_socket
from rollout.server.connections import (
    Connection,
    Connections,
    LimitedListener,
    connection_limit,
)
from rollout.server.forks import plain_children
from rollout.server.shutdown import ShutdownBudget

__all__ = ["serve", "serve_gateway"]

logger = get_logger(__name__)

KEEP_ALIVE_SEC = 75.0
"""How long an idle connection stays open; longer than any client of ours keeps one."""

_GRACE_SEC = 3.0
_BODY_SEC = 60.0

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
    `gc.set_threshold` has it look even less or never. The soft limit of open files is raised
    towards the hard one, and stays so; connections take three quarters of it at most.
    """
    check_flag("handle_signals", handle_signals)
    if shutdown is not None:
        app.shutdown_stages.budget = shutdown
    tls = _tls(certfile, keyfile, keyfile_password, ca_certs)
    started = trio.Event()
    try:
        async with AsyncExitStack() as stack:
            sock = stack.enter_context(bound_socket(bind))
            stack.enter_context(_rare_collections())
            url = f"{'http' if tls is None else 'https'}://{address_of(sock)}"
            stack.enter_context(plain_children(sock))
            app.bound(url)
            for_agents = _gateway_socket(app, url, stack)
            watchers = await stack.enter_async_context(trio.open_nursery())
            if handle_signals and threading.current_thread() is threading.main_thread():
                await watchers.start(_watch_signals, app)
            # A task of its own: context variables that the lifespan sets stay in it.
            async with trio.open_nursery() as nursery:
                watchers.start_soon(_give_up_start, app, started, nursery.cancel_scope)
                await nursery.start(_serve, app, bind, sock, tls, for_agents)
                started.set()
                task_status.started([url])
            watchers.cancel_scope.cancel()
    except BaseException as error:
        plain = sole_error(error)
        if isinstance(plain, RolloutServerError):
            raise plain from plain.__cause__
        if not isinstance(plain, Exception):
            raise
        raise RolloutServerError(f"the server failed: {type(plain).__name__}: {plain}") from plain
    if not started.is_set():
        raise RolloutServerError("the server was asked to stop before it had started")


async def _serve(
    app: RolloutServer,
    bind: str,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    for_agents: socket.socket | None,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    """Enter `RolloutServer.serving`, and serve connections until the shutdown is over."""
    with trio.CancelScope() as leaving:
        async with app.serving():
            try:
                sock.listen(BACKLOG)
                if for_agents is not None:
                    for_agents.listen(BACKLOG)
            except OSError as error:
                raise RolloutServerError(f"cannot listen on {bind}: {reason_of(error)}") from error
            task_status.started()
            await _serve_connections(app, sock, tls, for_agents)
            leaving.deadline = (
                trio.current_time() + app.shutdown_stages.budget.total_sec + _GRACE_SEC
            )
    if leaving.cancelled_caught:
        raise RolloutServerError("the lifespan did not end in time")


def _gateway_socket(app: RolloutServer, url: str, stack: AsyncExitStack) -> socket.socket | None:
    """Make the server's URL that of its gateway; return a socket for agents that cannot use it.

    That is one of the loopback. Without it agents would need a client for Unix sockets, or would
    have to trust the server's certificate.
    """
    gateway = app.gateway
    if gateway is None or gateway.bound(url):
        return None
    own = stack.enter_context(bound_socket("127.0.0.1:0"))
    stack.enter_context(plain_children(own))
    gateway.bound(f"http://{address_of(own)}")
    return own


async def _serve_connections(
    app: RolloutServer,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    for_agents: socket.socket | None,
) -> None:
    connections = Connections(
        limit=connection_limit(), keep_alive_sec=KEEP_ALIVE_SEC, grace_sec=_GRACE_SEC
    )

    async def serve_connection(
        stream: trio.SocketStream | trio.SSLStream[trio.SocketStream],
    ) -> None:
        await Connection(app, app.recognizes, connections, stream).run()

    async def serve_agent(stream: trio.SocketStream) -> None:
        await Connection(app.gateway_app, app.recognizes, connections, stream).run()

    listener: trio.abc.Listener[Any] = _listener(sock, connections)
    if tls is not None:
        listener = trio.SSLListener(listener, tls, https_compatible=True)
    async with trio.open_nursery() as handlers:
        try:
            async with trio.open_nursery() as accepting:
                if for_agents is not None:
                    listen = partial(trio.serve_listeners, handler_nursery=handlers)
                    accepting.start_soon(listen, serve_agent, [_listener(for_agents, connections)])
                accepting.start_soon(
                    partial(
                        trio.serve_listeners, serve_connection, [listener], handler_nursery=handlers
                    )
                )
                await app.shutdown_requested.wait()
                await app.shutdown_stages.run()
                accepting.cancel_scope.cancel()
        finally:
            connections.stop()
            handlers.cancel_scope.deadline = trio.current_time() + _GRACE_SEC


@asynccontextmanager
async def serve_gateway(gateway: ModelGateway, *, bind: str) -> AsyncGenerator[None, None]:
    """Serve a gateway that no rollout server has within the block; its end cancels calls.

    Args:
        gateway: The gateway.
        bind: ``host:port`` or ``[ipv6]:port``; port 0 takes a free one.

    Raises:
        RolloutServerError: The address cannot be bound, or LiteLLM cannot be used.
    """
    connections = Connections(
        limit=connection_limit(), keep_alive_sec=KEEP_ALIVE_SEC, grace_sec=_GRACE_SEC
    )
    app = partial(
        serve_agent_call,
        gateway,
        RefusalLog(),
        limit=DEFAULT_MAX_REQUEST_BYTES,
        body_timeout_sec=_BODY_SEC,
    )

    async def serve_agent(stream: trio.SocketStream) -> None:
        await Connection(app, gateway.recognizes, connections, stream).run()

    with bound_socket(bind) as sock, plain_children(sock):
        gateway.bound(f"http://{address_of(sock)}")
        async with gateway.running():
            try:
                sock.listen(BACKLOG)
            except OSError as error:
                reason = reason_of(error)
                raise RolloutServerError(f"cannot listen on {bind}: {reason}") from error
            listener = _listener(sock, connections)
            async with background_tasks(partial(trio.serve_listeners, serve_agent, [listener])):
                try:
                    yield
                finally:
                    connections.stop()


def _listener(sock: socket.socket, connections: Connections) -> LimitedListener:
    return LimitedListener(trio.SocketListener(trio.socket.from_stdlib_socket(sock)), connections)


@contextmanager
def _rare_collections() -> Generator[None, None, None]:
    """Run Python's garbage collector less often within the block."""
    before = gc.get_threshold()
    changed = 0 < before[0] < _NEW_OBJECTS
    if changed:
        gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        if changed and gc.get_threshold()[0] == _NEW_OBJECTS:
            gc.set_threshold(*before)


async def _give_up_start(
    app: RolloutServer, started: trio.Event, starting: trio.CancelScope
) -> None:
    """Cancel the start if a shutdown is requested before it is complete."""
    await app.shutdown_requested.wait()
    if not started.is_set():
        starting.cancel()


async def _watch_signals(app: RolloutServer, *, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        task_status.started()
        async for number in received:
            name = signal.Signals(number).name
            if app.shutdown_requested.is_set():
                logger.warning("received %s again: not waiting for work to finish", name)
                app.shutdown_stages.skip_drain()
            else:
                logger.info("received %s: shutting down", name)
                app.request_shutdown()


def _tls(
    certfile: str | Path | None,
    keyfile: str | Path | None,
    keyfile_password: str | None,
    ca_certs: str | Path | None,
) -> ssl.SSLContext | None:
    if (certfile is None) != (keyfile is None):
        raise RolloutServerError("TLS needs both a certfile and a keyfile")
    for name, path in (("certfile", certfile), ("keyfile", keyfile), ("ca_certs", ca_certs)):
        if path is not None and not Path(path).is_file():
            raise RolloutServerError(f"{name}: there is no file {path}")
    if certfile is None or keyfile is None:
        if ca_certs is not None:
            raise RolloutServerError("ca_certs needs TLS: give a certfile and a keyfile too")
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca_certs)
        context.load_cert_chain(certfile, keyfile, keyfile_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or reason_of(error)
        raise RolloutServerError(
            f"TLS: the certificate or key cannot be used ({reason}); both have to be PEM files, "
            "and belong together"
        ) from error
    context.set_alpn_protocols(["http/1.1"])  # one stream a connection; a reset ends just that
    if ca_certs is not None:
        context.verify_mode = ssl.VerifyMode.CERT_REQUIRED
    return context
