"""The folder that becomes the root of a sandbox, and what of the host is shown in it.

Shown read-only: the system's programs (`/usr`, `/opt`, and `/bin`, `/lib` and the like), an
allowlist of `/etc`, and the folders that the user names. Everything else is the sandbox's own:
Harbor's paths, `/tmp`, `/var`, `/home`, `/root`, `/run`. What is not named here does not exist
inside, least of all the host's home folders and keys.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from attrs import frozen

__all__ = ["Bind", "check_bind", "prepare_root"]

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Links into `/usr` on most systems, folders of their own on older ones."""

SHOWN = ("usr", "opt")

FOLDERS = {
    "app": 0o755,
    "dev": 0o755,
    "etc": 0o755,
    "home": 0o755,
    "logs": 0o755,
    "logs/agent": 0o777,
    "logs/artifacts": 0o777,
    "logs/verifier": 0o777,
    "mnt": 0o755,
    "proc": 0o555,
    "root": 0o700,
    "run": 0o755,
    "run/lock": 0o1777,
    "solution": 0o755,
    "srv": 0o755,
    "tests": 0o755,
    "tmp": 0o1777,
    "var": 0o755,
    "var/cache": 0o755,
    "var/lib": 0o755,
    "var/log": 0o755,
    "var/spool": 0o755,
    "var/tmp": 0o1777,
}
"""The sandbox's own folders with their modes."""

CLOSED = frozenset({"", "dev", "etc", "proc", "sys", *SHOWN, *SYSTEM})
"""Top-level folders in which nothing more can be shown."""

OWN = frozenset({"/home", "/logs", "/root", "/run", "/tmp", "/var"})  # noqa: S108
"""Folders in which something may be shown, but which are not replaced as a whole."""

ETC_FILES = (
    "bash.bashrc", "ca-certificates.conf", "debian_version", "ethertypes",
    "gai.conf", "group", "host.conf", "inputrc", "ld.so.cache", "ld.so.conf", "locale.alias",
    "locale.conf", "localtime", "login.defs", "magic", "magic.mime", "manpath.config",
    "mime.types", "networks", "nsswitch.conf", "os-release", "passwd", "profile", "protocols",
    "resolv.conf", "rpc", "services", "shells", "timezone", "vimrc",
)  # fmt: skip
"""Copied where they exist; none of them holds a secret, as `environment` does with its proxies."""

ETC_FOLDERS = (
    "alternatives", "ca-certificates", "crypto-policies", "fonts", "groff", "ld.so.conf.d", "perl",
    "pki/ca-trust", "pki/tls/certs", "profile.d", "python3", "ssl/certs", "terminfo", "vim", "xml",
)  # fmt: skip
"""Shown read-only where they exist."""


@frozen(kw_only=True)
class Bind:
    """A folder or file of the host that is shown inside.

    Attributes:
        source: Absolute path on the host.
        target: Absolute path inside.
        writable: Whether the sandbox may change it.
    """

    source: str
    target: str
    writable: bool = False


def check_bind(source: str | Path, target: str | None = None, *, writable: bool = False) -> Bind:
    """Take in a folder or file to show, at its own path unless another is named.

    Raises:
        ValueError: If a path is relative, has `..` in it, does not exist, or would hide what a
            sandbox needs.
    """
    inside = str(source) if target is None else target
    for path in (str(source), inside):
        parts = PurePosixPath(path)
        if not parts.is_absolute() or ".." in parts.parts or "\0" in path:
            raise ValueError(f"not an absolute path without '..': {path!r}")
    if not Path(source).exists():
        raise ValueError(f"does not exist: {str(source)!r}")
    inside = "/" + str(PurePosixPath(inside)).lstrip("/")
    bind = Bind(source=os.path.realpath(source), target=inside, writable=writable)
    first = inside.split("/")[1]
    if not _is_shown_anyway(bind) and (inside in OWN or first in CLOSED):
        raise ValueError(f"this place is the sandbox's own: {inside!r}")
    return bind


def _is_shown_anyway(bind: Bind) -> bool:
    inside = bind.target.split("/")[1] in SHOWN
    return inside and not bind.writable and bind.source == bind.target


def prepare_root(root: Path, hostname: str, extra: Iterable[Bind] = ()) -> list[Bind]:
    """Build the folder that becomes the root.

    Blocks; call it in a thread.

    Args:
        root: An empty folder.
        hostname: What the sandbox calls itself.
        extra: More to show, see `check_bind`.

    Returns:
        What is to be mounted in it, in this order.
    """
    binds: list[Bind] = []
    for name, mode in FOLDERS.items():
        folder = root / name
        folder.mkdir()
        folder.chmod(mode)
    (root / "var/run").symlink_to("/run")
    (root / "var/lock").symlink_to("/run/lock")
    for name in SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            (root / name).symlink_to(path.readlink())
        elif path.is_dir():
            binds.append(Bind(source=str(path), target=str(path)))
    shown = [f"/{name}" for name in SHOWN if Path("/", name).is_dir()]
    binds += [Bind(source=path, target=path) for path in shown]
    binds += _fill_etc(root / "etc", hostname)
    binds += [each for each in extra if not _is_shown_anyway(each)]
    for each in binds:
        make_target(root, each)
    # At last, over itself: what is inside /etc was put there on purpose, and stays.
    binds.append(Bind(source=str(root / "etc"), target="/etc"))
    return binds


def _fill_etc(etc: Path, hostname: str) -> list[Bind]:
    for name in ETC_FILES:
        source = Path("/etc", name)
        if source.is_file():
            # The content counts: resolv.conf and localtime are often links out of /etc.
            shutil.copyfile(source, etc / name)
            (etc / name).chmod(0o644)
    if not (etc / "passwd").exists():
        (etc / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (etc / "hostname").write_text(f"{hostname}\n")
    hosts = Path("/etc/hosts")
    known = hosts.read_text(errors="replace") if hosts.is_file() else "127.0.0.1 localhost\n"
    (etc / "hosts").write_text(f"{known.rstrip()}\n127.0.0.1 {hostname}\n")
    (etc / "mtab").symlink_to("/proc/self/mounts")
    return [
        Bind(source=os.path.realpath(f"/etc/{name}"), target=f"/etc/{name}")
        for name in ETC_FOLDERS
        if Path("/etc", name).is_dir()
    ]


def make_target(root: Path, bind: Bind) -> None:
    """Make the place where something is mounted, of the kind that its source is."""
    target = root / bind.target.lstrip("/")
    if Path(bind.source).is_dir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        target.touch(mode=stat.S_IRUSR | stat.S_IWUSR)
