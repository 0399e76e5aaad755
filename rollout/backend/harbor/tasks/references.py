"""Parse a rollout's reference to its task. Pure: nothing is opened here.

A value never gets into an error: a git URL may hold a password. Everything that git or a shell
could take for an option is refused here, before anything is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from rollout.backend.harbor.plan import ResolvedTask
from rollout.errors import InvalidFieldError

__all__ = ["credentials_of", "parse_task", "relative_path", "without_credentials"]

TASK = "metadata.harbor_task"

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_PACKAGE = re.compile(rf"({_NAME}/{_NAME})(?:@([^@]+))?")
_PACKAGE_NAME = re.compile(rf"{_NAME}/{_NAME}")
_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]*")
_COMMIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]*")
_SCP = re.compile(r"git@([A-Za-z0-9][A-Za-z0-9.-]*):(?!-)[^\s:]+")
_HOST = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:_-]*")
_CONTROL = re.compile(r"[\x00-\x20\x7f]")
_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")

_FORMS = (
    'is a path (as {"path": ".."} or beginning with "./"), a package ("org/name" or '
    '"org/name@ref", or {"name", "ref"}) or a task in git ({"git_url", "path", "git_commit_id"})'
)


def parse_task(value: Any, *, allow_local_git: bool = False) -> str | ResolvedTask:
    """Read ``metadata["harbor_task"]``.

    Returns:
        The path of a folder of this machine, relative to the backend's ``tasks_dir`` or absolute;
        or a task of Harbor's registry or of git that has yet to be fetched.

    Raises:
        InvalidFieldError: It has none of the forms; the error names the part that is wrong.
    """
    if isinstance(value, str):
        return _from_text(value)
    if not isinstance(value, Mapping):
        raise InvalidFieldError(TASK, _FORMS)
    if "git_url" in value or "git_commit_id" in value:
        return _git(value, allow_local_git=allow_local_git)
    if "name" in value or "ref" in value:
        _only(value, {"name", "ref"})
        ref = value.get("ref")
        if ref is not None:
            ref = _string(value, "ref", _REF, "is a tag, a revision or a digest")
        return _package(_string(value, "name", _PACKAGE_NAME, "is org/name"), ref)
    if "path" in value:
        _only(value, {"path"})
        return _local(value["path"], f"{TASK}.path")
    raise InvalidFieldError(TASK, _FORMS)


def _from_text(value: str) -> str | ResolvedTask:
    if value.startswith(("./", "/", "../")):
        return _local(value, TASK)
    match = _PACKAGE.fullmatch(value)
    if match is None or ".." in match[1]:
        raise InvalidFieldError(TASK, _FORMS)
    if match[2] is not None and _REF.fullmatch(match[2]) is None:
        raise InvalidFieldError(TASK, "has a ref that is not a tag, revision or digest")
    return _package(match[1], match[2])


def _package(name: str, ref: str | None) -> ResolvedTask:
    if ref is None:
        return ResolvedTask(name=name, source={"name": name})
    return ResolvedTask(name=f"{name}@{ref}", source={"name": name, "ref": ref})


def _local(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise InvalidFieldError(name, "is the path of a folder")
    if value.startswith("/"):
        return value
    return relative_path(value.removeprefix("./"), name)


def relative_path(value: Any, name: str) -> str:
    """Check a relative path that cannot leave its folder.

    Raises:
        InvalidFieldError: It is not a string, empty or absolute, or has ``..``, ``.``, empty
            parts, backslashes, or control characters.
    """
    if not isinstance(value, str):
        raise InvalidFieldError(name, "is a string")
    parts = value.split("/")
    if (
        not value
        or "\\" in value
        or any(ord(letter) < ord(" ") for letter in value)
        or any(part in {"", ".", ".."} for part in parts)
        or parts[0].startswith("-")
    ):
        raise InvalidFieldError(name, "is a relative path with '/', without '.' and '..'")
    return value


def _git(value: Mapping[Any, Any], *, allow_local_git: bool) -> ResolvedTask:
    _only(value, {"git_url", "git_commit_id", "path"})
    if "path" not in value:
        raise InvalidFieldError(f"{TASK}.path", "says where in the repository the task is")
    url = _git_url(value.get("git_url"), allow_local_git=allow_local_git)
    path = relative_path(value["path"], f"{TASK}.path")
    source = {"git_url": url, "path": path}
    commit = ""
    if value.get("git_commit_id") is not None:
        source["git_commit_id"] = _string(
            value, "git_commit_id", _COMMIT, "is a commit, a branch or a tag"
        )
        commit = f"@{source['git_commit_id']}"
    return ResolvedTask(name=f"{without_credentials(url)}{commit}:{path}", source=source)


def _git_url(url: Any, *, allow_local_git: bool) -> str:
    name = f"{TASK}.git_url"
    wanted = "is https://.., ssh://.. or git@host:path"
    if not isinstance(url, str) or not url or url.startswith("-") or _CONTROL.search(url):
        raise InvalidFieldError(name, wanted)
    if _SCP.fullmatch(url):
        return url
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError:
        raise InvalidFieldError(name, wanted) from None
    if parts.scheme in {"https", "ssh"} and url.startswith(f"{parts.scheme}://"):
        user = parts.username or ""
        if _HOST.fullmatch(host) is None or user.startswith("-") or not parts.path.strip("/"):
            raise InvalidFieldError(name, wanted)
        return url
    if parts.scheme == "file" or url.startswith("/"):
        if allow_local_git:
            return url
        raise InvalidFieldError(name, f"{wanted}; this backend takes no repository of its machine")
    raise InvalidFieldError(name, wanted)


def _only(value: Mapping[Any, Any], known: set[str]) -> None:
    if not set(value) <= known:
        raise InvalidFieldError(TASK, f"has other fields than {', '.join(sorted(known))}")


def _string(value: Mapping[Any, Any], key: str, pattern: re.Pattern[str], reason: str) -> str:
    text = value.get(key)
    if not isinstance(text, str) or pattern.fullmatch(text) is None or ".." in text:
        raise InvalidFieldError(f"{TASK}.{key}", reason)
    return text


def without_credentials(url: str) -> str:
    """Return a git URL for people: without user, password, query and fragment."""
    return re.split(r"[?#]", _USERINFO.sub("", url), maxsplit=1)[0]


def credentials_of(url: str) -> list[str]:
    """Return the parts of a git URL that may not be shown, as they stand and decoded.

    A user name counts where it may be a token: over HTTPS.
    """
    match = _USERINFO.search(url)
    userinfo = "" if match is None else match[0][:-1]
    user, _, password = userinfo.partition(":")
    _, _, query = url.partition("?")
    parts = [userinfo, password, user if url.startswith("https:") else "", query]
    return [text for part in parts if part for text in (part, unquote(part))]
