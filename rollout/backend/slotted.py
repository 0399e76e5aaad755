"""What backends with a bounded number of slots have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio

from rollout.backend.base import ExecutionBackend
from rollout.backend.executions import Executions

__all__ = ["SlottedBackend"]


class SlottedBackend(ExecutionBackend):
    """Counts, queues and interrupts by an `Executions` table, which subclasses set up."""

    _executions: Executions

    @property
    def max_concurrent(self) -> int | None:
        """How many rollouts run at a time; ``None`` for no limit."""
        return self._executions.max_concurrent

    @property
    def max_queue_depth(self) -> int | None:
        """How many may wait for a slot; ``None`` for no bound."""
        return self._executions.max_queue_depth

    def has_capacity(self) -> bool:
        """Whether a slot or a place in the queue is free, counting all that were admitted."""
        return self._executions.has_capacity()

    def reserve(self, rollout_id: str) -> bool:
        """Count a rollout from its admission on; see `ExecutionBackend.reserve`."""
        return self._executions.reserve(rollout_id)

    def release(self, rollout_id: str) -> None:
        """Forget a rollout; see `ExecutionBackend.release`."""
        self._executions.release(rollout_id)

    def health(self) -> dict[str, Any]:
        """Return the status and the slots' counts."""
        return {"status": "ok", **self._executions.health()}

    def rollout_status(self, rollout_id: str) -> dict[str, Any] | None:
        """Return the status of a rollout that has been admitted and has not ended."""
        return self._executions.status(rollout_id)

    def cancel_rollouts(
        self,
        ids: Sequence[str] | None = None,
        prefix: str | None = None,
        all: bool = False,
    ) -> dict[str, str]:
        """Interrupt matching rollouts; asking twice changes nothing."""
        return self._executions.cancel(ids, prefix, all)

    async def shutdown(self) -> None:
        """Interrupt what still runs."""
        self.cancel_rollouts(all=True)
        await trio.lowlevel.checkpoint()
