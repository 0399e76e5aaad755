"""Collect the sources of a workflow, and the distributions that they import, for a sandbox.

A sandbox may have no network, so nothing is built by a build backend or fetched from an index:
files that are here go into one archive. Sources that are not part of an installed distribution
are followed through their import statements. Distributions of pure Python come along. Compiled
ones do not: the sandbox has to have them, or gets them from an index. A user's own folder of code
or wheel goes in whole instead, with what it declares to depend on.
"""

from __future__ import annotations

import importlib.util
import io
import re
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from attrs import define, field, frozen

import rollout
from rollout._imports import imported_modules
from rollout.errors import BackendConfigurationError

if TYPE_CHECKING:
    from packaging.markers import Marker

__all__ = ["Bundle", "Need", "make_bundle", "tree_files"]

_CORE = ("attrs", "cattrs", "trio", "platformdirs", "httpx")
"""What this library needs where a workflow runs; the rest of it serves servers."""

_OWN = "trio-rollout"
_METADATA = "METADATA"
_COMPILED = frozenset({".so", ".pyd", ".dylib", ".dll"})
_OF_THIS_INSTALLATION = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
_EARLIEST = (1980, 1, 1, 0, 0, 0)
_MOST_BYTES = 64 * 1024 * 1024

_INSIDE = {"os_name": "posix", "sys_platform": "linux", "platform_system": "Linux"}
"""What markers of requirements may ask of a sandbox."""

_PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Which Python it has is not known here; what one of these needs comes along."""


@frozen
class Need:
    """A distribution that is not bundled: the sandbox has to provide it.

    Attributes:
        requirement: It, as pip takes it.
        imports: The modules by whose presence it is recognised.
    """

    requirement: str
    imports: tuple[str, ...]


@frozen
class Bundle:
    """The files and requirements of a workflow in a sandbox.

    Attributes:
        files: The contents of files by their paths below a folder that modules are imported from.
        needs: What is not among them.
    """

    files: Mapping[str, bytes] = field(repr=False)
    needs: tuple[Need, ...]

    def archive(self) -> bytes:
        """Return the files as a zip archive; the same files make the same bytes."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for path, data in sorted(self.files.items()):
                entry = zipfile.ZipInfo(path, _EARLIEST)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o100644 << 16
                archive.writestr(entry, data)
        return buffer.getvalue()


def make_bundle(
    modules: Iterable[str],
    *,
    main: tuple[str, Path] | None = None,
    requirements: Iterable[str] = (),
    code: Path | None = None,
) -> Bundle:
    """Collect modules and their dependencies. Blocking: reads all files.

    Args:
        modules: Names of modules that can be imported here.
        main: A file that runs as ``__main__`` here, and the module's name in the sandbox.
        requirements: More distributions, for what no import statement shows. One that is not
            installed here is left to the sandbox.
        code: A folder of code, or a wheel; its modules go before those that can be imported here.

    Raises:
        BackendConfigurationError: A module cannot be found, is too large, or is compiled, or
            *code* is not what it should be.
    """
    search = _Search()
    search.require(_CORE)
    search.require(requirements, from_index=True)
    if code is not None and code.is_dir():
        search.add_folder(code)
    elif code is not None:
        search.add_wheel(code)
    if main is not None:
        search.add_file(*main)
    for module in modules:
        top = module.partition(".")[0]
        if not search.visit(top):
            where = "" if code is None else f": it is not in {code}, and cannot be imported here"
            raise BackendConfigurationError(
                f"module {top!r} has no source that can be packaged{where}"
            )
        if top in search.given and not search.has(module):
            raise BackendConfigurationError(f"module {module!r} is not in {code}")
    return search.bundle()


# What is installed does not change while a process runs, so it is read once.


@cache
def _owners() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


@cache
def _own_files() -> Mapping[str, bytes]:
    """Return this library's files, with metadata that has its version."""
    version = metadata.version(_OWN)
    described = f"Metadata-Version: 2.1\nName: {_OWN}\nVersion: {version}\n"
    info = f"{_OWN.replace('-', '_')}-{version}.dist-info/{_METADATA}"
    return tree_files(Path(rollout.__file__).parent, "rollout") | {info: described.encode()}


@cache
def _files_of(name: str) -> Mapping[str, bytes]:
    """Return the files of an installed distribution of pure Python by their paths.

    Scripts and data outside of ``site-packages`` are left out, as is what says where the
    distribution came from.
    """
    files: dict[str, bytes] = {}
    for file in metadata.distribution(name).files or ():
        parts = PurePosixPath(file).parts
        outside = ".." in parts or file.is_absolute() or file.suffix == ".pth"
        if outside or "__pycache__" in parts or parts[-1] in _OF_THIS_INSTALLATION:
            continue
        files[str(PurePosixPath(file))] = _read(Path(str(file.locate())))
    return files


def tree_files(root: Path, below: str) -> dict[str, bytes]:
    """Return the files of a package's folder by their paths. Blocking.

    Hidden files and caches are left out.

    Args:
        root: The folder.
        below: What the folder is called in the sandbox; empty if its files stand at the top.

    Raises:
        BackendConfigurationError: They are too large, or compiled for one platform.
    """
    files: dict[str, bytes] = {}
    size = 0
    for path in sorted(root.rglob("*")):
        inner = path.relative_to(root)
        if not path.is_file() or any(
            part.startswith(".") or part == "__pycache__" for part in inner.parts
        ):
            continue
        if path.suffix in _COMPILED:
            raise _compiled(path)
        size += path.stat().st_size
        if size > _MOST_BYTES:
            raise _too_large(root)
        files[PurePosixPath(below, inner.as_posix()).as_posix()] = _read(path)
    return files


def _compiled(path: object) -> BackendConfigurationError:
    return BackendConfigurationError(
        f"{path} is compiled for one platform, so it cannot be brought into a sandbox; take an "
        "image that has it"
    )


def _too_large(path: Path) -> BackendConfigurationError:
    return BackendConfigurationError(
        f"{path} is larger than {_MOST_BYTES // 1024**2} MiB, too large to be brought into each "
        "sandbox; keep data out of it"
    )


def _wheel(path: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of a wheel, but for scripts and data, and what it requires."""
    files: dict[str, bytes] = {}
    size = 0
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                parts = PurePosixPath(entry.filename).parts
                if entry.is_dir() or parts[0].endswith(".data"):
                    continue
                if PurePosixPath(entry.filename).suffix in _COMPILED:
                    raise _compiled(f"{path}: {entry.filename}")
                size += entry.file_size
                if size > _MOST_BYTES:
                    raise _too_large(path)
                if parts[-1] not in _OF_THIS_INSTALLATION:
                    files[entry.filename] = archive.read(entry)
            info = next((name for name in files if name.endswith(f".dist-info/{_METADATA}")), None)
            if info is None:
                raise BackendConfigurationError(f"not a wheel, since it has no metadata: {path}")
            place = zipfile.Path(archive, info.removesuffix(_METADATA))
            return files, metadata.PathDistribution(place).requires or []
    except (OSError, zipfile.BadZipFile) as error:
        raise BackendConfigurationError(f"not a wheel that can be read: {path}: {error}") from error


def _declared(folder: Path) -> list[str] | None:
    """Return the dependencies that a project declares, ``None`` if it declares none."""
    file = folder / "pyproject.toml"
    if not file.is_file():
        return None
    try:
        project = tomllib.loads(_read(file).decode()).get("project", {})
    except ValueError as error:
        raise BackendConfigurationError(f"{file} is not valid TOML: {error}") from error
    found = project.get("dependencies")
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise BackendConfigurationError(f"{file}: project.dependencies is not a list of strings")
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BackendConfigurationError(f"cannot be packaged: {error}") from error


@define
class _Search:
    """A search through imports and requirements."""

    sources: dict[str, bytes] = field(factory=dict)
    distributions: set[str] = field(factory=set)
    needs: dict[str, Need] = field(factory=dict)
    seen: set[str] = field(factory=set)
    given: set[str] = field(factory=set)
    required: set[tuple[str, str]] = field(factory=set)
    owners: Mapping[str, list[str]] = field(factory=_owners)

    def bundle(self) -> Bundle:
        files = dict(_own_files())
        for name in sorted(self.distributions):
            files |= _files_of(name)
        files |= self.sources  # what is the user's own goes over all else
        return Bundle(files, tuple(self.needs[name] for name in sorted(self.needs)))

    # --- modules ------------------------------------------------------------------------------

    def visit(self, top: str) -> bool:
        """Add a top-level module; return whether it was found."""
        if top in self.seen or top in sys.stdlib_module_names or top == "rollout":
            return True
        self.seen.add(top)
        spec = _find(top)
        if spec is None:
            return False
        owners = self.owners.get(top, [])
        if owners and _in_site_packages(spec):
            for owner in owners:
                self.require([owner])
            return True
        for owner in owners:  # installed from here, in editable form
            self.require(metadata.requires(owner) or ())
        return self._take(top, spec)

    def _take(self, top: str, spec: ModuleSpec) -> bool:
        if spec.submodule_search_locations is not None:
            for place in spec.submodule_search_locations:
                self._add(tree_files(Path(place), top))
            return True
        if spec.origin is None or not spec.origin.endswith(".py"):
            return False
        self.add_file(top, Path(spec.origin))
        return True

    def add_file(self, name: str, path: Path) -> None:
        """Add one file as a module of that name."""
        self.seen.add(name)
        self._add({f"{name}.py": path.read_bytes()})

    def _add(self, files: dict[str, bytes]) -> None:
        self.sources |= files
        for path, data in files.items():
            if path.endswith(".py"):
                for top in imported_modules(data):
                    self.visit(top)

    def add_folder(self, folder: Path) -> None:
        """Add all of a folder of code, or of the ``src`` in it, and its dependencies."""
        root = folder / "src" if (folder / "src").is_dir() else folder
        files = tree_files(root, "")
        self._give(files)
        declared = _declared(folder)
        if declared is None:
            self._add(files)
        else:
            self.sources |= files
            self.require(declared, from_index=True)

    def add_wheel(self, path: Path) -> None:
        """Add all of a wheel, and what it requires."""
        files, requires = _wheel(path)
        self._give(files)
        self.sources |= files
        self.require(requires, from_index=True)

    def _give(self, files: Iterable[str]) -> None:
        """Keep the modules of these files from being searched for on this machine."""
        self.given |= {path.partition("/")[0].removesuffix(".py") for path in files}
        self.seen |= self.given

    def has(self, module: str) -> bool:
        """Whether a module, or a package of that name, is among the sources."""
        stem = module.replace(".", "/")
        return any(path == f"{stem}.py" or path.startswith(f"{stem}/") for path in self.sources)

    # --- distributions ------------------------------------------------------------------------

    def require(self, requirements: Iterable[str], *, from_index: bool = False) -> None:
        """Add distributions, and their requirements in turn.

        Args:
            requirements: As in a distribution's metadata.
            from_index: Leave what is not installed here to the sandbox; else it is passed
                over, for it is not needed here either.
        """
        # An extra: an installation without any has none.
        from packaging.requirements import InvalidRequirement, Requirement  # noqa: PLC0415

        pending = [(text, "") for text in requirements]
        while pending:
            text, asked = pending.pop()
            try:
                wanted = Requirement(text)
            except InvalidRequirement as error:
                raise BackendConfigurationError(f"not a requirement: {text!r}: {error}") from None
            if not _applies(wanted.marker, asked):
                continue
            version = f" @ {wanted.url}" if wanted.url else str(wanted.specifier)
            for extra in wanted.extras or {""}:
                pending += self._require(wanted.name, extra, f"{wanted.name}{version}", from_index)

    def _require(
        self, name: str, extra: str, text: str, from_index: bool
    ) -> Iterator[tuple[str, str]]:
        key = re.sub(r"[-_.]+", "-", name).lower()
        if (key, extra) in self.required or key == _OWN:
            return
        self.required.add((key, extra))
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if from_index:
                self.needs[key] = Need(text, (key.replace("-", "_"),))
            return
        if any(file.suffix in _COMPILED for file in found.files or ()):
            tops = sorted(top for top, names in self.owners.items() if name in names)
            imports = tuple(top for top in tops if not top.startswith("_")) or tuple(tops)
            requirement = f"{found.metadata['Name']}=={found.version}"
            self.needs[key] = Need(requirement, imports or (key.replace("-", "_"),))
        else:
            self.distributions.add(key)
        for required in found.requires or ():
            yield required, extra


def _applies(marker: Marker | None, extra: str) -> bool:
    return marker is None or any(
        marker.evaluate(
            {
                **_INSIDE,
                "python_version": version,
                "python_full_version": f"{version}.0",
                "extra": extra,
            }
        )
        for version in _PYTHONS
    )


def _find(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None


def _in_site_packages(spec: ModuleSpec) -> bool:
    place = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    roots = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    roots |= {path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}}
    return any(Path(place).is_relative_to(root) for root in roots)
