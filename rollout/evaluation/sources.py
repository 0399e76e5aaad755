"""The sources of a run's own server, so that a helper that changes is noticed.

Theory of operation: sources are read and nothing is imported, since code of users may do anything
when it is. From the application's module on, import statements are followed, and strings of the
form ``module:Name``, by which workflows may be given. A module that is a file is that file; a
package is the sources and texts in its folder. One in ``site-packages`` is its distribution.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from attrs import define, field

from rollout._imports import imported_modules
from rollout.errors import EvaluationError

__all__ = ["Sources"]

_OWN = "rollout"
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_KEPT = frozenset({".py", ".txt", ".md", ".json", ".toml", ".yaml", ".yml", ".jinja", ".j2"})
_REFERENCE = re.compile(rb"""["']([A-Za-z_]\w*)(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*["']""")
_LOCK = ".lock"
_DIGEST = 16
"""Characters of a digest that are kept: a change is to be noticed, not an attack."""


@define
class Sources:
    """The sources of an application. Blocking.

    Attributes:
        files: Digests by the file's path below the folder that it is imported from.
        distributions: Versions by the name of the distribution.

    Raises:
        EvaluationError: A file cannot be read.
    """

    files: dict[str, str] = field(factory=dict, init=False)
    distributions: dict[str, str] = field(factory=dict, init=False)
    _path: list[str]
    _seen: set[str] = field(factory=lambda: {_OWN, *sys.stdlib_module_names}, init=False)

    @classmethod
    def of_app(cls, app: str, environment: Mapping[str, str]) -> Sources:
        """Find what an application imports; a ``FILE.py`` itself is not among it.

        Args:
            app: ``MODULE:APP`` or ``FILE.py:APP``.
            environment: Variables that the server gets on top of those of this process.
        """
        importlib.invalidate_caches()
        module = app.rpartition(":")[0]
        file = Path(module) if module.endswith(".py") else None
        more = (os.environ | dict(environment)).get("PYTHONPATH", "").split(os.pathsep)
        folders = [] if file is None else [str(file.resolve().parent)]
        sources = cls([*folders, os.getcwd(), *filter(None, more), *sys.path])  # noqa: PTH109
        if file is None:
            sources._visit(module.partition(".")[0])
        else:
            sources._seen.add(file.stem)
            sources._follow(_read(file))
        return sources

    def _visit(self, top: str) -> None:
        """Add a top-level module, unless it is there or cannot be found."""
        if top in self._seen:
            return
        self._seen.add(top)
        spec = self._find(top)
        places = [] if spec is None else _places(spec)
        if any(_INSTALLED & set(place.parts) for place in places):
            for name in self._owners.get(top, ()):
                self.distributions[name] = metadata.version(name)
            return
        for place in places:
            for path in _files_in(place) if place.is_dir() else (place,):
                data = _read(path)
                name = path.relative_to(place.parent).as_posix()
                self.files[name] = hashlib.sha256(data).hexdigest()[:_DIGEST]
                if path.suffix == ".py":
                    self._follow(data)

    def _follow(self, source: bytes) -> None:
        references = {name.decode() for name in _REFERENCE.findall(source)}
        for top in sorted(imported_modules(source) | references):
            self._visit(top)

    def _find(self, top: str) -> ModuleSpec | None:
        found = PathFinder.find_spec(top, self._path)
        if found is not None:
            return found
        try:
            return importlib.util.find_spec(
                top
            )  # some editable installs have a finder of their own
        except (ImportError, ValueError):
            return None

    @cached_property
    def _owners(self) -> Mapping[str, list[str]]:
        return metadata.packages_distributions()


def _places(spec: ModuleSpec) -> list[Path]:
    """Return the folders of a package, or the file of a module."""
    if spec.submodule_search_locations is not None:
        return [Path(place) for place in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.origin is not None and spec.has_location else []


def _files_in(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        if _LOCK in names:  # it holds an evaluation
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if name[0] != "." and name != "__pycache__")
        for name in sorted(names):
            path = Path(root, name)
            if name[0] != "." and path.suffix in _KEPT and path.is_file():
                yield path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EvaluationError(f"server.app: {path}: {error.strerror or error}") from None
