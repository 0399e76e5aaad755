"""Storage of the files of rollouts, below ``<root>/<rollout_id>/``.

Theory of operation: an `ArtifactStore` stands for one root. Its files are written by a process of
their own (`rollout._files.writer`), so that a slow disk does not stop the event loop; the folder
for artifacts is made where user code asks for it. Nothing that it meets fails a rollout: storage
that cannot be used gives no folder and one warning. Storage that hangs holds up the end of a
rollout for a bounded time, and is then left alone until it answers.

Below the root no link and no special file is followed, and ids that cannot be the name of a
folder get another one, so no rollout writes anywhere else.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import platformdirs
import trio

from rollout._files.rollouts import RolloutFolders, problem_of
from rollout._files.trees import put_tree
from rollout._files.writer import Writer
from rollout._logs import get_logger
from rollout._threads import RESULTS, clock_jumps, run_off_loop
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

_HANGS = f"it did not answer within {LONGEST_WAIT_SEC:g} s"


class ArtifactStore:
    """Keeps the files of rollouts below one root.

    Args:
        root: The root. ``None`` takes the environment variable ``ROLLOUT_ARTIFACT_ROOT``, else
            the user's data folder of the platform; ``False`` keeps nothing.

    Raises:
        BackendConfigurationError: The root is neither a path, nor ``False``, nor ``None``.

    Under a clock that jumps (`trio.testing.MockClock` with an autojump threshold) nothing is
    kept either: hours would go by while files are written.

    Attributes:
        root: The root as an absolute path; ``None`` if nothing is kept.
        counts: Of how many rollouts files were written (``files.written``), and of how many some
            could not be (``files.failed``).
    """

    def __init__(self, root: str | os.PathLike[str] | Literal[False] | None = None) -> None:
        self.root = _resolve(root)
        self.counts: Counter[str] = Counter()
        self._folders = None if self.root is None else RolloutFolders(self.root)
        self._writer = None if self.root is None else Writer(self.root, LONGEST_WAIT_SEC)
        self._warned: set[str] = set()
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
        if self._folders is None:
            return None
        if self._hangs:
            self._warn(rollout_id, _HANGS)
            return None
        try:
            with (
                self._folders.enter(rollout_id) as folder,
                folder.enter(ARTIFACTS, make=True) as artifacts,
            ):
                artifacts.check_writable()
                return artifacts.path
        except Exception as error:  # noqa: BLE001 - a rollout does not fail for its files
            self._warn(rollout_id, problem_of(error))
            return None

    async def save(
        self,
        rollout_id: str,
        build: Callable[[], Mapping[str, bytes | None]],
        *,
        in_thread: bool = False,
    ) -> None:
        """Write files into a rollout's folder, each as a whole or not at all.

        Whatever is cancelled, it waits; then, or if the storage does not answer, for a bounded
        time. Never raises: what goes wrong is logged, once for each reason.

        Args:
            rollout_id: The rollout.
            build: Makes the files' contents by name, ``None`` to remove one.
            in_thread: Whether that takes long enough to call it in a thread.
        """
        problems = await self._saved(rollout_id, build, in_thread=in_thread)
        if self.keeps:
            self.counts["files.failed" if problems else "files.written"] += 1
        for problem in problems:
            self._warn(rollout_id, problem)

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
        if self._folders is None:
            raise OSError(errno.ENOENT, "nothing is kept")
        with self._folders.enter(rollout_id) as folder:
            put_tree(tree, folder, name, move=move, without=without)

    async def _saved(
        self, rollout_id: str, build: Callable[[], Mapping[str, bytes | None]], *, in_thread: bool
    ) -> list[str]:
        """Save files; return why some are not kept."""
        if self._writer is None or not self.keeps or self._hangs:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return [_HANGS] if self.keeps else []
        files: Mapping[str, bytes | None] = {}
        try:
            if in_thread:
                with trio.CancelScope(shield=True):
                    files = await run_off_loop(build, RESULTS)
            else:
                files = build()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign objects raise anything
            await trio.lowlevel.cancel_shielded_checkpoint()
            return [problem_of(error)]
        written = await self._writer.write(rollout_id, files)
        return [_HANGS] if written is None else written

    @property
    def _hangs(self) -> bool:
        return self._writer is not None and self._writer.hangs

    def _warn(self, rollout_id: str, reason: str) -> None:
        with self._lock:
            if reason in self._warned:
                return
            self._warned.add(reason)
        logger.warning(
            "rollout %s: its files are not kept below %s: %s (this is said once)",
            rollout_id,
            self.root,
            reason,
        )


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
