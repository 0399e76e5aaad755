"""A sandbox: its start and end, commands inside, and files copied in and out.

    `unshare` ── _setup.py, becomes `cat`              the first process
    `nsenter` ── `setpriv` ── `env` ── `bash -c ...`   one chain for each command

The first process waits on a pipe that only this process holds open. Killing it, closing the loop,
or the death of this process all have the same effect: the kernel kills everything in the pid
namespace, and the mounts vanish with the mount namespace. What is left is the folder.

Paths inside are only ever resolved inside, by programs that run there as root: a link in the
sandbox that points to `/etc/shadow` means the sandbox's own. The host reads and writes archives.
"""

from __future__ import annotations

import asyncio
import functools
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, Any, Self

from attrs import frozen

from rollout._files.atomic import writing_atomic
from rollout._files.claims import MARK, Claim, sweep_claimed
from rollout.sandbox._extract import extract
from rollout.sandbox._init_process import InitProcess
from rollout.sandbox._limits import Limits
from rollout.sandbox._output import Output
from rollout.sandbox._process_tree import kill_marked, new_mark
from rollout.sandbox._root import Bind, prepare_root
from rollout.sandbox._subprocesses import (
    PATH,
    Process,
    check_system,
    finish,
    kill_and_wait,
    run_tool,
    spawn,
)
from rollout.sandbox._user import User, find_user
from rollout.sandbox.errors import (
    CommandTimeoutError,
    NamespaceError,
    NamespaceStartError,
    TransferError,
)

__all__ = ["CommandResult", "Sandbox", "remove_abandoned"]

PREFIX = "rollout-sandbox-"
"""What the names of sandboxes' folders begin with."""

CAPABILITIES = (
    "chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap",
    "net_bind_service", "audit_write", "setfcap",
)  # fmt: skip
"""What root can do inside: as in a Docker container, without raw sockets, devices and chroot, which
would let it leave the root that keeps it from making user namespaces."""

GUARD = "lease"
"""A harmless capability for programs that copy files: a process with fewer capabilities can neither
trace them nor open their files, though it has the same user."""

LOADER = ("PATH", "LD_", "GLIBC_", "GCONV_PATH", "LOCPATH", "NLSPATH", "MALLOC_")
"""Variables that act on programs as they start. They must not act on those that run outside."""

MAX_BYTES = 16 * 1024**3
"""Most that one copy out of a sandbox may write on the host."""

TAR_CHANGED = 1
"""GNU tar's status for files that changed while they were read: no reason to refuse logs."""

# Positional parameters only: no name, however odd, becomes part of a script.
_MAKE_HOME = 'if [ ! -d "$1" ]; then mkdir -p -- "$1" && chown -- "$2" "$1"; fi'
_PUT_FILE = """
set -eu
target=$1
if [ -d "$target" ]; then target=${target%/}/$2; fi
parent=${target%/*}
mkdir -p -- "${parent:-/}"
rm -f -- "$target"
set -C
cat > "$target"
chmod -- "$3" "$target"
"""
_PUT_DIR = """
set -eu
mkdir -p -- "$1"
exec tar --extract --file=- --preserve-permissions --no-same-owner --no-overwrite-dir \
    --keep-directory-symlink --directory="$1"
"""
_GET_FILE = """
set -eu
if [ -d "$1" ]; then echo "is a folder, not a file: $1" >&2; exit 1; fi
if [ ! -f "$1" ]; then echo "no such file: $1" >&2; exit 1; fi
if [ "$(stat --dereference --format=%s -- "$1")" -gt "$2" ]; then
  echo "larger than $2 bytes: $1" >&2; exit 1
fi
stat --dereference --format=%a -- "$1" >&2
# A pipe that has come in its place meanwhile does not hold this up.
exec dd if="$1" iflag=nonblock bs=1M status=none
"""
_GET_DIR = """
set -eu
if [ ! -d "$1" ]; then echo "no such folder: $1" >&2; exit 2; fi
folder=$1
shift
exec tar --create --file=- --format=posix --sparse --hard-dereference "$@" --directory="$folder" .
"""


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
    """A root folder with its own processes, on this machine.

    As an asynchronous context manager it starts, and stops at the end of the block. It starts once.
    Every method may be cancelled at any await, and leaves nothing half done.

    Args:
        parent: Where the folder of the sandbox is made; the system's temporary folder if ``None``.
        binds: What else of the host is shown inside.
        network: Whether it shares the host's network. If not, it has a loopback of its own.
        max_output_bytes: How much of a command's output is kept, of each stream.
        limits: Limits on its processes.

    Attributes:
        folder: Its folder on the host, ``None`` before the start and after the removal.
    """

    def __init__(
        self,
        *,
        parent: Path | None = None,
        binds: Iterable[Bind] = (),
        network: bool = True,
        max_output_bytes: int = 16 * 1024 * 1024,
        limits: Limits | None = None,
    ) -> None:
        self.folder: Path | None = None
        self._parent = parent
        self._binds = tuple(binds)
        self._network = network
        self._max_output_bytes = max_output_bytes
        self._limits = limits or Limits()
        self._is_root = os.geteuid() == 0
        self._homes = {"/root", "/tmp"}  # noqa: S108 - inside
        self._init: InitProcess | None = None
        self._claim: Claim | None = None
        self._started = False
        self._stopped = False
        # Held while the namespaces are made, closed, or about to be entered.
        self._lock = asyncio.Lock()
        self._commands: set[Process] = set()
        self._outputs: set[Output] = set()

    def __repr__(self) -> str:
        state = "running" if self.is_running else "stopped" if self._stopped else "new"
        return f"<Sandbox {state} {self.folder}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def is_running(self) -> bool:
        """Whether commands can run inside."""
        return self._init is not None and not self._init.has_ended

    # Start and stop

    async def start(self) -> None:
        """Make the folder, set up the namespaces, and wait until they are ready.

        Raises:
            NamespaceStartError: If that fails, or `stop` is called meanwhile. Nothing is left
                behind, as after a cancellation.
        """
        if self._started or self._stopped:
            raise NamespaceStartError("a sandbox starts once: make another one")
        self._started = True
        check_system()
        try:
            async with self._lock:
                await self._set_up()
            if self._stopped:
                raise NamespaceStartError("the sandbox was stopped while it started")  # noqa: TRY301
        except BaseException as error:
            await self.stop()
            if isinstance(error, OSError):
                raise NamespaceStartError(f"the sandbox could not be set up: {error}") from error
            raise

    async def _set_up(self) -> None:
        folder = self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))
        self._claim = Claim(folder)
        (folder / "outer").mkdir(mode=0o700)
        (folder / "root").mkdir()
        (folder / "root").chmod(0o755)
        mounts = await finish(asyncio.to_thread(prepare_root, folder / "root", self._binds))
        self._init = await InitProcess.start(
            folder, mounts, network=self._network, shared_bytes=self._limits.shared_bytes
        )

    async def stop(self, *, remove: bool = True) -> None:
        """Kill everything inside and remove the folder.

        May be called again, and at any time: a start that is under way ends with an error then. A
        cancellation is raised after the work is done.

        Args:
            remove: Whether the folder goes as well.

        Raises:
            NamespaceError: If processes do not end or the folder cannot be removed.
        """
        self._stopped = True
        await finish(self._stop(remove=remove))

    async def _stop(self, *, remove: bool) -> None:
        async with self._lock:
            init, self._init = self._init, None
            if init is not None:
                try:
                    await init.end()
                    await asyncio.gather(*map(kill_and_wait, self._commands))
                finally:
                    init.close()
                    for output in self._outputs:
                        output.close()
            try:
                if remove and self.folder is not None:
                    await self._remove(self.folder)
                    self.folder = None
                elif self.folder is not None:
                    (self.folder / MARK).unlink(missing_ok=True)
            finally:
                if self._claim is not None:
                    self._claim.release()

    async def _remove(self, folder: Path) -> None:
        # A thread would hold up the loop in a large tree.
        if not self._is_root:
            await run_tool("chmod", "-R", "u+rwX", "--", str(folder))
        reason = await run_tool("rm", "-rf", "--one-file-system", "--", str(folder))
        if reason is not None:
            raise NamespaceError(f"the folder {folder} could not be removed: {reason}")

    # Commands

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        user: User | str | int | None = None,
        timeout_sec: float | None = None,
    ) -> CommandResult:
        """Run a program inside and collect its output.

        Its standard input is empty. What it leaves running in the background goes on, until the
        sandbox stops.

        Args:
            argv: The program and its arguments.
            cwd: Where it runs.
            env: More environment variables. None come from this process.
            user: Whom it runs as; root if ``None``, see `find_user`. A home folder that does not
                exist is made. There are other users only if this process is root.
            timeout_sec: For how long; ``None`` or 0 for any time.

        Raises:
            CommandTimeoutError: If it runs past its time. It is killed then, with all that it
                started, as it is after a cancellation.
            NamespaceError: If the sandbox does not run, or ended meanwhile, or there is no such
                user, or the command cannot be started.
        """
        who = user if isinstance(user, User) else find_user(user)
        if who.home not in self._homes and self._is_root:
            owner = f"{who.uid}:{who.gid}"
            await self._run(["bash", "-c", _MAKE_HOME, "home", who.home, owner])
            self._homes.add(who.home)
        return await self._run(argv, cwd=cwd, env=env, user=who, timeout_sec=timeout_sec)

    async def _run(
        self,
        argv: Sequence[str],
        *,
        stdin: IO[bytes] | None = None,
        stdout: IO[bytes] | None = None,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        user: User | None = None,
        timeout_sec: float | None = None,
        guarded: bool = False,
    ) -> CommandResult:
        """Run a program inside, see `run`, also on open files of the host.

        Args:
            argv: The program.
            stdin: What it reads; nothing by default.
            stdout: Where it writes, at most `MAX_BYTES`; collected by default.
            cwd: Where it runs.
            env: More environment variables.
            user: Whom it runs as.
            timeout_sec: For how long.
            guarded: Whether other processes inside are kept from these files, as long as they have
                no name inside.
        """
        with ExitStack() as unused:
            outputs = [
                unused.enter_context(closing(Output(self._max_output_bytes)))
                for _ in range(2 if stdout is None else 1)
            ]
            async with self._lock:
                init = self._running()
                mark = new_mark()
                kill = functools.partial(kill_marked, init.pid_namespace, mark, spare=init.pid)
                user = user or User()
                limits = self._limits.command(
                    privileged=self._is_root,
                    mark=mark,
                    max_file_bytes=None if stdout is None else MAX_BYTES,
                )
                variables, loader_variables = _environment(user, env or {})
                try:
                    with init.open_null() as nothing:
                        process = await spawn(
                            *[*limits, *init.enter(), *self._become(user, guarded=guarded)],
                            *["env", f"--chdir={cwd}", "--", *loader_variables, *argv],
                            stdin=stdin or nothing,
                            stdout=stdout or outputs[1].writer,
                            stderr=outputs[0].writer,
                            env=variables,
                            cwd="/",
                            umask=0o022,
                            abandon=kill,
                        )
                except (OSError, ValueError) as error:
                    # Too long, or with a NUL in it.
                    raise NamespaceError(f"the command cannot be started: {error}") from error
                self._commands.add(process)
            for output in outputs:
                output.close_writer()
            code = await self._wait(process, kill, timeout_sec)
            texts = [output.collect() for output in outputs]
            if self.is_running:
                # What runs on in the background may hold them open.
                unused.pop_all()
                self._outputs = {each for each in (*self._outputs, *outputs) if each.is_open}
        return CommandResult(
            stdout=texts[1] if stdout is None else "",
            stderr=texts[0],
            return_code=128 - code if code < 0 else code,
        )

    async def _wait(
        self,
        process: Process,
        kill: Callable[[Process], Coroutine[Any, Any, None]],
        timeout_sec: float | None,
    ) -> int:
        limit = asyncio.timeout(timeout_sec or None)
        try:
            async with limit:
                code = await process.wait()
        except BaseException as error:
            await finish(kill(process))
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
        return code

    def _running(self) -> InitProcess:
        if self._init is None or self._stopped:
            raise NamespaceError("the sandbox does not run: it is not started, or stopped")
        if self._init.has_ended:
            raise NamespaceError("the sandbox has ended: its first process was killed")
        return self._init

    def _become(self, user: User, *, guarded: bool) -> list[str]:
        """Return the beginning of a command line that runs the rest of it as a user."""
        names = (*CAPABILITIES, GUARD) if guarded else CAPABILITIES
        bounds = ",".join(["-all", *(f"+{name}" for name in names)])
        argv = ["setpriv", f"--bounding-set={bounds}", "--inh-caps=-all"]
        if self._is_root:
            argv += [f"--reuid={user.uid}", f"--regid={user.gid}"]
            groups = ",".join(map(str, user.groups))
            argv.append(f"--groups={groups}" if groups else "--clear-groups")
        elif user.uid != 0:
            raise NamespaceError(
                f"there is only root inside when the host's user is not root, no user {user.name!r}"
            )
        return [*argv, "--"]

    # Files

    async def upload_file(self, source: str | Path, target: str) -> None:
        """Copy a file of the host into the sandbox, with its permissions.

        Args:
            source: The file.
            target: Where it goes. Into it, under its own name, if that is an existing folder.

        Raises:
            FileNotFoundError: If there is no such file.
            TransferError: If it cannot be written inside.
        """
        with Path(source).open("rb") as file:  # noqa: ASYNC230 - read by the program inside
            mode = f"{stat.S_IMODE(os.fstat(file.fileno()).st_mode):o}"
            arguments = [target, Path(source).name, mode]
            await self._copy(_PUT_FILE, arguments, f"upload of {target!r}", stdin=file)

    async def upload_dir(
        self, source: str | Path, target: str, *, exclude: Sequence[str] = ()
    ) -> None:
        """Copy what is in a folder of the host into one of the sandbox, links as links.

        Args:
            source: The folder.
            target: Where its content goes; made if it does not exist.
            exclude: Names directly in the folder that are left out.

        Raises:
            FileNotFoundError: If there is no such folder.
            TransferError: If it cannot be read, or not be written inside.
        """
        if not Path(source).is_dir():  # noqa: ASYNC240 - at once
            raise FileNotFoundError(f"no such folder: {source}")
        with self._archive() as archive:
            reason = await run_tool(
                *["tar", "--create", "--file=-", "--format=posix", "--anchored", "--no-wildcards"],
                *[f"--exclude=./{name}" for name in exclude],
                *[f"--directory={source}", "."],
                stdout=archive,
            )
            if reason is not None:
                raise TransferError(f"cannot read {source}: {reason}")
            archive.seek(0)
            await self._copy(_PUT_DIR, [target], f"upload of {target!r}", stdin=archive)

    async def download_file(self, source: str, target: str | Path) -> None:
        """Copy a file of the sandbox to the host. A link is followed inside the sandbox.

        Args:
            source: The file.
            target: Where it goes. Into it, under its own name, if that is an existing folder.

        Raises:
            TransferError: If there is no such file, or it is too large.
        """
        arguments = [source, str(MAX_BYTES)]
        # A link in its place is replaced, not written through.
        with writing_atomic(_place_for(source, Path(target)), sync=False) as file:
            mode = await self._copy(_GET_FILE, arguments, f"download of {source!r}", stdout=file)
            os.fchmod(file.fileno(), (int(mode, 8) & 0o777) | 0o600)

    async def download_dir(
        self,
        source: str,
        target: str | Path,
        *,
        max_file_bytes: int = MAX_BYTES,
        exclude: Sequence[str] = (),
    ) -> list[str]:
        """Copy what is in a folder of the sandbox to the host, replacing files.

        Args:
            source: The folder.
            target: Where its content goes; made if it does not exist.
            max_file_bytes: The largest size of a file, holes included.
            exclude: Patterns of `tar` for what is left out.

        Returns:
            What was left out and why, a line each: devices, pipes, links that lead out of the
            folder, what is too large.

        Raises:
            TransferError: If there is no such folder, or it holds more than `MAX_BYTES`; holes in
                files do not count.
        """
        with self._archive() as archive:
            await self._copy(
                _GET_DIR, [source, *(f"--exclude={each}" for each in exclude)],
                f"download of {source!r}", stdout=archive, accept=TAR_CHANGED,
            )  # fmt: skip
            archive.seek(0)
            stop = threading.Event()
            work = asyncio.ensure_future(
                asyncio.to_thread(
                    extract,
                    archive,
                    Path(target),
                    max_bytes=MAX_BYTES,
                    max_file_bytes=max_file_bytes,
                    stop=stop,
                )
            )
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                stop.set()
                await finish(asyncio.wait([work]))
                raise

    async def _copy(
        self,
        script: str,
        arguments: list[str],
        what: str,
        *,
        stdin: IO[bytes] | None = None,
        stdout: IO[bytes] | None = None,
        accept: int = 0,
    ) -> str:
        """Run a script inside that copies files; return what it wrote to standard error."""
        if any("\0" in each for each in arguments):
            raise TransferError(f"{what}: no file has a NUL in its name")
        argv = ["bash", "-c", script, "copy", *arguments]
        result = await self._run(argv, stdin=stdin, stdout=stdout, guarded=True)
        said = result.stderr.strip()[:4000]
        if result.return_code not in {0, accept}:
            raise TransferError(
                f"{what} failed (status {result.return_code}): {said or 'no message'}"
            )
        return said

    def _archive(self) -> IO[bytes]:
        """Open an unnamed file on the host's disk, for what may be larger than the memory."""
        if self.folder is None:
            raise NamespaceError("the sandbox has no folder: it is not started, or removed")
        return tempfile.TemporaryFile(dir=self.folder)


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the folders of this user's sandboxes whose processes were killed. Blocks.

    Args:
        parent: Where the sandboxes were made.

    Returns:
        The removed ones.
    """
    return sweep_claimed(parent, f"{PREFIX}.*")


def _place_for(source: str, target: Path) -> Path:
    """Return where a file is copied to, which may be named by a folder, and make that folder."""
    if target.is_dir():
        name = source.rstrip("/").rpartition("/")[2]
        if name in {"", ".", ".."}:
            raise TransferError(f"not the name of a file: {source!r}")
        target /= name
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _environment(user: User, env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables of a command's chain, and those that only the command may have."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise NamespaceError(f"no process can have this environment variable: {name!r}")
    variables = {
        "PATH": PATH,
        "HOME": user.home,
        "USER": user.name,
        "LOGNAME": user.name,
        "TERM": "xterm",
        "LANG": "C.UTF-8",
        **{name: value for name, value in env.items() if not name.startswith(LOADER)},
    }
    return variables, [f"{name}={env[name]}" for name in env if name.startswith(LOADER)]
