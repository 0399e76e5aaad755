"""Fuzzing of graders: answers that deserve nothing, and right ones in other forms.

`fuzz_grader` looks for answers that a grader judges wrongly, each shrunk to the smallest one, and
`replay_findings` grades them again, in a test for example. No agent and no model runs.
"""

from rollout.evaluation.fuzzing.findings import (
    FAMILIES,
    Finding,
    FindingKind,
    FuzzSettings,
    GraderFindings,
    read_findings,
    save_findings,
)
from rollout.evaluation.fuzzing.run import fuzz_grader, replay_findings

__all__ = [
    "FAMILIES",
    "Finding",
    "FindingKind",
    "FuzzSettings",
    "GraderFindings",
    "fuzz_grader",
    "read_findings",
    "replay_findings",
    "save_findings",
]
