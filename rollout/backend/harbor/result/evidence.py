"""The manifest of a trial's kept files, and the check of the files against it.

The manifest has the form of the official package's, so either package checks what the other one
has kept. Blocking.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout._files.atomic import write_atomic
from rollout._json.text import utf8
from rollout.codec import dump_json, parse_json
from rollout.errors import EvidenceError, InvalidBodyError

__all__ = ["MANIFEST", "verify_trial_evidence", "write_manifest"]

MANIFEST = "manifest.json"

_SCHEMA = "harbor-evidence-v1"
_POLICY = "harbor-trial-folder-v1"
_RESULT = "result.json"


def write_manifest(
    folder: Path, rollout_id: str, *, without: Sequence[str] = (), lost: Sequence[str] = ()
) -> None:
    """Write the manifest of a trial's folder into it.

    Args:
        folder: The folder, which nobody else is at work on.
        rollout_id: The rollout.
        without: What at its top is not part of the evidence.
        lost: What has been removed from it and why, a line each; the evidence is incomplete then.

    Raises:
        OSError: A file cannot be read, or the manifest not written.
    """
    files = _inventory(folder, without)
    errors = [*lost]
    if not any(entry["path"] == _RESULT for entry in files):
        errors.append(f"{_RESULT}: Harbor wrote none")
    manifest: dict[str, Any] = {
        "schema_version": _SCHEMA,
        "rollout_id": rollout_id,
        "process_id": None,
        "selection_policy": _POLICY,
        "excluded": {},
        "complete": not errors,
        "files": files,
        "errors": errors,
    }
    write_atomic(folder / MANIFEST, dump_json(manifest))


def verify_trial_evidence(directory: str | os.PathLike[str], rollout_id: str) -> dict[str, Any]:
    """Check the kept files of a Harbor trial against their manifest. Blocking.

    Args:
        directory: The folder ``harbor`` of a rollout, or a copy of it.
        rollout_id: The rollout that it has to be of.

    Returns:
        The manifest. Each entry of its ``files`` has a ``path``, with ``size_bytes`` and
        ``sha256``, or with the ``link`` that it is.

    Raises:
        EvidenceError: There is no manifest, it is incomplete or of another rollout, or a file
            is missing, has changed, or was added.
    """
    folder = Path(directory)
    try:
        manifest = parse_json((folder / MANIFEST).read_bytes())
        found = {entry["path"]: entry for entry in _inventory(folder)}
    except (OSError, InvalidBodyError) as error:
        raise EvidenceError(f"the evidence in {folder} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("schema_version") != _SCHEMA:
        raise EvidenceError(f"{MANIFEST} is not of schema {_SCHEMA}")
    if manifest.get("rollout_id") != rollout_id:
        raise EvidenceError(
            f"the evidence is of rollout {manifest.get('rollout_id')!r}, not of {rollout_id!r}"
        )
    errors = manifest.get("errors")
    if manifest.get("complete") is not True or errors != []:
        raise EvidenceError(f"the evidence is incomplete: {json.dumps(errors)}")
    try:
        said = {entry["path"]: entry for entry in manifest["files"]}
    except (KeyError, TypeError) as error:
        raise EvidenceError(f"{MANIFEST} is damaged: files is not a list of files") from error
    for words, paths in (
        ("are missing", said.keys() - found.keys()),
        ("were added", found.keys() - said.keys()),
        (
            "have changed",
            {path for path in said.keys() & found.keys() if said[path] != found[path]},
        ),
    ):
        if paths:
            raise EvidenceError(
                f"files {words} since the trial: {', '.join(sorted(map(str, paths)))}"
            )
    return manifest


def _inventory(folder: Path, without: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return an entry for each file and link below a folder, but for its manifest."""
    entries: list[dict[str, Any]] = []
    for way, folders, files in os.walk(folder, onerror=_raise):
        top = Path(way) == folder
        if top:
            folders[:] = [name for name in folders if name not in without]
        for name in (*folders, *files):
            path = Path(way, name)
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode) or (top and name == MANIFEST):
                continue
            entry: dict[str, Any] = {"path": utf8(path.relative_to(folder).as_posix())}
            if stat.S_ISREG(mode):
                with path.open("rb") as file:
                    entry["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
                    entry["size_bytes"] = file.tell()
            else:
                entry["link"] = utf8(str(path.readlink()))
            entries.append(entry)
    return sorted(entries, key=lambda entry: str(entry["path"]))


def _raise(error: OSError) -> None:
    raise error
