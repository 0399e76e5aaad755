"""Move what a trial left to the rollout's artifact folder. Blocking.

``<root>/<rollout_id>/artifacts/`` gets what the task or the agent published, and
``<root>/<rollout_id>/harbor/`` Harbor's own files and logs. Only folders come here that are
known to be free of the rollout's key.
"""

from __future__ import annotations

from typing import Any

from attrs import define, field

from rollout._files.trees import drop_links_out
from rollout._logs import get_logger
from rollout.artifacts import ARTIFACTS, ArtifactStore
from rollout.backend.harbor.trial.plan import TrialPlan

__all__ = ["HARBOR", "ArchiveReport", "archive_trial"]

logger = get_logger(__name__)

HARBOR = "harbor"
"""The folder of a rollout with Harbor's files of it."""

_MOST_LINES = 20


@define
class ArchiveReport:
    """What went to the rollout's artifact folder.

    Attributes:
        folders: The folders that are there now, by name.
        dropped: What was left out, a line each.
        problem: Why something is not there.
    """

    folders: list[str] = field(factory=list)
    dropped: list[str] = field(factory=list)
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it in JSON types, without what is empty."""
        found = {
            "folders": self.folders,
            "dropped": self.dropped[:_MOST_LINES],
            "problem": self.problem,
        }
        return {name: value for name, value in found.items() if value}


def archive_trial(plan: TrialPlan, store: ArtifactStore, *, keep: bool) -> ArchiveReport:
    """Bring artifacts and logs of a trial into the rollout's artifact folder.

    Never raises for storage that cannot be used: that is logged and reported.

    Args:
        plan: The trial, whose folder is tame and clean.
        store: Where they go.
        keep: Whether the trial's folder stays as it is, so that they are copied.
    """
    report = ArchiveReport()
    if store.root is None or not plan.trial_dir.is_dir():
        return report
    try:
        for name, tree in ((ARTIFACTS, plan.trial_dir / ARTIFACTS), (HARBOR, plan.trial_dir)):
            if not tree.is_dir() or tree.is_symlink():
                continue
            drop_links_out(tree, lambda path, why: report.dropped.append(_said(f"{path}: {why}")))
            store.take_in(
                plan.request.id,
                name,
                tree,
                move=not keep,
                without=(ARTIFACTS,) if name == HARBOR else (),
            )
            report.folders.append(name)
    except OSError as error:
        report.problem = error.strerror or type(error).__name__
        logger.warning(
            "rollout %s: what its trial left cannot be kept below %s: %s",
            plan.request.id,
            store.root,
            report.problem,
        )
    return report


def _said(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
