"""The client: admission, polling, handles."""

from rollout.client.client import RolloutClient
from rollout.client.finished import FinishedRollout, RolloutRetry
from rollout.client.groups import FirstSuccesses, RolloutGroup
from rollout.client.handle import RolloutHandle, StatusStream
from rollout.errors import (
    NotOnTrioError,
    RolloutAdmissionTimeoutError,
    RolloutCancelTimeoutError,
    RolloutClientClosedError,
    RolloutClientEnteredError,
    RolloutClientNotEnteredError,
    RolloutHandleCancelled,
    RolloutIdleTimeoutError,
    RolloutPollTimeoutError,
    RolloutProtocolError,
)

__all__ = [
    "FinishedRollout",
    "FirstSuccesses",
    "NotOnTrioError",
    "RolloutAdmissionTimeoutError",
    "RolloutCancelTimeoutError",
    "RolloutClient",
    "RolloutClientClosedError",
    "RolloutClientEnteredError",
    "RolloutClientNotEnteredError",
    "RolloutGroup",
    "RolloutHandle",
    "RolloutHandleCancelled",
    "RolloutIdleTimeoutError",
    "RolloutPollTimeoutError",
    "RolloutProtocolError",
    "RolloutRetry",
    "StatusStream",
]
