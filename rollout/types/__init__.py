"""The types of the rollout protocol, as attrs classes.

Names and fields are those of the protocol. Constructors take keywords only and check what
they are given; the error is a `ValueError` that names the field.
"""

from rollout.types.config import AgentWorkflowConfig, BaseConfig, ConcurrencyConfig, GraderConfig
from rollout.types.execution import ExecutionOutcome, ExecutionRequest, ExecutionResult
from rollout.types.output import AgentWorkflowOutput, MessageDict, Messages
from rollout.types.protocol import (
    ADMISSION_KEYS,
    CONFIRMED_START,
    DURABLE_RESULTS,
    EXTENSIONS,
    POLLING_LEASE_HEADER,
    SEEN_STATE_HEADER,
    TRAJECTORIES,
    CancelRolloutsRequest,
    CancelRolloutsResponse,
    RolloutInitRequest,
    RolloutInitResponse,
    RolloutLifecycle,
    RolloutResultResponse,
)
from rollout.types.sample import (
    MODEL_ENDPOINT,
    MODEL_KEY,
    SERVER_RESTART,
    WORKER_LOST,
    RolloutErrorCategory,
    RolloutSample,
    RolloutStatus,
)

__all__ = [
    "ADMISSION_KEYS",
    "CONFIRMED_START",
    "DURABLE_RESULTS",
    "EXTENSIONS",
    "MODEL_ENDPOINT",
    "MODEL_KEY",
    "POLLING_LEASE_HEADER",
    "SEEN_STATE_HEADER",
    "SERVER_RESTART",
    "TRAJECTORIES",
    "WORKER_LOST",
    "AgentWorkflowConfig",
    "AgentWorkflowOutput",
    "BaseConfig",
    "CancelRolloutsRequest",
    "CancelRolloutsResponse",
    "ConcurrencyConfig",
    "ExecutionOutcome",
    "ExecutionRequest",
    "ExecutionResult",
    "GraderConfig",
    "MessageDict",
    "Messages",
    "RolloutErrorCategory",
    "RolloutInitRequest",
    "RolloutInitResponse",
    "RolloutLifecycle",
    "RolloutResultResponse",
    "RolloutSample",
    "RolloutStatus",
]
