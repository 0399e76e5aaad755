"""The folders that trials work in: made, removed, and put in order after a server was killed.

Each rollout has one, ``<trials_dir>/<name>``, with Harbor's trial folder in it at
``trials/<name>``. While it is in use it is claimed, see `rollout._files.claims`. One that
is kept has the trial's folder alone, and no mark. Blocking.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from rollout._files.claims import MARK, Claim, abandoned, is_claimed, make_claimed
from rollout._files.trees import remove_tree
from rollout._logs import get_logger

__all__ = ["TRIALS", "make_workspace", "prune_kept", "remove_workspace", "sweep_workspaces"]

logger = get_logger(__name__)

TRIALS = "trials"
"""The folder of a workspace that Harbor makes the trial's folder in."""

_NAME = re.compile(r"[a-z0-9-]+-[0-9a-f]{10}", re.ASCII)
_UNFINISHED = re.compile(r"\.new-[0-9a-f]{16}", re.ASCII)
_HOUR = 3600.0

_claims: dict[Path, Claim] = {}
"""Of this process, by workspace."""


def make_workspace(root: Path, name: str) -> Path:
    """Make the folder of one rollout, and claim it until `remove_workspace`.

    Raises:
        OSError: It cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    workspace = root / name
    _claims[workspace] = make_claimed(workspace)
    return workspace


def remove_workspace(rollout_id: str, workspace: Path, *, keep: Path | None = None) -> bool:
    """Remove the folder of a rollout's trial, task and all.

    Args:
        rollout_id: The rollout, for the log.
        workspace: The folder.
        keep: A folder in it that stays.

    Returns:
        Whether all of it is gone. If not, that is logged; a later start tries again.
    """
    problems = remove_tree(workspace) if keep is None else _remove_around(workspace, keep)
    if keep is not None and not problems:
        # At last, so that whoever finds a folder without it may take it for a clean one.
        problems = remove_tree(workspace / MARK)
    claim = _claims.pop(workspace, None)
    if claim is not None:
        claim.release()
    if problems:
        logger.warning(
            "rollout %s: %s cannot be removed completely: %s",
            rollout_id,
            workspace,
            "; ".join(map(_said, problems[:3])),
        )
    return not problems


def _remove_around(folder: Path, keep: Path) -> list[str]:
    problems: list[str] = []
    for path in sorted(folder.iterdir()):
        if path == keep or path.name == MARK:
            continue
        if keep.is_relative_to(path):
            problems += _remove_around(path, keep)
        else:
            problems += remove_tree(path)
    return problems


def sweep_workspaces(root: Path) -> list[str]:
    """Remove the folders of trials whose server was killed, which nobody has freed of a key.

    Those of servers that run are locked, and stay.

    Returns:
        The names of the removed ones.
    """
    removed = []
    for folder in _folders(root):
        if _UNFINISHED.fullmatch(folder.name) and _is_young(folder):
            continue  # its lock may be about to be taken
        with abandoned(folder) as is_abandoned:
            problems = remove_tree(folder) if is_abandoned else []
        if problems:
            logger.warning("%s cannot be removed completely: %s", folder, _said(problems[0]))
        elif is_abandoned:
            removed.append(folder.name)
    if removed:
        logger.warning(
            "removed what trials of a server that was killed had left in %s: %s", root, removed
        )
    return removed


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
            logger.warning("%s cannot be removed completely: %s", folder, _said(problems[0]))
        else:
            removed.append(folder.name)
    return removed


def _kept(root: Path) -> Iterator[tuple[float, Path]]:
    for folder in _folders(root):
        try:
            if is_claimed(folder) or [path.name for path in folder.iterdir()] != [TRIALS]:
                continue
            if [path.name for path in (folder / TRIALS).iterdir()] == [folder.name]:
                yield folder.stat().st_mtime, folder
        except OSError:  # somebody else removes it at the moment
            continue


def _is_young(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime < _HOUR
    except OSError:  # it is gone, or has its name by now
        return True


def _folders(root: Path) -> list[Path]:
    return [
        path
        for path in sorted(root.iterdir())
        if (_NAME.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name))
        and path.is_dir()
        and not path.is_symlink()
    ]


def _said(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
