"""The state of one rollout on its server, from admission to the end of its retention.

A record takes what happened (a status report, the agent's start, a poll, the end, the passing
of time) and answers what follows. It does no I/O and reads no clock: `now` is serving time,
see `rollout.rules.lease.ServingClock`.
"""

from __future__ import annotations

from datetime import datetime

from attrs import define, evolve, frozen

from rollout.rules.lease import PollingLease
from rollout.rules.status import is_terminal, may_follow
from rollout.types import RolloutErrorCategory, RolloutResultResponse, RolloutStatus

__all__ = ["RolloutRecord", "SeenState"]

_AGENT_STARTED = "agent-started"


@frozen
class SeenState:
    """The state that a lease holder has seen: a status, and whether the agent has started."""

    status: RolloutStatus = RolloutStatus.QUEUED
    agent_started: bool = False

    def to_header(self) -> str:
        """Write the value of `rollout.types.SEEN_STATE_HEADER`."""
        return f"{self.status};{_AGENT_STARTED}" if self.agent_started else str(self.status)

    @classmethod
    def from_header(cls, header: str | None) -> SeenState | None:
        """Read the header; ``None`` where it is missing or says nothing that we know."""
        if not header:
            return None
        status, *flags = (part.strip().lower() for part in header.split(";"))
        try:
            return cls(RolloutStatus(status), _AGENT_STARTED in flags)
        except ValueError:
            return None


@define(eq=False)
class RolloutRecord:
    """One rollout on its server.

    Attributes:
        rollout_id: Its id.
        lease: The polling lease, in serving time.
        status: Where it stands; only moves forward.
        agent_started_at: When its agent started (UTC); set once.
        start_kept: Whether that may be told: a state that has to keep it has done so.
        settled: The terminal result that is about to be published, once its files are written.
        result: The terminal result; set once.
        reported: What was last reported to the holder of the lease.
        delivered: Whether the terminal result was ever answered to a poll.
    """

    rollout_id: str
    lease: PollingLease
    status: RolloutStatus = RolloutStatus.QUEUED
    agent_started_at: datetime | None = None
    start_kept: bool = True
    settled: RolloutResultResponse | None = None
    result: RolloutResultResponse | None = None
    reported: SeenState = SeenState()
    delivered: bool = False

    @property
    def state(self) -> SeenState:
        """The current state, as a caller would see it."""
        return SeenState(self.status, self.told_start is not None)

    @property
    def told_start(self) -> datetime | None:
        """When the agent started, as far as that may be told."""
        return self.agent_started_at if self.start_kept else None

    def advance(self, status: RolloutStatus) -> bool:
        """Record a status report of an execution; ``False`` when it changes nothing.

        A report that does not lead forward, or a terminal one (only `finish` ends a rollout),
        is ignored: backends may report late.
        """
        if is_terminal(status) or not may_follow(status, self.status):
            return False
        self.status = status
        return True

    def mark_agent_started(self, when: datetime) -> bool:
        """Record the agent's start; only the first one before the end counts."""
        if self.agent_started_at is not None or self.end is not None:
            return False
        self.agent_started_at = when
        return True

    def renew(self, now: float) -> bool:
        """Renew the lease for a poll; ``False`` when it comes too late.

        Once the rollout has ended there is no lease to lose, and every poll is in time.
        """
        return self.result is not None or self.lease.renew(now)

    @property
    def end(self) -> RolloutResultResponse | None:
        """How the rollout ends, or has ended; ``None`` while that is open."""
        return self.result or self.settled

    def settle(self, result: RolloutResultResponse, now: float) -> RolloutResultResponse:
        """Decide that the rollout ends with *result*, which is published later.

        An end that was decided before stays, and so does that of a lease that has ended.

        Returns:
            How the rollout ends.
        """
        if self.end is None:
            decided = self.expiry() if self.lease.expired(now) else result
            self.settled = evolve(decided, agent_started_at=self.agent_started_at)
        return self.end or result

    def expire(self, now: float) -> bool:
        """End the rollout as `lease_expired`, or as settled, if its lease has ended at *now*."""
        if self.result is not None or not self.lease.expired(now):
            return False
        self._end(self.expiry())
        return True

    def finish(self, result: RolloutResultResponse, now: float) -> bool:
        """End the rollout with the result of its execution.

        A lease that has ended before wins over the result, whether or not anyone has noticed
        yet, and so does what was settled. The first end stays: ``False`` when this call was
        not the one that published it.
        """
        if self.result is not None or self.expire(now):
            return False
        self._end(result)
        return True

    def has_news(self, seen: SeenState) -> bool:
        """Whether a poll whose caller has *seen* that much is to be answered at once."""
        return (
            self.result is not None
            or may_follow(self.status, seen.status)
            or (self.told_start is not None and not seen.agent_started)
        )

    def answered(self, state: SeenState | None = None) -> None:
        """Note that a state was sent to the holder of the lease: *state*, or the current one."""
        self.reported = state or self.state
        self.delivered = self.delivered or is_terminal(self.reported.status)

    def expiry(self) -> RolloutResultResponse:
        """Return the result of a rollout whose lease has ended."""
        return RolloutResultResponse(
            rollout_id=self.rollout_id,
            status=RolloutStatus.FAILURE,
            err_message="polling lease expired",
            err_category=RolloutErrorCategory.LEASE_EXPIRED,
        )

    def _end(self, result: RolloutResultResponse) -> None:
        result = self.settled or result
        self.settled = None
        self.result = evolve(result, agent_started_at=self.agent_started_at)
        self.status = result.status
