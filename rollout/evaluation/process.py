"""The record of a run's own server: its pid, and when it started, so that no other is meant.

A pid may belong to another process later on. The start is what Linux keeps in ticks since its boot,
along with the boot's id; elsewhere there is no record, and a server has to end by itself.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from attrs import frozen

from rollout._files.atomic import reason_of, write_atomic
from rollout.codec import parse_json
from rollout.errors import EvaluationError, InvalidBodyError

__all__ = ["ServerRecord"]

_STATE, _START = 0, 19
"""Indexes in `/proc/PID/stat`, counted from the state."""


@frozen
class ServerRecord:
    """A process that was started as a server. Blocking.

    Attributes:
        pid: Its pid, which is also that of its process group.
        started: When it started.
    """

    pid: int
    started: str

    @classmethod
    def of_process(cls, pid: int) -> ServerRecord | None:
        """Describe a process that runs; ``None`` if it does not, or the system does not say."""
        started = _started(pid)
        return None if started is None else cls(pid, started)

    @classmethod
    def read(cls, path: Path) -> ServerRecord | None:
        """Read a record; ``None`` if the file is missing.

        Raises:
            EvaluationError: It is damaged.
        """
        try:
            document = parse_json(path.read_bytes())
            pid, started = document["pid"], document["started"]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EvaluationError(f"{path}: {reason_of(error)}") from None
        except (InvalidBodyError, KeyError, TypeError):
            pid, started = None, None
        if type(pid) is not int or pid <= 1 or not isinstance(started, str):
            raise EvaluationError(f"{path} is damaged; remove it once no server of the run is left")
        return cls(pid, started)

    def write(self, path: Path) -> None:
        """Write the record.

        Raises:
            EvaluationError: It cannot be written.
        """
        data = json.dumps({"pid": self.pid, "started": self.started}).encode()
        try:
            write_atomic(path, data + b"\n")
        except OSError as error:
            raise EvaluationError(f"{path}: {reason_of(error)}") from None

    @property
    def runs(self) -> bool:
        """Whether this very process runs."""
        return _started(self.pid) == self.started

    def kill(self) -> None:
        """Kill this very process with the processes that it started, if it runs.

        Raises:
            EvaluationError: It belongs to somebody else.
        """
        if not self.runs:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has just ended
        except PermissionError:
            raise EvaluationError(
                f"the server of the process before still runs (pid {self.pid}) and is another "
                "user's; have it ended first"
            ) from None


def _started(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold anything
    return None if fields[_STATE] == "Z" else f"{boot}/{fields[_START]}"
