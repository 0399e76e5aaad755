"""The figures as a picture; needs matplotlib, which nothing else does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from comparison.measures import Record
from comparison.pairs import Pair


def why_not() -> str | None:
    """Say why there can be no plot, if there can be none."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    mpl.use("Agg")
    return None


def draw(path: Path, pairs: Iterable[Pair], rows: list[Record]) -> None:
    """Draw throughput, processor time, wall time and memory into a PNG file."""
    from matplotlib import pyplot as plt

    pairs = tuple(pairs)
    figure, axes = plt.subplots(2, 2, figsize=(12, 9), layout="constrained")
    try:
        _lines(axes[0][0], pairs, rows, "rollouts_per_sec", 1.0)
        axes[0][0].set(title="No-op rollouts per second", yscale="log")
        _lines(axes[0][1], pairs, rows, "server_cpu_sec_per_rollout", 1000.0)
        axes[0][1].set(title="Processor time of the server for a rollout, ms", yscale="log")
        _bars(axes[1][0], pairs, rows, "wall_sec")
        axes[1][0].set(title="Many rollouts at once: wall time, s")
        _bars(axes[1][1], pairs, rows, "server_kib_per_rollout")
        axes[1][1].set(title="Many rollouts at once: server memory of each, KiB")
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)


def _lines(
    axes: Any, pairs: tuple[Pair, ...], rows: list[Record], name: str, factor: float
) -> None:
    for pair in pairs:
        points = sorted(
            (row["in_flight"], row[name] * factor)
            for row in rows
            if row["measure"] == "throughput" and row["pair"] == pair.key and row[name]
        )
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=pair.title)
    axes.set(xscale="log", xlabel="rollouts in flight")
    axes.grid(visible=True, alpha=0.3)
    if axes.lines:
        axes.legend()


def _bars(axes: Any, pairs: tuple[Pair, ...], rows: list[Record], name: str) -> None:
    done = [row for row in rows if row["measure"] == "wall" and row[name] is not None]
    works = sorted({(row["in_flight"], row["sleep_sec"]) for row in done})
    width = 0.8 / max(1, len(pairs))
    for index, pair in enumerate(pairs):
        heights = {
            (row["in_flight"], row["sleep_sec"]): row[name]
            for row in done
            if row["pair"] == pair.key
        }
        places = [place for place, work in enumerate(works) if work in heights]
        axes.bar(
            [place + (index - (len(pairs) - 1) / 2) * width for place in places],
            [heights[works[place]] for place in places],
            width=width,
            label=pair.title,
        )
    axes.set_xticks(range(len(works)), [f"{count:,} x {sleep:g} s" for count, sleep in works])
    axes.grid(visible=True, axis="y", alpha=0.3)
    if works:
        axes.legend()
