"""Coverage of intervals for pass@k, by simulation: how often they hold the true value.

Each simulated evaluation draws rows whose chances to pass come from a beta distribution, and n
attempts for each. The truth is pass@k over all rows that might be drawn. Three ways to make a
95% interval of the rows' own estimates are compared:

    t         mean -/+ t(0.975; R - 1) * SE, cut to 0 and 1
    bootstrap percentiles of the means of rows drawn again with replacement
    wilson    the one of the library: the Wilson interval for as many draws as the rows are worth

``python benchmarks/interval_coverage.py`` prints a table; ``--runs`` says how many evaluations
are drawn for each line of it.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable

from rollout.evaluation.estimators import curve, pass_at_k, percentile
from rollout.evaluation.intervals import t_quantile

Interval = Callable[[list[tuple[int, int]], int, random.Random], tuple[float, float]]

SHAPES = {"hard": (0.3, 2.0), "mixed": (0.5, 0.5), "easy": (4.0, 1.0)}
ROWS = (5, 10, 30, 100)
N = 8
RESAMPLES = 400


def values_of(rows: list[tuple[int, int]], k: int) -> list[float]:
    return [pass_at_k(n, c, k) or 0.0 for n, c in rows]


def by_t(rows: list[tuple[int, int]], k: int, _: random.Random) -> tuple[float, float]:
    values = values_of(rows, k)
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = t_quantile(0.975, count - 1) * math.sqrt(variance / count)
    return max(0.0, mean - half), min(1.0, mean + half)


def by_bootstrap(rows: list[tuple[int, int]], k: int, draw: random.Random) -> tuple[float, float]:
    values = values_of(rows, k)
    count = len(values)
    means = sorted(math.fsum(draw.choices(values, k=count)) / count for _ in range(RESAMPLES))
    return percentile(means, 0.025), percentile(means, 0.975)


def by_wilson(rows: list[tuple[int, int]], k: int, _: random.Random) -> tuple[float, float]:
    estimate = curve(Counter(rows), k)[-1]
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.high


METHODS: dict[str, Interval] = {"t": by_t, "bootstrap": by_bootstrap, "wilson": by_wilson}


def truth(shape: tuple[float, float], k: int) -> float:
    """The mean of 1 - (1 - p)**k over the beta distribution."""
    a, b = shape
    return 1 - math.prod((b + j) / (a + b + j) for j in range(k))


def measure(
    shape: tuple[float, float], count: int, k: int, runs: int, draw: random.Random
) -> dict[str, tuple[float, float]]:
    """Return coverage and mean width for each method."""
    wanted = truth(shape, k)
    found = {name: [0.0, 0.0] for name in METHODS}
    for _ in range(runs):
        rows = []
        for _ in range(count):
            chance = draw.betavariate(*shape)
            rows.append((N, sum(draw.random() < chance for _ in range(N))))
        for name, method in METHODS.items():
            low, high = method(rows, k, draw)
            found[name][0] += low <= wanted <= high
            found[name][1] += high - low
    return {name: (hits / runs, width / runs) for name, (hits, width) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    print(f"n = {N}, {options.runs} runs a line; coverage (mean width) of 95% intervals")
    print(f"{'rows':>9} {'R':>4} {'k':>2} {'pass@k':>7}" + "".join(f"{m:>16}" for m in METHODS))
    for name, shape in SHAPES.items():
        for count in ROWS:
            for k in (1, 4, 8):
                found = measure(shape, count, k, options.runs, draw)
                cells = "".join(f"{hit:>8.3f} ({width:.3f})" for hit, width in found.values())
                print(f"{name:>9} {count:>4} {k:>2} {truth(shape, k):>7.3f}{cells}", flush=True)


if __name__ == "__main__":
    main()
