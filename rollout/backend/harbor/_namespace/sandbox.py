"""A sandbox of Linux namespaces: one first process, its root folder, and commands inside.

    `unshare` ── setup.py, becomes `cat`      the first process; its end is the end of all others
    `nsenter` ── `setpriv` ── `bash -c ...`   one chain for each command

The first process waits on a pipe that only this process holds open. Killing it, closing the loop,
or the death of this process all have the same effect: the kernel kills everything in the pid
namespace, and the mounts vanish with the mount namespace. What is left is the folder.

asyncio code, since Harbor calls it. Every coroutine may be cancelled at any await.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from attrs import frozen

from rollout.backend.harbor._namespace.failures import (
    CommandTimeoutError,
    NamespaceError,
    NamespaceStartError,
)
from rollout.backend.harbor._namespace.layout import Bind, prepare_root
from rollout.backend.harbor._namespace.processes import (
    MARK,
    find_marked,
    has_ended,
    kill_by_descriptor,
)
from rollout.backend.harbor._namespace.tasks import finish

__all__ = ["PATH", "CommandResult", "Sandbox", "User"]

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

CAPABILITIES = (
    "chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap",
    "net_bind_service", "sys_chroot", "audit_write", "setfcap",
)  # fmt: skip
"""What root can do inside; the same as in a Docker container, without raw sockets and devices."""

NAMESPACES = ("mnt", "pid", "ipc", "uts", "net", "user")

LOADER = ("LD_", "GLIBC_", "GCONV_PATH", "LOCPATH", "NLSPATH", "MALLOC_")
"""Variables that act on programs as they load. They must not act on those that run outside."""

TOOLS = ("unshare", "nsenter", "setpriv", "env", "cat", "bash", "tar", "rm", "chmod", "prlimit")

END_SEC = 30.0
"""How long killed processes may take to go away. They do at once, unless a disk hangs."""


@frozen(kw_only=True)
class User:
    """Whom a command runs as, in numbers."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    name: str = "root"
    home: str = "/root"


@frozen(kw_only=True)
class CommandResult:
    """How a command ended.

    Attributes:
        stdout: What it wrote, decoded with replacement; the middle is cut out of long output.
        stderr: The same.
        return_code: Its exit status; 128 and the signal's number for one that was killed.
    """

    stdout: str
    stderr: str
    return_code: int


@frozen
class _Holder:
    """The running first process.

    Attributes:
        process: `unshare`, which waits for the first process.
        pid: The first process, as the host counts.
        pidfd: A descriptor of it.
        descriptors: Namespace to open file. They keep the namespaces from being mixed up with
            those of a later process of the same number.
        pid_namespace: Number of its pid namespace.
    """

    process: asyncio.subprocess.Process
    pid: int
    pidfd: int
    descriptors: dict[str, int]
    pid_namespace: int

    def close(self) -> None:
        for descriptor in (self.pidfd, *self.descriptors.values()):
            os.close(descriptor)


def find_tools() -> dict[str, str]:
    """Absolute paths of the system's programs that a sandbox needs.

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
    return {name: path for name, path in found.items() if path is not None}


class Sandbox:
    """A private root with its own processes, on this machine.

    Args:
        parent: Where the folder of the sandbox is made; the system's temporary folder if ``None``.
        binds: What else of the host is shown inside.
        network: Whether it shares the host's network. If not, it has a loopback of its own.
        interpreter: The Python that sets up the namespaces; this one if ``None``.
        max_output_bytes: How much of a command's output is kept, of each stream.
    """

    def __init__(
        self,
        *,
        parent: Path | None = None,
        binds: Iterable[Bind] = (),
        network: bool = True,
        interpreter: str | None = None,
        max_output_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        self.folder: Path | None = None
        self.hostname = "sandbox"
        self.is_privileged = os.geteuid() == 0
        self.max_output_bytes = max_output_bytes
        self._parent = parent
        self._binds = tuple(binds)
        self._network = network
        self._interpreter = interpreter or sys.executable
        self._tools: dict[str, str] = {}
        self._holder: _Holder | None = None
        self._commands: set[asyncio.subprocess.Process] = set()
        self._starting: asyncio.Task[Any] | None = None
        self._stopped = False

    def __repr__(self) -> str:
        state = "running" if self.is_running else "stopped" if self._stopped else "new"
        return f"<Sandbox {state} {self.folder}>"

    @property
    def root(self) -> Path:
        """The root as the host sees it. Never follow a path in it from outside."""
        if self.folder is None:
            raise NamespaceError("the sandbox has no folder: it is not started, or removed")
        return self.folder / "root"

    @property
    def is_running(self) -> bool:
        """Whether commands can run inside."""
        return self._holder is not None and not has_ended(self._holder.pidfd)

    # Start

    async def start(self) -> None:
        """Make the folder, set up the namespaces, and wait until they are ready.

        Raises:
            NamespaceStartError: If that fails. Nothing is left behind, as after a cancellation.
        """
        if self._stopped or self.folder is not None:
            raise NamespaceStartError("a sandbox starts once")
        self._tools = find_tools()
        self._starting = asyncio.current_task()
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="rollout-sandbox-", dir=self._parent))
            (self.root).mkdir(mode=0o755)
            (self.folder / "io").mkdir(mode=0o700)
            binds = await finish(
                asyncio.to_thread(prepare_root, self.root, self.hostname, self._binds)
            )
            await self._hold(binds)
        except OSError as error:
            await finish(self._end(remove=True))
            raise NamespaceStartError(f"the sandbox could not be set up: {error}") from error
        except BaseException:
            await finish(self._end(remove=True))
            raise
        finally:
            self._starting = None

    async def _hold(self, binds: Sequence[Bind]) -> None:
        plan = {
            "root": str(self.root),
            "binds": [[each.source, each.target, each.writable] for each in binds],
            "hostname": self.hostname,
            "loopback": not self._network,
            "wait": [self._tools["cat"]],
        }
        isolation = ["--mount", "--pid", "--ipc", "--uts", "--propagation", "private"]
        if not self.is_privileged:
            isolation += ["--user", "--map-root-user"]
        if not self._network:
            isolation += ["--net"]
        setup = Path(__file__).with_name("setup.py")
        argv = [
            self._tools["unshare"], *isolation, "--fork", "--kill-child=SIGKILL", "--",
            self._interpreter, "-I", "-S", str(setup), json.dumps(plan),
        ]  # fmt: skip
        errors = self.open_file()
        with errors:
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
                abandon=_kill_and_wait,
            )
            pidfd: int | None = None
            try:
                pid, pidfd = await self._first_report(process)
                if await self._report(process) != "ready":
                    raise NamespaceStartError(self._explain(process, errors))
                self._holder = self._open(process, pid, pidfd)
            except BaseException:
                await finish(self._abort(process, pidfd))
                raise

    async def _report(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None  # noqa: S101 - it was asked for
        return (await process.stdout.readline()).decode().strip()

    async def _first_report(self, process: asyncio.subprocess.Process) -> tuple[int, int | None]:
        word, _, number = (await self._report(process)).partition(" ")
        if word != "pid":
            return 0, None
        try:
            return int(number), os.pidfd_open(int(number))
        except OSError:
            return 0, None

    def _open(self, process: asyncio.subprocess.Process, pid: int, pidfd: int | None) -> _Holder:
        if pidfd is None:
            raise NamespaceStartError("the first process ended as soon as it was ready")
        names = [
            name
            for name in NAMESPACES
            if not (name == "net" and self._network) and not (name == "user" and self.is_privileged)
        ]
        opened: dict[str, int] = {}
        try:
            for name in names:
                opened[name] = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
            number = os.fstat(opened["pid"]).st_ino
        except BaseException:
            for descriptor in opened.values():
                os.close(descriptor)
            raise
        return _Holder(process, pid, pidfd, opened, number)

    @staticmethod
    async def _abort(process: asyncio.subprocess.Process, pidfd: int | None) -> None:
        try:
            if pidfd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await _kill_and_wait(process)
            # The first process holds the other end; it is gone when this ends.
            assert process.stdout is not None  # noqa: S101
            await process.stdout.read()
        finally:
            if pidfd is not None:
                os.close(pidfd)

    def _explain(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> str:
        errors.seek(0)
        said = (
            errors.read(10_000).decode(errors="replace").strip() or f"status {process.returncode}"
        )
        text = f"the namespaces could not be set up: {said}."
        if self.is_privileged:
            return f"{text} This user is root: is CAP_SYS_ADMIN withheld (a container)?"
        return (
            f"{text} This user is not root: user namespaces must be allowed "
            "(sysctl user.max_user_namespaces above 0; where they exist, "
            "kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0), "
            "and in a container /proc must not be masked."
        )

    # Commands

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        user: User | None = None,
        timeout_sec: float | None = None,
    ) -> CommandResult:
        """Run a program inside and collect its output.

        What it leaves running in the background goes on, until the sandbox stops.

        Raises:
            CommandTimeoutError: If it runs past its time. It is killed then, with all that it
                started, as it is after a cancellation.
            NamespaceError: If the sandbox does not run, or ended meanwhile.
        """
        with self.open_file() as stdout, self.open_file() as stderr:
            code = await self.run_with_files(
                argv,
                stdout=stdout,
                stderr=stderr,
                cwd=cwd,
                env=env,
                user=user,
                timeout_sec=timeout_sec,
            )
            return CommandResult(
                stdout=self._text(stdout), stderr=self._text(stderr), return_code=code
            )

    async def run_with_files(
        self,
        argv: Sequence[str],
        *,
        stdin: IO[bytes] | int = asyncio.subprocess.DEVNULL,
        stdout: IO[bytes],
        stderr: IO[bytes],
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        user: User | None = None,
        timeout_sec: float | None = None,
        max_file_bytes: int | None = None,
    ) -> int:
        """Run a program inside on open files of the host, see `run`."""
        holder = self._running()
        who = user or User()
        variables = _check_env(env or {})
        command_id = uuid.uuid4().hex
        outside = {k: v for k, v in variables.items() if not k.startswith(LOADER)}
        inside = [f"{k}={v}" for k, v in variables.items() if k.startswith(LOADER)]
        chain = [
            *self._enter(holder),
            *self._become(who),
            self._tools["env"], f"--chdir={cwd}", "--", *inside, *argv,
        ]  # fmt: skip
        if max_file_bytes is not None:
            chain = [self._tools["prlimit"], f"--fsize={max_file_bytes}", "--", *chain]
        try:
            process = await finish(
                asyncio.create_subprocess_exec(
                    *chain,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    env={**_defaults(who), **outside, MARK: command_id},
                    cwd="/",
                    umask=0o022,
                    start_new_session=True,
                ),
                abandon=lambda started: self._kill(holder, started, command_id),
            )
        except (OSError, ValueError) as error:
            # Too long, or with a NUL in it.
            raise NamespaceError(f"the command cannot be started: {error}") from error
        self._commands.add(process)
        try:
            async with asyncio.timeout(timeout_sec or None) as limit:
                code = await process.wait()
        except BaseException as error:
            await finish(self._kill(holder, process, command_id))
            if isinstance(error, TimeoutError) and limit.expired():
                raise CommandTimeoutError(
                    f"Command timed out after {timeout_sec} seconds"
                ) from None
            raise
        finally:
            self._commands.discard(process)
        if not self.is_running:
            raise NamespaceError("the sandbox ended while a command ran in it")
        return 128 - code if code < 0 else code

    def _running(self) -> _Holder:
        if self._holder is None:
            raise NamespaceError("the sandbox does not run: it is not started, or stopped")
        if has_ended(self._holder.pidfd):
            raise NamespaceError("the sandbox has ended: its first process was killed")
        return self._holder

    def _enter(self, holder: _Holder) -> list[str]:
        flags = {"mnt": "mount"}
        files = [
            f"--{flags.get(name, name)}=/proc/{os.getpid()}/fd/{descriptor}"
            for name, descriptor in holder.descriptors.items()
        ]
        if "user" in holder.descriptors:
            files.append("--preserve-credentials")
        return [self._tools["nsenter"], *files, "--"]

    def _become(self, user: User) -> list[str]:
        bounds = ",".join(["-all", *(f"+{name}" for name in CAPABILITIES)])
        argv = [self._tools["setpriv"], f"--bounding-set={bounds}", "--inh-caps=-all"]
        if self.is_privileged:
            argv += [f"--reuid={user.uid}", f"--regid={user.gid}"]
            groups = ",".join(map(str, user.groups))
            argv.append(f"--groups={groups}" if groups else "--clear-groups")
        elif user.uid != 0:
            raise NamespaceError(
                f"there is only root inside when the host's user is not root, no user {user.name!r}"
            )
        return [*argv, "--"]

    async def _kill(
        self, holder: _Holder, process: asyncio.subprocess.Process, command_id: str
    ) -> None:
        """Kill a command and all that it started, and wait until they are gone."""
        deadline = asyncio.get_running_loop().time() + END_SEC
        while True:
            left = await asyncio.to_thread(
                find_marked, holder.pid_namespace, command_id, spare=holder.pid
            )
            if not left:
                if process.returncode is not None:
                    return
                # Not inside yet, or on its way out.
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                continue
            if asyncio.get_running_loop().time() > deadline:
                raise NamespaceError(f"processes {left} do not end")
            for pid in left:
                kill_by_descriptor(pid, holder.pid_namespace)
            await asyncio.sleep(0.002)

    def open_file(self) -> IO[bytes]:
        """An unnamed file on the host's disk; output may be larger than the memory."""
        if self.folder is None:
            raise NamespaceError("the sandbox does not run: it is not started, or stopped")
        return tempfile.TemporaryFile(dir=self.folder / "io")

    def _text(self, file: IO[bytes]) -> str:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= self.max_output_bytes:
            return file.read(size).decode(errors="replace")
        half = self.max_output_bytes // 2
        head = file.read(half).decode(errors="replace")
        file.seek(size - half)
        tail = file.read(half).decode(errors="replace")
        return f"{head}\n[... {size - 2 * half} bytes left out ...]\n{tail}"

    # End

    async def stop(self, *, remove: bool = True) -> None:
        """Kill everything inside and remove the folder. Also ends a start that is under way.

        A cancellation is raised after the work is done. May be called again, and at any time.

        Args:
            remove: Whether the folder goes as well.

        Raises:
            NamespaceError: If processes do not end or the folder cannot be removed.
        """
        self._stopped = True
        starting = self._starting
        if starting is not None and starting is not asyncio.current_task():
            starting.cancel()
            await finish(asyncio.wait([starting]))
        await finish(self._end(remove=remove))

    async def _end(self, *, remove: bool) -> None:
        holder, self._holder = self._holder, None
        if holder is not None:
            try:
                await self._end_holder(holder)
            finally:
                holder.close()
        if remove and self.folder is not None:
            folder, self.folder = self.folder, None
            await self._remove(folder)

    async def _end_holder(self, holder: _Holder) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(holder.pidfd, signal.SIGKILL)
        try:
            async with asyncio.timeout(END_SEC):
                # `unshare` ends after its child, which ends after everything inside.
                await holder.process.wait()
                for process in list(self._commands):
                    await _kill_and_wait(process)
        except TimeoutError:
            raise NamespaceError(
                f"the processes of {self.folder} were killed but do not end (a disk that hangs?)"
            ) from None
        finally:
            if holder.process.stdin is not None:
                holder.process.stdin.close()

    async def _remove(self, folder: Path) -> None:
        # Trees may be deeper than Python can descend, and hold folders without permissions.
        commands = [[self._tools["rm"], "-rf", "--one-file-system", "--", str(folder)]]
        if not self.is_privileged:
            commands.insert(0, [self._tools["chmod"], "-R", "u+rwX", "--", str(folder)])
        said = b""
        for argv in commands:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env={"PATH": PATH, "LC_ALL": "C"},
                cwd="/",
                start_new_session=True,
            )
            said = (await process.communicate())[1]
        if folder.exists():
            reason = said.decode(errors="replace").strip()[:1000]
            raise NamespaceError(f"the folder {folder} could not be removed: {reason}")


async def _kill_and_wait(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _defaults(user: User) -> dict[str, str]:
    return {
        "PATH": PATH,
        "HOME": user.home,
        "USER": user.name,
        "LOGNAME": user.name,
        "TERM": "xterm",
        "LANG": "C.UTF-8",
    }


def _check_env(env: Mapping[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise NamespaceError(f"an environment variable is text, unlike {name!r}")
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise NamespaceError(f"no process can have this environment variable: {name!r}")
    return dict(env)
