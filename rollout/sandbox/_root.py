"""The folder that becomes the root of a sandbox, and what of the host is shown in it.

Shown read-only: the system's programs (`/usr`, `/opt`, and `/bin`, `/lib` and the like), an
allowlist of `/etc`, and what the user names. Everything else is the sandbox's own: `/tmp`, `/var`,
`/home`, `/root`, `/run`. What is not named here does not exist inside, least of all the host's home
folders and keys.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from attrs import Factory, field, frozen

__all__ = ["HOSTNAME", "Bind", "Mount", "prepare_root"]

HOSTNAME = "sandbox"

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Links into `/usr` on most systems, folders of their own on older ones."""

SHOWN = ("usr", "opt")

FOLDERS = {
    "dev": 0o755,
    "etc": 0o755,
    "home": 0o755,
    "mnt": 0o755,
    "proc": 0o555,
    "root": 0o700,
    "run": 0o755,
    "run/lock": 0o1777,
    "srv": 0o755,
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

OWN = frozenset({"/home", "/root", "/run", "/tmp", "/var"})  # noqa: S108
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

Mount = tuple[str, str, bool]
"""Path on the host, path inside, whether the sandbox may write to it."""


def _normalised(path: str) -> str:
    """Return an absolute path without repeated slashes; another one as it is."""
    return "/" + str(PurePosixPath(path)).lstrip("/") if path.startswith("/") else path


@frozen
class Bind:
    """A folder or file of the host that is shown inside.

    Attributes:
        source: Absolute path on the host. A link is shown as what it leads to.
        target: Absolute path inside; by default the same one.
        writable: Whether the sandbox may change it.

    Raises:
        ValueError: If a path is relative, has ``..`` in it, does not exist, or would hide what a
            sandbox needs.
    """

    source: str = field(converter=str)
    target: str = field(
        default=Factory(lambda self: self.source, takes_self=True), converter=_normalised
    )
    writable: bool = field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        for path in (self.source, self.target):
            if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
                raise ValueError(f"not an absolute path without '..': {path!r}")
        if not Path(self.source).exists():
            raise ValueError(f"does not exist: {self.source!r}")
        closed = self.target in OWN or self.target.split("/")[1] in CLOSED
        if closed and not self.is_shown_anyway:
            raise ValueError(f"this place is the sandbox's own: {self.target!r}")

    @property
    def is_shown_anyway(self) -> bool:
        """Whether every sandbox shows it, with the host's programs."""
        in_shown = self.target.split("/")[1] in SHOWN
        return in_shown and not self.writable and os.path.realpath(self.source) == self.target


def prepare_root(root: Path, binds: Iterable[Bind] = ()) -> list[Mount]:
    """Build the folder that becomes the root.

    Blocks; call it in a thread.

    Args:
        root: An empty folder.
        binds: What else of the host is shown.

    Returns:
        What is to be mounted in it, in this order.
    """
    for name, mode in FOLDERS.items():
        folder = root / name
        folder.mkdir()
        folder.chmod(mode)
    # Relative, so that what is shown below them is made in this root.
    (root / "var/run").symlink_to("../run")
    (root / "var/lock").symlink_to("../run/lock")
    read_only = [f"/{name}" for name in SHOWN if Path("/", name).is_dir()]
    for name in SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            (root / name).symlink_to(path.readlink())
        elif path.is_dir():
            read_only.append(str(path))
    mounts = [(path, path, False) for path in read_only]
    mounts += _fill_etc(root / "etc")
    mounts += [
        (os.path.realpath(bind.source), bind.target, bind.writable)
        for bind in binds
        if not bind.is_shown_anyway
    ]
    for source, target, _ in mounts:
        place = root / target.lstrip("/")
        if Path(source).is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch(mode=0o600)
    # At last, over itself: what is inside /etc was put there on purpose, and stays.
    mounts.append((str(root / "etc"), "/etc", False))
    return mounts


def _fill_etc(etc: Path) -> list[Mount]:
    for name in ETC_FILES:
        source = Path("/etc", name)
        if source.is_file():
            # The content counts: resolv.conf and localtime are often links out of /etc.
            shutil.copyfile(source, etc / name)
            (etc / name).chmod(0o644)
    if not (etc / "passwd").exists():
        (etc / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (etc / "hostname").write_text(f"{HOSTNAME}\n")
    hosts = Path("/etc/hosts")
    known = hosts.read_text(errors="replace") if hosts.is_file() else "127.0.0.1 localhost\n"
    (etc / "hosts").write_text(f"{known.rstrip()}\n127.0.0.1 {HOSTNAME}\n")
    (etc / "mtab").symlink_to("/proc/self/mounts")
    return [
        (os.path.realpath(f"/etc/{name}"), f"/etc/{name}", False)
        for name in ETC_FOLDERS
        if Path("/etc", name).is_dir()
    ]
