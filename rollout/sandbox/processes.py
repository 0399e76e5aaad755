"""Find and kill what a command has started inside a sandbox.

A command's processes carry a mark that children inherit, whatever they clear and however they
detach themselves: the hard limit of a resource that nothing here uses, which can only be lowered.
Those that lowered it are found as children of those that did not.
"""

from __future__ import annotations

import itertools
import os
import re
import resource
import select
import signal
from collections.abc import Iterator
from pathlib import Path

__all__ = ["find_marked", "new_mark", "pid_namespace", "signal_if_inside"]

_LOOKS = 20
"""How often the list of processes is taken anew for those that ended before they were looked at."""

_THREADS = 20 - 3
"""Where it stands in `/proc/PID/stat`, counted from the state."""

_HARD_LIMIT = re.compile(rb"Max realtime timeout +\S+ +(\d+)")

_marks = itertools.count(1)


def new_mark() -> int:
    """Return a limit for the processor time of a real-time process that no other command has."""
    own = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
    return (2**62 if own == resource.RLIM_INFINITY else own) - next(_marks)


def pid_namespace(pid: int) -> int | None:
    """Number of the pid namespace of a process, ``None`` if it is gone or not ours to see."""
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
    """Processes in a pid namespace that belong to a command, as the host counts.

    Args:
        namespace: See `pid_namespace`.
        mark: The command's mark, see `new_mark`.
        spare: The first process of the namespace, which is no command's.

    Returns:
        The processes, and whether these are all. Where processes end faster than they can be looked
        at, each leaving another one, they are to be looked for again.
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


def signal_if_inside(pid: int, namespace: int, number: signal.Signals) -> None:
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


def has_ended(descriptor: int) -> bool:
    """Whether the process behind a pidfd has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
