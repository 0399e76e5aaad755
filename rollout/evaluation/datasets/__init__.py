"""Datasets: JSONL, CSV and Parquet, streamed, and taken faithfully or not at all."""

from rollout.evaluation.datasets.dataset import Dataset, DatasetScan, open_dataset
from rollout.evaluation.datasets.rows import DatasetRow
from rollout.evaluation.selection import RowSelection, parse_rows

__all__ = [
    "Dataset",
    "DatasetRow",
    "DatasetScan",
    "RowSelection",
    "open_dataset",
    "parse_rows",
]
