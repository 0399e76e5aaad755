"""``rollout doctor``."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import click
import trio
from attrs import asdict, frozen
from rich.table import Table

from rollout._version import package_version
from rollout.artifacts import ARTIFACT_ROOT_VARIABLE, ArtifactStore
from rollout.cli.options import json_option_with
from rollout.cli.terminal import draw_table, make_console
from rollout.cli.text import one_line, print_json
from rollout.integrations.asyncio_bridge import open_asyncio_bridge
from rollout.sandbox import NamespaceError, Sandbox

__all__ = ["command"]

_HOST, _PORT = "127.0.0.1", 8000
"""Where ``rollout serve`` listens by default."""

_PACKAGES = ("trio", "httpx", "hypercorn", "h11", "quart-trio", "attrs", "cattrs")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+).*extra\s*==\s*['\"]([A-Za-z0-9._-]+)['\"]")
_FEW_FILES = 4096
_LITTLE_SPACE = 2**30
_SANDBOX_SEC = 30

Verdict = Literal["ok", "note", "problem"]
_STYLES: dict[Verdict, str] = {"ok": "green", "note": "yellow", "problem": "red"}


@frozen
class _Found:
    """What a check has found.

    Attributes:
        check: What was looked at.
        verdict: ``problem`` if something will not work, ``note`` if something may not.
        text: What was found, and what to do.
    """

    check: str
    verdict: Verdict
    text: str


@click.command()
@json_option_with("Print a JSON object for each check instead.")
def command(as_json: bool) -> int:
    """Look at what this machine offers to servers and evaluations.

    Packages and extras, the default port, open files, sandboxes of namespaces, the folder for files
    of rollouts, the clock. Exits with 1 if something will not work.
    """
    table = Table(box=None, show_header=False, pad_edge=False)
    worst = 0
    for found in _checks():
        worst = max(worst, found.verdict == "problem")
        if as_json:
            print_json(asdict(found))
        else:
            verdict = f"[{_STYLES[found.verdict]}]{found.verdict}[/]"
            table.add_row(found.check, verdict, one_line(found.text).replace("[", r"\["))
    if not as_json:
        draw_table(table, make_console(highlight=False, soft_wrap=True))
    return int(worst)


def _checks() -> Iterator[_Found]:
    yield _Found("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield _Found("trio-rollout", "ok", package_version())
    yield from _packages()
    yield from _extras()
    yield _port()
    yield _open_files()
    yield _sandboxes()
    yield _artifact_root()
    yield _clock()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> Iterator[_Found]:
    versions = {name: _version(name) for name in _PACKAGES}
    missing = [name for name, version in versions.items() if version is None]
    there = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    yield _Found("packages", "ok", there)
    if missing:
        yield _Found("packages", "problem", f"missing: {', '.join(missing)}")


def _extras() -> Iterator[_Found]:
    """Say which extras are installed; one is if all that it names is."""
    wanted: dict[str, set[str]] = {}
    try:
        requirements = importlib.metadata.requires("trio-rollout") or []
    except importlib.metadata.PackageNotFoundError:
        yield _Found("extras", "note", "trio-rollout is not installed, so its extras are unknown")
        return
    for requirement in requirements:
        if found := _REQUIREMENT.match(requirement):
            wanted.setdefault(found[2], set()).add(found[1])
    there = {name for name, needs in wanted.items() if all(map(_version, needs))}
    yield _Found("extras", "ok", ", ".join(sorted(there)) or "none is installed")
    if absent := sorted(wanted.keys() - there):
        yield _Found(
            "extras", "ok", f'not installed: {", ".join(absent)} (pip install "trio-rollout[NAME]")'
        )


def _port() -> _Found:
    place = f"{_HOST}:{_PORT}"
    try:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((_HOST, _PORT))
    except OSError as error:
        reason = error.strerror or str(error)
        return _Found("port", "note", f"{place}: {reason}; serve with another --bind")
    return _Found("port", "ok", f"{place} is free")


def _open_files() -> _Found:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < _FEW_FILES:
        return _Found(
            "open files", "note", f"at most {most}; thousands of rollouts need more (ulimit -Hn)"
        )
    return _Found("open files", "ok", "no limit" if most < 0 else f"up to {most}")


def _sandboxes() -> _Found:
    try:
        trio.run(_try_sandbox)
    except NamespaceError as error:
        return _Found("sandboxes", "note", str(error))
    except trio.TooSlowError:
        return _Found("sandboxes", "note", f"one did not start within {_SANDBOX_SEC} s")
    return _Found("sandboxes", "ok", "namespaces work")


async def _try_sandbox() -> None:
    sandbox = Sandbox(network=False)
    async with open_asyncio_bridge() as bridge:
        try:
            with trio.fail_after(_SANDBOX_SEC):
                await bridge.run(sandbox.start)
                await bridge.run(partial(sandbox.run, ["true"], timeout_sec=_SANDBOX_SEC))
        finally:
            with trio.CancelScope(shield=True):
                await bridge.run(sandbox.stop)


def _artifact_root() -> _Found:
    root = ArtifactStore().root
    check = "files of rollouts"
    if root is None:
        return _Found(check, "note", f"none are kept ({ARTIFACT_ROOT_VARIABLE} is empty)")
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    try:
        with (there / f".rollout-doctor-{time.time_ns()}").open("x") as probe:
            Path(probe.name).unlink()
        free = shutil.disk_usage(there).free
    except OSError as error:
        return _Found(check, "problem", f"{root} cannot be written: {error.strerror or error}")
    text = f"{root}, {_file_system(there)}{free / 2**30:.1f} GiB free"
    return _Found(check, "note" if free < _LITTLE_SPACE else "ok", text)


def _file_system(folder: Path) -> str:
    """Return the kind of file system of a folder, where Linux says it."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    except OSError:
        return ""
    path = folder.resolve()
    kinds = {place: kind for _, place, kind, *_ in mounts}
    home = next((str(each) for each in (path, *path.parents) if str(each) in kinds), None)
    return "" if home is None else f"{kinds[home]}, "


def _clock() -> _Found:
    installed = Path(__file__).stat().st_mtime
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if time.time() < installed:
        return _Found("clock", "problem", f"{now} is before this package was installed; set it")
    ticks = time.get_clock_info("monotonic").resolution
    return _Found("clock", "ok", f"{now}, resolution {ticks:g} s")
