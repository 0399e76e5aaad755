"""What a server process uses, as ``/proc`` has it. Linux alone."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import define

TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@define
class Server:
    """A server process."""

    url: str
    pid: int

    def cpu_sec(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_SEC

    def memory_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * PAGE_BYTES / 2**20
