"""The interface between a server and what keeps its rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from rollout.server.state.rows import KeptRollout, Restored

__all__ = ["StateStore"]


class StateStore(ABC):
    """Keeps rows beyond the life of a process. One registry uses it at a time.

    No method is called while another one of `commit` and `sweep` runs; `find` may be.
    """

    @abstractmethod
    async def open(self) -> Restored:
        """Take the state for this process, and return what it holds.

        Raises:
            RolloutServerError: It cannot be used; nothing was changed.
        """

    @abstractmethod
    async def commit(self, rows: Sequence[KeptRollout], time: float) -> Collection[int]:
        """Keep rows, all or none; a row replaces the one with its number.

        Args:
            rows: At most one for each number.
            time: The serving time. A row whose retention has ended gives up its id.

        Returns:
            The numbers of new rows that were left out: another rollout has their id.

        Raises:
            StateUnavailableError: None was kept.
        """

    @abstractmethod
    async def find(self, rollout_ids: Sequence[str]) -> list[KeptRollout]:
        """Return the rows of those of these rollouts that have one.

        Raises:
            StateUnavailableError: They cannot be read.
        """

    @abstractmethod
    async def sweep(self, time: float) -> bool:
        """Note the serving time, and delete some rows whose retention has ended.

        Returns:
            Whether there may be more of them.

        Raises:
            StateUnavailableError: Nothing was changed.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of the state; what was committed stays."""
