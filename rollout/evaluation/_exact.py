"""Exact sums: whole numbers instead of floats, so that no order of adding can matter.

A float is a whole number of steps of 2**-k for some k. Sums, squares and products of such
numbers are whole numbers again, which Python adds without rounding, overflow or cancellation.
What leaves this module as a float was rounded once.
"""

from __future__ import annotations

import math
import sys
from fractions import Fraction

from attrs import define, field

__all__ = ["ClusterSums", "ExactMean", "PairedSums", "binary_places", "sqrt_float", "to_float"]

FINEST = 1074
"""Every float is a whole number of steps of 2**-1074."""


def binary_places(value: float) -> int:
    """The smallest k for which *value* is a whole number of steps of 2**-k."""
    return value.as_integer_ratio()[1].bit_length() - 1


def to_steps(value: float, places: int) -> int:
    """*value* as a number of steps of 2**-*places*; *places* must not be too few for it."""
    numerator, denominator = value.as_integer_ratio()
    return numerator << (places - denominator.bit_length() + 1)


def to_float(value: Fraction) -> float:
    """The float nearest to *value*; the largest one of its sign where it is out of range."""
    try:
        return float(value)
    except OverflowError:
        return -sys.float_info.max if value < 0 else sys.float_info.max


def sqrt_float(value: Fraction) -> float:
    """The square root as a float, also where *value* itself fits in none."""
    numerator, denominator = value.numerator, value.denominator
    # Enough bits that the whole part of the root has more of them than a float.
    shift = max(0, 128 - numerator.bit_length() + denominator.bit_length())
    shift += shift % 2
    root = math.isqrt((numerator << shift) // denominator)
    return to_float(Fraction(root, 1 << (shift // 2)))


@define
class ExactMean:
    """A mean whose sum is exact; takes constant memory.

    Attributes:
        count: How many numbers it has taken.
    """

    count: int = 0
    _steps: int = 0

    def add(self, value: float) -> None:
        """Take a finite number."""
        self.count += 1
        self._steps += to_steps(value, FINEST)

    def mean(self) -> float | None:
        """The mean, ``None`` of nothing. It lies between the extremes, so it is finite."""
        return self._steps / (self.count << FINEST) if self.count else None


@define
class ClusterSums:
    """What the clustered standard error of a mean needs, in one pass over the clusters.

    Numbers are in steps of 2**-`places`.

    Attributes:
        places: The size of a step.
        clusters: How many clusters have at least one number.
        count: How many numbers there are.
    """

    places: int = 0
    clusters: int = 0
    count: int = 0
    _total: int = 0
    _squares: int = 0
    _products: int = 0
    _sizes: int = 0

    def add(self, total: int, size: int) -> None:
        """Take a cluster of *size* numbers that sum up to *total* steps."""
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
        return Fraction(self._total, self.count << self.places)

    def variance_of_mean(self) -> Fraction:
        """The squared clustered standard error of the mean; needs two clusters.

        With T_i and m_i the sum and the size of cluster i, M the mean of all N numbers and G
        clusters: ``G/(G-1) * sum((T_i - m_i*M)**2) / N**2``.
        """
        mean = Fraction(self._total, self.count)
        spread = self._squares - 2 * mean * self._products + mean * mean * self._sizes
        variance = Fraction(self.clusters, self.clusters - 1) * spread / self.count**2
        return variance / (1 << 2 * self.places)


@define
class PairedSums:
    """Mean of rational differences, and its variance, in one pass.

    Attributes:
        places: Numerators are in steps of 2**-`places`.
        count: How many differences it has taken.
    """

    places: int = 0
    count: int = 0
    _sums: dict[int, list[int]] = field(factory=dict)

    def add(self, numerator: int, denominator: int) -> None:
        """Take the difference *numerator* / *denominator*."""
        self.count += 1
        sums = self._sums.setdefault(denominator, [0, 0])
        sums[0] += numerator
        sums[1] += numerator * numerator

    def mean(self) -> Fraction:
        """The mean difference; there must be one."""
        return self._sum() / (self.count << self.places)

    def variance_of_mean(self) -> Fraction:
        """The squared standard error of the mean, ``s**2 / count``; needs two differences."""
        total = self._sum()
        squares = sum(
            (Fraction(square, under**2) for under, (_, square) in self._sums.items()), Fraction()
        )
        spread = squares - total * total / self.count
        return spread / (self.count * (self.count - 1)) / (1 << 2 * self.places)

    def _sum(self) -> Fraction:
        return sum((Fraction(total, under) for under, (total, _) in self._sums.items()), Fraction())
