"""Write wheels by hand: of what is installed here, and of sources that are not installed.

A sandbox needs the workflow, this library and what they import, and may have no network. So
nothing is built by a build backend or fetched from an index: files that are here are put into
zip archives in the form that the wheel specification asks for. The same files make the same
bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zipfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath

from attrs import field, frozen

from rollout.errors import BackendConfigurationError

__all__ = [
    "Wheel",
    "build_wheel",
    "is_compiled",
    "normalized",
    "repacked_wheel",
    "tree_files",
]

_TAG = "py3-none-any"
_COMPILED = frozenset({".so", ".pyd", ".dylib", ".dll"})
_LEFT_OUT = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "WHEEL", "METADATA"})
"""What says how and from where a distribution was installed here, and what is written anew."""

_EARLIEST = (1980, 1, 1, 0, 0, 0)
_MOST_BYTES = 64 * 1024 * 1024


@frozen(kw_only=True)
class Wheel:
    """A wheel in memory.

    Attributes:
        filename: Its name, which installers read.
        data: Its bytes.
    """

    filename: str
    data: bytes = field(repr=False)


def normalized(name: str) -> str:
    """Return a distribution's name in the form in which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def build_wheel(
    name: str,
    version: str,
    files: Mapping[str, bytes],
    *,
    requires: Iterable[str] = (),
    info: Mapping[str, bytes] | None = None,
) -> Wheel:
    """Write a wheel of pure Python.

    Args:
        name: The distribution's name.
        version: Its version.
        files: What is installed, by the path below ``site-packages``.
        requires: What it depends on, as requirement strings.
        info: More files for its ``.dist-info``.
    """
    stem = f"{normalized(name).replace('-', '_')}-{version.replace('-', '_')}"
    folder = f"{stem}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    entries = dict(sorted(files.items()))
    entries |= {f"{folder}/{path}": data for path, data in sorted((info or {}).items())}
    entries[f"{folder}/METADATA"] = ("\n".join(lines) + "\n").encode()
    entries[f"{folder}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: trio-rollout\nRoot-Is-Purelib: true\nTag: {_TAG}\n"
    ).encode()
    record = f"{folder}/RECORD"
    rows = [_row(path, data) for path, data in entries.items()]
    entries[record] = "".join([*rows, f"{_quoted(record)},,\n"]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in entries.items():
            entry = zipfile.ZipInfo(path, _EARLIEST)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o100644 << 16
            entry.create_system = 3  # Unix, wherever this runs
            archive.writestr(entry, data)
    return Wheel(filename=f"{stem}-{_TAG}.whl", data=buffer.getvalue())


def _row(path: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{_quoted(path)},sha256={digest},{len(data)}\n"


def _quoted(path: str) -> str:
    return '"' + path.replace('"', '""') + '"' if set(path) & set(',"\r\n') else path


def is_compiled(distribution: metadata.Distribution) -> bool:
    """Whether a distribution has parts that are made for one platform."""
    return any(file.suffix in _COMPILED for file in distribution.files or ())


def repacked_wheel(distribution: metadata.Distribution) -> Wheel:
    """Write a wheel of an installed distribution of pure Python.

    Scripts and data outside of ``site-packages`` are left out, as is what says where the
    distribution came from.

    Raises:
        BackendConfigurationError: A file of it is missing.
    """
    files: dict[str, bytes] = {}
    info: dict[str, bytes] = {}
    for file in distribution.files or ():
        parts = PurePosixPath(file).parts
        if ".." in parts or file.is_absolute() or "__pycache__" in parts:
            continue
        if parts[0].endswith((".dist-info", ".egg-info")):
            if parts[-1] not in _LEFT_OUT:
                info["/".join(parts[1:])] = _read(Path(str(file.locate())))
            continue
        if file.suffix != ".pth":
            files[str(PurePosixPath(file))] = _read(Path(str(file.locate())))
    return build_wheel(
        distribution.metadata["Name"],
        distribution.version,
        files,
        requires=distribution.requires or (),
        info=info,
    )


def tree_files(root: Path, below: str) -> dict[str, bytes]:
    """Return the files of a package's folder by their path in a wheel. Blocking.

    Hidden files and caches are left out.

    Args:
        root: The folder.
        below: What the folder is called in the wheel.

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
            raise BackendConfigurationError(
                f"{path} is compiled for this machine, so package {below!r} cannot be brought "
                "into a sandbox"
            )
        size += path.stat().st_size
        if size > _MOST_BYTES:
            raise BackendConfigurationError(
                f"package {below!r} in {root} is larger than {_MOST_BYTES // 1024**2} MiB, too "
                "large to be brought into each sandbox; keep data out of it"
            )
        files[f"{below}/{inner.as_posix()}"] = _read(path)
    return files


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BackendConfigurationError(f"cannot be packaged: {error}") from error
