"""Limits on the processes of a sandbox, as far as they can be set without control groups."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

__all__ = ["Limits"]

_KILLED_FIRST = 500
"""Added to a process's badness when the machine is out of memory, as if it had half of it more."""

_NO_CORE = "--core=1:1"
"""The size of a core file for which the kernel neither writes one nor starts the host's program for
them, which zero would not keep it from: the memory of a process inside may hold a key."""


@frozen(kw_only=True)
class Limits:
    """What each process inside may have.

    Attributes:
        file_bytes: The largest size of a file; ``None`` for any.
        processes: How many processes there may be. Only holds where the host's user is not root.
        shared_bytes: The size of `/dev/shm`, and of all System V shared memory.
    """

    file_bytes: int | None = None
    processes: int = 4096
    shared_bytes: int = 1024**3

    def command(
        self, *, privileged: bool, mark: int, max_file_bytes: int | None = None
    ) -> list[str]:
        """Return the beginning of a command line that runs the rest of it within these limits.

        Args:
            privileged: Whether this process is root, whose processes the kernel does not count.
            mark: See `new_mark`.
            max_file_bytes: Another bound on the size of a file; the smaller one holds.
        """
        limits = [_NO_CORE, f"--rttime={mark}"]
        sizes = [size for size in (self.file_bytes, max_file_bytes) if size is not None]
        if sizes:
            limits.append(f"--fsize={min(sizes)}")
        if not privileged:
            limits.append(f"--nproc={self.processes}")
        score = max(_KILLED_FIRST, _own_score())
        return ["prlimit", *limits, "--", "choom", f"--adjust={score}", "--"]


def _own_score() -> int:
    """Return this process's adjustment of its badness; its children cannot have a lower one."""
    return int(Path("/proc/self/oom_score_adj").read_text())
