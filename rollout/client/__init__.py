"""The client: admission, polling, handles."""

from rollout.client.bulk import FinishedRollout
from rollout.client.client import RolloutClient
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
    "NotOnTrioError",
    "RolloutAdmissionTimeoutError",
    "RolloutCancelTimeoutError",
    "RolloutClient",
    "RolloutClientClosedError",
    "RolloutClientEnteredError",
    "RolloutClientNotEnteredError",
    "RolloutHandle",
    "RolloutHandleCancelled",
    "RolloutIdleTimeoutError",
    "RolloutPollTimeoutError",
    "RolloutProtocolError",
    "StatusStream",
]
