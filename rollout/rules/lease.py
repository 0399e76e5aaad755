"""Polling leases: how long a rollout outlives the silence of its caller.

A lease ends a fixed time after the last valid request. A renewal that comes at the deadline
or later does not revive it. The same arithmetic serves both sides: the server counts from
the moment when it sees a request, the client (which cannot know that moment) from the moment
when it sent one, so the client's deadline is never the later of the two.
"""

from __future__ import annotations

import math

from attrs import define

__all__ = ["PollingLease", "ServingClock"]


@define
class PollingLease:
    """A lease of *timeout_sec*, and its deadline on some monotonic clock.

    Attributes:
        timeout_sec: The length of the lease in seconds.
        deadline: When it ends unless it is renewed before.
    """

    timeout_sec: float
    deadline: float

    @classmethod
    def starting(cls, now: float, timeout_sec: float) -> PollingLease:
        """Grant a lease at *now*."""
        return cls(timeout_sec, now + timeout_sec)

    def expired(self, now: float) -> bool:
        """Whether the lease has ended at *now*. The deadline itself is past it."""
        return now >= self.deadline

    def renew(self, now: float) -> bool:
        """Extend the lease from *now*; ``False``, and no change, when it has ended already.

        A renewal never moves the deadline back, so requests may be seen out of order.
        """
        if self.expired(now):
            return False
        self.deadline = max(self.deadline, now + self.timeout_sec)
        return True


@define
class ServingClock:
    """A clock that stands still while the server cannot serve.

    A process whose event loop is blocked, or that is stopped as a whole, cannot see the polls
    that wait in its sockets. Counting that time would expire leases whose callers did all
    that they should. Whoever ticks this clock says when the next tick is due; the time by
    which a tick comes late is taken out.

    Attributes:
        tick_sec: The longest time between two ticks. What the clock may miss of one stall is
            at most this.
        stalled_sec: The time taken out so far.
        due: When the next tick is due, or ``None`` while the clock is not ticking.
    """

    tick_sec: float
    stalled_sec: float = 0.0
    due: float | None = None

    def time(self, now: float) -> float:
        """Return the serving time at *now*, including a stall that is not accounted for yet."""
        return now - (self.stalled_sec + self._late(now))

    def at(self, serving_time: float) -> float:
        """Return the first moment at which the serving time is *serving_time*, without more stalls.

        Adding and subtracting floats is not exact. A moment that is a hair too early would
        find nothing due, and whoever waits for it would wait for the same moment again.
        """
        moment = serving_time + self.stalled_sec
        while moment - self.stalled_sec < serving_time:
            moment = math.nextafter(moment, math.inf)
        return moment

    def tick(self, now: float, *, at_most: float) -> float:
        """Account for the time since the last tick; return when the next one is due.

        Args:
            now: The moment of this tick.
            at_most: A serving time at which the caller wants to be woken at the latest.
        """
        self.stalled_sec += self._late(now)
        self.due = min(now + self.tick_sec, max(now, self.at(at_most)))
        return self.due

    def stop(self, now: float) -> None:
        """Stop ticking, because nothing is left that could expire."""
        self.stalled_sec += self._late(now)
        self.due = None

    def _late(self, now: float) -> float:
        return 0.0 if self.due is None else max(0.0, now - self.due)
