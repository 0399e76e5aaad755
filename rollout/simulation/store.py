"""The state of simulated servers: in memory, and kept beyond the processes that write it.

Theory of operation: a `Disk` holds what was committed. Each server process has a `SimulatedStore`
of its own on it, whose commits take steps of the tasks: a process that is killed meanwhile has
written all of the commit or nothing, and nobody learns which. A cut of the power takes the last
commits back, unless they are synced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import trio
from attrs import define, field

from rollout.errors import StateUnavailableError
from rollout.server.state import KeptRollout, Restored, StateStore
from rollout.simulation.trace import Trace

__all__ = ["COMMIT_MOMENTS", "Disk", "SimulatedStore"]

COMMIT_MOMENTS = ("before-commit", "committed", "after-commit")
"""The moments of a commit: it begins, it is written, and its writer has learned of it."""

_STEPS = 12
"""How many steps of the tasks pass after each moment of a commit."""

_UNSYNCED = 3
"""How many commits a cut of the power takes back, where they are not synced."""

Moment = Callable[[str], None]


@define(eq=False)
class Disk:
    """What simulated processes have committed.

    Attributes:
        trace: Where it records what a cut of the power takes back.
        synced: Whether each commit survives a cut of the power.
        rows: The rows, by number.
        time: The latest serving time that was noted.
        on_moment: Called with each of `COMMIT_MOMENTS`.
    """

    trace: Trace
    synced: bool = False
    rows: dict[int, KeptRollout] = field(factory=dict)
    time: float = 0.0
    on_moment: Moment | None = None
    _undo: list[dict[int, KeptRollout | None]] = field(factory=list)

    def write(self, rows: Sequence[KeptRollout], time: float) -> Collection[int]:
        """Commit rows; return the numbers of those whose id is taken."""
        taken: set[int] = set()
        undo: dict[int, KeptRollout | None] = {}
        ids = {row.rollout_id: row for row in self.rows.values()}
        for row in rows:
            before = ids.get(row.rollout_id)
            if before is not None and before.number != row.number:
                if before.until is None or before.until > time:
                    taken.add(row.number)
                    continue
                undo[before.number] = self.rows.pop(before.number)
            undo[row.number] = self.rows.get(row.number)
            self.rows[row.number] = ids[row.rollout_id] = row
        self._undo = [] if self.synced else [*self._undo, undo][-_UNSYNCED:]
        return taken

    def cut_power(self) -> None:
        """Take the last commits back, if they are not synced."""
        lost: set[str] = set()
        while self._undo:
            for number, row in self._undo.pop().items():
                now = self.rows.pop(number, None)
                lost |= {each.rollout_id for each in (now, row) if each is not None}
                if row is not None:
                    self.rows[number] = row
        for rollout_id in sorted(lost):
            self.trace.add("world", "commit-lost", rollout_id)

    def reached(self, moment: str) -> None:
        """Call whoever waits for a moment of a commit."""
        if self.on_moment is not None:
            self.on_moment(moment)


@define(eq=False)
class SimulatedStore(StateStore):
    """The store of one process.

    Attributes:
        disk: What it writes to.
        dead: Whether its process is gone, so that nothing more is written.
    """

    disk: Disk
    dead: bool = False

    async def open(self) -> Restored:
        """Return what is on the disk."""
        await trio.lowlevel.checkpoint()
        rows = self.disk.rows
        return Restored(
            secret=b"the secret of a simulated server",
            time=self.disk.time,
            next_number=max(rows, default=0) + 1,
            in_flight=tuple(row for row in rows.values() if row.until is None),
        )

    async def commit(self, rows: Sequence[KeptRollout], time: float) -> Collection[int]:
        """Write rows, unless the process dies before."""
        await self._go_on("before-commit")
        taken = self.disk.write(rows, time)
        await self._go_on("committed")
        await self._go_on("after-commit")
        return taken

    async def _go_on(self, moment: str) -> None:
        self.disk.reached(moment)
        for _ in range(_STEPS):
            if self.dead:
                raise StateUnavailableError("the process was killed")
            await trio.lowlevel.checkpoint()
        if self.dead:
            raise StateUnavailableError("the process was killed")

    async def find(self, rollout_ids: Sequence[str]) -> list[KeptRollout]:
        """Return the rows of these rollouts."""
        await trio.lowlevel.checkpoint()
        wanted = set(rollout_ids)
        return [row for row in self.disk.rows.values() if row.rollout_id in wanted]

    async def sweep(self, time: float) -> bool:
        """Delete the rows whose retention has ended."""
        await trio.lowlevel.checkpoint()
        if not self.dead:
            self.disk.time = time
            rows = self.disk.rows.items()
            self.disk.rows = {
                number: row for number, row in rows if row.until is None or row.until > time
            }
        return False

    async def close(self) -> None:
        """Leave the disk to the next process."""
        self.dead = True
        await trio.lowlevel.checkpoint()
