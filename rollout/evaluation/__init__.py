"""Evaluations: a dataset, n attempts for each row, and figures that one can trust.

`evaluate` runs one and can be stopped at any point: what has ended is on the disk, and the
same call goes on from there. `compute_metrics`, `compare_runs` and `write_report` work on what
it left, complete or not.
"""

from rollout.evaluation.comparison import Comparison, compare_runs
from rollout.evaluation.config import (
    ChatConfig,
    DatasetColumns,
    DatasetConfig,
    EvaluationConfig,
    PricesConfig,
    RunConfig,
    SecretsConfig,
    ServerConfig,
    load_config,
)
from rollout.evaluation.datasets import Dataset, DatasetRow, DatasetScan, open_dataset
from rollout.evaluation.folder.journal import final_records, read_records
from rollout.evaluation.folder.manifest import read_manifest
from rollout.evaluation.folder.outputs import summarize
from rollout.evaluation.forecast import Forecast
from rollout.evaluation.metrics import EvaluationMetrics, compute_metrics
from rollout.evaluation.records import AttemptOutcome, AttemptRecord
from rollout.evaluation.report import write_report
from rollout.evaluation.run import EvaluationProgress, EvaluationRun, evaluate

__all__ = [
    "AttemptOutcome",
    "AttemptRecord",
    "ChatConfig",
    "Comparison",
    "Dataset",
    "DatasetColumns",
    "DatasetConfig",
    "DatasetRow",
    "DatasetScan",
    "EvaluationConfig",
    "EvaluationMetrics",
    "EvaluationProgress",
    "EvaluationRun",
    "Forecast",
    "PricesConfig",
    "RunConfig",
    "SecretsConfig",
    "ServerConfig",
    "compare_runs",
    "compute_metrics",
    "evaluate",
    "final_records",
    "load_config",
    "open_dataset",
    "read_manifest",
    "read_records",
    "summarize",
    "write_report",
]
