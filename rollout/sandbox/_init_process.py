"""The first process of a sandbox, and the namespaces that live and die with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from attrs import frozen

from rollout.sandbox._root import HOSTNAME, Mount
from rollout.sandbox._subprocesses import END_SEC, PATH, Process, finish, kill_and_wait, spawn
from rollout.sandbox.errors import NamespaceError, NamespaceStartError

__all__ = ["InitProcess"]

NAMESPACES = ("mnt", "pid", "ipc", "uts", "net", "user")


@frozen
class InitProcess:
    """The running first process.

    Attributes:
        unshare: The program that waits for the first process.
        pid: The first process, as the host counts.
        pidfd: A descriptor of it.
        root: A descriptor of its root, which is not that of its mount namespace.
        namespaces: Namespace to open file. They keep the namespaces from being mixed up with
            those of a later process of the same number.
    """

    unshare: Process
    pid: int
    pidfd: int
    root: int
    namespaces: dict[str, int]

    @classmethod
    async def start(
        cls, folder: Path, mounts: Sequence[Mount], *, network: bool, shared_bytes: int
    ) -> InitProcess:
        """Set up the namespaces and wait until they are ready.

        Args:
            folder: The sandbox's, with ``root``, see `prepare_root`, and an empty ``outer``.
            mounts: What is mounted in the root.
            network: Whether it shares the host's network.
            shared_bytes: How much shared memory there is.

        Raises:
            NamespaceStartError: If that fails. No process is left, as after a cancellation.
            OSError: The same, for other reasons.
        """
        plan = {
            "root": str(folder / "root"),
            "outer": str(folder / "outer"),
            "mounts": mounts,
            "hostname": HOSTNAME,
            "loopback": not network,
            "shared": shared_bytes,
        }
        own = {"mnt", "pid", "ipc", "uts"}
        options = ["--mount", "--pid", "--ipc", "--uts", "--propagation", "private"]
        if os.geteuid() != 0:
            own.add("user")
            options += ["--user", "--map-root-user"]
        if not network:
            own.add("net")
            options += ["--net"]
        setup = Path(__file__).with_name("_setup.py")
        with tempfile.TemporaryFile(dir=folder) as errors:
            unshare = await spawn(
                *["unshare", *options, "--fork", "--kill-child=SIGKILL", "--"],
                *[sys.executable, "-I", "-S", str(setup), json.dumps(plan)],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={"PATH": PATH, "LANG": "C.UTF-8"},
                cwd="/",
                umask=0o022,
            )
            opened: dict[str, int] = {}
            try:
                pid = await _line(unshare)
                if await _line(unshare) != "ready":
                    # Ended for sure, so that the reason is written.
                    await kill_and_wait(unshare)
                    raise _failure(unshare, errors)  # noqa: TRY301 - cleaned up like the rest
                pidfd = opened["pidfd"] = os.pidfd_open(int(pid))
                root = opened["root"] = os.open(f"/proc/{pid}/root", os.O_DIRECTORY | os.O_CLOEXEC)
                namespaces = {}
                for name in NAMESPACES:
                    if name in own:
                        opened[name] = os.open(f"/proc/{pid}/ns/{name}", os.O_CLOEXEC)
                        namespaces[name] = opened[name]
            except BaseException:
                for descriptor in opened.values():
                    os.close(descriptor)
                await finish(kill_and_wait(unshare))
                raise
        return cls(unshare, int(pid), pidfd, root, namespaces)

    @property
    def has_ended(self) -> bool:
        """Whether the first process is gone, and with it all others."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def pid_namespace(self) -> int:
        """Number of the pid namespace."""
        return os.fstat(self.namespaces["pid"]).st_ino

    def enter(self) -> list[str]:
        """Return the beginning of a command line that runs the rest of it inside."""
        own = f"/proc/{os.getpid()}/fd"
        files = [
            f"--{'mount' if name == 'mnt' else name}={own}/{descriptor}"
            for name, descriptor in self.namespaces.items()
        ]
        files += [f"--root={own}/{self.root}", f"--wd={own}/{self.root}"]
        if "user" in self.namespaces:
            files.append("--preserve-credentials")
        return ["nsenter", *files, "--"]

    def open_null(self) -> IO[bytes]:
        """Open the `/dev/null` inside, whose attributes nobody can change, unlike the host's."""
        return os.fdopen(os.open("dev/null", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.root), "rb")

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
                await self.unshare.wait()
        except TimeoutError:
            raise NamespaceError(
                f"processes of the sandbox {self.pid} were killed but do not end (a disk hangs?)"
            ) from None

    def close(self) -> None:
        """Close all descriptors. The mounts vanish with the last of them."""
        for descriptor in (self.pidfd, self.root, *self.namespaces.values()):
            os.close(descriptor)
        if self.unshare.stdin is not None:
            self.unshare.stdin.close()


async def _line(process: Process) -> str:
    assert process.stdout is not None  # noqa: S101 - it was asked for
    return (await process.stdout.readline()).decode().strip()


def _failure(process: Process, errors: IO[bytes]) -> NamespaceStartError:
    """Return an error with what `unshare` or the setup wrote, and what to do about it."""
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
