"""Where the Python of this process is."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["python_paths"]


def python_paths() -> list[str]:
    """Return the folders of this process's Python and of its packages.

    For environments that show parts of this machine, as `NamespaceEnvironment` does with its
    ``read_only_paths``: a workflow then runs on the same Python, with all that is installed.
    """
    found: list[str] = []
    for path in (sys.base_prefix, sys.prefix, *map(_real, (sys.base_prefix, sys.prefix))):
        # What lies below another one is shown with it; /usr is there in any case.
        inside = any(Path(path).is_relative_to(other) for other in ("/usr", *found))
        if Path(path).is_dir() and not inside:
            found.append(path)
    return found


def _real(path: str) -> str:
    return str(Path(path).resolve())
