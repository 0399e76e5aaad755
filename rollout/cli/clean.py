"""``rollout clean``."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
from attrs import frozen

from rollout._files.trees import remove_tree
from rollout.artifacts import ARTIFACT_ROOT_VARIABLE, ARTIFACTS, ArtifactStore
from rollout.backend.saving import DIAGNOSTICS
from rollout.cli.failures import CommandError
from rollout.cli.options import FILE_PATH, json_option
from rollout.cli.text import one_line, print_json

__all__ = ["command"]

_AGE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)([smhdw])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_MB = 1_000_000


@frozen
class _Kept:
    """The folder of a rollout.

    Attributes:
        path: Where it is.
        changed: When anything in it was changed last, in seconds since the epoch.
        size: The bytes of its files.
    """

    path: Path
    changed: float
    size: int


def _age(value: str) -> float:
    found = _AGE.fullmatch(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not an age; give one such as 7d, 12h, 30m or 2w")
    return float(found[1]) * _UNITS[found[2]]


@click.command()
@click.argument("folder", type=FILE_PATH, required=False)
@click.option(
    "--older-than",
    type=_age,
    required=True,
    metavar="AGE",
    help="Remove rollouts in which nothing has changed for this long: 7d, 12h, 30m, 2w.",
)
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@json_option
def command(folder: str | None, older_than: float, dry_run: bool, as_json: bool) -> None:
    """Remove the files of old rollouts from FOLDER.

    Without FOLDER, from where rollout serve puts them: the folder that ROLLOUT_ARTIFACT_ROOT
    names, else the user's data folder. Only folders of rollouts are removed.
    """
    root = Path(folder) if folder else ArtifactStore().root
    if root is None:
        raise CommandError(
            f"{ARTIFACT_ROOT_VARIABLE} is empty, or there is no home folder; name the FOLDER"
        )
    before = time.time() - older_than
    old = [kept for kept in _rollouts(root) if kept.changed < before]
    problems: list[str] = []
    for kept in sorted(old, key=lambda kept: kept.path):
        if not dry_run:
            problems += remove_tree(kept.path)
        elif not as_json:
            click.echo(one_line(str(kept.path)))
    size = sum(kept.size for kept in old)
    if as_json:
        names = sorted(kept.path.name for kept in old)
        print_json(
            {"folder": str(root), "dry_run": dry_run, "rollouts": names, "bytes": size}
            | {"problems": [str(problem) for problem in problems]}
        )
    else:
        verb, shown = "would remove" if dry_run else "removed", one_line(str(root))
        click.echo(f"{verb} {len(old)} rollout(s), {size / _MB:.1f} MB, below {shown}")
    if problems:
        raise CommandError(f"{len(problems)} file(s) could not be removed: {problems[0]}")


def _rollouts(root: Path) -> Iterator[_Kept]:
    """Yield the folders of rollouts.

    Raises:
        CommandError: The folder cannot be read.
    """
    try:
        with os.scandir(root) as entries:
            folders = [Path(each) for each in entries if each.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    except OSError as error:
        raise CommandError(f"{root}: {error.strerror or error}") from None
    held: dict[Path, set[str]] = {}
    for folder in folders:
        with suppress(PermissionError):  # then it is somebody else's
            held[folder] = {path.name for path in folder.iterdir()}
    is_root = any(DIAGNOSTICS in names for names in held.values())
    for folder, names in held.items():
        # One that was cut short has no diagnostics, and nothing else besides; a folder of some
        # project may look the same, but not beside rollouts.
        if DIAGNOSTICS in names or (is_root and names == {ARTIFACTS}):
            yield _kept(folder)


def _kept(folder: Path) -> _Kept:
    changed, size = folder.lstat().st_mtime, 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # a server may be at work
            found = path.lstat()
            changed = max(changed, found.st_mtime)
            size += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return _Kept(folder, changed, size)
