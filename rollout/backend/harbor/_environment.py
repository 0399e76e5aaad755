"""The Harbor environment around a sandbox of namespaces. Needs Harbor."""

from __future__ import annotations

import asyncio
import os
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from harbor.environments.base import (  # type: ignore[import-not-found,unused-ignore] # pyright: ignore[reportMissingImports]
    BaseEnvironment,
    ExecResult,
)
from harbor.environments.capabilities import (  # type: ignore[import-not-found,unused-ignore] # pyright: ignore[reportMissingImports]
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)

from rollout.backend.harbor.trial.limits import drop_large_files
from rollout.backend.signatures import signature_of
from rollout.sandbox import transfer
from rollout.sandbox.errors import NamespaceError, NamespaceStartError
from rollout.sandbox.holder import find_tools
from rollout.sandbox.layout import Bind, check_bind
from rollout.sandbox.limits import MIB, Limits
from rollout.sandbox.sandbox import Sandbox, User
from rollout.sandbox.tasks import finish
from rollout.sandbox.users import find_user

__all__ = ["NamespaceEnvironment"]

WORKDIR = "/app"
DEFINITIONS = ("Dockerfile", "docker-compose.yaml", ".dockerignore")

# Harbor's own names for what a user may not have to say, in one version or another.
_IGNORED = frozenset({"suppress_override_warnings"})

_MAKE_HOME = 'if [ ! -d "$1" ]; then mkdir -p -- "$1" && chown -- "$2" "$1"; fi'


class NamespaceEnvironment(BaseEnvironment):  # type: ignore[misc,unused-ignore]
    """Runs a Harbor trial in Linux namespaces on this machine, without Docker.

    Use it through Harbor's own configuration:

        EnvironmentConfig(
            import_path="rollout.backend.harbor.namespace:NamespaceEnvironment",
            kwargs={"read_only_paths": ["/srv/models"]},
        )

    Isolated: processes (nothing outside can be seen or signalled), the file system (a root of its
    own; of the host only its programs and an allowlist of `/etc`, read-only), System V and POSIX
    IPC, the host name, the server's environment variables, and, for a task with
    ``network_mode = "no-network"``, the network. Root inside has the capabilities of a container,
    without devices and raw sockets.

    Not isolated: the kernel is the host's. By default so is the network, with every service on the
    host's loopback. CPU, memory and disk are not limited: such settings of a task are named in one
    warning, and a job that insists on them is refused. What can be had without control groups is:
    no file grows beyond ``storage_mb``, shared memory is bounded, and if the machine runs out of
    memory, the kernel kills processes of sandboxes first. Images are not built or pulled:
    `docker_image` and `Dockerfile` are not applied, the host's programs are what there is. It keeps
    trials apart and the host clean; it is no boundary against code that wants to break out, least
    of all where the server runs as root.

    Refused: compose files, network allowlists, GPUs, Windows, users other than root where the
    server does not run as root.

    Args:
        *args: Harbor's own arguments.
        read_only_paths: Folders and files of the host that are shown at the same place inside, for
            example the prefix of a Python.
        folder: Where the sandbox's own folder is made; the system's temporary folder by default.
        max_output_bytes: How much of a command's output is kept, of each stream.
        max_file_bytes: The largest file that comes out with a folder, such as that of the logs.
        **kwargs: Harbor's own arguments.

    Raises:
        ValueError: If an argument is unknown or cannot work, or the task asks for what is refused.
    """

    def __init__(
        self,
        *args: Any,
        read_only_paths: Sequence[str] = (),
        folder: str | Path | None = None,
        max_output_bytes: int = 16 * 1024 * 1024,
        max_file_bytes: int = transfer.MAX_FILE_BYTES,
        **kwargs: Any,
    ) -> None:
        known = set(signature_of(BaseEnvironment.__init__).parameters)
        unknown = sorted(set(kwargs) - known - _IGNORED)
        if unknown:
            raise ValueError(f"unknown options of NamespaceEnvironment: {', '.join(unknown)}")
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"not a folder: {str(folder)!r}")
        for name, value in (
            ("max_output_bytes", max_output_bytes),
            ("max_file_bytes", max_file_bytes),
        ):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is a positive whole number: {value!r}")
        if not isinstance(read_only_paths, (list, tuple)):
            raise ValueError(f"read_only_paths is a list: {read_only_paths!r}")  # noqa: TRY004 - as Harbor
        self._shown = [check_bind(path) for path in read_only_paths]
        self._folder = None if folder is None else Path(folder).absolute()
        self._max_output_bytes = max_output_bytes
        self._max_file_bytes = max_file_bytes
        self._sandbox: Sandbox | None = None
        self._homes: set[str] = {"/root", "/tmp"}  # noqa: S108
        super().__init__(*args, **kwargs)
        self._shown += self._user_mounts()

    # What it can do

    @staticmethod
    def type() -> str:
        """The name of this kind of environment."""
        return "namespace"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """It can cut off the network; nothing is mounted, so Harbor copies logs."""
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """It limits neither CPU nor memory, so a job that insists on that is refused."""
        return EnvironmentResourceCapabilities(fractional_cpus=True)

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        """Check that this machine has the programs that are needed.

        Raises:
            SystemExit: If it has not.
        """
        super().preflight(*([kwargs] if _takes_kwargs(super().preflight) else []))
        try:
            find_tools()
        except NamespaceStartError as error:
            raise SystemExit(str(error)) from error

    def _validate_definition(self) -> None:
        compose = self.environment_dir / "docker-compose.yaml"
        if compose.exists():
            raise ValueError(
                f"{compose} asks for services, which a namespace environment does not run"
            )

    def _user_mounts(self) -> list[Bind]:
        """Mounts that the user asked for. Harbor's own, for logs, are made up for by copying."""
        binds = []
        for mount in self._mounts:
            source, target = mount.get("source"), mount["target"]
            if source is not None and Path(source).is_relative_to(
                Path(self.trial_paths.trial_dir).resolve()
            ):
                continue
            if mount.get("type") != "bind" or source is None:
                raise ValueError(f"only mounts of the type 'bind' can be made, not {dict(mount)}")
            writable = not mount.get("read_only", False)
            binds.append(check_bind(source, target, writable=writable))
        return binds

    def _limits(self) -> Limits:
        storage, memory = self.task_env_config.storage_mb, self._effective_memory_mb
        limits = Limits()
        if storage is not None:
            limits = attrs.evolve(limits, file_bytes=max(storage, 1) * MIB)
        if memory is not None:
            half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
            limits = attrs.evolve(limits, shared_bytes=min(max(memory, 1) * MIB, half))
        return limits

    def _not_applied(self) -> list[str]:
        config = self.task_env_config
        found = [
            f"{name}={value}{but}"
            for name, value, but in (
                ("docker_image", config.docker_image, ""),
                ("cpus", self._effective_cpus, ""),
                ("memory_mb", self._effective_memory_mb, " (but to shared memory)"),
                ("storage_mb", config.storage_mb, " (but to each file)"),
            )
            if value is not None
        ]
        if (self.environment_dir / "Dockerfile").exists():
            found.append("environment/Dockerfile")
        return found

    # Start and stop

    async def start(self, force_build: bool) -> None:  # noqa: ARG002 - there is nothing to build
        """Start the sandbox and copy the task's environment folder into the working folder.

        Nothing is left behind if this fails or is cancelled.

        Raises:
            NamespaceStartError: If the machine does not allow it; the message says what it lacks.
        """
        if self._sandbox is not None:
            raise NamespaceStartError("this environment was started before")
        ignored = self._not_applied()
        if ignored:
            self.logger.warning(
                "Not applied in a namespace environment, which has the host's programs and "
                "memory: %s",
                ", ".join(ignored),
            )
        sandbox = self._sandbox = Sandbox(
            parent=self._folder,
            binds=self._shown,
            network=not self._network_disabled,
            max_output_bytes=self._max_output_bytes,
            limits=self._limits(),
        )
        await sandbox.start()
        try:
            await self._prepare(sandbox)
        except BaseException:
            await finish(sandbox.stop())
            raise

    async def _prepare(self, sandbox: Sandbox) -> None:
        open_to_all = [m["target"] for m in self._mounts if m["target"].startswith("/logs/")]
        result = await sandbox.run(
            ["bash", "-c", 'mkdir -p -- "$@" && shift && { [ $# = 0 ] || chmod 777 -- "$@"; }',
             "prepare", self._workdir, *open_to_all],
        )  # fmt: skip
        if result.return_code != 0:
            raise NamespaceStartError(f"cannot make the folders: {result.stderr.strip()}")
        upload = getattr(self, "_enable_environment_dir_upload", True)
        if upload and self.environment_dir.is_dir():
            await transfer.upload_dir(
                sandbox, self.environment_dir, self._workdir, exclude=DEFINITIONS
            )

    async def stop(self, delete: bool) -> None:
        """Kill everything inside and remove the folder, also while the start is under way.

        Args:
            delete: If not set, the folder stays for a look at it; where it is, is logged.

        Raises:
            NamespaceError: If a process does not end, or the folder cannot be removed.
        """
        sandbox = self._sandbox
        if sandbox is None:
            return
        await sandbox.stop(remove=delete)
        if sandbox.folder is not None:
            self.logger.info("The files of the environment stay in %s", sandbox.folder)

    # Commands

    @property
    def _workdir(self) -> str:
        return posixpath.join("/", self.task_env_config.workdir or WORKDIR)

    def _running(self) -> Sandbox:
        if self._sandbox is None:
            raise NamespaceError("the environment is not started")
        return self._sandbox

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command with bash inside.

        Args:
            command: What bash is given. Its standard input is empty.
            cwd: Folder to run it in, relative to the working folder, which is the default.
            env: More environment variables. None are taken over from the server.
            timeout_sec: Kill it, and all that it started, after so long.
            user: Name or number; the environment's default user, and else root.

        Raises:
            CommandTimeoutError: If it ran past its time.
            NamespaceError: If the environment does not run, or there is no such user.
        """
        sandbox = self._running()
        result = await sandbox.run(
            ["bash", "-c", command],
            cwd=posixpath.join(self._workdir, cwd or ""),
            env=self._merge_env(env),
            user=await self._user(sandbox, self._resolve_user(user)),
            timeout_sec=timeout_sec,
        )
        await self._tell(result.stdout, result.stderr)
        return ExecResult(
            stdout=result.stdout, stderr=result.stderr, return_code=result.return_code
        )

    async def _tell(self, stdout: str, stderr: str) -> None:
        listening = getattr(self, "_output_callback", None)
        tell = listening() if listening is not None else None
        if tell is not None:
            for text, stream in ((stdout, "stdout"), (stderr, "stderr")):
                if text:
                    await tell(text, stream)

    async def _user(self, sandbox: Sandbox, wanted: str | int | None) -> User:
        user = find_user(sandbox.root, wanted)
        if user.home not in self._homes and sandbox.is_privileged:
            owner = f"{user.uid}:{user.gid}"
            await sandbox.run(["bash", "-c", _MAKE_HOME, "home", user.home, owner])
            self._homes.add(user.home)
        return user

    # Files

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file into the environment, with its permissions.

        Raises:
            FileNotFoundError: If there is no such file.
            TransferError: If it cannot be written.
        """
        await transfer.upload_file(self._running(), Path(source_path), self._inside(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy what is in a folder into a folder of the environment.

        Raises:
            FileNotFoundError: If there is no such folder.
            TransferError: If it cannot be written.
        """
        await transfer.upload_dir(self._running(), Path(source_dir), self._inside(target_dir))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file out of the environment.

        Raises:
            TransferError: If there is no such file.
        """
        await transfer.download_file(self._running(), self._inside(source_path), Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy what is in a folder of the environment into a folder of the host.

        Raises:
            TransferError: If there is no such folder.
        """
        await self._download_dir(source_dir, Path(target_dir))

    async def download_dir_with_exclusions(
        self, *, source_dir: str, target_dir: Path | str, exclude: list[str]
    ) -> None:
        """Copy a folder out of the environment without what matches patterns of `tar`.

        Raises:
            TransferError: If there is no such folder.
        """
        await self._download_dir(source_dir, Path(target_dir), exclude)

    async def _download_dir(self, source: str, target: Path, exclude: Sequence[str] = ()) -> None:
        await transfer.download_dir(
            self._running(),
            self._inside(source),
            target,
            self.logger,
            max_file_bytes=self._max_file_bytes,
            exclude=exclude,
        )
        await asyncio.to_thread(drop_large_files, target, self.logger)

    def _inside(self, path: str) -> str:
        return posixpath.join(self._workdir, str(path))


def _takes_kwargs(preflight: Any) -> bool:
    return bool(signature_of(preflight).parameters)
