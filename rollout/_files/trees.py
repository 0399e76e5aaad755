"""Trees of files that untrusted code has made: made safe, moved and removed.

Everything is done relative to descriptors of folders, so that no link is ever followed, and
with a bounded depth, so that neither a path nor a recursion gets too long. Nobody who has made
the tree is expected to be at work on it still. Blocking; use a thread.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout._files.folders import Folder

__all__ = ["drop_links_out", "put_tree", "remove_tree", "tame_tree"]

DEEPEST = 48
"""How deep a tree may be that is kept."""

_LONGEST_PATH = 2000
"""In bytes; systems take 4096, and a tree is kept below another folder later on."""

_FLATTEN_AT = 32
_READ = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_FILE = _NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_OWNER_FOLDER = 0o700
_OWNER_FILE = 0o600

Report = Callable[[str, str], None]
"""Called with a path within the tree, and why it was removed."""


# --- removing ---------------------------------------------------------------------------------


def remove_tree(path: Path) -> list[str]:
    """Remove a file or a folder with everything in it, however it is protected or nested.

    A link is removed, not what it leads to. What cannot be removed does not keep the rest.

    Returns:
        What is left and why, a line each; nothing if *path* is gone, or was not there.
    """
    try:
        parent = os.open(path.parent, _READ)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [_line(str(path), error)]
    try:
        return _remove_all(parent, path.name)
    finally:
        os.close(parent)


def _remove_all(parent: int, name: str) -> list[str]:
    problems: list[str] = []
    waiting = [name]
    while waiting:
        _remove(parent, waiting.pop(), "", 0, (parent, waiting), problems)
    return problems


def _remove(
    parent: int, name: str, way: str, depth: int, top: tuple[int, list[str]], problems: list[str]
) -> None:
    here = f"{way}/{name}" if way else name
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=parent)
            return
        if depth == _FLATTEN_AT:
            # Deeper ones are brought up here, so that no depth is too deep.
            moved = f".{secrets.token_hex(8)}.rest"
            os.rename(name, moved, src_dir_fd=parent, dst_dir_fd=top[0])
            top[1].append(moved)
            return
        with _entered(parent, name, found) as folder:
            for entry in os.listdir(folder):  # noqa: PTH208 - a descriptor
                _remove(folder, entry, here, depth + 1, top, problems)
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or not problems:
            problems.append(_line(here, error))


@contextmanager
def _entered(parent: int, name: str, found: os.stat_result) -> Generator[int, None, None]:
    """Open the folder *name*, after giving its owner all rights."""
    if found.st_mode & _OWNER_FOLDER != _OWNER_FOLDER:
        _set_mode(parent, name, stat.S_IMODE(found.st_mode) | _OWNER_FOLDER)
    descriptor = os.open(name, _READ | _NOFOLLOW, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _set_mode(parent: int, name: str, mode: int) -> None:
    """Change the mode of a file or folder, without following it if it has become a link."""
    if os.chmod in os.supports_follow_symlinks:
        os.chmod(name, mode, dir_fd=parent, follow_symlinks=False)
        return
    if not hasattr(os, "O_PATH"):
        raise OSError(errno.EACCES, "no way to change its permissions safely", name)
    handle = os.open(name, os.O_PATH | _NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        if not stat.S_ISLNK(os.fstat(handle).st_mode):
            os.chmod(f"/proc/self/fd/{handle}", mode)  # noqa: PTH101 - the same
    finally:
        os.close(handle)


# --- taming -----------------------------------------------------------------------------------


def tame_tree(path: Path, report: Report) -> bool:
    """Make a tree safe to read, move and remove.

    Its owner may read and write everything; nothing runs as somebody else. What is neither a
    file nor a folder nor a link within the tree is removed, and so is what is nested too
    deeply and what cannot be made readable.

    Args:
        path: A folder.
        report: Called for everything that was removed or could not be.

    Returns:
        Whether all of it is tame now.
    """
    outcome = [True]
    with _root(path) as folder:
        _tame(folder, "", 0, report, outcome)
    drop_links_out(path, report)
    return outcome[0]


@contextmanager
def _root(path: Path) -> Generator[int, None, None]:
    parent = os.open(path.parent, _READ)
    try:
        found = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
        with _entered(parent, path.name, found) as folder:
            yield folder
    finally:
        os.close(parent)


def _tame(folder: int, way: str, depth: int, report: Report, outcome: list[bool]) -> None:
    for name in os.listdir(folder):
        here = f"{way}/{name}" if way else name
        try:
            reason = _tame_one(folder, name, here, depth, report, outcome)
        except OSError as error:
            reason = error.strerror or type(error).__name__
        if reason is not None:
            _drop(folder, name, here, reason, report, outcome)


def _tame_one(
    folder: int, name: str, here: str, depth: int, report: Report, outcome: list[bool]
) -> str | None:
    """Tame one entry; say why it has to go, if it has."""
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if len(os.fsencode(here)) > _LONGEST_PATH:
        return "its path is too long"
    if stat.S_ISDIR(found.st_mode):
        if depth == DEEPEST:
            return "it is nested too deeply"
        with _entered(folder, name, found) as inner:
            mode = stat.S_IMODE(found.st_mode)
            if mode & 0o777 | _OWNER_FOLDER != mode:
                os.fchmod(inner, mode & 0o777 | _OWNER_FOLDER)
            _tame(inner, here, depth + 1, report, outcome)
        return None
    if stat.S_ISREG(found.st_mode):
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o777 | _OWNER_FILE != mode:
            _set_mode(folder, name, mode & 0o777 | _OWNER_FILE)
        return None
    return None if stat.S_ISLNK(found.st_mode) else "it is a special file"


def _drop(
    folder: int, name: str, here: str, reason: str, report: Report, outcome: list[bool]
) -> None:
    if _remove_all(folder, name):
        outcome[0] = False
        reason = f"{reason}, and it cannot be removed"
    report(here, reason)


def drop_links_out(path: Path, report: Report) -> None:
    """Remove the links in a tree that lead out of it.

    Args:
        path: A tame folder.
        report: Called for each of them.

    Raises:
        OSError: One of them cannot be removed.
    """
    root = os.path.realpath(path)
    for way, folders, files, folder in os.fwalk(path, follow_symlinks=False):
        for name in (*folders, *files):
            if not stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                continue
            target = os.readlink(name, dir_fd=folder)
            if os.path.isabs(target) or not (  # noqa: PTH117 - a target may be no valid path
                _within(os.path.normpath(os.path.join(os.path.abspath(way), target)), str(path))  # noqa: PTH100, PTH118
                and _within(os.path.realpath(os.path.join(way, target)), root)  # noqa: PTH118
            ):
                os.unlink(name, dir_fd=folder)
                inside = os.path.relpath(os.path.join(way, name), path)  # noqa: PTH118
                report(inside, "it is a link that leads out")


def _within(path: str, folder: str) -> bool:
    folder = os.path.abspath(folder)  # noqa: PTH100 - not resolved
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


# --- moving -----------------------------------------------------------------------------------


def put_tree(
    source: Path, target: Folder, name: str, *, move: bool, without: Collection[str] = ()
) -> None:
    """Put a tame folder into another one, replacing what has its name there.

    Args:
        source: The folder.
        target: Where it goes to.
        name: Its name there.
        move: Whether it is gone afterwards from where it was.
        without: What in it is not copied. What is moved, is moved as a whole.

    Raises:
        OSError: It cannot be put there; then what was there still is.
    """
    if target.descriptor is None:
        raise OSError(errno.ENOSYS, "folders cannot be moved safely on this platform")
    inside = target.descriptor
    fresh, old = (f".{secrets.token_hex(8)}.{kind}" for kind in ("new", "old"))
    try:
        moved = move and _moved(source, inside, fresh)
        if not moved:
            with _root(source) as folder:
                _copy_folder(folder, inside, fresh, without)
        with suppress(FileNotFoundError):
            os.rename(name, old, src_dir_fd=inside, dst_dir_fd=inside)
        os.rename(fresh, name, src_dir_fd=inside, dst_dir_fd=inside)
    finally:
        for each in (fresh, old):
            _remove_all(inside, each)
    if move and not moved:
        remove_tree(source)


def _moved(source: Path, target: int, name: str) -> bool:
    """Move a folder, if it is on the same file system and its owner allows it."""
    parent = os.open(source.parent, _READ)
    try:
        os.rename(source.name, name, src_dir_fd=parent, dst_dir_fd=target)
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EACCES, errno.EPERM}:
            raise
        return False
    finally:
        os.close(parent)
    return True


def _copy_folder(folder: int, target: int, name: str, without: Collection[str] = ()) -> None:
    os.mkdir(name, _OWNER_FOLDER, dir_fd=target)
    made = os.open(name, _READ | _NOFOLLOW, dir_fd=target)
    try:
        for entry in set(os.listdir(folder)).difference(without):
            found = os.stat(entry, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                with _entered(folder, entry, found) as inner:
                    _copy_folder(inner, made, entry)
            elif stat.S_ISLNK(found.st_mode):
                os.symlink(os.readlink(entry, dir_fd=folder), entry, dir_fd=made)
            elif stat.S_ISREG(found.st_mode):
                _copy_file(folder, made, entry)
        os.fchmod(made, stat.S_IMODE(os.fstat(folder).st_mode) & 0o777 | _OWNER_FOLDER)
    finally:
        os.close(made)


def _copy_file(folder: int, target: int, name: str) -> None:
    descriptor = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
    with open(descriptor, "rb") as reader:  # noqa: PTH123 - a descriptor has no path
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o777 | _OWNER_FILE
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        with open(os.open(name, flags, mode, dir_fd=target), "wb") as writer:  # noqa: PTH123 - the same
            shutil.copyfileobj(reader, writer, 1 << 20)


def _line(path: str, error: OSError) -> str:
    return f"{path}: {error.strerror or type(error).__name__}"
