"""Users inside a sandbox, which are those of the host."""

from __future__ import annotations

import os
import pwd

from attrs import frozen

from rollout.sandbox.errors import NamespaceError

__all__ = ["User", "find_user"]


@frozen(kw_only=True)
class User:
    """The user that a command runs as."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    name: str = "root"
    home: str = "/root"


def find_user(wanted: str | int | None) -> User:
    """Find a user by name or number; root if ``None``.

    A number that the host has no user for is a user without a name, whose home is `/tmp`.

    Args:
        wanted: Name, number, or number as text.

    Raises:
        NamespaceError: If there is no user of this name.
    """
    text = "root" if wanted is None else str(wanted)
    if text in {"root", "0"}:
        return User()
    is_number = text.isascii() and text.isdecimal() and int(text) < 2**32 - 1
    try:
        entry = pwd.getpwuid(int(text)) if is_number else pwd.getpwnam(text)
    except (KeyError, ValueError):
        if is_number:
            return User(uid=int(text), gid=int(text), name=text, home="/tmp")  # noqa: S108
        raise NamespaceError(
            f"there is no user {text!r} inside: name one of the host's passwd, or use a number"
        ) from None
    return User(
        uid=entry.pw_uid,
        gid=entry.pw_gid,
        groups=tuple(sorted({entry.pw_gid, *os.getgrouplist(entry.pw_name, entry.pw_gid)})),
        name=entry.pw_name,
        home=entry.pw_dir if entry.pw_dir.startswith("/") else "/",
    )
