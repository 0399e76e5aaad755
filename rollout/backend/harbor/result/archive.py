"""Move what a trial left to the rollout's artifact folder. Blocking.

``<root>/<rollout_id>/artifacts/`` gets what the task or the agent published, and
``<root>/<rollout_id>/harbor/`` Harbor's own files and logs. Only folders come here that are
known to be free of the rollout's key.
"""

from __future__ import annotations

from typing import Any

from rollout._files.trees import drop_links_out
from rollout._json.text import utf8
from rollout._logs import get_logger
from rollout.artifacts import ARTIFACTS, ArtifactStore
from rollout.backend.harbor.trial.plan import TrialPlan

__all__ = ["archive_trial"]

logger = get_logger(__name__)

_HARBOR = "harbor"
_MOST_LINES = 20


def archive_trial(plan: TrialPlan, store: ArtifactStore, *, keep: bool) -> dict[str, Any]:
    """Bring artifacts and logs of a trial into the rollout's artifact folder.

    Never raises for storage that cannot be used: that is logged and reported.

    Args:
        plan: The trial, whose folder is tame and clean.
        store: Where they go.
        keep: Whether the trial's folder stays as it is, so that they are copied.

    Returns:
        For the diagnostics, without what is empty: the ``folders`` that are there now, what was
        ``dropped``, a line each, and the ``problem``, why something is not there.
    """
    folders: list[str] = []
    dropped: list[str] = []
    problem: str | None = None
    if store.root is None or not plan.trial_dir.is_dir():
        return {}
    try:
        for name, tree in ((ARTIFACTS, plan.trial_dir / ARTIFACTS), (_HARBOR, plan.trial_dir)):
            if not tree.is_dir() or tree.is_symlink():
                continue
            drop_links_out(tree, lambda path, why: dropped.append(utf8(f"{path}: {why}")))
            store.take_in(
                plan.request.id,
                name,
                tree,
                move=not keep,
                without=(ARTIFACTS,) if name == _HARBOR else (),
            )
            folders.append(name)
    except OSError as error:
        problem = error.strerror or type(error).__name__
        logger.warning(
            "rollout %s: what its trial left cannot be kept below %s: %s",
            plan.request.id,
            store.root,
            problem,
        )
    found = {"folders": folders, "dropped": dropped[:_MOST_LINES], "problem": problem}
    return {name: value for name, value in found.items() if value}
