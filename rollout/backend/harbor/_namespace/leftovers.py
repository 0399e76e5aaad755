"""The folders of sandboxes whose server was killed; their processes and mounts went with it."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from rollout._trees import remove_tree
from rollout.backend.harbor.claims import abandoned

__all__ = ["PREFIX", "sweep_sandboxes"]

logger = logging.getLogger(__name__)

PREFIX = "rollout-sandbox-"
"""What the names of sandboxes' folders begin with."""


def sweep_sandboxes(parent: Path | None = None) -> list[Path]:
    """Remove the folders of this user's sandboxes that nobody holds any more. Blocking.

    Args:
        parent: Where they were made; the system's temporary folder if ``None``.

    Returns:
        The removed ones.
    """
    removed = []
    for folder in sorted(Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*")):
        if folder.is_symlink() or not folder.is_dir():
            continue
        with abandoned(folder) as is_abandoned:
            problems = remove_tree(folder) if is_abandoned else []
        if problems:
            logger.warning("%s cannot be removed completely: %s", folder, problems[0])
        elif is_abandoned:
            removed.append(folder)
    if removed:
        logger.warning("removed the folders of %d sandboxes whose server was killed", len(removed))
    return removed
