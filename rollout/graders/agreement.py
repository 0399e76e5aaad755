"""How far judges agree: two statistics over ratings on an interval scale.

A *unit* is what was rated, as the list of the ratings that it got, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

__all__ = ["krippendorff_alpha", "mean_absolute_difference"]


def krippendorff_alpha(units: Sequence[Sequence[float]]) -> float | None:
    """Return Krippendorff's alpha for interval data.

    1 is perfect agreement, 0 is what chance would bring, and less is systematic disagreement.
    Units with a single rating are left out. See K. Krippendorff, "Computing Krippendorff's
    Alpha-Reliability", University of Pennsylvania, 2011.

    Returns:
        Alpha; ``None`` where it is undefined: there is nothing to compare, or all ratings are
        the same.
    """
    rated = [unit for unit in units if len(unit) > 1]
    values = [value for unit in rated for value in unit]
    if not values or min(values) == max(values):
        return None
    # The sum of squared differences over ordered pairs is 2 n times that of squared deviations.
    expected = 2 * _squares(values) / (len(values) - 1)
    observed = sum(2 * len(unit) * _squares(unit) / (len(unit) - 1) for unit in rated)
    return 1 - observed / (len(values) * expected)


def mean_absolute_difference(units: Sequence[Sequence[float]]) -> float | None:
    """Return the mean distance between two ratings of a unit, ``None`` without a pair."""
    distances = [abs(a - b) for unit in units for a, b in combinations(unit, 2)]
    return fmean(distances) if distances else None


def _squares(values: Sequence[float]) -> float:
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values)
