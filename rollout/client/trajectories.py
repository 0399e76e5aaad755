"""Fetches the trajectories of rollouts that a client has run, by the leases that it remembers."""

from __future__ import annotations

import math

import trio
from attrs import define, field, frozen

from rollout.client.polling import durable_sec, retried
from rollout.client.wire import Wire
from rollout.errors import TrajectoryUnavailableError
from rollout.rules.retry import ResultRetrySchedule
from rollout.trajectory import Trajectory
from rollout.types import TRAJECTORIES, RolloutInitResponse

__all__ = ["TrajectoryFetcher"]

MOST_LEASES = 65_536
"""How many leases a client remembers; each takes some 300 bytes."""

_REQUEST_SEC = 60.0
"""How long the server may be silent: it reads and compresses the file before it answers."""


@frozen
class _Lease:
    """What is remembered of an admission."""

    token: str = field(repr=False)
    durable_sec: float
    offered: bool


@define(eq=False)
class TrajectoryFetcher:
    """The leases of the latest rollouts of a client, and the trajectories behind them."""

    _wire: Wire
    _leases: dict[str, _Lease] = field(factory=dict, init=False, repr=False)

    def remember(self, admission: RolloutInitResponse | None) -> None:
        """Remember the lease of a rollout that was admitted; the oldest one is forgotten."""
        if admission is None:
            return
        self._leases.pop(admission.rollout_id, None)
        self._leases[admission.rollout_id] = _Lease(
            admission.polling_lease_token,
            durable_sec(admission),
            TRAJECTORIES in admission.extensions,
        )
        if len(self._leases) > MOST_LEASES:
            del self._leases[next(iter(self._leases))]

    async def fetch(self, rollout_id: str) -> Trajectory:
        """See `rollout.client.RolloutClient.fetch_trajectory`."""
        await trio.lowlevel.checkpoint()
        lease = self._leases.get(rollout_id)
        if lease is None:
            raise TrajectoryUnavailableError(
                f"rollout {rollout_id} is not among the last {MOST_LEASES:,} of this client, "
                "so the client has no lease of it"
            )
        if not lease.offered:
            raise TrajectoryUnavailableError(
                f"the server of rollout {rollout_id} hands out no trajectories: it does not "
                f"announce the extension {TRAJECTORIES!r}"
            )

        async def attempt(_: Exception | None) -> Trajectory:
            return await self._wire.trajectory(rollout_id, lease.token, timeout_sec=_REQUEST_SEC)

        # There is no lease to lose any more.
        deadline = trio.current_time() if lease.durable_sec else math.inf
        schedule = ResultRetrySchedule(_REQUEST_SEC, deadline, lease.durable_sec)
        return await retried(attempt, schedule, f"rollout {rollout_id}: fetching its trajectory")
