"""Check and copy the folders of tasks: no links out of them, no special files. Blocking.

Harbor reads a task's files on the host and uploads what it reads. A link that leaves the folder
would hand a file of the host to a sandbox, and a FIFO would hang its reader.
"""

from __future__ import annotations

import graphlib
import os
import posixpath
import shutil
import stat
from pathlib import Path

from rollout.backend.harbor.errors import UnfitTaskError

__all__ = ["check_tree", "copy_tree"]

_DEEPEST = 100
"""How deep folders may lie; those who walk through a task do so folder by folder."""


def check_tree(folder: Path) -> None:
    """Check that a task holds only folders, files, and links that stay within it.

    Refused are links that are absolute, that lead out of the folder (also by way of other
    links, or out and in again), that lead nowhere, that lead to each other, and those that
    would make a walk through the folder endless; everything that is neither a file, a folder
    nor a link; and folders a hundred deep.

    Raises:
        UnfitTaskError: It holds something else.
    """
    root = Path(os.path.realpath(folder))
    children: dict[str, list[str]] = {}
    for way, folders, files in os.walk(root, onerror=_raise):
        for entry in sorted((*folders, *files)):
            path = Path(way, entry)
            name = str(path.relative_to(root))
            if name.count(os.sep) >= _DEEPEST:
                raise UnfitTaskError(f"it has folders more than {_DEEPEST} deep")
            if path.is_symlink():
                target = _link_target(path, root, name)
                if target.is_dir():
                    children.setdefault(way, []).append(str(target))
            elif entry in folders:
                children.setdefault(way, []).append(str(path))
            elif not stat.S_ISREG(path.lstat().st_mode):
                raise UnfitTaskError(f"{name} is neither a file, a folder nor a link")
    try:
        graphlib.TopologicalSorter(children).prepare()
    except graphlib.CycleError as error:
        names = ", ".join(os.path.relpath(each, root) for each in error.args[1][1:])
        raise UnfitTaskError(f"it has no end: links lead in a circle through {names}") from None


def copy_tree(source: Path, target: Path, *, without: str | None = None) -> None:
    """Copy a task's folder that has been checked, without following links.

    Permissions are kept, except that the owner may enter and change every folder, so that the
    copy can be removed; so are times of files.

    Args:
        source: The folder.
        target: The copy; it may not exist.
        without: The name of a file at the top that is left out.

    Raises:
        UnfitTaskError: A file has become a special one since the check.
        OSError: It cannot be read or written.
    """
    root = os.path.realpath(source)
    for folder, folders, files in os.walk(root, onerror=_raise):
        here, to = Path(folder), target / os.path.relpath(folder, root)
        to.mkdir(mode=0o700)
        to.chmod(_permissions(here) | 0o700)
        for name in (*folders, *files):
            if (here / name).is_symlink():
                os.symlink(os.readlink(here / name), to / name)  # noqa: PTH115, PTH211 - as it is
            elif name in files and not (folder == root and name == without):
                _copy_file(here / name, to / name)


def _copy_file(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target, follow_symlinks=False)
    except shutil.SpecialFileError as error:
        raise UnfitTaskError(f"{source.name} is no longer a file") from error
    shutil.copystat(source, target, follow_symlinks=False)
    target.chmod(_permissions(source))


def _permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode) & 0o777


def _raise(error: OSError) -> None:
    raise error


def _link_target(link: Path, root: Path, name: str) -> Path:
    text = os.readlink(link)  # noqa: PTH115 - the text as it stands
    if posixpath.isabs(text):
        raise UnfitTaskError(f"{name} is an absolute link")
    try:
        link.stat()  # unlike `resolve`, refuses "file/."
        target = link.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise UnfitTaskError(f"{name} is a link that leads nowhere") from error
    here = link.parent
    for part in text.split("/"):
        # Each step of the way, so that it does not leave and come back by the folder's name.
        here = here.parent if part == ".." else Path(os.path.realpath(here / part))
        if not here.is_relative_to(root):
            raise UnfitTaskError(f"{name} is a link out of the task")
    return target
