"""Users as a sandbox knows them: read from the copy of the host's list that it was given."""

from __future__ import annotations

from pathlib import Path

from rollout.sandbox.errors import NamespaceError
from rollout.sandbox.sandbox import User

__all__ = ["find_user"]

_PASSWD_FIELDS = 7
_GROUP_FIELDS = 4


def find_user(root: Path, wanted: str | int | None) -> User:
    """Find a user by name or number; root if ``None``.

    A number that is not in the list is a user without a name, whose home is `/tmp`.

    Args:
        root: Root folder of the sandbox. Its `/etc` cannot be changed from inside.
        wanted: Name, number, or number as text.

    Raises:
        NamespaceError: If there is no user of this name.
    """
    if wanted is None:
        return User()
    text = str(wanted)
    for name, _, uid, gid, _, home, _ in _lines(root / "etc/passwd", _PASSWD_FIELDS):
        if text in {name, uid}:
            groups = (
                int(number)
                for _, _, number, members in _lines(root / "etc/group", _GROUP_FIELDS)
                if name in members.split(",")
            )
            return User(
                uid=int(uid),
                gid=int(gid),
                groups=tuple(sorted({int(gid), *groups})) if uid != "0" else (),
                name=name,
                home=home if home.startswith("/") else "/",
            )
    if text.isascii() and text.isdecimal() and int(text) < 2**32 - 1:
        return User(uid=int(text), gid=int(text), name=text, home="/tmp")  # noqa: S108
    raise NamespaceError(f"there is no user {text!r} inside; there are those of the host's passwd")


def _lines(file: Path, fields: int) -> list[list[str]]:
    if not file.is_file():
        return []
    rows = [line.split(":") for line in file.read_text(errors="replace").splitlines()]
    return [row for row in rows if len(row) == fields and row[2].isdecimal()]
