"""A Harbor environment that needs no Docker: trials in Linux namespaces on this machine.

Point Harbor to it with ``import_path="rollout.backend.harbor.namespace:NamespaceEnvironment"``.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.backend.harbor.limits import drop_large_files
from rollout.backend.harbor.validation import has_harbor
from rollout.backend.signatures import signature_of
from rollout.errors import BackendConfigurationError
from rollout.sandbox import (
    Bind,
    CommandTimeoutError,
    Limits,
    NamespaceError,
    NamespaceStartError,
    Sandbox,
    TransferError,
    check_system,
)

if TYPE_CHECKING or has_harbor():
    from harbor.environments.base import BaseEnvironment, ExecResult
    from harbor.environments.capabilities import (
        EnvironmentCapabilities,
        EnvironmentResourceCapabilities,
    )
else:

    class BaseEnvironment:
        """Stands in for Harbor's class where Harbor is not installed."""

        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            raise BackendConfigurationError(
                "NamespaceEnvironment needs Harbor: pip install 'trio-rollout[harbor]'"
            )


__all__ = [
    "CommandTimeoutError",
    "NamespaceEnvironment",
    "NamespaceError",
    "NamespaceStartError",
    "TransferError",
]

WORKDIR = "/app"
DEFINITIONS = ("Dockerfile", "docker-compose.yaml", ".dockerignore")

FOLDERS = ("/app", "/logs", "/solution", "/tests")
OPEN_FOLDERS = ("/logs/agent", "/logs/artifacts", "/logs/verifier")
"""Harbor's folders inside; the second ones are writable for every user."""

MAX_FILE_BYTES = 256 * 1024**2
"""The largest file of a folder that is copied out. Harbor reads logs and results as a whole, so a
sandbox could fill the memory of the host with a file that is one hole."""

_MIB = 1024**2

# Harbor's own names for what a user may not have to say, in one version or another.
_IGNORED = frozenset({"suppress_override_warnings"})


class NamespaceEnvironment(BaseEnvironment):  # type: ignore[misc,unused-ignore]
    """Runs a Harbor trial in Linux namespaces on this machine, without Docker.

    Use it through Harbor's own configuration::

        EnvironmentConfig(
            import_path="rollout.backend.harbor.namespace:NamespaceEnvironment",
            kwargs={"read_only_paths": ["/srv/models"]},
        )

    `rollout.sandbox` says what is isolated and what is not. Images are neither built nor pulled:
    `docker_image` and `Dockerfile` are not applied, the host's programs are what there is. CPU and
    memory are not limited; such settings of a task are named in one warning, and a job that insists
    on them is refused. No file grows beyond ``storage_mb``, and shared memory is bounded by
    ``memory_mb``.

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
        max_file_bytes: int = MAX_FILE_BYTES,
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
        self._shown = [Bind(path) for path in read_only_paths]
        self._folder = None if folder is None else Path(folder).absolute()
        self._max_output_bytes = max_output_bytes
        self._max_file_bytes = max_file_bytes
        self._sandbox: Sandbox | None = None
        super().__init__(*args, **kwargs)
        self._shown += self._user_mounts()

    # What it can do

    @staticmethod
    def type() -> str:
        """Return the name of this kind of environment."""
        return "namespace"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """Say that it can cut off the network; nothing is mounted, so Harbor copies logs."""
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Say that it limits neither CPU nor memory, so Harbor refuses a job that insists on it."""
        return EnvironmentResourceCapabilities(fractional_cpus=True)

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        """Check that this machine has the programs that are needed.

        Raises:
            SystemExit: If one is missing.
        """
        takes_options = bool(signature_of(super().preflight).parameters)
        super().preflight(*([kwargs] if takes_options else []))
        try:
            check_system()
        except NamespaceStartError as error:
            raise SystemExit(str(error)) from error

    def _validate_definition(self) -> None:
        compose = self.environment_dir / "docker-compose.yaml"
        if compose.exists():
            raise ValueError(
                f"{compose} asks for services, which a namespace environment does not run"
            )

    def _user_mounts(self) -> list[Bind]:
        """Return the mounts that the user asked for; instead of Harbor's own, logs are copied."""
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
            binds.append(Bind(source, target, writable=writable))
        return binds

    def _limits(self) -> Limits:
        storage, memory = self.task_env_config.storage_mb, self._effective_memory_mb
        limits: dict[str, int] = {}
        if storage is not None:
            limits["file_bytes"] = max(storage, 1) * _MIB
        if memory is not None:
            half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
            limits["shared_bytes"] = min(max(memory, 1) * _MIB, half)
        return Limits(**limits)

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
            await sandbox.stop()
            raise

    async def _prepare(self, sandbox: Sandbox) -> None:
        targets = [mount["target"] for mount in self._mounts]
        open_to_all = {*OPEN_FOLDERS, *(each for each in targets if each.startswith("/logs/"))}
        folders = shlex.join([*FOLDERS, self._workdir, *open_to_all])
        script = f"mkdir -p -- {folders} && chmod 777 -- {shlex.join(open_to_all)}"
        result = await sandbox.run(["bash", "-c", script])
        if result.return_code != 0:
            raise NamespaceStartError(f"cannot make the folders: {result.stderr.strip()}")
        upload = getattr(self, "_enable_environment_dir_upload", True)
        if upload and self.environment_dir.is_dir():
            await sandbox.upload_dir(self.environment_dir, self._workdir, exclude=DEFINITIONS)

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
        result = await self._running().run(
            ["bash", "-c", command],
            cwd=posixpath.join(self._workdir, cwd or ""),
            env=self._merge_env(env),
            user=self._resolve_user(user),
            timeout_sec=timeout_sec,
        )
        await self._report(result.stdout, result.stderr)
        return ExecResult(
            stdout=result.stdout, stderr=result.stderr, return_code=result.return_code
        )

    async def _report(self, stdout: str, stderr: str) -> None:
        """Call Harbor's callback for output, where this version has one and it is set."""
        find_callback = getattr(self, "_output_callback", None)
        callback = find_callback() if find_callback is not None else None
        if callback is not None:
            for text, stream in ((stdout, "stdout"), (stderr, "stderr")):
                if text:
                    await callback(text, stream)

    # Files

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file into the environment, with its permissions.

        Raises:
            FileNotFoundError: If there is no such file.
            TransferError: If it cannot be written.
        """
        await self._running().upload_file(source_path, self._inside(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy what is in a folder into a folder of the environment.

        Raises:
            FileNotFoundError: If there is no such folder.
            TransferError: If it cannot be written.
        """
        await self._running().upload_dir(source_dir, self._inside(target_dir))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file out of the environment.

        Raises:
            TransferError: If there is no such file.
        """
        await self._running().download_file(self._inside(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy what is in a folder of the environment into a folder of the host.

        Raises:
            TransferError: If there is no such folder.
        """
        await self.download_dir_with_exclusions(
            source_dir=source_dir, target_dir=target_dir, exclude=[]
        )

    async def download_dir_with_exclusions(
        self, *, source_dir: str, target_dir: Path | str, exclude: list[str]
    ) -> None:
        """Copy a folder out of the environment without what matches patterns of `tar`.

        Raises:
            TransferError: If there is no such folder.
        """
        skipped = await self._running().download_dir(
            self._inside(source_dir),
            target_dir,
            max_file_bytes=self._max_file_bytes,
            exclude=exclude,
        )
        for each in skipped:
            self.logger.warning("Not copied out of the sandbox: %s", each)
        await asyncio.to_thread(drop_large_files, Path(target_dir), self.logger)

    def _inside(self, path: str) -> str:
        return posixpath.join(self._workdir, str(path))
