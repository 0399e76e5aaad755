"""The files of a dataset, in the order in which their rows count."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from glob import glob
from pathlib import Path

from rollout.evaluation.datasets._place import Place

__all__ = ["expand"]

_PATTERN = frozenset("*?[")


def expand(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """List the files of paths and patterns; those of a pattern by their names.

    A path that exists is a file, whatever its name.

    Raises:
        DatasetError: A pattern matches no file, or a file is there twice.
    """
    found = tuple(file for path in paths for file in _matches(path))
    for file, times in Counter(found).items():
        if times > 1:
            raise Place(str(file)).file_error("is twice among the files of the dataset")
    return found


def _matches(path: Path) -> Iterator[Path]:
    if _PATTERN.isdisjoint(str(path)) or os.path.lexists(path):
        yield path
        return
    names = glob(str(path), recursive=True)  # noqa: PTH207 - that of Path takes no absolute one
    files = sorted(file for name in names if (file := Path(name)).is_file())
    if not files:
        raise Place(str(path)).file_error("no file matches this pattern")
    yield from files
