"""Download tasks from git and Harbor's registry, with Harbor's own client.

What is here runs on the bridge's asyncio loop. Rollouts of the same task that come at the same
time share one download; it is cancelled when the last of them has gone, and not before. Each
rollout then gets a copy in its own workspace, so that nothing that is fetched later, and nothing
that a rollout does to its task, changes what another one runs.

A task of the registry is kept in Harbor's cache under its digest, and a task of git under its
commit if the rollout names the whole commit. A branch, a tag or no commit at all means what is
there now: it is downloaded again once nobody is downloading it, into a folder that goes away.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from pathlib import Path, PurePosixPath
from typing import Any
from weakref import WeakKeyDictionary

from attrs import define

from rollout._redaction import redact
from rollout._tasks import sole_error
from rollout.backend.harbor.errors import TaskFetchError, UnfitTaskError
from rollout.backend.harbor.plan import ResolvedTask
from rollout.backend.harbor.tasks.files import describe
from rollout.backend.harbor.tasks.links import check_tree, copy_tree
from rollout.backend.harbor.tasks.references import credentials_of, without_credentials
from rollout.errors import BackendConfigurationError, InvalidFieldError

__all__ = ["fetch_task"]

_FIELD = "metadata.harbor_task"
_WHOLE_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.IGNORECASE)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST_REASON = 500


async def fetch_task(task: ResolvedTask, workspace: Path) -> ResolvedTask:
    """Download a task if it is not on this machine, and read what its files say. For asyncio.

    Args:
        task: The task; one that is complete comes back as it is.
        workspace: The rollout's own folder; the task's copy goes below it.

    Raises:
        TaskFetchError: The download failed.
        InvalidFieldError: What was downloaded is not a task, or has links out of it.
        BackendConfigurationError: A folder of this machine is not a task, or has links out of it.

    A cancellation ends the download if no other rollout waits for it; the unfinished copy stays
    in *workspace*.
    """
    if task.folder is not None:
        return task
    if set(task.source) == {"path"}:
        folder = Path(task.source["path"])
        try:
            return await asyncio.to_thread(describe, folder, task.name)
        except UnfitTaskError as error:
            raise BackendConfigurationError(f"task {task.name}: {error}") from error
    place = str(task.source.get("path") or task.source["name"])
    folder = workspace / "task" / place.rpartition("/")[2]
    async with _shared(task) as fetched:
        try:
            return await asyncio.to_thread(_copy, fetched, folder, task.name)
        except UnfitTaskError as error:
            raise InvalidFieldError(
                _FIELD, f"({task.name}) is not a usable task: {error}"
            ) from error


def _copy(fetched: Path, folder: Path, name: str) -> ResolvedTask:
    check_tree(fetched)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    copy_tree(fetched, folder)
    return describe(folder, name)


# --- one download for all that wait for it ----------------------------------------------------


@define(eq=False)
class _Download:
    """A download, from its start until the last rollout that waited for it has its copy.

    Attributes:
        work: Returns where the task is.
        staging: The folders that go away with it.
        readers: How many rollouts wait for it or copy it.
        end: Removes what is not kept.
    """

    work: asyncio.Task[Path]
    staging: list[Path]
    readers: int = 0
    end: asyncio.Task[None] | None = None


_downloads: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Download]] = WeakKeyDictionary()


@asynccontextmanager
async def _shared(task: ResolvedTask) -> AsyncGenerator[Path, None]:
    """Keep a downloaded task on this machine while the block runs."""
    loop = asyncio.get_running_loop()
    running = _downloads.setdefault(loop, {})
    key = repr(sorted(task.source.items()))
    download = running.get(key)
    if download is None or download.work.done():
        staging: list[Path] = []
        # Nobody's context: the work belongs to all that wait for it.
        work = loop.create_task(_obtain(task, staging), context=Context())
        download = running[key] = _Download(work, staging)
    download.readers += 1
    try:
        await asyncio.wait({download.work})
        error = download.work.exception()
        if error is not None:
            raise _failure(task, sole_error(error))  # for each that waits one of its own
        yield download.work.result()
    finally:
        download.readers -= 1
        if download.readers == 0:
            if running.get(key) is download:
                del running[key]
            download.end = loop.create_task(_end(download), context=Context())
            # It goes on by itself if this wait is cancelled.
            await asyncio.shield(download.end)


async def _end(download: _Download) -> None:
    download.work.cancel()
    await asyncio.gather(download.work, return_exceptions=True)
    for folder in download.staging:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


# --- the download itself ----------------------------------------------------------------------


async def _obtain(task: ResolvedTask, staging: list[Path]) -> Path:
    """Return the folder of a task, downloaded if it is not cached."""
    client = await asyncio.to_thread(_client, str(task.source.get("path", "")))
    task_id = _task_id(task)
    kept = _kept_at(task_id)
    if kept is not None and kept.is_dir() and any(kept.iterdir()):
        return kept
    folder = _new_folder(kept)
    staging.append(folder)
    result = await client.download_tasks([task_id], output_dir=folder)
    path = Path(result.paths[0])
    return path if kept is None else _keep(path, kept)


def _new_folder(kept: Path | None) -> Path:
    """Make a folder to download into, on the file system of the cache."""
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=".rollout-", dir=kept and kept.parent))


def _keep(path: Path, kept: Path) -> Path:
    """Move a task into the cache in one step, unless it is there already."""
    try:
        path.rename(kept)
    except OSError:
        return path
    return kept


def _task_id(task: ResolvedTask) -> Any:
    from harbor.models.task.id import GitTaskId, PackageTaskId  # noqa: PLC0415 - an extra

    source = task.source
    if "git_url" in source:
        return GitTaskId(
            git_url=source["git_url"],
            git_commit_id=source.get("git_commit_id"),
            path=Path(source["path"]),
        )
    org, _, name = source["name"].partition("/")
    return PackageTaskId(org=org, name=name, ref=source.get("ref"))


def _kept_at(task_id: Any) -> Path | None:
    """Return where Harbor keeps a task whose content can never change, ``None`` for others."""
    commit = getattr(task_id, "git_commit_id", None)
    digest = getattr(task_id, "ref", None)
    if (commit and _WHOLE_COMMIT.fullmatch(commit)) or (digest and _DIGEST.fullmatch(digest)):
        return Path(task_id.get_local_path())
    return None


def _client(path: str) -> Any:
    """Make Harbor's client, with a git that never prompts and ends when it is cancelled.

    It also checks a task within its clone: Harbor up to 0.20 copies what its links lead to.
    """
    from harbor.tasks.client import TaskClient  # noqa: PLC0415 - an extra

    class Client(TaskClient):  # type: ignore[misc,unused-ignore]
        async def _run_git(
            self, *args: Any, cwd: Path | None = None, input: bytes | None = None
        ) -> None:
            await _git(args, cwd, input)

        async def _run_git_stdout(self, *args: Any, cwd: Path | None = None) -> str:
            return (await _git(args, cwd)).decode("utf-8", "replace").strip()

        def _copy_task_source_to_target(
            self, source_path: Path, target_path: Path, **kwargs: Any
        ) -> None:
            _check_clone(source_path, path)
            super()._copy_task_source_to_target(source_path, target_path, **kwargs)

    return Client()


def _check_clone(folder: Path, path: str) -> None:
    """Check a task in a clone, and the way to it from the clone's top."""
    here = folder
    for _ in PurePosixPath(path).parts:
        if here.is_symlink():
            raise UnfitTaskError("the way to it in the repository has a link")
        here = here.parent
    check_tree(folder)


async def _git(args: Sequence[Any], cwd: Path | None, given: bytes | None = None) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *map(str, args),
        stdin=asyncio.subprocess.DEVNULL if given is None else asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=cwd,
        env=os.environ | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
        # No terminal to ask for a password, and one signal for all that git starts.
        start_new_session=True,
    )
    try:
        stdout, stderr = await process.communicate(given)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(
            process.returncode, [str(arg) for arg in args], stdout, stderr
        )
    return stdout


def _failure(task: ResolvedTask, error: BaseException) -> Exception:
    """Return what to raise for a failed download.

    Harbor's own error is not chained: the command line of git is in it, and a password may be.
    """
    if isinstance(error, (ValueError, FileNotFoundError)):
        # Harbor checks links on its own, and opens the task's folder in the repository.
        reason = "is not there" if isinstance(error, FileNotFoundError) else str(error)
        return InvalidFieldError(_FIELD, f"({task.name}) {_clean(reason, task)}")
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or b"").decode("utf-8", "replace").strip().splitlines()
        verb = next((word for word in error.cmd[1:] if word.isalpha()), "git")
        reason = f"git {verb} failed ({lines[-1] if lines else error.returncode})"
    else:
        reason = f"{type(error).__name__}: {error}"
    return TaskFetchError(f"task {task.name} cannot be fetched: {_clean(reason, task)}")


def _clean(text: str, task: ResolvedTask) -> str:
    url = task.source.get("git_url")
    if url is not None:
        text = redact(text.replace(url, without_credentials(url)), credentials_of(url))
    return text[:_LONGEST_REASON]
