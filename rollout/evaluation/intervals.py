"""Confidence intervals that know that attempts of one row belong together. Pure.

The rows of a dataset are the independent draws; attempts of one row are not. Treating n
attempts of R rows as n*R draws makes an interval up to sqrt(n) times too narrow.
"""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist

from attrs import define, frozen

__all__ = [
    "LEVEL",
    "ClusterSums",
    "Estimate",
    "PairedDifference",
    "PairedSums",
    "cluster_mean",
    "cluster_rate",
    "paired_difference",
    "row_rate",
    "sign_test",
    "t_cdf",
    "t_quantile",
    "wilson",
]

LEVEL = 0.95
"""The confidence level of all intervals."""

_SERIES_DEGREES = 1000
"""Up to how many degrees of freedom the t distribution is summed up exactly."""


@frozen
class Estimate:
    """A mean with its confidence interval.

    Attributes:
        value: The mean, ``None`` of nothing.
        low: Lower end of the interval, ``None`` where there is none.
        high: Upper end of the interval, ``None`` where there is none.
        standard_error: Standard error of the mean, clustered by row; ``None`` for fewer than
            two rows.
        level: Confidence level of the interval.
        method: How the interval was made: ``cluster-t``, ``cluster-wilson``, ``wilson-rows``,
            ``sequential`` (see `rollout.evaluation.sequential`) or ``none``.
        attempts: How many attempts it is the mean of.
        rows: How many rows these belong to.
    """

    value: float | None
    low: float | None
    high: float | None
    standard_error: float | None
    level: float
    method: str
    attempts: int
    rows: int


@define
class ClusterSums:
    """Exact sums over rows: what the clustered standard error of a mean needs, in one pass.

    Fractions add up without rounding, so the order of the rows does not matter.

    Attributes:
        clusters: How many rows have at least one number.
        count: How many numbers there are.
    """

    clusters: int = 0
    count: int = 0
    _total: Fraction = Fraction()
    _squares: Fraction = Fraction()
    _products: Fraction = Fraction()
    _sizes: int = 0

    def add(self, total: Fraction | int, size: int) -> None:
        """Add a row of *size* numbers whose sum is *total*."""
        if not size:
            return
        self.clusters += 1
        self.count += size
        self._total += total
        self._squares += total * total
        self._products += total * size
        self._sizes += size * size

    def mean(self) -> Fraction:
        """The mean of all numbers; there must be one."""
        return self._total / self.count

    def variance_of_mean(self) -> Fraction:
        """The squared clustered standard error of the mean; needs two rows.

        With T_i and m_i the sum and the size of row i, M the mean of all N numbers and R rows:
        ``R/(R-1) * sum((T_i - m_i*M)**2) / N**2``.
        """
        mean = self.mean()
        spread = self._squares - 2 * mean * self._products + mean * mean * self._sizes
        return Fraction(self.clusters, self.clusters - 1) * spread / self.count**2


def to_float(value: Fraction) -> float:
    """The float nearest to *value*; the largest one of its sign where it is out of range."""
    try:
        return float(value)
    except OverflowError:
        return -sys.float_info.max if value < 0 else sys.float_info.max


def sqrt_float(value: Fraction) -> float:
    """The square root as a float, also where *value* itself is out of range."""
    numerator, denominator = value.numerator, value.denominator
    # Enough bits that the whole part of the root has more of them than a float.
    shift = max(0, 128 - numerator.bit_length() + denominator.bit_length())
    shift += shift % 2
    root = math.isqrt((numerator << shift) // denominator)
    return to_float(Fraction(root, 1 << (shift // 2)))


def cluster_mean(sums: ClusterSums) -> Estimate:
    """Mean over attempts, with an interval for attempts that are clustered by row.

    Formula: with T_i and m_i the sum and the number of attempts of row i, N attempts of R
    rows and the mean M = sum(T_i) / N::

        SE = sqrt(R / (R - 1) * sum((T_i - m_i * M)**2)) / N
        interval = M -/+ t(0.975; R - 1) * SE

    The interval (method ``cluster-t``) is ``None`` for fewer than two rows. It is ``None``
    also where SE is 0: an interval of no width would claim what no sample can show.

    Source: Miller 2024, "Adding Error Bars to Evals: A Statistical Approach to Language Model
    Evaluations", arXiv:2411.00640, on clustered standard errors. The factor
    R / (R - 1) and the t quantile are the usual corrections for a small number of clusters
    (Cameron and Miller 2015, "A Practitioner's Guide to Cluster-Robust Inference", Journal of
    Human Resources 50(2), section VI). With as many attempts in each row this is the t
    interval of the row means.
    """
    if not sums.count:
        return _NOTHING
    mean, variance = sums.mean(), _variance(sums)
    error = None if variance is None else sqrt_float(variance)
    if not variance or error is None:
        return _estimate(sums, error, "none")
    return _estimate(sums, error, "cluster-t", _around(mean, error, sums.clusters - 1))


def cluster_rate(sums: ClusterSums) -> Estimate:
    """Rate of attempts that pass, with an interval for attempts that are clustered by row.

    Formula: with the rate p and its SE as in `cluster_mean`, over ones and zeros, the N
    attempts of R rows are worth as much as this many independent ones::

        E = min(N, p * (1 - p) / SE**2)

    The interval (method ``cluster-wilson``) is the Wilson score interval (see `wilson`) of p
    and E draws, with t(0.975; R - 1) in place of z. Unlike one of p and a multiple of SE, it
    stays within 0 to 1, and keeps its level where nearly all attempts pass, or nearly none.

    Where SE is 0, as when all attempts pass or none does, it is the Wilson interval for R
    draws (method ``wilson-rows``): each row counts as one draw, however many attempts it has.
    The interval is ``None`` for fewer than two rows.

    Source: Korn and Graubard 1998, "Confidence Intervals for Proportions with Small Expected
    Number of Positive Counts Estimated from Survey Data", Survey Methodology 24(2), on the
    effective number of draws and its correction for R; Franco, Little, Louis and Slud 2019,
    "Comparative Study of Confidence Intervals for Proportions in Complex Sample Surveys",
    Journal of Survey Statistics and Methodology 7(3), on the Wilson interval with it.
    """
    if not sums.count:
        return _NOTHING
    rate, variance = sums.mean(), _variance(sums)
    if variance is None:
        return _estimate(sums, None, "none")
    if not variance:
        return _estimate(sums, 0.0, "wilson-rows", wilson(to_float(rate), sums.clusters))
    draws = min(Fraction(sums.count), rate * (1 - rate) / variance)
    quantile = t_quantile((1 + LEVEL) / 2, sums.clusters - 1)
    ends = _score_interval(to_float(rate), float(draws), quantile)
    return _estimate(sums, sqrt_float(variance), "cluster-wilson", ends)


def row_rate(
    mean: Fraction, mean_square: Fraction, rows: int, most: Fraction
) -> tuple[float, float] | tuple[None, None]:
    """Interval of a mean over rows of what lies between 0 and 1 for each, such as pass@k.

    Formula: with the mean p of R rows and the sample variance s**2 of their values, the rows are
    worth as much as this many draws of ones and zeros::

        E = min(N / k, R * p * (1 - p) / s**2)

    N / k is how many groups of k the N attempts of these rows make. The interval is the Wilson
    score interval of p and E draws, with t(0.975; R - 1) in place of z, as in `cluster_rate`:
    for pass@1, and rows with as many attempts each, it is the same one. Where all rows have the
    same value it is the Wilson interval for R draws. ``benchmarks/interval_coverage.py``
    simulates its coverage.

    Args:
        mean: The mean.
        mean_square: The mean of the squares.
        rows: How many rows there are.
        most: N / k.

    Returns:
        Its ends, ``None`` for fewer than two rows.
    """
    if rows <= 1:
        return None, None
    variance = max(Fraction(0), (mean_square - mean * mean) / (rows - 1))
    if not variance:
        return wilson(to_float(mean), rows)
    draws = min(most, mean * (1 - mean) / variance)
    return _score_interval(to_float(mean), to_float(draws), t_quantile((1 + LEVEL) / 2, rows - 1))


_NOTHING = Estimate(None, None, None, None, LEVEL, "none", 0, 0)


def _variance(sums: ClusterSums) -> Fraction | None:
    """The squared standard error, ``None`` for fewer than two rows."""
    return sums.variance_of_mean() if sums.clusters > 1 else None


def _estimate(
    sums: ClusterSums,
    error: float | None,
    method: str,
    ends: tuple[float | None, float | None] = (None, None),
) -> Estimate:
    value = to_float(sums.mean())
    return Estimate(value, *ends, error, LEVEL, method, sums.count, sums.clusters)


def _around(
    mean: Fraction, error: float, degrees: int, bounds: tuple[float, float] | None = None
) -> tuple[float, float]:
    half = Fraction(t_quantile((1 + LEVEL) / 2, degrees)) * Fraction(error)
    low, high = to_float(mean - half), to_float(mean + half)
    if bounds:
        low, high = max(low, bounds[0]), min(high, bounds[1])
    return low, high


def wilson(rate: float, draws: int, level: float = LEVEL) -> tuple[float, float]:
    """The Wilson score interval of a proportion, which has a width also at 0 and 1.

    Formula: with z the quantile of the normal distribution for the level::

        (p + z**2 / 2n -/+ z * sqrt(p * (1 - p) / n + z**2 / 4n**2)) / (1 + z**2 / n)

    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical
    Inference", Journal of the American Statistical Association 22(158).

    Args:
        rate: The proportion p.
        draws: The number n of independent draws, from 1.
        level: The confidence level.
    """
    return _score_interval(rate, draws, NormalDist().inv_cdf((1 + level) / 2))


def _score_interval(rate: float, draws: float, quantile: float) -> tuple[float, float]:
    square = quantile * quantile / draws
    middle = rate + square / 2
    half = math.sqrt(square * (rate * (1 - rate) + square / 4))
    low, high = (middle - half) / (1 + square), (middle + half) / (1 + square)
    # At the border one end is the rate itself, but for rounding.
    return (0.0 if rate == 0 else max(0.0, low)), (1.0 if rate == 1 else min(1.0, high))


@frozen
class PairedDifference:
    """The change from run A to run B on the rows that both have.

    Attributes:
        a: Mean over these rows in run A, each row with the mean of its attempts.
        b: The same in run B.
        difference: The mean of B minus A.
        low: Lower end of the difference's interval, ``None`` where there is none.
        high: Upper end of it.
        standard_error: Standard error of the difference, ``None`` for fewer than two rows.
        level: Confidence level of the interval.
        method: How the interval was made: ``paired-t`` or ``none``.
        rows: How many rows were paired.
    """

    a: float | None
    b: float | None
    difference: float | None
    low: float | None
    high: float | None
    standard_error: float | None
    level: float
    method: str
    rows: int


@define
class PairedSums:
    """Exact sums over rows: the means of both runs, their difference and its variance.

    Attributes:
        rows: How many rows it has.
    """

    rows: int = 0
    _a: Fraction = Fraction()
    _b: Fraction = Fraction()
    _squares: Fraction = Fraction()

    def add(self, a: Fraction, b: Fraction) -> None:
        """Add the mean of a row in run A and in run B."""
        self.rows += 1
        self._a += a
        self._b += b
        self._squares += (b - a) ** 2

    def means(self) -> tuple[Fraction, Fraction]:
        """The means of A and B; there must be a row."""
        return self._a / self.rows, self._b / self.rows

    def variance_of_difference(self) -> Fraction:
        """The squared standard error of the mean difference; needs two rows."""
        spread = self._squares - (self._b - self._a) ** 2 / self.rows
        return spread / (self.rows * (self.rows - 1))


def paired_difference(
    sums: PairedSums, bounds: tuple[float, float] | None = None
) -> PairedDifference:
    """Mean of the differences between two runs, row by row, with an interval.

    Formula: with d_i the mean of row i in B minus its mean in A, over R rows, and s their
    sample standard deviation::

        D = sum(d_i) / R
        SE = s / sqrt(R)
        interval = D -/+ t(0.975; R - 1) * SE

    The interval (method ``paired-t``) is ``None`` for fewer than two rows, and where all d_i
    are the same: an interval of no width would claim what no sample can show.

    Source: Miller 2024, arXiv:2411.00640, on paired differences. What makes rows
    easy or hard for both runs cancels out in the differences.

    Args:
        sums: The row means of both runs.
        bounds: Range that the interval is cut to.
    """
    if not sums.rows:
        return PairedDifference(None, None, None, None, None, None, LEVEL, "none", 0)
    a, b = sums.means()
    low = high = error = None
    method = "none"
    if sums.rows > 1:
        variance = sums.variance_of_difference()
        error = sqrt_float(variance)
        if variance:
            low, high = _around(b - a, error, sums.rows - 1, bounds)
            method = "paired-t"
    return PairedDifference(
        to_float(a),
        to_float(b),
        to_float(b - a),
        low,
        high,
        error,
        LEVEL,
        method,
        sums.rows,
    )


def sign_test(up: int, down: int) -> float:
    """Two-sided p-value of the sign test, which for single attempts is McNemar's exact test.

    Formula: with N = up + down and m the smaller of the two, ``min(1, 2 * sum(C(N, j) for j =
    0..m) / 2**N)``: how likely a split at least this uneven is if each row that changed was as
    likely to get better as to get worse. 1 where nothing changed.

    Source: Conover 1999, "Practical Nonparametric Statistics", section 3.4; McNemar 1947,
    "Note on the sampling error of the difference between correlated proportions or
    percentages", Psychometrika 12(2), in its exact binomial form.
    """
    changed, less = up + down, min(up, down)
    if 2 * less >= changed - 1:
        return 1.0
    if changed <= _SERIES_DEGREES:
        term = tail = 1
        for j in range(less):
            term = term * (changed - j) // (j + 1)
            tail += term
        return 2 * tail / (1 << changed)
    # The largest term, by logarithms, times the sum of the others relative to it.
    largest = (
        math.lgamma(changed + 1)
        - math.lgamma(less + 1)
        - math.lgamma(changed - less + 1)
        - changed * math.log(2)
    )
    share = tail_share = 1.0
    for j in range(less, 0, -1):
        share *= j / (changed - j + 1)
        tail_share += share
        if share < tail_share * 1e-17:
            break
    return min(1.0, 2 * math.exp(largest) * tail_share)


def t_cdf(t: float, degrees: int) -> float:
    """The probability that Student's t is at most *t*.

    Formula: the finite series in cos(atan(t / sqrt(degrees))), all of whose terms are
    positive; good to about 1e-15.

    Source: Abramowitz and Stegun 1964, "Handbook of Mathematical Functions", 26.7.3 and
    26.7.4.

    Args:
        t: Any finite number.
        degrees: Degrees of freedom, from 1.
    """
    if degrees < 1:
        raise ValueError("degrees must be at least 1")
    return 0.5 + math.copysign(_within(math.atan(abs(t) / math.sqrt(degrees)), degrees) / 2, t)


def _within(angle: float, degrees: int) -> float:
    """The probability of -t to t, where ``t = sqrt(degrees) * tan(angle)``."""
    sine, cosine = math.sin(angle), math.cos(angle)
    square = cosine * cosine
    odd = degrees % 2
    term = cosine if odd else 1.0
    terms = [term] if degrees > 1 else []
    for j in range(2 + odd, degrees - 1, 2):
        term *= square * (j - 1) / j
        terms.append(term)
    series = sine * math.fsum(terms)
    return min(1.0, 2 / math.pi * (angle + series) if odd else series)


@lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: int) -> float:
    """The value that Student's t stays below with a probability.

    Up to 1,000 degrees of freedom `t_cdf` is inverted by bisection; beyond, it is the
    Cornish-Fisher expansion around the normal quantile, which is off by less than 1e-12 there.
    Meant for confidence levels: between 1e-6 and 1 - 1e-6 it is good to nine digits or more.

    Source: Abramowitz and Stegun 1964, 26.7.5 (the expansion).

    Args:
        probability: Between 0 and 1, both excluded.
        degrees: Degrees of freedom, from 1.
    """
    if degrees < 1:
        raise ValueError("degrees must be at least 1")
    if not 0 < probability < 1:
        raise ValueError("probability must be between 0 and 1")
    if degrees > _SERIES_DEGREES:
        return _expansion(NormalDist().inv_cdf(probability), degrees)
    wanted = abs(2 * probability - 1)
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if _within(middle, degrees) < wanted:
            low = middle
        else:
            high = middle
    return math.copysign(math.sqrt(degrees) * math.tan(low), probability - 0.5)


def _expansion(z: float, degrees: int) -> float:
    square = z * z
    terms = (
        z,
        z * (square + 1) / 4,
        z * ((5 * square + 16) * square + 3) / 96,
        z * (((3 * square + 19) * square + 17) * square - 15) / 384,
        z * ((((79 * square + 776) * square + 1482) * square - 1920) * square - 945) / 92160,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))
