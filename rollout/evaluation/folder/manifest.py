"""The manifest: the inputs of a run, so that it is only ever resumed with the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs

from rollout._checks import is_whole_from_one
from rollout._files.atomic import write_atomic
from rollout._redaction import public_url
from rollout.codec import format_timestamp, parse_json
from rollout.errors import (
    EvaluationDamagedError,
    EvaluationError,
    EvaluationInputsChangedError,
    InvalidBodyError,
)
from rollout.evaluation.config import EvaluationConfig
from rollout.evaluation.selection import Picker, parse_rows
from rollout.evaluation.sources import Sources

__all__ = [
    "MANIFEST",
    "check_unchanged",
    "describe_app",
    "describe_inputs",
    "differences",
    "digest_change",
    "file_change",
    "new_manifest",
    "read_manifest",
    "same_inputs",
    "sources_change",
    "write_manifest",
]

MANIFEST = "manifest.json"
_SCHEMA = "rollout-evaluation/1"
_SECTIONS = ("dataset", "server", "chat", "run")
_FILES = "server.sources."
_SOURCES = (_FILES, "server.distributions.")
_MOST_FILES = 8
"""So many files that changed are named."""
_DIGEST = 8
"""Characters of a digest that are shown."""
_FREE = frozenset(
    {
        *(f"dataset.{name}" for name in ("path", "revision", "split", "config")),
        "run.pass_threshold",
        "run.until",
    }
)
"""What may differ when a run is resumed: the same bytes in another place are the same dataset,
with another threshold what there is is scored again, and a confidence sequence does not mind when
one looks."""
_SELECTION = frozenset({"dataset.selection", "dataset.limit", "dataset.selected"})
"""What may differ if no row is left out that was selected before."""


def describe_inputs(
    config: EvaluationConfig,
    *,
    format: str,
    digest: str,
    rows: int,
    selected: int,
    revision: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Collect the inputs that decide about the outcome of a run, by section. Blocking.

    Args:
        config: The run's configuration.
        format: What the dataset's format turned out to be.
        digest: The dataset's digest, see `DatasetScan`.
        rows: How many rows the dataset has.
        selected: How many of them the run takes.
        revision: The commit of a dataset of the Hub.

    Raises:
        EvaluationError: The file of the server's application cannot be read.
    """
    dataset, run = config.dataset, config.run
    from_hub = {"revision": revision, "split": dataset.split, "config": dataset.config}
    if revision is None:
        from_hub.clear()
    return {
        "dataset": {
            "path": dataset.location,
            **from_hub,
            "format": format,
            "digest": digest,
            "rows": rows,
            "selected": selected,
            "selection": dataset.rows,
            "limit": dataset.limit,
            "columns": attrs.asdict(dataset.columns),
            "encoding": dataset.encoding,
            "delimiter": dataset.delimiter,
        },
        "server": _server(config),
        "chat": _chat(config),
        "run": {
            "n": run.n,
            "agent_timeout_sec": run.agent_timeout_sec,
            "grader_timeout_sec": run.grader_timeout_sec,
            "pass_threshold": run.pass_threshold,
            "until": run.until,
            "seed": run.seed,
        },
    }


def _chat(config: EvaluationConfig) -> dict[str, Any]:
    chat = config.chat
    if chat.url is not None:
        return {"url": public_url(chat.url), "model": chat.model}
    base = None if chat.api_base is None else public_url(chat.api_base)
    return {"url": None, "model": chat.model, "api_base": base}


def _server(config: EvaluationConfig) -> dict[str, Any]:
    server = config.server
    if server.app is None:
        return {"url": public_url(server.url or "").rstrip("/")}
    described = describe_app(server.app, config.env)
    if config.env:
        described["env"] = dict(sorted(config.env.items()))
    if config.secrets.required:
        described["secrets"] = sorted(config.secrets.required)
    return described


def describe_app(app: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Describe the application of a run by digests of its sources. Blocking.

    Args:
        app: ``MODULE:APP`` or ``FILE.py:APP``.
        environment: Variables that its server gets.

    Raises:
        EvaluationError: A file cannot be read.
    """
    found = Sources.of_app(app, environment or {})
    sources = {
        "sources": dict(sorted(found.files.items())),
        "distributions": dict(sorted(found.distributions.items())),
    }
    file = Path(app.rpartition(":")[0])
    if file.suffix != ".py":
        return {"app": app, **sources}
    try:
        data = file.read_bytes()
    except OSError as error:
        raise EvaluationError(f"server.app: {file}: {error.strerror or error}") from None
    return {
        "app": f"{file.name}:{app.rpartition(':')[2]}",
        "digest": hashlib.sha256(data).hexdigest(),
        **sources,
    }


def new_manifest(run_id: str, created_at: datetime, inputs: dict[str, Any]) -> dict[str, Any]:
    """Make the manifest of a new run."""
    return {
        "schema": _SCHEMA,
        "run_id": run_id,
        "created_at": format_timestamp(created_at),
        **inputs,
    }


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a run. Blocking."""
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=2).encode() + b"\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a run. Blocking.

    Raises:
        EvaluationError: The folder has no manifest.
        EvaluationDamagedError: It was not written by this library.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise EvaluationError(f"{folder} holds no evaluation (it has no {MANIFEST})") from None
    except OSError as error:
        raise EvaluationError(f"{path}: {error.strerror or error}") from None
    try:
        manifest = parse_json(data)
    except InvalidBodyError as error:
        raise EvaluationDamagedError(f"{path}: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != _SCHEMA:
        raise EvaluationDamagedError(f"{path} is not the manifest of an evaluation ({_SCHEMA})")
    if not isinstance(manifest.get("run_id"), str) or not all(
        isinstance(manifest.get(section), dict) for section in _SECTIONS
    ):
        raise EvaluationDamagedError(f"{path} is damaged: run_id or a section is missing")
    for section, name in (("dataset", "selected"), ("run", "n")):
        if not is_whole_from_one(manifest[section].get(name)):
            raise EvaluationDamagedError(
                f"{path}: {section}.{name} must be a whole number from 1 up"
            )
    return manifest


def check_unchanged(folder: Path, manifest: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Check that a run may go on with *inputs*, which may add rows and attempts to it.

    Raises:
        EvaluationInputsChangedError: It was started with others; all are named.
    """
    changes = _changes(manifest, inputs)
    if changes:
        raise EvaluationInputsChangedError(
            f"{folder} was started with other inputs: {'; '.join(changes)}. Change them back "
            "to resume it, choose another output folder, or start anew (--fresh keeps the old "
            "run in archive/)",
            changes,
        )


def same_inputs(manifest: dict[str, Any], inputs: dict[str, Any]) -> bool:
    """Whether *inputs* are those that the manifest has, but for what may differ freely."""
    return {name for name, _, _ in differences(manifest, inputs)} <= _FREE


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each input that differs: its name with its section, and both values."""
    old, new = _flat(before), _flat(now)
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)


def _changes(manifest: dict[str, Any], inputs: dict[str, Any]) -> list[str]:
    free = set(_FREE)
    if inputs["run"]["n"] > manifest["run"]["n"]:
        free.add("run.n")
    if _selects_all_of(inputs["dataset"], manifest["dataset"]):
        free |= _SELECTION
    if manifest["run"].get("seed") is None:
        free.add("run.seed")  # what has ended enters in its turn, as if it had waited for it
    changed = {
        name: f"{name} was {_shown(old)} and is {_shown(new)}"
        for name, old, new in differences(manifest, inputs)
        if name not in free
    }
    unknown = "sources" not in manifest["server"]  # of a release that did not keep them
    for name in [name for name in changed if name.startswith(_SOURCES)]:
        if unknown or "server.app" in changed or name.startswith(_FILES):
            del changed[name]
    if "server.app" in changed:
        changed.pop("server.digest", None)
    named = [digest_change(name, manifest, inputs) or change for name, change in changed.items()]
    files = None if unknown or "server.app" in changed else sources_change(manifest, inputs)
    return named if files is None else [*named, files]


def sources_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the change of the sources of a server by their files; ``None`` without one."""
    old, new = (each["server"].get("sources", {}) for each in (before, now))
    notes = [
        name + (" (new)" if name not in old else " (gone)" if name not in new else "")
        for name in sorted({**old, **new})
        if old.get(name) != new.get(name)
    ]
    if len(notes) > _MOST_FILES:
        notes[_MOST_FILES:] = [f"and {len(notes) - _MOST_FILES} more"]
    return f"server sources changed: {', '.join(notes)}" if notes else None


def digest_change(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the change of a digest by its file; ``None`` for any other input."""
    section, _, field = name.partition(".")
    if field != "digest" or not all(each[section].get("digest") for each in (before, now)):
        return None
    return file_change(section, before[section], now[section])


def file_change(section: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the change of a section's file, ``dataset`` or ``server``.

    Args:
        section: The section.
        before: The section in one manifest.
        now: The section in the other.
    """
    file = str(now.get("path") or now.get("app") or "")
    file = Path(file.rpartition(":")[0] if section == "server" else file).name
    kind = "server file" if section == "server" else section
    digests = (str(each.get("digest"))[:_DIGEST] for each in (before, now))
    return f"{kind} changed: {file} ({' → '.join(digests)})"


def _selects_all_of(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether each row that was selected before still is."""
    new, old = (
        Picker(parse_rows(each.get("selection") or "0-"), each.get("limit"))
        for each in (now, before)
    )
    for row in range(now["rows"]):
        if old.takes(row) > new.takes(row):
            return False
        if old.is_done(row + 1):
            break
    return True


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section in _SECTIONS:
        for name, value in tree[section].items():
            if isinstance(value, dict):
                flat |= {f"{section}.{name}.{key}": inner for key, inner in value.items()}
            else:
                flat[f"{section}.{name}"] = value
    return flat


def _shown(value: Any) -> str:
    return "not given" if value is None else json.dumps(value, ensure_ascii=False)
