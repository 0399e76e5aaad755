"""Trajectories: what happened in a rollout, step by step, as an ATIF document.

ATIF is Harbor's Agent Trajectory Interchange Format. All but `save_trajectory` is pure.
"""

from rollout.trajectory.build import SCHEMA_VERSION, build_trajectory
from rollout.trajectory.checker import trajectory_problems
from rollout.trajectory.reading import Trajectory, TrajectoryCall, read_trajectory
from rollout.trajectory.report import (
    TrajectoryReport,
    convert_sample_to_trajectory,
    report_from_response,
    save_trajectory,
)
from rollout.trajectory.totals import token_totals

__all__ = [
    "SCHEMA_VERSION",
    "Trajectory",
    "TrajectoryCall",
    "TrajectoryReport",
    "build_trajectory",
    "convert_sample_to_trajectory",
    "read_trajectory",
    "report_from_response",
    "save_trajectory",
    "token_totals",
    "trajectory_problems",
]
