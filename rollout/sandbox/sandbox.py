"""A sandbox of Linux namespaces: one first process, its root folder, and commands inside.

    `unshare` ── setup.py, becomes `cat`               the first process
    `nsenter` ── `setpriv` ── `env` ── `bash -c ...`   one chain for each command

The first process waits on a pipe that only this process holds open. Killing it, closing the loop,
or the death of this process all have the same effect: the kernel kills everything in the pid
namespace, and the mounts vanish with the mount namespace. What is left is the folder.

asyncio code, since Harbor calls it. Every coroutine may be cancelled at any await.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from attrs import frozen

from rollout._files.claims import MARK, Claim
from rollout.sandbox.errors import (
    CommandTimeoutError,
    NamespaceError,
    NamespaceStartError,
)
from rollout.sandbox.holder import END_SEC, PATH, Holder, find_tools
from rollout.sandbox.layout import Bind, prepare_root
from rollout.sandbox.limits import Limits
from rollout.sandbox.output import Output
from rollout.sandbox.processes import find_marked, new_mark, signal_if_inside
from rollout.sandbox.tasks import finish, kill_and_wait

__all__ = ["PREFIX", "CommandResult", "Sandbox", "User"]

PREFIX = "rollout-sandbox-"
"""What the names of sandboxes' folders begin with."""

CAPABILITIES = (
    "chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap",
    "net_bind_service", "audit_write", "setfcap",
)  # fmt: skip
"""What root can do inside: as in a Docker container, without raw sockets, devices and chroot, which
would let it leave the root that keeps it from making user namespaces."""

GUARD = "lease"
"""One capability more, of no use to anybody: whoever has fewer than a process can neither trace it
nor get at its open files, though it is the same user."""

LOADER = ("LD_", "GLIBC_", "GCONV_PATH", "LOCPATH", "NLSPATH", "MALLOC_")
"""Variables that act on programs as they load. They must not act on those that run outside."""


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
        stdout: What it wrote, decoded with replacement; the middle is left out of long output.
        stderr: The same.
        return_code: Its exit status; 128 and the signal's number for one that was killed.
    """

    stdout: str
    stderr: str
    return_code: int


class Sandbox:
    """A private root with its own processes, on this machine.

    Args:
        parent: Where the folder of the sandbox is made; the system's temporary folder if ``None``.
        binds: What else of the host is shown inside.
        network: Whether it shares the host's network. If not, it has a loopback of its own.
        interpreter: The Python that sets up the namespaces; this one if ``None``.
        max_output_bytes: How much of a command's output is kept, of each stream.
        limits: What holds its processes back.

    Attributes:
        folder: Its folder on the host, ``None`` before the start and after the removal.
        is_privileged: Whether this process is root, and so can have other users inside.
    """

    def __init__(
        self,
        *,
        parent: Path | None = None,
        binds: Iterable[Bind] = (),
        network: bool = True,
        interpreter: str | None = None,
        max_output_bytes: int = 16 * 1024 * 1024,
        limits: Limits | None = None,
    ) -> None:
        self.folder: Path | None = None
        self.is_privileged = os.geteuid() == 0
        self._hostname = "sandbox"
        self._parent = parent
        self._binds = tuple(binds)
        self._network = network
        self._interpreter = interpreter or sys.executable
        self._max_output_bytes = max_output_bytes
        self._limits = limits or Limits()
        self._tools: dict[str, str] = {}
        self._holder: Holder | None = None
        self._claim: Claim | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopped = False
        # No command may be about to start while the namespaces are let go of.
        self._spawning = asyncio.Lock()
        self._commands: set[asyncio.subprocess.Process] = set()
        self._outputs: set[Output] = set()

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
        return self._holder is not None and not self._holder.has_ended

    # Start

    async def start(self) -> None:
        """Make the folder, set up the namespaces, and wait until they are ready.

        Raises:
            NamespaceStartError: If that fails, or `stop` is called meanwhile. Nothing is left
                behind, as after a cancellation.
        """
        if self._stopped or self._starting is not None:
            raise NamespaceStartError("a sandbox starts once")
        self._tools = find_tools()
        # A task of its own: `stop` may cancel it, but not whoever waits here.
        starting = self._starting = asyncio.ensure_future(self._start())
        try:
            await asyncio.wait([starting])
        except asyncio.CancelledError:
            starting.cancel()
            await finish(asyncio.wait([starting]))
            # It may have been through already.
            await finish(self._end(remove=True))
            raise
        if starting.cancelled():
            raise NamespaceStartError("the sandbox was stopped while it started")
        starting.result()

    async def _start(self) -> None:
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))
            self._claim = Claim(self.folder)
            for name in ("io", "outer"):
                (self.folder / name).mkdir(mode=0o700)
            self.root.mkdir(mode=0o755)
            self.root.chmod(0o755)
            binds = await finish(
                asyncio.to_thread(prepare_root, self.root, self._hostname, self._binds)
            )
            self._holder = await Holder.start(
                self.root,
                self.folder / "outer",
                binds,
                hostname=self._hostname,
                network=self._network,
                shared_bytes=self._limits.shared_bytes,
                tools=self._tools,
                interpreter=self._interpreter,
            )
        except OSError as error:
            await finish(self._end(remove=True))
            raise NamespaceStartError(f"the sandbox could not be set up: {error}") from error
        except BaseException:
            await finish(self._end(remove=True))
            raise

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
        outputs: list[Output] = []
        try:
            outputs += [Output(self._max_output_bytes)]
            outputs += [Output(self._max_output_bytes)]
            code = await self.run_with_files(
                argv,
                stdout=outputs[0],
                stderr=outputs[1],
                cwd=cwd,
                env=env,
                user=user,
                timeout_sec=timeout_sec,
            )
            stdout, stderr = (each.collect() for each in outputs)
        except BaseException:
            for each in outputs:
                each.close()
            raise
        # Held open by what the command left running.
        self._outputs = {each for each in (*self._outputs, *outputs) if each.is_open}
        if not self.is_running:
            self._close_outputs()
        return CommandResult(stdout=stdout, stderr=stderr, return_code=code)

    async def run_with_files(
        self,
        argv: Sequence[str],
        *,
        stdin: IO[bytes] | None = None,
        stdout: IO[bytes] | Output,
        stderr: IO[bytes] | Output,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        user: User | None = None,
        timeout_sec: float | None = None,
        max_file_bytes: int | None = None,
        guarded: bool = False,
    ) -> int:
        """Run a program inside on open files of the host, see `run`.

        Args:
            argv: The program.
            stdin: What it reads; nothing by default.
            stdout: Where it writes.
            stderr: Where it writes what goes wrong.
            cwd: Where it runs.
            env: More environment variables.
            user: Whom it runs as.
            timeout_sec: For how long.
            max_file_bytes: The largest size of a file that it writes.
            guarded: Whether what else runs inside is kept from these files, as long as they have
                no name inside.
        """
        variables = _check_env(env or {})
        mark = new_mark()
        who = user or User()
        async with self._spawning:
            holder = self._running()
            number = holder.pid_namespace
            limits = self._limits.with_file_bytes(max_file_bytes)
            chain = [
                *limits.prefix(self._tools, privileged=self.is_privileged, mark=mark),
                *holder.enter(self._tools["nsenter"]),
                *self._become(who, guarded=guarded),
            ]
            inside = [f"{k}={v}" for k, v in variables.items() if k.startswith(LOADER)]
            outside = {k: v for k, v in variables.items() if not k.startswith(LOADER)}
            try:
                nothing = holder.open_null()
            except OSError as error:
                raise NamespaceError(f"the sandbox has no /dev/null: {error}") from error
            try:
                process = await finish(
                    asyncio.create_subprocess_exec(
                        *chain,
                        *[self._tools["env"], f"--chdir={cwd}", "--", *inside, *argv],
                        stdin=nothing if stdin is None else stdin,
                        stdout=stdout.writer if isinstance(stdout, Output) else stdout,
                        stderr=stderr.writer if isinstance(stderr, Output) else stderr,
                        env={**_defaults(who), **outside},
                        cwd="/",
                        umask=0o022,
                        start_new_session=True,
                    ),
                    abandon=lambda started: _kill(holder.pid, number, started, mark),
                )
            except (OSError, ValueError) as error:
                # Too long, or with a NUL in it.
                raise NamespaceError(f"the command cannot be started: {error}") from error
            finally:
                os.close(nothing)
            self._commands.add(process)
        for each in (stdout, stderr):
            if isinstance(each, Output):
                each.started()
        limit = asyncio.timeout(timeout_sec or None)
        try:
            async with limit:
                code = await process.wait()
        except BaseException as error:
            await finish(_kill(holder.pid, number, process, mark))
            if isinstance(error, TimeoutError) and limit.expired():
                raise CommandTimeoutError(
                    f"Command timed out after {timeout_sec} seconds"
                ) from None
            raise
        finally:
            self._commands.discard(process)
        # Killed along, or its way into namespaces that were ending was barred.
        if code != 0 and not self.is_running:
            raise NamespaceError("the sandbox ended while a command ran in it")
        return 128 - code if code < 0 else code

    def open_file(self) -> IO[bytes]:
        """An unnamed file on the host's disk, for what may be larger than the memory.

        Raises:
            NamespaceError: If the sandbox has no folder.
        """
        return tempfile.TemporaryFile(dir=self.root.parent / "io")

    def _running(self) -> Holder:
        if self._holder is None or self._stopped:
            raise NamespaceError("the sandbox does not run: it is not started, or stopped")
        if self._holder.has_ended:
            raise NamespaceError("the sandbox has ended: its first process was killed")
        return self._holder

    def _become(self, user: User, *, guarded: bool) -> list[str]:
        names = (*CAPABILITIES, GUARD) if guarded else CAPABILITIES
        bounds = ",".join(["-all", *(f"+{name}" for name in names)])
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
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await finish(asyncio.wait([self._starting]))
        await finish(self._end(remove=remove))

    async def _end(self, *, remove: bool) -> None:
        self._stopped = True
        async with self._spawning:
            holder, self._holder = self._holder, None
            if holder is not None:
                try:
                    await holder.end()
                    await asyncio.gather(*map(kill_and_wait, self._commands))
                finally:
                    holder.close()
                    self._close_outputs()
        try:
            if remove and self.folder is not None:
                await self._remove(self.folder)
                self.folder = None
            elif self.folder is not None:
                (self.folder / MARK).unlink(missing_ok=True)
        finally:
            if self._claim is not None:
                self._claim.release()

    def _close_outputs(self) -> None:
        for each in self._outputs:
            each.close()
        self._outputs.clear()

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
        if os.access(folder, os.F_OK):
            reason = said.decode(errors="replace").strip()[:1000]
            raise NamespaceError(f"the folder {folder} could not be removed: {reason}")


async def _kill(spare: int, namespace: int, process: asyncio.subprocess.Process, mark: int) -> None:
    """Kill a command and all that it started, and wait until they are gone.

    All are stopped before the first is killed: a child that lowered its limit is only known by its
    parent.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + END_SEC
    halted: set[int] = set()
    while loop.time() < deadline:
        left, is_all = await asyncio.to_thread(find_marked, namespace, mark, spare=spare)
        new = set(left) - halted
        halted |= new
        for pid in new:
            signal_if_inside(pid, namespace, signal.SIGSTOP)
        if new or not is_all:
            await asyncio.sleep(0)
        elif left:
            for pid in left:
                signal_if_inside(pid, namespace, signal.SIGKILL)
            await asyncio.sleep(0.001)
        elif process.returncode is None:
            # It is not inside yet, or on its way out.
            await kill_and_wait(process)
        else:
            return
    raise NamespaceError("processes of a command were killed but do not end (a disk that hangs?)")


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
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise NamespaceError(f"no process can have this environment variable: {name!r}")
    return dict(env)
