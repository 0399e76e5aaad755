"""Find and kill what a command has started inside a sandbox.

A command's processes carry a mark in their environment, which children inherit however they
detach themselves. Those that cleared their environment are found as children of those that did not.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

__all__ = ["MARK", "find_marked", "kill_if_inside", "pid_namespace"]

MARK = "ROLLOUT_COMMAND_ID"
"""The environment variable that marks the processes of one command."""


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
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in brackets, may hold anything; what follows the last bracket may not.
    state, parent = fields[fields.rindex(b")") + 1 :].split()[:2]
    return None if state in {b"Z", b"X"} else int(parent)


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def find_marked(namespace: int, command_id: str, *, spare: int) -> list[int]:
    """Processes in a pid namespace that belong to a command, as the host counts.

    Args:
        namespace: See `pid_namespace`.
        command_id: The value of the mark.
        spare: The first process of the namespace, which is no command's.
    """
    mark = f"{MARK}={command_id}".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for pid in _pids():
        if pid == spare or pid_namespace(pid) != namespace:
            continue
        parent = _parent(pid)
        if parent is None:
            continue
        parents[pid] = parent
        if _is_marked(pid, mark):
            found.add(pid)
    more = True
    while more:
        children = {pid for pid, parent in parents.items() if parent in found} - found
        found |= children
        more = bool(children)
    return sorted(found)


def kill_if_inside(pid: int, namespace: int) -> None:
    """Kill a process unless its number belongs to another one by now."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if pid_namespace(pid) == namespace:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


def has_ended(descriptor: int) -> bool:
    """Whether the process behind a pidfd has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
