"""The folders of rollouts below one root, and the files in them. Blocking."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollout._files.folders import Folder, folder_name, make_root

__all__ = ["RolloutFolders", "problem_of"]


class RolloutFolders:
    """A root with a folder for each rollout.

    Args:
        root: The root, as an absolute path; it is made when it is needed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._exact_case: bool | None = None

    @contextmanager
    def enter(self, rollout_id: str, *, likely: bool = False) -> Generator[Folder, None, None]:
        """Open the folder of a rollout for the block; make what is missing.

        Args:
            rollout_id: The rollout.
            likely: Whether it is probably there, which saves an attempt to make it.

        Raises:
            OSError: It cannot be made or opened.
        """
        root = Folder(self.root)
        if self._exact_case is None:
            make_root(self.root)
            self._exact_case = root.is_case_sensitive()
        name = folder_name(rollout_id, exact_case=self._exact_case)
        with root.enter(name, make=True, likely=likely) as folder:
            yield folder

    def read(self, rollout_id: str, names: Sequence[str], *, largest: int) -> list[bytes]:
        """Return the contents of files in a rollout's folder; the root may be read-only.

        Args:
            rollout_id: The rollout.
            names: The files.
            largest: How many bytes each may have.

        Raises:
            OSError: One is missing, or cannot be read.
        """
        try:
            return self._read(rollout_id, names, largest, exact_case=False)
        except FileNotFoundError:
            return self._read(rollout_id, names, largest, exact_case=True)

    def _read(
        self, rollout_id: str, names: Sequence[str], largest: int, *, exact_case: bool
    ) -> list[bytes]:
        name = folder_name(rollout_id, exact_case=exact_case)
        with Folder(self.root).enter(name, make=False) as folder:
            return [folder.read(each, largest) for each in names]

    def save(self, rollout_id: str, files: Mapping[str, bytes | None]) -> list[str]:
        """Write files into a rollout's folder, each as a whole or not at all.

        Args:
            rollout_id: The rollout.
            files: Their contents by name, ``None`` to remove one.

        Returns:
            What could not be done, and why; nothing if all is well.
        """
        problems = []
        try:
            with self.enter(rollout_id) as folder:
                for name, data in files.items():
                    try:
                        folder.remove(name) if data is None else folder.write(name, data)
                    except OSError as error:
                        problems.append(problem_of(error))
        except Exception as error:  # noqa: BLE001 - a rollout does not fail for its files
            problems.append(problem_of(error))
        return problems


def problem_of(error: BaseException) -> str:
    """Say in a few words what went wrong, without anything that a message might give away."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror or os.strerror(error.errno)
    return type(error).__name__
