"""What holds processes of a sandbox back, as far as anybody may without control groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import evolve, frozen

__all__ = ["MIB", "Limits"]

MIB = 1024**2

_KILLED_FIRST = 500
"""How much sooner than others the kernel kills a process inside if the machine is out of memory:
as if it had half of the memory more."""


_NO_CORE = "--core=1:1"
"""The size of a core file for which the kernel neither writes one nor starts the host's program for
them, which zero would not keep it from: the memory of a process inside may hold a key."""


@frozen(kw_only=True)
class Limits:
    """What each process inside may have.

    Attributes:
        file_bytes: The largest size of a file; ``None`` for any.
        processes: How many processes there may be. Only holds where the host's user is not root.
        shared_bytes: The size of `/dev/shm`, and of all shared memory of the older kind.
    """

    file_bytes: int | None = None
    processes: int = 4096
    shared_bytes: int = 1024 * MIB

    def with_file_bytes(self, most: int | None) -> Limits:
        """Return limits with a smaller size of files, if it is smaller."""
        if most is None:
            return self
        return evolve(
            self, file_bytes=most if self.file_bytes is None else min(self.file_bytes, most)
        )

    def prefix(self, tools: Mapping[str, str], *, privileged: bool, mark: int) -> list[str]:
        """Return the command that runs another one within these limits.

        Args:
            tools: See `find_tools`.
            mark: See `new_mark`.
            privileged: Whether this process is root, whose processes the kernel does not count.
        """
        limits = [_NO_CORE, f"--rttime={mark}"]
        if self.file_bytes is not None:
            limits.append(f"--fsize={self.file_bytes}")
        if not privileged:
            limits.append(f"--nproc={self.processes}")
        command = [tools["prlimit"], *limits, "--"]
        if "choom" in tools:
            command += [tools["choom"], f"--adjust={max(_KILLED_FIRST, _own_score())}", "--"]
        return command


def _own_score() -> int:
    """What this process has; its children may have no less."""
    return int(Path("/proc/self/oom_score_adj").read_text())
