"""Find and kill the processes that a command has started inside a sandbox.

A command's processes carry a mark that children inherit, whatever they clear and however they
detach themselves: the hard limit of a resource that nothing here uses, which can only be lowered.
Those that lowered it are found as children of those that did not.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

from rollout.sandbox._subprocesses import END_SEC, Process, kill_and_wait
from rollout.sandbox.errors import NamespaceError

__all__ = ["find_marked", "kill_marked", "new_mark", "pid_namespace"]

_LOOKS = 20
"""How often processes are listed again because some ended before they were looked at."""

_THREADS = 20 - 3
"""Index of the number of threads in `/proc/PID/stat`, counted from the state."""

_HARD_LIMIT = re.compile(rb"Max realtime timeout +\S+ +(\d+)")

_marks = itertools.count(1)


def new_mark() -> int:
    """Return a limit on the processor time of real-time processes that no other command has."""
    own = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
    return (2**62 if own == resource.RLIM_INFINITY else own) - next(_marks)


def pid_namespace(pid: int) -> int | None:
    """Return the number of a process's pid namespace, ``None`` if it is gone or out of reach."""
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return None


def _pids() -> Iterator[int]:
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            yield int(path.name)


def _parent(pid: int) -> int | None:
    """Return the parent of a process, ``None`` if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in brackets, may hold anything; what follows the last bracket may not.
    rest = fields[fields.rindex(b")") + 1 :].split()
    # The first thread of a process may have ended before the others.
    if rest[0] in {b"Z", b"X"} and int(rest[_THREADS]) <= 1:
        return None
    return int(rest[1])


def _mark(pid: int) -> int | None:
    try:
        found = _HARD_LIMIT.search(Path(f"/proc/{pid}/limits").read_bytes())
    except OSError:
        return None
    return None if found is None else int(found[1])


def find_marked(namespace: int, mark: int, *, spare: int) -> tuple[list[int], bool]:
    """Find the processes in a pid namespace that belong to a command, as the host counts.

    Args:
        namespace: See `pid_namespace`.
        mark: The command's mark, see `new_mark`.
        spare: The first process of the namespace, which belongs to no command.

    Returns:
        The processes, and whether these are all. Where processes end faster than they can be looked
        at, each leaving another one, look for them again.
    """
    parents: dict[int, int] = {}
    found: set[int] = set()
    known = {spare}
    fled = True
    for _ in range(_LOOKS):
        new = set(_pids()) - known
        fled = False
        for pid in new:
            number = pid_namespace(pid)
            if number is not None and number != namespace:
                continue
            parent = _parent(pid)
            if parent is None or number is None:
                # What it started before it ended is younger than the list.
                fled = True
                continue
            parents[pid] = parent
            if _mark(pid) == mark:
                found.add(pid)
        known |= new
        if not fled:
            break
    more = True
    while more:
        children = {pid for pid, parent in parents.items() if parent in found} - found
        found |= children
        more = bool(children)
    return sorted(found), not fled


async def kill_marked(namespace: int, mark: int, process: Process, *, spare: int) -> None:
    """Kill a command and all that it started, and wait until they are gone.

    All are stopped before the first is killed: a child that lowered its limit is only known by its
    parent.

    Args:
        namespace: See `pid_namespace`.
        mark: The command's mark, see `new_mark`.
        process: The command's process on the host, whose child enters the namespaces.
        spare: The first process of the namespace.

    Raises:
        NamespaceError: If they do not end.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + END_SEC
    halted: set[int] = set()
    while loop.time() < deadline:
        left, is_all = await asyncio.to_thread(find_marked, namespace, mark, spare=spare)
        new = set(left) - halted
        halted |= new
        for pid in new:
            _signal_inside(pid, namespace, signal.SIGSTOP)
        if new or not is_all:
            await asyncio.sleep(0)
        elif left:
            for pid in left:
                _signal_inside(pid, namespace, signal.SIGKILL)
            await asyncio.sleep(0.001)
        elif process.returncode is None:
            # It is not inside yet, or on its way out.
            await kill_and_wait(process)
        else:
            return
    raise NamespaceError("processes of a command were killed but do not end (a disk that hangs?)")


def _signal_inside(pid: int, namespace: int, number: signal.Signals) -> None:
    """Send a signal to a process unless its number belongs to one elsewhere by now."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if pid_namespace(pid) == namespace:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)
