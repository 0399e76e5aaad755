"""pass@k, pass^k and percentiles, against enumeration and exact fractions."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from fractions import Fraction
from itertools import combinations
from math import comb, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.evaluation.estimators import (
    EXACT_ATTEMPTS,
    KEstimate,
    curve,
    pass_at_k,
    pass_hat_k,
    percentile,
)
from rollout.evaluation.intervals import ClusterSums, cluster_rate, wilson

SMALL = [(n, c, k) for n in range(1, 8) for c in range(n + 1) for k in range(1, n + 1)]
LARGE = [
    (n, c, k)
    for n in (257, 400)
    for c in (0, 1, 2, 77, n // 2, n - 1, n)
    for k in (1, 2, 3, 100, n - 1, n)
]


@st.composite
def attempts(draw, max_n=400):
    n = draw(st.integers(1, max_n))
    return n, draw(st.integers(0, n))


@pytest.mark.parametrize(("n", "c", "k"), SMALL)
def test_both_are_shares_of_all_choices(n, c, k):
    choices = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == float(Fraction(sum(map(any, choices)), len(choices)))
    assert pass_hat_k(n, c, k) == float(Fraction(sum(map(all, choices)), len(choices)))


@pytest.mark.parametrize(("n", "c", "k"), LARGE)
def test_many_attempts_lose_no_digits(n, c, k):
    assert n > EXACT_ATTEMPTS
    at = 1 - Fraction(comb(n - c, k), comb(n, k))
    hat = Fraction(comb(c, k), comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(at), rel=1e-12, abs=0)
    assert pass_hat_k(n, c, k) == pytest.approx(float(hat), rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("passed", [1, 2, 10**6, 10**12 - 1])
@pytest.mark.parametrize("k", [1, 3, 50])
def test_huge_counts_neither_overflow_nor_cancel(passed, k):
    n = 10**12
    none = prod(Fraction(n - passed - j, n - j) for j in range(k))
    every = prod(Fraction(max(0, passed - j), n - j) for j in range(k))
    assert pass_at_k(n, passed, k) == pytest.approx(float(1 - none), rel=1e-12, abs=0)
    assert pass_hat_k(n, passed, k) == pytest.approx(float(every), rel=1e-12, abs=0)


def test_huge_k_takes_the_shorter_way():
    n = 10**12
    assert pass_at_k(n, n // 2, n // 2) == 1.0
    assert pass_hat_k(n, n // 2, n // 2) == 0.0
    assert pass_at_k(n, 1, n // 4) == 0.25
    assert pass_hat_k(n, n - 1, n // 4) == 0.75


@pytest.mark.parametrize("n", [5, EXACT_ATTEMPTS + 1])
def test_there_is_nothing_to_say_of_more_attempts_than_there_are(n):
    assert pass_at_k(n, 3, n + 1) is None
    assert pass_hat_k(n, 3, n + 1) is None


@pytest.mark.parametrize("estimate", [pass_at_k, pass_hat_k])
@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, -2)])
def test_impossible_counts_are_refused(estimate, n, c, k):
    with pytest.raises(ValueError, match="must be"):
        estimate(n, c, k)


@given(attempts())
def test_more_attempts_help_one_and_hurt_all(counts):
    n, c = counts
    at = [pass_at_k(n, c, k) for k in range(1, n + 1)]
    hat = [pass_hat_k(n, c, k) for k in range(1, n + 1)]
    assert at == sorted(at)
    assert hat == sorted(hat, reverse=True)
    assert all(0 <= value <= 1 for value in at + hat)
    assert at[0] == pytest.approx(c / n) == hat[0]
    assert at[-1] == (1.0 if c else 0.0)
    assert hat[-1] == (1.0 if c == n else 0.0)


@given(attempts(), st.data())
def test_one_that_passes_is_the_opposite_of_all_that_fail(counts, data):
    n, c = counts
    k = data.draw(st.integers(1, n))
    assert pass_at_k(n, c, k) == pytest.approx(1 - pass_hat_k(n, n - c, k), abs=1e-12)


@given(st.dictionaries(attempts(12), st.integers(1, 10**9), max_size=8), st.integers(1, 12))
def test_a_curve_is_the_mean_of_the_rows_that_have_k_attempts(rows, n):
    for estimates, single in (
        (curve(rows, n), _exact_at),
        (curve(rows, n, all_pass=True), _exact_hat),
    ):
        assert [estimate.k for estimate in estimates] == list(range(1, n + 1))
        for estimate in estimates:
            usable = {kind: count for kind, count in rows.items() if kind[0] >= estimate.k}
            assert estimate.rows == sum(usable.values())
            if not usable:
                assert estimate.value is None
                continue
            total = sum(count * single(*kind, estimate.k) for kind, count in usable.items())
            assert estimate.value == float(total / estimate.rows)


def _exact_at(n, c, k):
    return 1 - Fraction(comb(n - c, k), comb(n, k))


def _exact_hat(n, c, k):
    return Fraction(comb(c, k), comb(n, k))


def test_a_curve_may_mix_rows_with_few_and_with_many_attempts():
    rows = {(2, 1): 3, (300, 40): 1, (300, 0): 2}
    at, hat = curve(rows, 300), curve(rows, 300, all_pass=True)
    for k in (1, 2, 3, 150, 300):
        usable = {kind: count for kind, count in rows.items() if kind[0] >= k}
        for estimates, single in ((at, _exact_at), (hat, _exact_hat)):
            total = sum(count * single(*kind, k) for kind, count in usable.items())
            rate = float(total / sum(usable.values()))
            assert estimates[k - 1].value == pytest.approx(rate, rel=1e-12, abs=1e-300)
            assert estimates[k - 1].rows == sum(usable.values())


def test_no_row_at_all_has_a_curve_of_nothing():
    assert curve({}, 2) == (KEstimate(1, None, 0), KEstimate(2, None, 0))
    assert curve({(0, 0): 7}, 1) == (KEstimate(1, None, 0),)


@pytest.mark.parametrize("all_pass", [False, True])
def test_the_interval_of_one_attempt_is_that_of_the_pass_rate(all_pass):
    counts = [0, 1, 1, 2, 4, 4, 3, 0]
    sums = ClusterSums()
    for passed in counts:
        sums.add(passed, 4)
    rate = cluster_rate(sums)
    first = curve(Counter((4, passed) for passed in counts), 4, all_pass=all_pass)[0]
    assert (first.value, first.low, first.high) == (rate.value, rate.low, rate.high)


def test_an_interval_needs_two_rows_and_has_a_width_where_all_rows_are_alike():
    (one,) = curve({(1, 1): 1}, 1)
    assert (one.value, one.low, one.high) == (1.0, None, None)
    for size in (8, EXACT_ATTEMPTS + 1):
        last = curve({(size, size): 6}, 3)[-1]
        assert (last.low, last.high) == wilson(1.0, 6)


@pytest.mark.parametrize(
    ("shape", "count", "k"), [((0.3, 2.0), 5, 4), ((0.5, 0.5), 10, 8), ((4.0, 1.0), 10, 4)]
)
def test_intervals_hold_the_truth_about_as_often_as_they_say(shape, count, k):
    """Rows that differ, eight attempts each; benchmarks/interval_coverage.py draws more."""
    a, b = shape
    truth = 1 - prod((b + j) / (a + b + j) for j in range(k))
    draw = random.Random(0)
    hits = 0
    for _ in range(300):
        chances = [draw.betavariate(a, b) for _ in range(count)]
        rows = Counter((8, sum(draw.random() < chance for _ in range(8))) for chance in chances)
        found = curve(rows, k)[-1]
        hits += found.low <= truth <= found.high
    assert hits >= 0.92 * 300


@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=40))
def test_percentiles_are_those_of_the_standard_library(values):
    ordered = sorted(values)
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    assert percentile(ordered, 0.95) == pytest.approx(cuts[18], rel=1e-9, abs=1e-9)
    assert percentile(ordered, 0.5) == pytest.approx(statistics.median(values), rel=1e-9)
    assert percentile(ordered, 0) == ordered[0]
    assert percentile(ordered, 1) == ordered[-1]


def test_one_number_is_each_of_its_percentiles():
    assert [percentile([7.0], share) for share in (0, 0.5, 0.95, 1)] == [7.0] * 4
