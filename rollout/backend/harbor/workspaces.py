"""The folders of trials: made, claimed, removed, and pruned.

Each rollout has one, ``<trials_dir>/<name>``, with Harbor's trial folder in it at
``trials/<name>``. While it is in use it is claimed, see `rollout._files.claims`. One that
is kept has the trial's folder alone, and no mark. Blocking.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rollout._files.claims import MARK, Claim
from rollout._files.trees import remove_tree
from rollout._json.text import utf8
from rollout._logs import get_logger

__all__ = ["NAMES", "TRIALS", "make_workspace", "prune_kept", "remove_workspace"]

logger = get_logger(__name__)

TRIALS = "trials"
"""The folder of a workspace that Harbor makes the trial's folder in."""

NAMES = r"[a-z0-9-]+-[0-9a-f]{10}"
"""A regular expression for the names of workspaces."""

_claims: dict[Path, Claim] = {}
"""Of this process, by workspace."""


def make_workspace(root: Path, name: str) -> Path:
    """Make the folder of one rollout, and claim it until `remove_workspace`.

    Raises:
        OSError: It cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    workspace = root / name
    workspace.mkdir(mode=0o700)
    try:
        workspace.chmod(0o700)  # whatever the umask says
        _claims[workspace] = Claim(workspace)
    except BaseException:
        remove_tree(workspace)
        raise
    return workspace


def remove_workspace(rollout_id: str, workspace: Path, *, keep: Path | None = None) -> bool:
    """Remove the folder of a rollout's trial, task and all.

    Args:
        rollout_id: The rollout, for the log.
        workspace: The folder.
        keep: The trial's own folder, if it stays.

    Returns:
        Whether all of it is gone. If not, that is logged; a later start tries again.
    """
    if keep is None:
        problems = remove_tree(workspace)
    else:
        stay = {keep, keep.parent, workspace / MARK}
        others = sorted({*workspace.iterdir(), *keep.parent.iterdir()} - stay)
        # The mark goes last: a folder without it counts as a clean one.
        problems = [line for path in others for line in remove_tree(path)]
        problems = problems or remove_tree(workspace / MARK)
    claim = _claims.pop(workspace, None)
    if claim is not None:
        claim.release()
    if problems:
        logger.warning(
            "rollout %s: %s cannot be removed completely: %s",
            rollout_id,
            workspace,
            "; ".join(map(utf8, problems[:3])),
        )
    return not problems


def prune_kept(root: Path, most: int | None) -> list[str]:
    """Remove the oldest folders of trials that were kept, until no more than *most* are left.

    Returns:
        The names of the removed ones.
    """
    if most is None:
        return []
    kept = sorted(_kept(root), reverse=True)
    removed = []
    for _, folder in kept[most:]:
        problems = remove_tree(folder)
        if problems:
            logger.warning("%s cannot be removed completely: %s", folder, utf8(problems[0]))
        else:
            removed.append(folder.name)
    return removed


def _kept(root: Path) -> Iterator[tuple[float, Path]]:
    for folder in sorted(root.iterdir()):
        if not re.fullmatch(NAMES, folder.name, re.ASCII) or folder.is_symlink():
            continue
        try:
            # Nothing but the trial's folder, and so no mark either.
            if [path.name for path in folder.iterdir()] != [TRIALS]:
                continue
            if [path.name for path in (folder / TRIALS).iterdir()] == [folder.name]:
                yield folder.stat().st_mtime, folder
        except OSError:  # a file, or somebody else removes it at the moment
            continue
