"""Forked children of user code do not inherit the server's handlers and sockets.

`multiprocessing` forks on many systems. Such a child would inherit the server's signal handlers,
so that SIGTERM does not end it; the descriptor that wakes the server's event loop; and its
sockets, so that the address stays taken and closed connections stay open for as long as it lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

__all__ = ["plain_children"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@frozen(eq=False)
class _Server:
    """The handlers and sockets of one server that a forked child must not inherit.

    Attributes:
        handlers: The signal handlers from before the server, by number.
        address: The port or socket file that it listens on.
    """

    handlers: dict[int, Any]
    address: int | str

    def drop(self) -> None:
        """Reset them, in the child."""
        signal.set_wakeup_fd(-1)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        null = os.open(os.devnull, os.O_RDWR)
        for path in list(Path("/dev/fd").iterdir()):
            fd = int(path.name)
            if _address_of(fd) == self.address:
                # Not closed: an object of the server may close the number when it is collected.
                os.dup2(null, fd, inheritable=False)
        os.close(null)


_servers: list[_Server] = []
_forking = threading.local()


@contextmanager
def plain_children(listening: socket.socket) -> Generator[None, None, None]:
    """Reset a server's handlers and sockets in children that are forked within the block."""
    handlers: dict[int, Any] = {
        number: signal.getsignal(number) or signal.SIG_DFL for number in _SIGNALS
    }
    if callable(handlers[signal.SIGINT]):
        handlers[signal.SIGINT] = signal.default_int_handler  # by now, it is trio's
    server = _Server(handlers, _address(listening))
    _servers.append(server)
    try:
        yield
    finally:
        _servers.remove(server)


def _address(sock: socket.socket) -> int | str:
    """Return the port of a socket, or its file."""
    name: Any = sock.getsockname()
    address: int | str = name[1] if isinstance(name, tuple) else name
    return address


def _address_of(fd: int) -> int | str | None:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        sock = socket.socket(fileno=fd)
        try:
            return _address(sock)
        finally:
            sock.detach()
    except OSError:
        return None  # the descriptor of the list itself, for one


def _before_fork() -> None:
    # A signal for the child must not meet the handlers that it is born with.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS if _servers else ())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    for server in reversed(_servers):
        with contextlib.suppress(OSError):  # no /dev/fd
            server.drop()
    _servers.clear()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
