"""Evaluations: a dataset, n attempts for each row, and figures that one can trust."""

from rollout.evaluation.config import (
    ChatConfig,
    DatasetColumns,
    DatasetConfig,
    EvaluationConfig,
    RunConfig,
    ServerConfig,
    load_config,
)
from rollout.evaluation.records import AttemptOutcome, AttemptRecord

__all__ = [
    "AttemptOutcome",
    "AttemptRecord",
    "ChatConfig",
    "DatasetColumns",
    "DatasetConfig",
    "EvaluationConfig",
    "RunConfig",
    "ServerConfig",
    "load_config",
]
