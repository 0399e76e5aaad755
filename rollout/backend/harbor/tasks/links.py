"""Folders of tasks: no links out of them, no special files in them, and copies of them. Blocking.

Harbor reads a task's files on the host and uploads what it reads. A link that leaves the folder
would hand a file of the host to a sandbox, and a FIFO would hang its reader.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from rollout.backend.harbor.errors import UnfitTaskError

__all__ = ["check_tree", "copy_tree"]

_BLOCK = 1024 * 1024
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
    for entry, here in _entries(root):
        name = _name(entry, root)
        if name.count(os.sep) >= _DEEPEST:
            raise UnfitTaskError(f"it has folders more than {_DEEPEST} deep")
        if entry.is_symlink():
            target = _link_target(Path(entry.path), root, name)
            if target.is_dir():
                children.setdefault(here, []).append(str(target))
        elif entry.is_dir(follow_symlinks=False):
            children.setdefault(here, []).append(entry.path)
        elif not entry.is_file(follow_symlinks=False):
            raise UnfitTaskError(f"{name} is neither a file, a folder nor a link")
    _refuse_cycles(str(root), children, root)


def copy_tree(source: Path, target: Path, *, without: str | None = None) -> None:
    """Copy a task's folder that has been checked, without following links.

    Permissions and times are kept, except that the owner may enter and change every folder, so
    that the copy can be removed. Something that has become a link or a special file since the
    check is refused.

    Args:
        source: The folder.
        target: The copy; it may not exist.
        without: The name of a file at the top that is left out.

    Raises:
        UnfitTaskError: It changed meanwhile.
        OSError: It cannot be read or written.
    """
    _copy_folder(Path(os.path.realpath(source)), target, without)


def _entries(root: Path) -> Iterator[tuple[os.DirEntry[str], str]]:
    pending = [str(root)]
    while pending:
        here = pending.pop()
        with os.scandir(here) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            yield entry, here


def _name(entry: os.DirEntry[str], root: Path) -> str:
    return os.path.relpath(entry.path, root)


def _link_target(link: Path, root: Path, name: str) -> Path:
    text = os.readlink(link)  # noqa: PTH115 - the text as it stands
    if posixpath.isabs(text):
        raise UnfitTaskError(f"{name} is an absolute link")
    try:
        target = link.resolve(strict=True)
        target.stat()
    except (OSError, RuntimeError) as error:
        raise UnfitTaskError(f"{name} is a link that leads nowhere") from error
    here = link.parent
    for part in text.split("/"):
        # Each step of the way, so that it does not leave and come back by the folder's name.
        here = here.parent if part == ".." else Path(os.path.realpath(here / part))
        if not here.is_relative_to(root):
            raise UnfitTaskError(f"{name} is a link out of the task")
    return target


def _refuse_cycles(start: str, children: dict[str, list[str]], root: Path) -> None:
    """Refuse folders from which links lead back to a folder on the way to them."""
    open_, done = {start}, set[str]()
    way: list[tuple[str, Iterator[str]]] = [(start, iter(children.get(start, ())))]
    while way:
        here, rest = way[-1]
        child = next(rest, None)
        if child is None:
            way.pop()
            open_.discard(here)
            done.add(here)
        elif child in open_:
            raise UnfitTaskError(
                f"links in {os.path.relpath(here, root)} lead back to "
                f"{os.path.relpath(child, root)}, so that it has no end"
            )
        elif child not in done:
            open_.add(child)
            way.append((child, iter(children.get(child, ()))))


def _copy_folder(source: Path, target: Path, without: str | None = None) -> None:
    status = os.lstat(source)
    if not stat.S_ISDIR(status.st_mode):
        raise UnfitTaskError(f"{source.name} is no longer a folder")
    target.mkdir(mode=0o700)
    with os.scandir(source) as found:
        entries = list(found)
    for entry in entries:
        if entry.name == without:
            continue
        to = target / entry.name
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), to)  # noqa: PTH115, PTH211 - the text as it stands
        elif entry.is_dir(follow_symlinks=False):
            _copy_folder(Path(entry.path), to)
        else:
            _copy_file(entry.path, to)
    mode = stat.S_IMODE(status.st_mode) & 0o777 | 0o700
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.chmod(target, mode)  # noqa: PTH101 - whatever the umask says


def _copy_file(source: str, target: Path) -> None:
    # A FIFO would keep its opener waiting; a link is not followed.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.open(source, flags)
    except OSError as error:
        raise UnfitTaskError(f"{target.name} cannot be read: {error.strerror}") from error
    with os.fdopen(handle, "rb") as reader:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise UnfitTaskError(f"{target.name} is no longer a file")
        with target.open("xb") as writer:
            shutil.copyfileobj(reader, writer, _BLOCK)
            os.fchmod(writer.fileno(), stat.S_IMODE(status.st_mode) & 0o777)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
