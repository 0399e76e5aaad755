"""Rollout servers in processes of their own, which end with the process that started them.

The stdin of such a server is a pipe that only its starter holds open: however the starter ends, by
SIGKILL too, the pipe closes, and the server shuts down. Its address comes through a pipe of its
own, so that nothing that an application prints can be taken for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import trio

__all__ = ["first_line", "killed_by", "start_server"]


async def start_server(
    app: str, options: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> tuple[trio.Process, trio.abc.ReceiveStream]:
    """Start ``rollout serve``; its stdin and its whole output are pipes.

    Args:
        app: ``MODULE:APP`` or ``FILE.py:APP``.
        options: Further options of the command.
        environment: The variables that it gets; those of this process by default.

    Returns:
        The process, and the stream through which its address comes, see `first_line`.

    Raises:
        OSError: The system starts no process.
    """
    # In a session of its own, so that Ctrl-C reaches the starter alone, which then stops it. And
    # with `-u`, so that what it prints comes when it prints it, not when it ends.
    read, write = os.pipe()
    command = [sys.executable, "-u", "-m", "rollout.cli", "serve", app, *options]
    try:
        process = await trio.lowlevel.open_process(
            [*command, "--address-fd", str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            pass_fds=(write,),
        )
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    return process, trio.lowlevel.FdStream(read)


async def first_line(stream: trio.abc.ReceiveStream) -> str:
    """Read a line; the empty text if the stream ends before."""
    received = b""
    async for data in stream:
        received += data
        if b"\n" in received:
            return received.partition(b"\n")[0].decode()
    return ""


def killed_by(code: int) -> str | None:
    """Say which signal ended a process; ``None`` if its exit code says that none did."""
    if code >= 0:
        return None
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL:
        name += ", which the system sends when memory runs out"
    return f"killed by {name}"
