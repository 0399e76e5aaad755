"""A key that must not be left, and a look at what is left."""

from __future__ import annotations

import os
from pathlib import Path

KEY = "sk-Proj_7f3aQ9zLw2"


def contents(folder: Path) -> bytes:
    """Everything that is left, names included, as one string of bytes."""
    found = []
    for way, folders, files in os.walk(folder):
        found += [os.fsencode(name) for name in (*folders, *files)]
        for name in files:
            path = Path(way, name)
            found.append(os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes())
    return b"\n".join(found)
