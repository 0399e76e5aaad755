"""The rules of the protocol, without I/O and without a clock.

Every function and class here takes the time (`now`, seconds of a monotonic clock) as an
argument and answers what follows, so that each rule can be tested, simulated and reused
without a socket. The loops in `rollout.client` and `rollout.server` stay thin around them.
"""

from rollout.rules.lease import PollingLease, ServingClock
from rollout.rules.record import RolloutRecord, SeenState
from rollout.rules.retry import ResultRetrySchedule, retry_after_sec
from rollout.rules.status import is_terminal, may_follow, reached

__all__ = [
    "PollingLease",
    "ResultRetrySchedule",
    "RolloutRecord",
    "SeenState",
    "ServingClock",
    "is_terminal",
    "may_follow",
    "reached",
    "retry_after_sec",
]
