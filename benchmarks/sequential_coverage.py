"""Confidence sequences of pass rates, by simulation: how often they ever miss, and what they cost.

Each simulated evaluation has a dataset whose rows' chances to pass come from a beta distribution,
and n attempts for each, drawn in random order without replacement. For each line, the figures are:

    ever      how often the sequence misses the rate of all rows after any row up to the stop
    fixed     the same for the mean -/+ 1.96 * SE, looked at as often from the 20th row on
    rows      how many rows it takes until the interval is narrow enough (mean, and 9 of 10)
    planned   how many rows an interval of that width takes if one may look once, the rate known

``python benchmarks/sequential_coverage.py`` prints a table for runs, and one for comparisons of
runs with no difference: how often one is called ahead, ever. ``--runs`` says how many are drawn
for each line.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from fractions import Fraction

from rollout.evaluation.sequential import ConfidenceSequence

SHAPES = {"hard": (0.3, 2.0), "mixed": (0.5, 0.5), "easy": (9.0, 1.0)}
NORMAL = 1.96
FIRST_LOOK = 20


def planned(values: list[float], until: float) -> int:
    """Rows for a half-width at one look: normal quantile, finite population."""
    rows = len(values)
    needed = (NORMAL / until) ** 2 * statistics.pvariance(values)
    return math.ceil(needed / (1 + needed / rows))


def measure(
    shape: tuple[float, float], rows: int, n: int, until: float, runs: int, draw: random.Random
) -> str:
    ever = fixed = plan = 0
    taken = []
    for _ in range(runs):
        chances = [draw.betavariate(*shape) for _ in range(rows)]
        passed = [sum(draw.random() < chance for _ in range(n)) for chance in chances]
        truth = sum(passed) / (n * rows)
        sequence, total, squares = ConfidenceSequence(rows), 0.0, 0.0
        missed = missed_fixed = False
        for each in passed:
            sequence.add(Fraction(each, n))
            missed |= not sequence.low <= truth <= sequence.high
            total, squares, seen = total + each / n, squares + (each / n) ** 2, sequence.rows
            if seen >= FIRST_LOOK:
                error = math.sqrt((squares - total**2 / seen) / (seen - 1) / seen)
                missed_fixed |= abs(total / seen - truth) > NORMAL * error
            if sequence.half_width <= until:
                break
        ever += missed
        fixed += missed_fixed
        taken.append(sequence.rows)
        plan += planned([each / n for each in passed], until)
    taken.sort()
    return (
        f"{ever / runs:>7.3f} {fixed / runs:>7.3f} {statistics.mean(taken):>7.0f} "
        f"{taken[int(0.9 * runs)]:>7} {plan / runs:>8.0f}"
    )


def compared(
    shape: tuple[float, float], rows: int, gap: float, runs: int, draw: random.Random
) -> str:
    """Two runs of the same rows, one attempt each; B passes what A fails with a chance of *gap*."""
    a_ahead = b_ahead = 0
    taken = []
    for _ in range(runs):
        sequence = ConfidenceSequence()
        for _ in range(rows):
            chance = draw.betavariate(*shape)
            a, b = (draw.random() < chance for _ in range(2))
            b = b or draw.random() < gap
            sequence.add((Fraction(b) - Fraction(a) + 1) / 2)
            if not sequence.low <= 0.5 <= sequence.high:
                break
        a_ahead += sequence.high < 0.5
        b_ahead += sequence.low > 0.5
        taken.append(sequence.rows)
    return f"{a_ahead / runs:>7.3f} {b_ahead / runs:>7.3f} {statistics.mean(taken):>7.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    print(f"{options.runs} runs a line; confidence sequences of 95%")
    print(
        f"{'shape':>6} {'rows':>6} {'n':>2} {'until':>6}    ever   fixed    rows     90%  planned"
    )
    for name, shape in SHAPES.items():
        for rows, n, until in ((500, 1, 0.05), (5000, 1, 0.05), (5000, 4, 0.03)):
            figures = measure(shape, rows, n, until, options.runs, draw)
            print(f"{name:>6} {rows:>6} {n:>2} {until:>6} {figures}", flush=True)
    print("comparisons: B passes what A fails with a chance of gap; up to 1,000 rows")
    print(f"{'shape':>6} {'gap':>6} A ahead B ahead    rows")
    for name, shape in SHAPES.items():
        for gap in (0.0, 0.1, 0.3):
            print(
                f"{name:>6} {gap:>6} {compared(shape, 1000, gap, options.runs, draw)}", flush=True
            )


if __name__ == "__main__":
    main()
