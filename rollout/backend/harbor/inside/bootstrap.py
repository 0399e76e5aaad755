"""The first script in a sandbox; it needs the standard library alone.

It is copied into the sandbox beside an archive of modules. ``check`` says what this Python lacks,
``unpack`` puts the modules where they can be imported, ``run`` hands over to
`rollout.backend.harbor.inside.runner`, which is one of them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import zipfile
from pathlib import Path

__all__ = ["OLDEST", "check", "run", "unpack"]

OLDEST = (3, 11)
"""The first Python that runs this library."""


def check(home: Path) -> int:
    """Print what this Python is and lacks; 0 if it lacks nothing, 2 if it is too old."""
    if sys.version_info < OLDEST:
        return 2
    sys.path.insert(0, str(home / "site"))
    needs = json.loads((home / "in" / "needs.json").read_text())
    missing = [need["requirement"] for need in needs if not all(map(_is_there, need["imports"]))]
    version = ".".join(map(str, sys.version_info[:3]))
    print(json.dumps({"python": sys.executable, "version": version, "missing": missing}))  # noqa: T201
    return 1 if missing else 0


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def unpack(home: Path) -> int:
    """Unpack the modules into the folder that `run` imports from."""
    with zipfile.ZipFile(home / "in" / "site.zip") as archive:
        archive.extractall(home / "site")
    return 0


def run(home: Path) -> int:
    """Run the workflow; 0 if a result was written, also that of a failure."""
    with contextlib.suppress(OSError):
        os.setsid()
    # Whoever wants it to end kills the group, and so what the workflow has started.
    (home / "out" / "pid").write_text(str(os.getpgrp()))
    sys.path.insert(0, str(home / "site"))
    runner = importlib.import_module("rollout.backend.harbor.inside.runner")
    return int(runner.main(home / "in" / "payload.json", home / "out" / "result.json"))


if __name__ == "__main__":
    sys.exit({"check": check, "unpack": unpack, "run": run}[sys.argv[1]](Path(sys.argv[2])))
