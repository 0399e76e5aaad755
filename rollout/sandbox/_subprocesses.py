"""Programs of the host, run so that a cancellation leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Callable, Coroutine
from typing import IO, Any, TypeVar

from rollout.sandbox.errors import NamespaceStartError

__all__ = ["END_SEC", "PATH", "check_system", "finish", "kill_and_wait", "run_tool", "spawn"]

T = TypeVar("T")
Process = asyncio.subprocess.Process

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs are looked for, inside and outside."""

TOOLS = (
    "unshare", "nsenter", "setpriv", "prlimit", "choom", "env", "cat", "bash", "tar", "rm", "chmod",
)  # fmt: skip

END_SEC = 30.0
"""How long killed processes may take to go away. They do at once, unless a disk hangs."""


def check_system() -> None:
    """Check that this machine has the programs that a sandbox needs.

    Raises:
        NamespaceStartError: If this is not Linux, or one is missing.
    """
    if sys.platform != "linux":
        raise NamespaceStartError(f"namespaces exist on Linux only, not on {sys.platform}")
    missing = [name for name in TOOLS if shutil.which(name, path=PATH) is None]
    if missing:
        raise NamespaceStartError(
            f"missing in {PATH}: {', '.join(missing)}. Install util-linux (unshare, nsenter, "
            "setpriv, prlimit, choom), coreutils, tar and bash."
        )


async def finish(
    work: Coroutine[Any, Any, T], *, abandon: Callable[[T], Coroutine[Any, Any, None]] | None = None
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
        await finish(abandon(task.result()))
    raise cancelled


async def kill_and_wait(process: Process) -> None:
    """Kill a process, if it still runs, and wait for its end and that of its output."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()


async def spawn(
    *argv: str,
    abandon: Callable[[Process], Coroutine[Any, Any, None]] = kill_and_wait,
    **options: Any,
) -> Process:
    """Start a program in a session of its own.

    Args:
        argv: The program, looked for in the ``PATH`` of ``env``.
        abandon: Called with the process if a cancellation arrives while it starts.
        options: See `asyncio.create_subprocess_exec`.
    """
    return await finish(
        asyncio.create_subprocess_exec(*argv, start_new_session=True, **options), abandon=abandon
    )


async def run_tool(*argv: str, stdout: IO[bytes] | int = asyncio.subprocess.DEVNULL) -> str | None:
    """Run a program of the host; it is killed if that is cancelled.

    Returns:
        What it wrote to standard error if it failed, else ``None``.
    """
    process = await spawn(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": PATH, "LC_ALL": "C"},
    )
    try:
        said = (await process.communicate())[1]
    except BaseException:
        await finish(kill_and_wait(process))
        raise
    return said.decode(errors="replace").strip()[:4000] if process.returncode else None
