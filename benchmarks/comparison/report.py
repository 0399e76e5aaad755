"""Tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from comparison.measures import Record
from comparison.pairs import PAIRS, Pair
from comparison.profiles import WAITING, Profile
from comparison.summary import Target

Column = tuple[str, Callable[[Record], str]]


def number(value: float | None, digits: int = 1, *, factor: float = 1.0) -> str:
    """Write a figure, or a dash where there is none."""
    return "-" if value is None else f"{value * factor:,.{digits}f}"


def print_results(
    console: Console,
    pairs: Iterable[Pair],
    rows: list[Record],
    left_out: list[Record],
    targets: list[Target],
) -> None:
    """Print a table for each measure, what was left out, and the targets."""
    pairs = tuple(pairs)
    for measure, title in (
        ("throughput", "No-op rollouts per second, by rollouts in flight"),
        ("scale", "The same, for our pair at scale"),
    ):
        levels = _levels(rows, measure)
        if levels:
            console.print(_by_level(title, pairs, rows, measure, levels, _rate))
    levels = _levels(rows, "throughput")
    if levels:
        title = "Processor time of a rollout in ms, server + client, by rollouts in flight"
        console.print(_by_level(title, pairs, rows, "throughput", levels, _cpu))
    _print_rows(
        console,
        "Latency of one rollout alone",
        [row for row in rows if row["measure"] == "throughput" and row["in_flight"] == 1],
        (
            ("p50 ms", lambda row: number(row["latency_p50_sec"], 2, factor=1000)),
            ("p95 ms", lambda row: number(row["latency_p95_sec"], 2, factor=1000)),
        ),
    )
    _print_rows(
        console,
        "Many rollouts at once",
        [row for row in rows if row["measure"] == "wall"],
        (
            ("rollouts", lambda row: f"{row['in_flight']:,} x {row['sleep_sec']:g} s"),
            ("wall s", _wall),
            ("failed", lambda row: "all" if row["wall_sec"] is None else f"{row['failed']:,}"),
            ("server KiB each", lambda row: number(row["server_kib_per_rollout"])),
            ("client KiB each", lambda row: number(row["client_kib_per_rollout"])),
            ("CPU ms each", _cpu),
        ),
    )
    _print_rows(
        console,
        "Traffic of a rollout, 64 in flight",
        [row for row in rows if row["measure"] == "traffic"],
        (
            ("sleep s", lambda row: f"{row['sleep_sec']:g}"),
            ("requests", lambda row: number(row["requests_per_rollout"], 2)),
            ("bytes up", lambda row: number(row["bytes_up_per_rollout"], 0)),
            ("bytes down", lambda row: number(row["bytes_down_per_rollout"], 0)),
            ("connections", lambda row: number(row["connections_per_rollout"], 2)),
        ),
    )
    for item in left_out:
        sleep = f" x {item['sleep_sec']:g} s" if item["sleep_sec"] else ""
        console.print(
            f"Left out: {item['measure']}, {item['in_flight']:,} in flight{sleep}, "
            f"{PAIRS[item['pair']].title}: {item['reason']}."
        )
    for row in rows:
        for error in row["errors"]:
            console.print(
                f"Failed: {row['measure']}, {row['in_flight']} in flight, "
                f"{PAIRS[row['pair']].title}: {error}",
                style="red",
                markup=False,
            )
    console.print(_target_table(targets))


def _levels(rows: list[Record], measure: str) -> list[int]:
    return sorted({row["in_flight"] for row in rows if row["measure"] == measure})


def _mark(row: Record) -> str:
    return " (cut)" if row["cut"] else ""


def _rate(row: Record) -> str:
    if row["rollouts_per_sec"] is None:
        return "failed"
    failed = f", {row['failed']} failed" if row["failed"] and not row["cut"] else ""
    return number(row["rollouts_per_sec"]) + _mark(row) + failed


def _wall(row: Record) -> str:
    return "failed" if row["wall_sec"] is None else number(row["wall_sec"], 2) + _mark(row)


def _cpu(row: Record) -> str:
    server, client = (row[f"{side}_cpu_sec_per_rollout"] for side in ("server", "client"))
    return f"{number(server, 2, factor=1000)} + {number(client, 2, factor=1000)}"


def _by_level(
    title: str,
    pairs: tuple[Pair, ...],
    rows: list[Record],
    measure: str,
    levels: list[int],
    show: Callable[[Record], str],
) -> Table:
    cells = {
        (row["pair"], row["in_flight"]): show(row) for row in rows if row["measure"] == measure
    }
    shown = [pair for pair in pairs if any((pair.key, level) in cells for level in levels)]
    table = Table("in flight", title=title, title_justify="left")
    for pair in shown:
        table.add_column(pair.title, justify="right")
    for level in levels:
        table.add_row(f"{level:,}", *(cells.get((pair.key, level), "-") for pair in shown))
    return table


def _print_rows(
    console: Console, title: str, rows: list[Record], columns: tuple[Column, ...]
) -> None:
    if not rows:
        return
    table = Table("pair", title=title, title_justify="left")
    for name, _ in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(PAIRS[row["pair"]].title, *(show(row) for _, show in columns))
    console.print(table)


def _target_table(targets: list[Target]) -> Table:
    table = Table("work", "target", title="Targets", title_justify="left")
    table.add_column("measured", justify="right")
    table.add_column("range", justify="right")
    table.add_column("met")
    table.add_column("note")
    for target in targets:
        spread = "-" if target.low is None else f"{target.low:.2f} to {target.high:.2f}"
        met = {True: "yes", False: "no", None: "not measured"}[target.met]
        table.add_row(target.work, target.aim, number(target.value, 2), spread, met, target.note)
    return table


def print_profile(console: Console, profile: Profile, lines: int) -> None:
    """Print where the time went: by package, by own and by cumulative time."""
    report: dict[str, Any] = profile.report
    own, with_trio = profile.by_package(), profile.by_package(passing_trio=True)
    waiting = own.pop(WAITING, 0.0)
    busy = sum(own.values())
    console.print(
        f"Profile of our {profile.who}: {report['finished']} rollouts in "
        f"{report['wall_sec']:.1f} s; {busy:.2f} s busy, {waiting:.2f} s waiting. A profile makes "
        "everything slower, many small calls most of all."
    )
    table = Table("package", title="By package, each with what it calls in the standard library")
    for name in ("s", "% of busy", "with trio: s", "% of busy"):
        table.add_column(name, justify="right")
    for package, seconds in sorted(own.items(), key=lambda item: -item[1]):
        whole = with_trio.get(package, 0.0)
        if max(seconds, whole) < busy / 1000:
            continue
        table.add_row(
            package,
            f"{seconds:.2f}",
            f"{100 * seconds / busy:.1f}",
            f"{whole:.2f}",
            f"{100 * whole / busy:.1f}",
        )
    console.print(table)
    for order, title in (("tottime", "own time"), ("cumtime", "cumulative time")):
        table = Table("function", title=f"Top {lines} by {title}")
        for name in ("calls", "own s", "cumulative s"):
            table.add_column(name, justify="right")
        for name, calls, seconds, cumulative in profile.top(order, lines):
            table.add_row(name, f"{calls:,}", f"{seconds:.3f}", f"{cumulative:.3f}")
        console.print(table, markup=False)


def print_layers(console: Console, who: str, layers: dict[str, float]) -> None:
    """Print the processor time of a rollout by layer."""
    total = sum(layers.values())
    table = Table("layer", title=f"Processor time of a rollout in our {who}", title_justify="left")
    for name in ("µs", "%"):
        table.add_column(name, justify="right")
    for layer, sec in sorted(layers.items(), key=lambda item: -item[1]):
        table.add_row(layer, number(sec, 0, factor=1e6), number(sec / total, 1, factor=100))
    table.add_section()
    table.add_row("all", number(total, 0, factor=1e6), "")
    console.print(table)
