"""Where the time of one of our processes goes: a profile, by function and by package."""

from __future__ import annotations

import pstats
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from comparison.job import Job
from comparison.pairs import Launcher, Pair

Function = tuple[str, int, str]

WAITING = "(waiting)"
_WAITS = ("'poll' of 'select.epoll'", "'control' of 'select.kqueue'", "select.select")
_STANDARD = "standard library"
_PASSED_ON = frozenset({_STANDARD, "built in"})
"""Whose time counts for whoever calls them."""

_TRIO = frozenset({"trio", "outcome"})
_SCHEDULER = frozenset({"unrolled_run", "run"})


@frozen
class Profile:
    """A profile of one process.

    Attributes:
        report: What the client reported of the job that ran meanwhile.
    """

    who: str
    stats: pstats.Stats
    report: dict[str, Any] = field(repr=False)

    def top(self, order: str, lines: int) -> list[tuple[str, int, float, float]]:
        """The first functions in an order: name, calls, own and cumulative seconds."""
        self.stats.sort_stats(order)
        functions: list[Function] = self.stats.fcn_list[:lines]  # type: ignore[attr-defined]
        return [
            (_name(function), entry[1], entry[2], entry[3])
            for function in functions
            for entry in [self._entries[function]]
        ]

    @property
    def _entries(self) -> dict[Function, Any]:
        return self.stats.stats  # type: ignore[attr-defined, no-any-return]

    def by_package(self, *, passing_trio: bool = False) -> dict[str, float]:
        """Own seconds of each package, with those of the library functions that it called.

        With *passing_trio* the time in trio counts for whoever called it too, so that a
        package pays for its tasks, scopes and sends; what is left is the scheduler itself.
        """
        owners = _Owners(self._entries, _PASSED_ON | _TRIO if passing_trio else _PASSED_ON)
        seconds: dict[str, float] = defaultdict(float)
        for function, (_, _, own, _, _) in self._entries.items():
            for package, share in owners.of(function).items():
                seconds[package] += own * share
        return seconds


@define
class _Owners:
    """Says whose time the time of a function is."""

    entries: dict[Function, Any]
    passed_on: frozenset[str]
    known: dict[Function, dict[str, float]] = field(factory=dict)

    def of(self, function: Function) -> dict[str, float]:
        """Packages, with their shares in the function's own time."""
        if function in self.known:
            return self.known[function]
        package = package_of(function)
        self.known[function] = {package: 1.0}  # also what a cycle of calls comes back to
        scheduler = package == "trio" and function[2] in _SCHEDULER
        if package not in self.passed_on or scheduler:
            return self.known[function]
        callers = self.entries[function][4] if function in self.entries else {}
        weights = {caller: float(times[2]) for caller, times in callers.items()}
        if not sum(weights.values()):
            weights = {caller: float(times[1]) for caller, times in callers.items()}
        total = sum(weights.values())
        if not total:
            return self.known[function]
        owners: dict[str, float] = defaultdict(float)
        for caller, weight in weights.items():
            for owner, share in self.of(caller).items():
                owners[owner] += share * weight / total
        self.known[function] = dict(owners)
        return self.known[function]


def package_of(function: Function) -> str:
    """Name the package that a function is part of."""
    path, _, name = function
    if any(call in name for call in _WAITS):
        return WAITING
    parts = Path(path).parts
    if "site-packages" in parts:
        return Path(parts[parts.index("site-packages") + 1]).stem
    if "rollout" in parts:
        return "rollout"
    if "comparison" in parts:
        return "the benchmark"
    if path.startswith(("~", "<")):
        return "built in"
    return _STANDARD


def _name(function: Function) -> str:
    path, line, name = function
    if path.startswith("~"):
        return name
    parts = Path(path).parts
    if "site-packages" in parts:
        path = "/".join(parts[parts.index("site-packages") + 1 :])
    elif "rollout" in parts:
        path = "/".join(parts[len(parts) - parts[::-1].index("rollout") - 1 :])
    else:
        path = "/".join(parts[-2:])
    return f"{path}:{line} {name}"


async def profile(
    launcher: Launcher, pair: Pair, who: str, job: Job, keep: Path | None = None
) -> Profile:
    """Run a job with our server or our client under cProfile.

    With *keep* the profile stays in that folder, as ``server.prof`` or ``client.prof``.

    Raises:
        ChildError: A process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = (keep or Path(folder)) / f"{who}.prof"
        options = ("--profile", str(path))
        report = await launcher.run_once(pair, who, options, job)
        return Profile(who, pstats.Stats(str(path)), report)
