"""Counts that cost next to nothing to keep: plain numbers, and histograms of a short list each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from rollout._checks import is_finite_number

__all__ = ["CALL_SEC", "LAG_SEC", "ROLLOUT_SEC", "Histogram", "numbers"]

LAG_SEC = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
CALL_SEC = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
ROLLOUT_SEC = (
    *(0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0),
    *(7200.0, 14400.0),
)


@define
class Histogram:
    """How many values there were up to each of some bounds, and their sum.

    Attributes:
        bounds: The bounds, ascending; there is a last count for all larger values.
        counts: How many values are above the bound before, and not above this one.
        total: The sum of the values.
    """

    bounds: Sequence[float]
    counts: list[float] = field(factory=list)
    total: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def flat(self, name: str) -> dict[str, float]:
        """Return it as numbers by name, which can be added to those of others."""
        parts = {f"{name}.{place}": count for place, count in enumerate(self.counts)}
        return {**parts, f"{name}.total": self.total}

    @classmethod
    def of_flat(cls, bounds: Sequence[float], name: str, numbers: Mapping[str, float]) -> Histogram:
        """Return one out of such numbers; those that are missing are 0."""
        counts = [numbers.get(f"{name}.{place}", 0) for place in range(len(bounds) + 1)]
        return cls(bounds, counts, numbers.get(f"{name}.total", 0.0))


def numbers(value: Any) -> dict[str, float]:
    """Return the finite numbers of a mapping by their names; of anything else, none."""
    items = value.items() if isinstance(value, Mapping) else ()
    return {str(name): number for name, number in items if is_finite_number(number)}
