"""The first process of a sandbox, and the namespaces that live and die with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from attrs import frozen

from rollout.sandbox.errors import NamespaceError, NamespaceStartError
from rollout.sandbox.layout import Bind
from rollout.sandbox.processes import has_ended
from rollout.sandbox.tasks import finish, kill_and_wait

__all__ = ["END_SEC", "PATH", "Holder", "find_tools"]

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs are looked for, inside and outside."""

OPTIONAL = ("choom",)

NAMESPACES = ("mnt", "pid", "ipc", "uts", "net", "user")

TOOLS = ("unshare", "nsenter", "setpriv", "env", "cat", "bash", "tar", "rm", "chmod", "prlimit")

END_SEC = 30.0
"""How long killed processes may take to go away. They do at once, unless a disk hangs."""


def find_tools() -> dict[str, str]:
    """Absolute paths of the system's programs that a sandbox needs, and of those it can do without.

    Raises:
        NamespaceStartError: If this is not Linux, or one is missing.
    """
    if sys.platform != "linux":
        raise NamespaceStartError(f"namespaces exist on Linux only, not on {sys.platform}")
    found = {name: shutil.which(name, path=PATH) for name in TOOLS}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise NamespaceStartError(
            f"missing in {PATH}: {', '.join(missing)}. Install util-linux (unshare, nsenter, "
            "setpriv, prlimit), coreutils, tar and bash."
        )
    found |= {name: shutil.which(name, path=PATH) for name in OPTIONAL}
    return {name: path for name, path in found.items() if path is not None}


@frozen
class Holder:
    """The running first process.

    Attributes:
        process: `unshare`, which waits for the first process.
        pid: The first process, as the host counts.
        pidfd: A descriptor of it.
        namespaces: Namespace to open file. They keep the namespaces from being mixed up with
            those of a later process of the same number.
        root: A descriptor of its root, which is not that of its mount namespace.
    """

    process: asyncio.subprocess.Process
    pid: int
    pidfd: int
    namespaces: dict[str, int]
    root: int

    @classmethod
    async def start(
        cls,
        root: Path,
        outer: Path,
        binds: Sequence[Bind],
        *,
        hostname: str,
        network: bool,
        shared_bytes: int,
        tools: dict[str, str],
        interpreter: str,
    ) -> Holder:
        """Set up the namespaces and wait until they are ready.

        Args:
            root: The folder that becomes the root, see `prepare_root`.
            outer: An empty folder, beside it.
            binds: What is mounted in it.
            hostname: What the sandbox calls itself.
            network: Whether it shares the host's network.
            shared_bytes: How much shared memory there is.
            tools: See `find_tools`.
            interpreter: The Python that does it.

        Raises:
            NamespaceStartError: If that fails. No process is left, as after a cancellation.
        """
        plan = {
            "root": str(root),
            "outer": str(outer),
            "binds": [[each.source, each.target, each.writable] for each in binds],
            "hostname": hostname,
            "loopback": not network,
            "shared": shared_bytes,
            "wait": [tools["cat"]],
        }
        isolation = ["--mount", "--pid", "--ipc", "--uts", "--propagation", "private"]
        if os.geteuid() != 0:
            isolation += ["--user", "--map-root-user"]
        if not network:
            isolation += ["--net"]
        setup = Path(__file__).with_name("setup.py")
        argv = [
            tools["unshare"], *isolation, "--fork", "--kill-child=SIGKILL", "--",
            interpreter, "-I", "-S", str(setup), json.dumps(plan),
        ]  # fmt: skip
        with tempfile.TemporaryFile(dir=root.parent) as errors:
            process = await finish(
                asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    env={"PATH": PATH, "LANG": "C.UTF-8"},
                    cwd="/",
                    umask=0o022,
                    start_new_session=True,
                ),
                abandon=lambda started: _abort(started, None),
            )
            pidfd: int | None = None
            try:
                word, _, number = (await _report(process)).partition(" ")
                if word == "pid":
                    # It may have failed and gone by now; the reason is told below.
                    with contextlib.suppress(ProcessLookupError):
                        pidfd = os.pidfd_open(int(number))
                if pidfd is None or await _report(process) != "ready":
                    # Ended for sure, so that the reason is written.
                    await kill_and_wait(process)
                    raise _failure(process, errors)  # noqa: TRY301 - cleaned up like the rest
                namespaces, inside = _open(int(number), network=network)
                return cls(process, int(number), pidfd, namespaces, inside)
            except BaseException:
                await finish(_abort(process, pidfd))
                raise

    @property
    def has_ended(self) -> bool:
        """Whether the first process is gone, and with it all others."""
        return has_ended(self.pidfd)

    @property
    def pid_namespace(self) -> int:
        """Number of the pid namespace."""
        return os.fstat(self.namespaces["pid"]).st_ino

    def enter(self, nsenter: str) -> list[str]:
        """The command that runs another one inside."""
        files = [
            f"--{'mount' if name == 'mnt' else name}=/proc/{os.getpid()}/fd/{descriptor}"
            for name, descriptor in self.namespaces.items()
        ]
        root = f"/proc/{os.getpid()}/fd/{self.root}"
        files += [f"--root={root}", f"--wd={root}"]
        if "user" in self.namespaces:
            files.append("--preserve-credentials")
        return [nsenter, *files, "--"]

    def open_null(self) -> int:
        """Open the `/dev/null` inside, whose attributes nobody can change, unlike the host's."""
        return os.open("dev/null", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.root)

    async def end(self) -> None:
        """Kill all processes inside and wait until they are gone.

        Raises:
            NamespaceError: If they do not go away.
        """
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        try:
            async with asyncio.timeout(END_SEC):
                # `unshare` ends after its child, which ends after everything inside.
                await self.process.wait()
        except TimeoutError:
            raise NamespaceError(
                f"processes of the sandbox {self.pid} were killed but do not end (a disk hangs?)"
            ) from None

    def close(self) -> None:
        """Let go of all descriptors. The mounts vanish with the last of them."""
        for descriptor in (self.pidfd, self.root, *self.namespaces.values()):
            os.close(descriptor)
        if self.process.stdin is not None:
            self.process.stdin.close()


async def _report(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None  # noqa: S101 - it was asked for
    return (await process.stdout.readline()).decode().strip()


def _open(pid: int, *, network: bool) -> tuple[dict[str, int], int]:
    """Open the namespaces that a process does not share with this one, and its root."""
    shared = {name for name, own in (("net", network), ("user", os.geteuid() == 0)) if own}
    opened: dict[str, int] = {}
    try:
        for name in NAMESPACES:
            if name not in shared:
                opened[name] = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        root = os.open(f"/proc/{pid}/root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        for descriptor in opened.values():
            os.close(descriptor)
        raise NamespaceStartError(f"the namespaces cannot be opened: {error}") from error
    return opened, root


async def _abort(process: asyncio.subprocess.Process, pidfd: int | None) -> None:
    try:
        if pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        await kill_and_wait(process)
        # The first process holds the other end, so it is gone when this ends.
        assert process.stdout is not None  # noqa: S101 - it was asked for
        await process.stdout.read()
    finally:
        if pidfd is not None:
            os.close(pidfd)


def _failure(process: asyncio.subprocess.Process, errors: IO[bytes]) -> NamespaceStartError:
    """What `unshare` or the setup said, and what to do about it."""
    errors.seek(0)
    said = errors.read(10_000).decode(errors="replace").strip()
    text = f"the namespaces could not be set up: {said or f'status {process.returncode}'}."
    if os.geteuid() == 0:
        return NamespaceStartError(
            f"{text} This user is root: is CAP_SYS_ADMIN withheld (a container)?"
        )
    return NamespaceStartError(
        f"{text} This user is not root: user namespaces must be allowed (sysctl "
        "user.max_user_namespaces above 0; where they exist, kernel.unprivileged_userns_clone=1 "
        "and kernel.apparmor_restrict_unprivileged_userns=0), and in a container /proc must not "
        "be masked."
    )
