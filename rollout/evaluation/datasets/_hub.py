"""Datasets of the Hugging Face Hub: which files a split is made of, and where they are cached.

A dataset says in the metadata of its README which files its configs and splits have; where it
does not, their names say it, as ``train`` does in ``data/train-00000-of-00002.parquet``.
huggingface_hub comes with the extra ``hub``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rollout.evaluation.addresses import parse_address
from rollout.evaluation.datasets._place import Place, shown

__all__ = ["HubFiles", "fetch"]

_README = "README.md"
_SPLITS = ("train", "validation", "valid", "dev", "val", "test")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)")
_MOST_SHOWN = 12


class HubFiles(NamedTuple):
    """The files of a split.

    Attributes:
        files: Where they are in the cache.
        revision: The commit that they are of.
    """

    files: tuple[Path, ...]
    revision: str


def fetch(address: str, config: str | None, split: str | None, suffixes: Iterable[str]) -> HubFiles:
    """Download the files of a split, unless they are cached. Blocking.

    With ``HF_HUB_OFFLINE=1`` only the cache is used.

    Args:
        address: ``hf://OWNER/NAME`` or ``hf://OWNER/NAME@REVISION``.
        config: The config of the dataset; ``None`` for its default.
        split: The split; ``None`` if there is only one.
        suffixes: What the names of files with rows end in.

    Raises:
        DatasetError: huggingface_hub is missing, the dataset cannot be had, or there is no such
            config or split.
    """
    place = Place(address)
    hub, errors = _import(place)
    name, revision = parse_address(address) or (address, None)
    repository = {"repo_id": name, "repo_type": "dataset", "revision": revision}
    try:
        if hub.constants.HF_HUB_OFFLINE:
            folder = Path(hub.snapshot_download(**repository, allow_patterns=[_README]))
            commit = folder.name
            files = (each for each in folder.rglob("*") if each.is_file())
            names = [each.relative_to(folder).as_posix() for each in files]
        else:
            info = hub.HfApi().dataset_info(name, revision=revision)
            commit, names = info.sha, [each.rfilename for each in info.siblings]
        chosen = _chosen(
            sorted(names),
            _metadata(hub, repository, names),
            config=config,
            split=split,
            suffixes=tuple(suffixes),
            place=place,
        )
        _check_shards(chosen, place)
        found = tuple(Path(hub.hf_hub_download(filename=each, **repository)) for each in chosen)
    except (errors.HTTPError, OSError) as error:
        raise place.file_error(_reason(error, errors)) from error
    for path, file in zip(found, chosen, strict=True):
        if path.parts[-len(file.split("/")) - 1] != commit:
            raise place.file_error("got another commit while it was downloaded; try again")
    return HubFiles(found, commit)


def _import(place: Place) -> tuple[Any, Any]:
    try:
        for module in ("constants", "repocard"):
            import_module(f"huggingface_hub.{module}")
        return import_module("huggingface_hub"), import_module("huggingface_hub.errors")
    except ImportError as error:
        raise place.file_error(
            'the Hub needs an extra: pip install "trio-rollout[hub]" '
            f"({type(error).__name__}: {error})"
        ) from None


def _reason(error: Exception, errors: Any) -> str:
    if isinstance(error, errors.RevisionNotFoundError):
        return "the dataset has no such revision"
    if isinstance(error, errors.GatedRepoError):
        return "the dataset is gated; ask for access on its page, and log in with hf auth login"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such dataset, or it is private; log in with hf auth login"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "is not in the cache, or not all of it; download it without HF_HUB_OFFLINE"
    lines = str(error).split("\n")
    return f"cannot be downloaded: {type(error).__name__}: {lines[0]}"


def _metadata(hub: Any, repository: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Read the metadata of the README."""
    if _README not in names:
        return {}
    path = hub.hf_hub_download(filename=_README, **repository)
    return hub.repocard.metadata_load(path) or {}


# --- choosing ---------------------------------------------------------------------------------


def _chosen(
    names: list[str],
    metadata: Mapping[str, Any],
    *,
    config: str | None,
    split: str | None,
    suffixes: tuple[str, ...],
    place: Place,
) -> list[str]:
    """Choose the files of a split."""
    configs = metadata.get("configs")
    if isinstance(configs, list) and configs:
        entry = _config(configs, config, place)
        if "data_files" in entry:
            patterns = _patterns(entry["data_files"], place)
            wanted = patterns[_split(list(patterns), split, place)]
            found = [
                name for each in wanted for name in names if re.fullmatch(_expression(each), name)
            ]
            return list(dict.fromkeys(found)) or _none(place, ", ".join(wanted))
        folder = str(entry.get("data_dir", ""))
    else:
        folder = config or ""
    inside = f"{folder.rstrip('/')}/" if folder else ""
    data = [
        name
        for name in names
        if name.startswith(inside) and name.lower().endswith(suffixes) and name[:1] != "."
    ]
    if not data:
        return _none(place, f"{inside}*")
    by_split: defaultdict[str, list[str]] = defaultdict(list)
    for name in data:
        for each in _named(name.removeprefix(inside), [split] if split else _SPLITS):
            by_split[each].append(name)
    if split is None and not by_split:
        return data
    return by_split[_split(list(by_split), split, place)]


def _none(place: Place, pattern: str) -> list[str]:
    raise place.file_error(f"the dataset has no file {pattern} with rows")


def _config(configs: list[Any], config: str | None, place: Place) -> Mapping[str, Any]:
    by_name = {str(each.get("config_name")): each for each in configs if isinstance(each, dict)}
    if config is None:
        default = [name for name, each in by_name.items() if each.get("default") is True]
        config = next(iter([*default, *(by_name if len(by_name) == 1 else ())]), "default")
    if config not in by_name:
        raise place.file_error(_missing("config", config, by_name))
    found: Mapping[str, Any] = by_name[config]
    return found


def _split(splits: list[str], split: str | None, place: Place) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None or split not in splits:
        raise place.file_error(_missing("split", split, splits))
    return split


def _missing(kind: str, wanted: str | None, known: Iterable[str]) -> str:
    names = list(known)
    listed = ", ".join(map(shown, names[:_MOST_SHOWN])) or "none that is named"
    if wanted is None or (kind == "config" and wanted == "default"):
        return f"the dataset has several {kind}s, so set dataset.{kind}: {listed}"
    return f"the dataset has no {kind} {shown(wanted)}; there are {listed}"


def _patterns(files: Any, place: Place) -> dict[str, list[str]]:
    """Read ``data_files``, in each of the forms that it may have, as patterns by split."""
    if isinstance(files, list) and all(isinstance(each, dict) for each in files):
        files = {each.get("split"): each.get("path") for each in files}
    elif isinstance(files, (str, list)):
        files = {"train": files}
    found: dict[str, list[str]] = {}
    for split, patterns in files.items() if isinstance(files, dict) else ():
        several = [patterns] if isinstance(patterns, str) else patterns
        if isinstance(several, list) and all(isinstance(each, str) for each in several):
            found[str(split)] = several
    if not found:
        raise place.file_error("data_files in the README's metadata cannot be read")
    return found


def _expression(pattern: str) -> str:
    """Write a pattern as a regular expression: ``*`` stays within a folder, ``**`` does not."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.removeprefix("./"))
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(known.get(part) or re.escape(part) for part in parts)


def _named(name: str, splits: Iterable[str]) -> Iterator[str]:
    """Yield the splits that a name has as a word of its own."""
    for split in splits:
        if re.search(rf"(?<![a-zA-Z0-9]){re.escape(split)}(?![a-zA-Z0-9])", name, re.IGNORECASE):
            yield split


def _check_shards(names: list[str], place: Place) -> None:
    """Refuse a split with missing parts, as a cache may have it."""
    parts: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for name in names:
        if match := _SHARD.fullmatch(name):
            parts[match[1], match[3], match[4]].add(match[2])
    for (head, total, tail), numbers in parts.items():
        if len(numbers) != int(total):
            raise place.file_error(
                f"has {len(numbers)} of the {int(total)} files {head}-*-of-{total}{tail}; "
                "download them without HF_HUB_OFFLINE"
            )
