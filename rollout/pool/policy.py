"""One state of the policy for all workers of a pool, each of which has a model gateway of its own.

Theory of operation: the pool has the state that its workers are to have, and each worker a task
that sends it that state until its answers and its health say the same. So a state survives
whoever asked for it, a worker that joins or was away gets the present one, and the last request
counts. A worker without the present state gets no rollouts.
"""

from __future__ import annotations

from typing import Any

import trio
from attrs import evolve

from rollout._checks import check_choice, check_number, check_whole
from rollout.pool.source import Workers
from rollout.pool.worker import Worker

__all__ = ["PoolPolicy"]

_DELIVERY_SEC = 3.0
_READ_SEC = 1.0
"""How long workers may take for the state, and to say theirs; together less than a front waits."""

_FIRST_LOOK_SEC = 0.02
_LONGEST_LOOK_SEC = 0.25
"""How long between two looks at the calls in flight."""


class PoolPolicy:
    """The policy behind the gateways of a pool's workers.

    Args:
        workers: The workers.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    @property
    def supported(self) -> bool:
        """Whether a worker has a gateway, or none has answered yet."""
        answered = [worker for worker in self._workers if worker.process_id is not None]
        return not answered or any(worker.policy is not None for worker in answered)

    def state(self) -> dict[str, Any]:
        """Return the state as JSON, with the calls in flight as far as they are known."""
        parts = [_part(worker) for worker in self._concerned()]
        return {
            "paused": self._workers.wanted_policy.paused,
            "version": self._workers.wanted_policy.version,
            "calls_in_flight": sum(part[0] for part in parts),
            "workers": {
                "total": sum(part[1] for part in parts),
                "current": sum(part[2] for part in parts),
            },
        }

    async def read(self) -> dict[str, Any]:
        """Return the state once the workers that answer have it, and have said their calls."""
        with trio.move_on_after(_DELIVERY_SEC):
            while self._pending():
                await self._workers.changed.wait()
        with trio.move_on_after(_READ_SEC):
            async with trio.open_nursery() as nursery:
                for worker in self._concerned():
                    if worker.trouble is None:
                        nursery.start_soon(worker.read_policy)
        return self.state()

    async def pause(self, mode: str, timeout_sec: float) -> dict[str, Any]:
        """Hold back all calls; return the state once none is in flight, or the time is up.

        A worker that does not answer is waited for while it has rollouts. Arguments and errors
        are those of `rollout.gateway.policy.Policy.pause`.

        Cancelling this leaves the pause as it is.
        """
        check_choice("mode", mode, ("drain", "abort"))
        check_number("timeout_sec", timeout_sec, least=0)
        until = trio.current_time() + timeout_sec
        # Calls that were not aborted yet still are, whoever pauses in between.
        abort = mode == "abort" or self._workers.wanted_policy.abort
        self._want(paused=True, abort=abort)
        delay_sec = _FIRST_LOOK_SEC
        while True:
            state = await self.read()
            awaited = any(
                worker.in_flight and (worker.trouble is not None or not worker.has_policy)
                for worker in self._concerned()
            )
            left = until - trio.current_time()
            if not state["paused"] or left <= 0 or not (state["calls_in_flight"] or awaited):
                return state
            await trio.sleep(min(delay_sec, left))
            delay_sec = min(2 * delay_sec, _LONGEST_LOOK_SEC)

    def resume(self, version: int | None = None) -> None:
        """Send calls again, with a new version if one is given; `read` waits for the workers.

        Raises:
            InvalidFieldError: The version is not a whole number from 0.
        """
        check_whole("version", version, least=0, none=True)
        version = self._workers.wanted_policy.version if version is None else version
        self._want(paused=False, abort=False, version=version)

    def _want(self, **changes: Any) -> None:
        wanted = self._workers.wanted_policy
        number = wanted.number + 1
        self._workers.want_policy(evolve(wanted, asked=True, number=number, **changes))

    def _concerned(self) -> list[Worker]:
        """Return the workers that have a gateway, or may have one."""
        return [
            worker
            for worker in self._workers
            if worker.refusal is None and (worker.policy is not None or worker.process_id is None)
        ]

    def _pending(self) -> bool:
        """Whether a worker that answers lacks the state, or none has answered yet."""
        concerned = self._concerned()
        if concerned and all(worker.process_id is None for worker in concerned):
            return True
        return any(worker.trouble is None and not worker.has_policy for worker in concerned)


def _part(worker: Worker) -> tuple[int, int, int]:
    """Return the calls in flight of a worker, and how many workers it stands for, and has current.

    It stands for several if it is a front itself.
    """
    if worker.policy is None or worker.trouble is not None:
        return 0, 1, 0
    calls = worker.policy.get("calls_in_flight", 0)
    counts = worker.policy.get("workers", {"total": 1, "current": 1})
    return calls, counts["total"], counts["current"] if worker.has_policy else 0
