"""Free a folder of a key, so that it may be kept.

Theory of operation: first the folder is made one that can be dealt with (links out of it,
special files and locked folders go). Then names and files are searched for every form of the
key. Text has it blanked out; whatever else holds it is deleted, and so is what nobody can look
into. At last everything is searched once more: only a folder in which nothing is found is
called clean.
"""

from __future__ import annotations

import errno
import os
import secrets as tokens
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from attrs import define, field, frozen

from rollout._trees import remove_tree, tame_tree
from rollout.backend.harbor.credential_forms import SHORTEST, Forms
from rollout.backend.harbor.credential_search import Limits, Search, rewrite
from rollout.backend.harbor.errors import UnverifiableError

__all__ = ["ScrubReport", "scrub_folder"]

_MOST_LINES = 50
_LONGEST_NAME = 200
_OPEN = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
)
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


@frozen(kw_only=True)
class ScrubReport:
    """What was done to free a folder of a key.

    Attributes:
        cleaned: How many files and names had the key blanked out.
        deleted: What was deleted and why, a line each, without the key.
        verified: Whether the folder is known to be free of it.
        reason: Why it is not.
    """

    cleaned: int = 0
    deleted: list[str] = field(factory=list)
    verified: bool = True
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it in JSON types, with a bounded number of lines."""
        lines = self.deleted[:_MOST_LINES]
        if len(self.deleted) > _MOST_LINES:
            lines = [*lines, f"and {len(self.deleted) - _MOST_LINES} more"]
        found: dict[str, Any] = {
            "cleaned": self.cleaned,
            "deleted": lines,
            "verified": self.verified,
        }
        return found if self.reason is None else found | {"reason": self.reason}


def scrub_folder(
    folder: Path, secrets: Iterable[str | None], *, limits: Limits | None = None
) -> ScrubReport:
    """Free a folder of keys, whatever their form. Blocking.

    Args:
        folder: The folder, which nobody works in any more.
        secrets: The keys. Without one nothing is done.
        limits: How much is looked into; files beyond that are deleted.

    Returns:
        What was done. Only if it is ``verified`` may anything in the folder be kept. A key of
        fewer than four characters cannot be looked for, so there it never is.
    """
    keys = [key for key in secrets if key]
    if not keys:
        return ScrubReport()
    if any(len(key.strip()) < SHORTEST for key in keys):
        return ScrubReport(
            verified=False,
            reason=f"a key of fewer than {SHORTEST} characters cannot be looked for",
        )
    scrub = _Scrub(folder, Search(Forms.of(keys), limits or Limits()))
    try:
        scrub.run()
    except OSError as error:
        scrub.fail(f"the folder cannot be read: {error.strerror or type(error).__name__}")
    return ScrubReport(
        cleaned=scrub.cleaned,
        deleted=scrub.deleted,
        verified=scrub.reason is None,
        reason=scrub.reason,
    )


@define
class _Scrub:
    """One folder on its way to being clean.

    Attributes:
        total: How many bytes of files were looked at.
    """

    folder: Path
    search: Search
    cleaned: int = 0
    deleted: list[str] = field(factory=list)
    reason: str | None = None
    total: int = 0

    def run(self) -> None:
        """Clean the folder, and check that it is clean."""
        if not self.folder.is_dir() or self.folder.is_symlink():
            return
        if not tame_tree(self.folder, self._tell):
            self.fail("something in it cannot be removed")
        for place in _entries(self.folder, bottom_up=True):
            self._attempt(place, self._clean)
        self.search = Search(self.search.forms, self.search.limits)
        self.total = 0
        for place in _entries(self.folder, bottom_up=True):
            self._attempt(place, self._check)

    def fail(self, reason: str) -> None:
        """Take down why the folder cannot be called clean; the first reason stays."""
        self.reason = self.reason or self._said(reason)

    def _said(self, text: str) -> str:
        return (
            os.fsdecode(self.search.forms.blank(os.fsencode(text)))
            .encode("utf-8", "replace")
            .decode()
        )

    def _tell(self, path: str, reason: str) -> None:
        self.deleted.append(self._said(f"{path}: {reason}"))

    def _attempt(self, place: _Place, function: Callable[[_Place], None]) -> None:
        """Do something with an entry; delete it if that does not work."""
        try:
            function(place)
            return
        except UnverifiableError as error:
            reason = str(error)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                reason = "there is no room to write it anew"
            else:
                reason = error.strerror or type(error).__name__
        self._delete(place, reason)

    def _delete(self, place: _Place, reason: str) -> None:
        self._tell(place.shown, reason)
        try:
            if place.is_folder:
                problems = remove_tree(self.folder / place.shown)
                if problems:
                    self.fail(f"{place.shown} cannot be removed")
            else:
                os.unlink(place.name, dir_fd=place.parent)
        except FileNotFoundError:
            return
        except OSError as error:
            self.fail(f"{place.shown} cannot be removed: {error.strerror}")

    # One entry

    def _clean(self, place: _Place) -> None:
        if place.is_link:
            target = os.readlink(place.name, dir_fd=place.parent)
            if self.search.forms.holds(os.fsencode(target)):
                raise UnverifiableError("the key is in where it leads")
        elif not place.is_folder:
            self._clean_file(place)
        self._clean_name(place)

    def _clean_name(self, place: _Place) -> None:
        name = os.fsencode(place.name)
        clean = self.search.forms.blank(name)
        if clean == name:
            return
        stem = os.fsdecode(clean[:_LONGEST_NAME])
        fresh, number = stem, 1
        while _there(fresh, place.parent):
            number += 1
            fresh = f"{stem} ({number})"
        os.rename(place.name, fresh, src_dir_fd=place.parent, dst_dir_fd=place.parent)
        self.cleaned += 1

    def _clean_file(self, place: _Place) -> None:
        with self._opened(place) as file:
            seen = self.search.look(file)
            if not seen.encodings:
                return
            if not self.search.can_blank(file, seen):
                raise UnverifiableError("the key is in it, and it is no text")
            self._write_anew(place, file)
            self.cleaned += 1

    def _write_anew(self, place: _Place, file: IO[bytes]) -> None:
        """Put a clean copy into the place of a file; other names of it keep what they have."""
        found = os.fstat(file.fileno())
        fresh = f".{tokens.token_hex(8)}.clean"
        descriptor = os.open(fresh, _MAKE, 0o600, dir_fd=place.parent)
        try:
            with open(descriptor, "wb") as target:  # noqa: PTH123 - a descriptor has no path
                rewrite(file, target, self.search.forms)
            os.chmod(fresh, stat.S_IMODE(found.st_mode), dir_fd=place.parent)
            os.utime(fresh, ns=(found.st_atime_ns, found.st_mtime_ns), dir_fd=place.parent)
            os.replace(fresh, place.name, src_dir_fd=place.parent, dst_dir_fd=place.parent)
        except BaseException:
            os.unlink(fresh, dir_fd=place.parent)
            raise

    def _check(self, place: _Place) -> None:
        if self.search.forms.holds(os.fsencode(place.name)):
            raise UnverifiableError("the key is still in its name")
        if place.is_link:
            if self.search.forms.holds(os.fsencode(os.readlink(place.name, dir_fd=place.parent))):
                raise UnverifiableError("the key is still in where it leads")
        elif not place.is_folder:
            with self._opened(place) as file:
                if self.search.look(file).encodings:
                    raise UnverifiableError("the key is still in it")

    def _opened(self, place: _Place) -> IO[bytes]:
        descriptor = os.open(place.name, _OPEN, dir_fd=place.parent)
        file = open(descriptor, "rb")  # noqa: PTH123, SIM115 - the caller closes it
        try:
            self._admit(os.fstat(descriptor))
            self._clean_attributes(descriptor)
        except BaseException:
            file.close()
            raise
        return file

    def _admit(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise UnverifiableError("it is a special file")
        if found.st_size > self.search.limits.file_bytes:
            raise UnverifiableError("it is too large to be looked through")
        self.total += found.st_size
        if self.total > self.search.limits.total_bytes:
            raise UnverifiableError("there is too much to look through")

    def _clean_attributes(self, descriptor: int) -> None:
        """Remove extended attributes that users may set, if the key is in them."""
        if not hasattr(os, "listxattr"):
            return
        try:
            names = os.listxattr(descriptor)
        except OSError:  # the file system has none
            return
        for name in names:
            data = os.fsencode(name) + b"\n" + os.getxattr(descriptor, name)
            if self.search.forms.holds(data):
                os.removexattr(descriptor, name)


@frozen
class _Place:
    """An entry of a folder.

    Attributes:
        parent: A descriptor of the folder, open while the entry is dealt with.
        name: The entry's name.
        shown: Its path within the tree.
        is_folder: Whether it is a folder.
        is_link: Whether it is a link.
    """

    parent: int
    name: str
    shown: str
    is_folder: bool
    is_link: bool


def _entries(folder: Path, *, bottom_up: bool) -> Iterator[_Place]:
    """Walk through a tree; what is in a folder comes before the folder."""
    for way, folders, files, parent in os.fwalk(
        folder, topdown=not bottom_up, follow_symlinks=False, onerror=_raise
    ):
        for name in (*files, *folders):
            try:
                mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
            except FileNotFoundError:
                continue
            shown = os.path.relpath(os.path.join(way, name), folder)  # noqa: PTH118 - any bytes
            yield _Place(parent, name, shown, stat.S_ISDIR(mode), stat.S_ISLNK(mode))


def _raise(error: OSError) -> None:
    raise error


def _there(name: str, parent: int) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
