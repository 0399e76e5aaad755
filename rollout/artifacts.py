"""Storage of the files of rollouts, below ``<root>/<rollout_id>/``.

Theory of operation: an `ArtifactStore` stands for one root. It saves files in a few threads, so
that a slow disk does not stop the event loop; the folder for artifacts is made where user code
asks for it. Nothing that it meets fails a rollout: storage that cannot be used gives no folder
and one warning. Storage that hangs holds up the end of a rollout for a bounded time, and is then
left alone until it answers.

Below the root no link and no special file is followed, and ids that cannot be the name of a
folder get another one, so no rollout writes anywhere else.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import platformdirs
import trio

from rollout._files.folders import Folder, folder_name, make_root
from rollout._files.thread_pool import Job, ThreadPool
from rollout._files.trees import put_tree
from rollout._logs import get_logger
from rollout._threads import clock_jumps
from rollout.errors import BackendConfigurationError

__all__ = ["ARTIFACT_ROOT_VARIABLE", "ArtifactStore"]

logger = get_logger(__name__)

ARTIFACT_ROOT_VARIABLE = "ROLLOUT_ARTIFACT_ROOT"
"""The environment variable that names the root; set but empty it keeps nothing."""

ARTIFACTS = "artifacts"
LONGEST_WAIT_SEC = 8.0
"""How long storage may take; less than a server's shutdown leaves to what it ends by force.

A rollout waits longer while others' files are written one after the other: busy storage does
not hang."""

_PATIENCE_SEC = 0.25
"""How long a call waits before another thread is called, since one may be stuck."""

_MOST_THREADS = 8


class ArtifactStore:
    """Keeps the files of rollouts below one root.

    Args:
        root: The root. ``None`` takes the environment variable ``ROLLOUT_ARTIFACT_ROOT``, else
            the user's data folder of the platform; ``False`` keeps nothing.

    Raises:
        BackendConfigurationError: The root is neither a path, nor ``False``, nor ``None``.

    Under a clock that jumps (`trio.testing.MockClock` with an autojump threshold) nothing is
    kept either: hours would go by while a thread works.

    Attributes:
        root: The root as an absolute path; ``None`` if nothing is kept.
    """

    def __init__(self, root: str | os.PathLike[str] | Literal[False] | None = None) -> None:
        self.root = _resolve(root)
        self._pool = ThreadPool(_MOST_THREADS)
        self._exact_case: bool | None = None
        self._abandoned: list[Job] = []
        self._warned: set[object] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ArtifactStore {'keeps nothing' if self.root is None else self.root}>"

    @property
    def keeps(self) -> bool:
        """Whether anything is kept, under the running clock; asked within a trio run."""
        return self.root is not None and not clock_jumps()

    def artifacts_dir(self, rollout_id: str) -> Path | None:
        """Make the artifacts folder of a rollout, and check that it can be written to. Blocking.

        For any thread; whether anything is kept under the running clock is for the caller to ask.

        Returns:
            The folder, ``None`` if nothing is kept or the storage cannot be used or hangs. The
            latter is logged, once for each reason.
        """
        if self.root is None:
            return None
        if self._hangs:
            self._warn(rollout_id, "it does not answer", "hangs")
            return None
        try:
            with (
                self._folder(rollout_id) as folder,
                folder.enter(ARTIFACTS, make=True) as artifacts,
            ):
                artifacts.check_writable()
                return artifacts.path
        except Exception as error:  # noqa: BLE001 - a rollout does not fail for its files
            self._warn_of(rollout_id, error)
            return None

    async def save(self, rollout_id: str, build: Callable[[], Mapping[str, bytes | None]]) -> None:
        """Write files into a rollout's folder, each as a whole or not at all.

        Whatever is cancelled, it waits; then, or if the storage does not answer, for a bounded
        time. Never raises: what goes wrong is logged, once for each reason.

        Args:
            rollout_id: The rollout.
            build: Makes the files' contents by name, ``None`` to remove one. It runs in the
                thread too.
        """
        if self.keeps:
            if not self._hangs:
                await self._save_in_thread(rollout_id, build)
                return
            self._warn(rollout_id, "it does not answer", "hangs")
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()

    def take_in(
        self, rollout_id: str, name: str, tree: Path, *, move: bool, without: Collection[str] = ()
    ) -> None:
        """Put a folder into a rollout's folder, replacing what has its name. Blocking.

        For threads that have the time that it takes. Links in the folder must not lead out of
        it (see `rollout._files.trees.tame_tree`). It is in its place as a whole or not at all.

        Args:
            rollout_id: The rollout.
            name: The folder's name there.
            tree: The folder.
            move: Whether it is gone afterwards from where it was.
            without: What in it is not copied. What is moved, is moved as a whole.

        Raises:
            OSError: It cannot be put there, or nothing is kept.
        """
        with self._folder(rollout_id) as folder:
            put_tree(tree, folder, name, move=move, without=without)

    async def _save_in_thread(
        self, rollout_id: str, build: Callable[[], Mapping[str, bytes | None]]
    ) -> None:
        self._abandoned.clear()
        job = Job(partial(self._save, rollout_id, build))
        try:
            self._pool.submit(job)
        except RuntimeError as error:
            self._warn_of(rollout_id, error)
            job.ended = True
        answers = await self._wait(job)
        if job.ended:
            self._abandoned.clear()
            return
        job.dropped = True
        if not answers:
            self._abandoned.append(job)
        self._warn(rollout_id, f"it did not answer within {LONGEST_WAIT_SEC:g} s", "hangs")

    async def _wait(self, job: Job) -> bool:
        """Wait for the end of a job, for as long as the storage answers others meanwhile.

        Returns:
            Whether it has answered anyone lately.
        """
        since = trio.current_time()
        patience = min(_PATIENCE_SEC, LONGEST_WAIT_SEC)
        with trio.CancelScope(deadline=since + patience, shield=True):
            await job.wait()
            return True
        self._pool.reinforce()
        while True:
            with trio.CancelScope(deadline=since + LONGEST_WAIT_SEC, shield=True):
                await job.wait()
                return True
            answers = self._pool.progress_at >= since
            if not answers or trio.current_effective_deadline() == -math.inf:
                return answers
            since = trio.current_time()

    @property
    def _hangs(self) -> bool:
        """Whether the storage has kept threads for too long, and answers nobody since."""
        return bool(self._abandoned) and not any(job.ended for job in self._abandoned)

    def _warn(self, rollout_id: str, reason: str, kind: object) -> None:
        with self._lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        logger.warning(
            "rollout %s: its files are not kept below %s: %s (this is said once)",
            rollout_id,
            self.root,
            reason,
        )

    def _warn_of(self, rollout_id: str, error: BaseException) -> None:
        self._warn(rollout_id, _reason(error), (type(error), getattr(error, "errno", None)))

    # --- in any thread --------------------------------------------------------------------------

    @contextmanager
    def _folder(self, rollout_id: str, *, likely: bool = False) -> Generator[Folder, None, None]:
        """Open the folder of a rollout for the block; make what is missing.

        Raises:
            OSError: It cannot be made or opened, or nothing is kept.
        """
        if self.root is None:
            raise OSError(errno.ENOENT, "nothing is kept")
        root = Folder(self.root)
        if self._exact_case is None:
            make_root(self.root)
            self._exact_case = root.is_case_sensitive()
        name = folder_name(rollout_id, exact_case=self._exact_case)
        with root.enter(name, make=True, likely=likely) as folder:
            yield folder

    def _save(self, rollout_id: str, build: Callable[[], Mapping[str, bytes | None]]) -> None:
        try:
            files = build()
            with self._folder(rollout_id, likely=True) as folder:
                for name, data in files.items():
                    try:
                        folder.remove(name) if data is None else folder.write(name, data)
                    except OSError as error:
                        self._warn_of(rollout_id, error)
        except BaseException as error:  # noqa: BLE001 - a rollout does not fail for its files
            self._warn_of(rollout_id, error)


def _resolve(root: Any) -> Path | None:
    """Return the root as an absolute path."""
    if root is None:
        named = os.environ.get(ARTIFACT_ROOT_VARIABLE)
        if named is None:
            return _default_root()
        root = named or False
    if root is False:
        return None
    try:
        path = os.fspath(root)
    except TypeError:
        path = None
    if not isinstance(path, str) or not path.strip():
        raise BackendConfigurationError(
            "artifact_root must be the path of a folder, False to keep nothing, or None"
        )
    return Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111


def _default_root() -> Path | None:
    """Return the folder in the user's data folder; ``None``, and a warning, without a home."""
    try:
        root = platformdirs.user_data_path("trio-rollout", appauthor=False) / "rollouts"
    except RuntimeError:
        root = Path()
    if root.is_absolute():
        return root
    logger.warning(
        "the files of rollouts are not kept: this user has no home folder; name a folder with %s "
        "(set but empty, it keeps nothing)",
        ARTIFACT_ROOT_VARIABLE,
    )
    return None


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror or os.strerror(error.errno)
    return type(error).__name__
