"""Listening sockets: TCP and Unix addresses, and the removal of abandoned socket files."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout._files.atomic import reason_of
from rollout.errors import RolloutServerError

__all__ = ["BACKLOG", "address_of", "bound_socket"]

BACKLOG = 4096
"""Connections that may wait to be accepted; a loop that starts thousands at once needs it."""

_TCP = re.compile(r"(?:\[(?P<ipv6>[^\]]+)\]|(?P<host>[^:]*)):(?P<port>[0-9]+)")


@contextmanager
def bound_socket(bind: str) -> Generator[socket.socket, None, None]:
    """Bind a socket for the block; the path of a Unix socket is removed after it.

    Args:
        bind: ``host:port``, ``[ipv6]:port`` or ``unix:path``.

    Raises:
        RolloutServerError: The address is malformed, cannot be bound, or is served already.
    """
    path = Path(bind.removeprefix("unix:")) if bind.startswith("unix:") else None
    made = None
    try:
        if path is None:
            sock = _bind_tcp(bind)
        else:
            sock = _bind_path(path)
            made = path.stat()
    except (OSError, OverflowError) as error:
        raise RolloutServerError(f"cannot listen on {bind}: {reason_of(error)}") from error
    try:
        with sock:
            sock.setblocking(False)
            yield sock
    finally:
        with suppress(OSError):
            if path is not None and made is not None and os.path.samestat(made, path.stat()):
                path.unlink()


def address_of(sock: socket.socket) -> str:
    """Return the address of a bound socket as it appears in a URL."""
    name = sock.getsockname()
    if not isinstance(name, tuple):
        return f"unix:{name}"
    return f"[{name[0]}]:{name[1]}" if sock.family == socket.AF_INET6 else f"{name[0]}:{name[1]}"


def _bind_tcp(bind: str) -> socket.socket:
    match = _TCP.fullmatch(bind)
    if match is None:
        raise RolloutServerError(f"bind must be host:port, [ipv6]:port or unix:path, not {bind!r}")
    host = match["ipv6"] or match["host"]
    sock = socket.socket(socket.AF_INET6 if match["ipv6"] else socket.AF_INET)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, int(match["port"])))
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_path(path: Path) -> socket.socket:
    _remove_abandoned(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(str(path))
        sock.listen(BACKLOG)  # at once, or another server would take the path for abandoned
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_abandoned(path: Path) -> None:
    """Remove a socket that nobody listens on any more.

    Raises:
        OSError: Somebody does, or the path is something else.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if path.is_socket():
                path.unlink()
            return
        except BlockingIOError:
            pass  # it has too many connections to answer
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
