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

from attrs import frozen

__all__ = ["MARK", "find_marked", "pid_namespace", "signal_if_inside"]

MARK = "ROLLOUT_COMMAND_ID"
"""The environment variable that marks the processes of one command."""

_LOOKS = 20
"""How often the list of processes is taken anew for those that ended before they were looked at."""

_THREADS, _ENV_END = 20 - 3, 51 - 3
"""Where they stand in `/proc/PID/stat`, counted from the state."""


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


@frozen
class _Seen:
    """A process that lives: its parent, and where its environment is in its memory."""

    parent: int
    environment: tuple[bytes, bytes]

    @property
    def is_executing(self) -> bool:
        """Whether it is just now replacing its program, and has no environment yet."""
        return self.environment[1] == b"0"


def _look_at(pid: int) -> _Seen | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in brackets, may hold anything; what follows the last bracket may not.
    rest = fields[fields.rindex(b")") + 1 :].split()
    # The first thread of a process may have ended before the others.
    if rest[0] in {b"Z", b"X"} and int(rest[_THREADS]) <= 1:
        return None
    return _Seen(int(rest[1]), (rest[_ENV_END - 1], rest[_ENV_END]))


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def find_marked(namespace: int, command_id: str, *, spare: int) -> tuple[list[int], bool]:
    """Processes in a pid namespace that belong to a command, as the host counts.

    Args:
        namespace: See `pid_namespace`.
        command_id: The value of the mark.
        spare: The first process of the namespace, which is no command's.

    Returns:
        The processes, and whether these are all. A process that is replacing its program has no
        environment for a moment, so it is to be looked at again; so is a place where processes end
        faster than they can be looked at, each leaving another one.
    """
    mark = f"{MARK}={command_id}".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    unclear: set[int] = set()
    known = {spare}
    fled = True
    for _ in range(_LOOKS):
        new = set(_pids()) - known
        fled = False
        for pid in new:
            number = pid_namespace(pid)
            if number is not None and number != namespace:
                continue
            seen = _look_at(pid)
            if seen is None or number is None:
                # What it started before it ended is younger than the list.
                fled = True
                continue
            parents[pid] = seen.parent
            if mark in _environment(pid):
                found.add(pid)
            elif seen.is_executing or _look_at(pid) != seen:
                unclear.add(pid)
        known |= new
        if not fled:
            break
    more = True
    while more:
        children = {pid for pid, parent in parents.items() if parent in found} - found
        found |= children
        more = bool(children)
    return sorted(found), not fled and unclear <= found


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
