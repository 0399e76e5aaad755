"""Estimators of what several attempts of one row achieve: pass@k and pass^k. Pure.

Both are averages over every choice of k of the n attempts that a row has, which makes them
unbiased: computed from a row's n attempts, they have the expectation of what k fresh attempts
would do. Up to `EXACT_ATTEMPTS` attempts they are exact rational numbers, rounded once;
beyond, they are built up by sums and products of numbers from 0 to 1, none of which cancel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice

from attrs import frozen

from rollout.evaluation.intervals import row_rate

__all__ = ["KEstimate", "curve", "pass_at_k", "pass_hat_k", "percentile"]

EXACT_ATTEMPTS = 256
"""Up to how many attempts of a row whole numbers are used."""


@frozen
class KEstimate:
    """An estimate for one k, averaged over rows.

    Attributes:
        k: How many attempts it is about.
        value: The mean over the rows, ``None`` where no row has k attempts.
        rows: How many rows it is the mean of: those with at least k attempts that count.
        low: Lower end of its interval, see `rollout.evaluation.intervals.row_rate`; ``None``
            for fewer than two rows.
        high: Upper end of it.
    """

    k: int
    value: float | None
    rows: int
    low: float | None = None
    high: float | None = None


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Estimate the chance that at least one of k attempts passes.

    Formula: ``1 - C(n-c, k) / C(n, k)``, the share of the choices of k out of n attempts that
    hold one of the c that passed.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    arXiv:2107.03374, equation 1.

    Args:
        n: Attempts of the row.
        c: How many of them passed.
        k: How many attempts the question is about, from 1.

    Returns:
        The estimate, ``None`` where n < k.

    Raises:
        ValueError: *k* is below 1, or *c* is not between 0 and *n*.
    """
    _check(n, c, k)
    if n < k:
        return None
    if n <= EXACT_ATTEMPTS:
        return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)
    # The formula is the same with c and k changed over, so take the shorter way.
    return _at(_any_pass(n, max(c, k)), min(c, k), 1.0)


def pass_hat_k(n: int, c: int, k: int) -> float | None:
    """Estimate the chance that all of k attempts pass, called pass^k.

    Formula: ``C(c, k) / C(n, k)``, the share of the choices of k out of n attempts that hold
    nothing but attempts that passed.

    Source: Yao et al. 2024, "tau-bench: A Benchmark for Tool-Agent-User Interaction in
    Real-World Domains", arXiv:2406.12045.

    Args:
        n: Attempts of the row.
        c: How many of them passed.
        k: How many attempts the question is about, from 1.

    Returns:
        The estimate, ``None`` where n < k.

    Raises:
        ValueError: *k* is below 1, or *c* is not between 0 and *n*.
    """
    _check(n, c, k)
    if n < k:
        return None
    if n <= EXACT_ATTEMPTS:
        return math.comb(c, k) / math.comb(n, k)
    # None of the n-c that failed may be among the k: the same with n-c and k changed over.
    return _at(_all_pass(n, n - max(n - c, k)), min(n - c, k), 0.0)


def curve(
    rows: Mapping[tuple[int, int], int], n: int, *, all_pass: bool = False
) -> tuple[KEstimate, ...]:
    """Average pass@k, or pass^k, over rows, for each k from 1 to *n*.

    Formula: for each k the mean of `pass_at_k` (or `pass_hat_k`) over the rows that have at
    least k attempts that count. The others are left out, since nothing unbiased can be said
    of them; `KEstimate.rows` tells how many remain. The interval is
    `rollout.evaluation.intervals.row_rate`.

    Args:
        rows: How many rows there are with this many attempts and passes, by ``(n_i, c_i)``.
        n: The largest k.
        all_pass: Whether it is about pass^k.
    """
    shares = _all_pass if all_pass else _any_pass
    choices = _all_pass_choices if all_pass else _any_pass_choices
    # One running series for each kind of row; all of them move from k to k + 1 together.
    exact: dict[int, list[tuple[int, Iterator[int]]]] = {}
    rough: dict[int, list[tuple[int, Iterator[float]]]] = {}
    for (size, passed), weight in sorted(rows.items()):
        if size <= EXACT_ATTEMPTS:
            exact.setdefault(size, []).append((weight, choices(size, passed)))
        else:
            rough.setdefault(size, []).append((weight, shares(size, passed)))
    found = []
    for k in range(1, n + 1):
        used, attempts, total, squares = 0, 0, Fraction(), Fraction()
        for size, kinds in exact.items():
            if size >= k:
                held = [(weight, next(series)) for weight, series in kinds]
                every = math.comb(size, k)
                weights = sum(weight for weight, _ in held)
                used, attempts = used + weights, attempts + weights * size
                total += Fraction(sum(weight * some for weight, some in held), every)
                squares += Fraction(sum(weight * some * some for weight, some in held), every**2)
        for size, members in rough.items():
            if size >= k:
                parts = [(weight, next(series)) for weight, series in members]
                weights = sum(weight for weight, _ in parts)
                used, attempts = used + weights, attempts + weights * size
                total += Fraction(math.fsum(weight * share for weight, share in parts))
                squares += Fraction(math.fsum(weight * share * share for weight, share in parts))
        if not used:
            found.append(KEstimate(k, None, 0))
            continue
        mean = min(Fraction(1), total / used)
        ends = row_rate(mean, squares / used, used, Fraction(attempts, k))
        found.append(KEstimate(k, float(mean), used, *ends))
    return tuple(found)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Read off a percentile by linear interpolation between the two nearest numbers.

    Formula: with h = (N - 1) * share, ``x[floor(h)] + (h - floor(h)) * (x[floor(h) + 1] -
    x[floor(h)])``, counting from 0. The median (share 0.5) is the usual one.

    Source: Hyndman and Fan 1996, "Sample Quantiles in Statistical Packages", The American
    Statistician 50(4), definition 7.

    Args:
        ordered: The numbers, smallest first; at least one.
        share: Which percentile, from 0 to 1.
    """
    position = (len(ordered) - 1) * share
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    return low + (position - below) * (high - low)


def _check(n: int, c: int, k: int) -> None:
    if k < 1:
        raise ValueError("k must be at least 1")
    if not 0 <= c <= n:
        raise ValueError("c must be between 0 and n")


def _at(series: Iterator[float], k: int, limit: float) -> float:
    """The value for *k*, or the *limit* that a series never leaves once it is there."""
    if k == 0:
        return 1.0 - limit
    value = limit
    for value in islice(series, k):
        if value == limit:
            break
    return value


def _any_pass_choices(n: int, c: int) -> Iterator[int]:
    """How many choices of k = 1, 2, ..., n attempts hold one that passed."""
    none, every = 1, 1
    for k in range(n):
        none = none * (n - c - k) // (k + 1)
        every = every * (n - k) // (k + 1)
        yield every - none


def _all_pass_choices(n: int, c: int) -> Iterator[int]:
    """How many choices of k = 1, 2, ..., n attempts hold nothing but ones that passed."""
    good = 1
    for k in range(n):
        good = good * (c - k) // (k + 1)
        yield good


def _any_pass(n: int, c: int) -> Iterator[float]:
    """Pass@k of a row for k = 1, 2, ..., n."""
    # The next one is the first to pass: those before do not, and it does. Adding these up
    # keeps the digits of a small chance; what is left to 1 keeps those of a large one.
    reached, left = 0.0, 1.0
    for k in range(n):
        reached += left * min(1.0, c / (n - k))
        left *= max(0, n - c - k) / (n - k)
        yield reached if left > 0.5 else 1.0 - left  # noqa: PLR2004 - the nearer end


def _all_pass(n: int, c: int) -> Iterator[float]:
    """Pass^k of a row for k = 1, 2, ..., n."""
    share = 1.0
    for k in range(n):
        share *= max(0, c - k) / (n - k)
        yield share
