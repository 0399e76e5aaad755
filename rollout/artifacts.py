"""Storage of the files of rollouts, below ``<root>/<rollout_id>/``.

Theory of operation: an `ArtifactStore` stands for one root. It does its work in a few threads,
so that a slow disk never stops the event loop, and nothing that it meets fails a rollout:
storage that cannot be used gives no folder and one warning. Storage that hangs holds up a
rollout for a bounded time at most, and is then left alone until it answers.

The root is opened, and tried for whether it takes files, once for all rollouts that had asked
before.

Below the root no link and no special file is followed, and ids that cannot be the name of a
folder get another one, so no rollout writes anywhere else.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

import platformdirs
import trio

from rollout._files.folders import Folder, folder_name, open_root
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

T = TypeVar("T")


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
        self._pool: ThreadPool[_Call[Any]] = ThreadPool(self._work, _MOST_THREADS)
        self._exact_case: bool | None = None
        self._abandoned: list[_Call[Any]] = []
        self._warned: set[object] = set()

    def __repr__(self) -> str:
        return f"<ArtifactStore {'keeps nothing' if self.root is None else self.root}>"

    @property
    def keeps(self) -> bool:
        """Whether anything is kept, under the running clock; asked within a trio run."""
        return self.root is not None and not clock_jumps()

    async def artifacts_dir(self, rollout_id: str) -> Path | None:
        """Make the artifacts folder of a rollout, and check that it can be written to.

        Cancellation leaves the work to its thread, which may still make the folder.

        Returns:
            The folder, ``None`` if nothing is kept or the storage cannot be used. The latter
            is logged, once for each reason.
        """
        if self.root is None or not self.keeps:
            await trio.lowlevel.checkpoint()
            return None
        return await self._call(rollout_id, self._make)

    async def save(self, rollout_id: str, build: Callable[[], Mapping[str, bytes | None]]) -> None:
        """Write files into a rollout's folder, each as a whole or not at all.

        Whatever is cancelled, it waits; then, or if the storage does not answer, for a bounded
        time. Never raises: what goes wrong is logged, once for each reason.

        Args:
            rollout_id: The rollout.
            build: Makes the files' contents by name, ``None`` to remove one. It runs in the
                thread too.
        """
        if self.root is None or not self.keeps:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
            return
        await self._call(rollout_id, self._save, build, shield=True)

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
        if self.root is None:
            raise OSError(errno.ENOENT, "nothing is kept")
        with (
            open_root(self.root) as root,
            root.enter(self._name(root, rollout_id), make=True) as folder,
        ):
            put_tree(tree, folder, name, move=move, without=without)

    async def _call(
        self, rollout_id: str, function: Callable[..., T], *args: Any, shield: bool = False
    ) -> T | None:
        """Run a function in a thread; ``None``, and a warning, if it fails or takes too long."""
        if self._hangs():
            self._warn(rollout_id, "it does not answer", "hangs")
            with trio.CancelScope(shield=shield):
                await trio.lowlevel.checkpoint()
            return None
        call = _Call(function, (rollout_id, *args))
        try:
            self._pool.submit(call)
        except RuntimeError as error:
            call.fail(error)
        try:
            await self._wait(call, shield=shield)
        finally:
            if not call.ended:
                call.dropped = True
                if call.begun:
                    self._abandoned.append(call)
        if not call.ended:
            self._warn(rollout_id, f"it did not answer within {LONGEST_WAIT_SEC:g} s", "hangs")
            return None
        if call.trouble is not None:
            self._warn(rollout_id, *call.trouble)
        return call.value

    async def _wait(self, call: _Call[Any], *, shield: bool) -> None:
        """Wait for the end of a call, for as long as the storage answers others meanwhile."""
        since = trio.current_time()
        patience = min(_PATIENCE_SEC, LONGEST_WAIT_SEC)
        with trio.CancelScope(deadline=since + patience, shield=shield):
            await call.wait()
            return
        self._pool.reinforce()
        while True:
            with trio.CancelScope(deadline=since + LONGEST_WAIT_SEC, shield=shield):
                await call.wait()
                return
            cancelled = trio.current_effective_deadline() == -math.inf
            if cancelled or self._pool.progress_at < since:
                return
            since = trio.current_time()

    def _hangs(self) -> bool:
        """Whether a thread has worked for too long, and no other one made progress either."""
        self._abandoned = [call for call in self._abandoned if not call.ended and call.of_this_run]
        if not self._abandoned:
            return False
        last = max(self._pool.progress_at, min(call.started for call in self._abandoned))
        return trio.current_time() - last >= LONGEST_WAIT_SEC

    def _warn(self, rollout_id: str, reason: str, kind: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(
                "rollout %s: its files are not kept below %s: %s (this is said once)",
                rollout_id,
                self.root,
                reason,
            )

    # --- in the thread --------------------------------------------------------------------------

    def _work(self, calls: Iterator[_Call[Any]]) -> None:
        with suppress(OSError), _Root(self.root, self._pool) as root:
            for call in calls:
                call.run(root)

    def _name(self, root: Folder, rollout_id: str) -> str:
        if self._exact_case is None:
            self._exact_case = root.is_case_sensitive()
        return folder_name(rollout_id, exact_case=self._exact_case)

    def _make(self, root: _Root, rollout_id: str) -> Path:
        folder = root.open()
        name = self._name(folder, rollout_id)
        with folder.enter(name, make=True) as own:
            fresh = own.make(ARTIFACTS)
            if not fresh or not root.tried:
                asked = self._pool.submitted
                with own.enter(ARTIFACTS, make=False) as artifacts:
                    artifacts.check_writable()
                root.tried_for = asked
        return folder.path / name / ARTIFACTS

    def _save(
        self, root: _Root, rollout_id: str, build: Callable[[], Mapping[str, bytes | None]]
    ) -> None:
        files = build()
        folder = root.open()
        with folder.enter(self._name(folder, rollout_id), make=True, likely=True) as own:
            first: OSError | None = None
            for name, data in files.items():
                try:
                    own.remove(name) if data is None else own.write(name, data)
                except OSError as error:
                    first = first or error
            if first is not None:
                raise first


class _Root:
    """The open root of a store, for the calls that one thread does.

    Attributes:
        tried_for: Up to which call it is known that files can be written below it.
    """

    def __init__(self, path: Path | None, pool: ThreadPool[Any]) -> None:
        self.tried_for = 0
        self._path = path
        self._pool = pool
        self._call = 0
        self._opened_for = 0
        self._folder: Folder | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self, number: int) -> None:
        """Begin the call of that number."""
        self._call = number
        if number > self._opened_for:
            self.close()

    @property
    def tried(self) -> bool:
        """Whether it is known for the current call that files can be written."""
        return self.tried_for >= self._call

    def open(self) -> Folder:
        """Return the root's folder, opened after the current call was submitted.

        Raises:
            OSError: It cannot be opened.
        """
        if self._path is None:
            raise OSError(errno.ENOENT, "nothing is kept")
        if self._folder is None:
            self._opened_for = self._pool.submitted
            self._folder = self._stack.enter_context(open_root(self._path))
        return self._folder

    def close(self) -> None:
        """Close the folder."""
        self._folder = None
        self.tried_for = 0
        self._stack.close()


class _Call(Job, Generic[T]):
    """A call of a function in a thread.

    Attributes:
        value: What it returned.
        trouble: The reason of a failure, for people, and a key for its kind.
    """

    def __init__(self, function: Callable[..., T], args: tuple[Any, ...]) -> None:
        super().__init__()
        self.value: T | None = None
        self.trouble: tuple[str, object] | None = None
        self._function = function
        self._args = args

    def run(self, root: _Root) -> None:
        """Call the function; runs in the thread."""
        try:
            root.next(self.number)
            self.value = self._function(root, *self._args)
            self.ended = True
        except BaseException as error:  # noqa: BLE001 - a rollout does not fail for its files
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Record a failure, without the error itself: its traceback would lead back here."""
        self.trouble = _reason(error), (type(error), getattr(error, "errno", None))
        self.ended = True


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
