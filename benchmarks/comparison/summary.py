"""Medians over the rounds, ratios within them, and the targets."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from attrs import asdict, frozen

from comparison.measures import Record

_FAILED = "a job failed"
_KEYS = ("measure", "pair", "in_flight", "sleep_sec")
_PER_ROLLOUT = (
    "server_cpu_sec",
    "client_cpu_sec",
    "requests",
    "bytes_up",
    "bytes_down",
    "connections",
)


def summarize(records: Iterable[Record]) -> list[Record]:
    """One row for each measure, pair, number in flight and sleep: medians over the rounds."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in _KEYS), []).append(record)
    return [_row(dict(zip(_KEYS, key, strict=True)), group) for key, group in groups.items()]


def _row(row: Record, group: list[Record]) -> Record:
    done = [record for record in group if "error" not in record]
    row["rounds"] = len(group)
    row["cut"] = any(record["cut"] for record in done)
    row["errors"] = [record["error"] for record in group if "error" in record]
    row["failed"] = sum(_failed(record) for record in done)
    names = ("wall_sec", "rollouts_per_sec", "latency_p50_sec", "latency_p95_sec")
    for name in names:
        row[name] = _median(record.get(name) for record in done)
    for name in _PER_ROLLOUT:
        row[f"{name}_per_rollout"] = _median(_share(record, name) for record in done)
    for side in ("server", "client"):
        row[f"{side}_kib_per_rollout"] = _median(_growth(record, side) for record in done)
    return row


def _failed(record: Record) -> int:
    outcomes: dict[str, int] = record["outcomes"]
    failed = sum(outcomes.values()) - outcomes.get("success", 0)
    return failed + int(record["unfinished"])


def _share(record: Record, name: str) -> float | None:
    if name not in record or not record["finished"]:
        return None
    return float(record[name] / record["finished"])


def _growth(record: Record, side: str) -> float | None:
    if f"{side}_idle_rss_kib" not in record:
        return None
    grown = record[f"{side}_peak_rss_kib"] - record[f"{side}_idle_rss_kib"]
    return float(grown / record["in_flight"])


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


@frozen(kw_only=True)
class Target:
    """What was aimed for, and what was measured in the same run.

    Attributes:
        value: The measured figure, ``None`` where it was not measured; `low` and `high` are
            its range over the rounds.
    """

    work: str
    aim: str
    met: bool | None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def targets(records: list[Record]) -> list[Target]:
    """Hold what was measured against the targets."""
    return [
        _ratio(
            "no-op rollouts/s, 256 in flight, our pair : official pair",
            records,
            ("throughput", "ours", 256),
            ("throughput", "official", 256),
            at_least=25,
        ),
        _ratio(
            "the same, with connections for all handed to the official client",
            records,
            ("throughput", "ours", 256),
            ("throughput", "official-wide", 256),
            at_least=25,
        ),
        _ratio(
            "our pair, 256 in flight, files kept : not kept",
            records,
            ("throughput", "ours", 256),
            ("throughput", "ours-no-files", 256),
            at_least=0.85,
        ),
        _wall("1,000 concurrent rollouts of 5 s, our pair", records, (1000, 5.0), 7.0, None),
        _wall("10,000 concurrent rollouts of 30 s, our pair", records, (10_000, 30.0), 34.0, 15.0),
        _ratio(
            "throughput of our pair, 10,000 in flight : 100",
            records,
            ("scale", "ours", 10_000),
            ("scale", "ours", 100),
            at_least=0.95,
        ),
        *(
            _ratio(
                f"official client on our server : on its own, {level} in flight",
                records,
                ("throughput", "official-on-ours", level),
                ("throughput", "official", level),
                at_least=1.1,
            )
            for level in (1, 64)
        ),
        _ratio(
            "latency of a single rollout, our pair : official pair",
            records,
            ("throughput", "ours", 1),
            ("throughput", "official", 1),
            name="latency_p50_sec",
            at_most=0.8,
        ),
    ]


def _ratio(
    work: str,
    records: list[Record],
    above: tuple[str, str, int],
    below: tuple[str, str, int],
    *,
    name: str = "rollouts_per_sec",
    at_least: float | None = None,
    at_most: float | None = None,
) -> Target:
    """Compare two figures round by round: both were measured within moments of each other."""
    upper, lower = _rounds(records, above, name), _rounds(records, below, name)
    ratios = [upper[number] / lower[number] for number in upper if lower.get(number)]
    aim = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}"
    errors = any("error" in record for record in records if _place(record) in {above, below})
    if not ratios:
        return _without_figures(work, aim, failed=errors)
    value = median(ratios)
    met = value >= at_least if at_least is not None else at_most is None or value <= at_most
    cut = any(record.get("cut") for record in records if _place(record) in {above, below})
    return Target(
        work=work,
        aim=aim,
        met=met,
        value=value,
        low=min(ratios),
        high=max(ratios),
        note=_FAILED if errors else "a job was cut short" if cut else "",
    )


def _without_figures(work: str, aim: str, *, failed: bool) -> Target:
    """A target that was missed because the job failed, or that was not measured."""
    return Target(work=work, aim=aim, met=False if failed else None, note=_FAILED if failed else "")


def _place(record: Record) -> tuple[str, str, int]:
    return record["measure"], record["pair"], record["in_flight"]


def _rounds(records: list[Record], place: tuple[str, str, int], name: str) -> dict[int, float]:
    return {
        record["round"]: record[name]
        for record in records
        if _place(record) == place and record.get(name) is not None
    }


def _wall(
    work: str,
    records: list[Record],
    job: tuple[int, float],
    most_sec: float,
    most_kib: float | None,
) -> Target:
    aim = f"<= {most_sec:g} s, no failure"
    if most_kib is not None:
        aim += f", <= {most_kib:g} KiB server memory each"
    tried = [
        record
        for record in records
        if record["measure"] == "wall"
        and record["pair"] == "ours"
        and (record["in_flight"], record["sleep_sec"]) == job
    ]
    done = [record for record in tried if "error" not in record]
    if len(done) < len(tried) or not done:
        return _without_figures(work, aim, failed=bool(tried))
    walls = [record["wall_sec"] for record in done]
    failed = sum(map(_failed, done))
    kib = _median(_growth(record, "server") for record in done)
    met = median(walls) <= most_sec and not failed
    if most_kib is not None and kib is not None:
        met = met and kib <= most_kib
    memory = "" if kib is None else f", {kib:.1f} KiB server memory each"
    return Target(
        work=work,
        aim=aim,
        met=met,
        value=median(walls),
        low=min(walls),
        high=max(walls),
        note=f"{failed} failed{memory}",
    )
