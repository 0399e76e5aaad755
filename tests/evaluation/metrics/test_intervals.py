"""Quantiles against printed tables, intervals against naive formulas and simulated draws."""

from __future__ import annotations

import math
import random
import statistics
import sys
from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.evaluation.intervals import (
    ClusterSums,
    PairedSums,
    _expansion,
    cluster_mean,
    cluster_rate,
    paired_difference,
    sign_test,
    sqrt_float,
    t_cdf,
    t_quantile,
    to_float,
    wilson,
)

# Upper quantiles of Student's t as tables print them, by degrees of freedom.
TABLE = {
    1: {0.9: 3.078, 0.95: 6.314, 0.975: 12.706, 0.99: 31.821, 0.995: 63.657},
    2: {0.9: 1.886, 0.95: 2.920, 0.975: 4.303, 0.99: 6.965, 0.995: 9.925},
    3: {0.9: 1.638, 0.95: 2.353, 0.975: 3.182, 0.99: 4.541, 0.995: 5.841},
    4: {0.9: 1.533, 0.95: 2.132, 0.975: 2.776, 0.99: 3.747, 0.995: 4.604},
    5: {0.9: 1.476, 0.95: 2.015, 0.975: 2.571, 0.99: 3.365, 0.995: 4.032},
    10: {0.9: 1.372, 0.95: 1.812, 0.975: 2.228, 0.99: 2.764, 0.995: 3.169},
    20: {0.9: 1.325, 0.95: 1.725, 0.975: 2.086, 0.99: 2.528, 0.995: 2.845},
    30: {0.9: 1.310, 0.95: 1.697, 0.975: 2.042, 0.99: 2.457, 0.995: 2.750},
    60: {0.9: 1.296, 0.95: 1.671, 0.975: 2.000, 0.99: 2.390, 0.995: 2.660},
    120: {0.9: 1.289, 0.95: 1.658, 0.975: 1.980, 0.99: 2.358, 0.995: 2.617},
    10**9: {0.9: 1.282, 0.95: 1.645, 0.975: 1.960, 0.99: 2.326, 0.995: 2.576},
}


@pytest.mark.parametrize(
    ("degrees", "probability", "printed"),
    [(degrees, p, t) for degrees, line in TABLE.items() for p, t in line.items()],
)
def test_quantiles_are_those_of_the_tables(degrees, probability, printed):
    assert round(t_quantile(probability, degrees), 3) == printed
    assert t_quantile(1 - probability, degrees) == pytest.approx(-printed, abs=6e-4)


@pytest.mark.parametrize("probability", [0.6, 0.9, 0.975, 0.9995])
def test_one_and_two_degrees_have_closed_forms(probability):
    spread = 2 * probability - 1
    assert t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * spread / 2), rel=1e-12)
    two = spread * math.sqrt(2 / (1 - spread * spread))
    assert t_quantile(probability, 2) == pytest.approx(two, rel=1e-12)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 8, 31, 200, 999, 1000])
@pytest.mark.parametrize("t", [0.1, 1.0, 2.5])
def test_the_distribution_is_the_integral_of_its_density(degrees, t):
    # Simpson's rule over the density, whose constant is written with gamma functions.
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    scale /= math.sqrt(math.pi * degrees)
    steps = 400
    points = [
        (1 + (t * j / steps) ** 2 / degrees) ** (-(degrees + 1) / 2) for j in range(steps + 1)
    ]
    area = points[0] + points[-1] + 4 * sum(points[1::2]) + 2 * sum(points[2:-1:2])
    assert t_cdf(t, degrees) == pytest.approx(0.5 + scale * area * t / steps / 3, abs=1e-10)


@given(st.integers(1, 1200), st.floats(0.001, 0.999))
def test_quantile_and_distribution_are_inverses(degrees, probability):
    assert t_cdf(t_quantile(probability, degrees), degrees) == pytest.approx(probability, abs=1e-12)


@pytest.mark.parametrize("probability", [0.6, 0.975, 0.999, 1 - 1e-6])
def test_series_and_expansion_meet(probability):
    below, above = t_quantile(probability, 1000), t_quantile(probability, 1001)
    normal = statistics.NormalDist().inv_cdf(probability)
    # The first term of the expansion says how far two neighbours lie apart.
    step = normal * (normal**2 + 1) / 4 * (1 / 1000 - 1 / 1001)
    assert below - above == pytest.approx(step, rel=0.02)
    assert t_cdf(above, 1001) == pytest.approx(probability, abs=1e-12)


@pytest.mark.parametrize("probability", [0.9, 0.975, 0.995])
def test_the_expansion_is_off_by_the_fifth_power_of_the_degrees(probability):
    # Five right terms leave an error that shrinks 32 times when the degrees double.
    normal = statistics.NormalDist().inv_cdf(probability)
    errors = [t_quantile(probability, d) - _expansion(normal, d) for d in (20, 40, 80)]
    assert 32 < errors[0] / errors[1] < 33.5
    assert 32 < errors[1] / errors[2] < 33
    assert abs(errors[2]) < 1e-8


@pytest.mark.parametrize("probability", [0, 1, -0.5, 2, math.nan])
def test_a_quantile_needs_a_probability(probability):
    with pytest.raises(ValueError, match="probability"):
        t_quantile(probability, 5)


@pytest.mark.parametrize("function", [t_cdf, t_quantile])
def test_there_are_no_zero_degrees_of_freedom(function):
    with pytest.raises(ValueError, match="degrees"):
        function(0.9, 0)


def test_wilson_intervals_are_those_in_print():
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I.
    for passed, draws, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = wilson(passed / draws, draws)
        assert [round(end, 4) for end in found] == [low, high]


@given(st.integers(1, 10**6), st.data())
def test_a_wilson_interval_holds_its_rate_and_mirrors(draws, data):
    rate = data.draw(st.integers(0, draws)) / draws
    low, high = wilson(rate, draws)
    assert 0 <= low <= rate <= high <= 1
    assert low < high
    other_low, other_high = wilson(1 - rate, draws)
    assert (1 - other_high, 1 - other_low) == pytest.approx((low, high), abs=1e-12)


clusters = st.lists(st.lists(st.integers(-50, 50), min_size=1, max_size=6), min_size=2, max_size=12)


def _sums(rows, places=0):
    sums = ClusterSums()
    for row in rows:
        sums.add(Fraction(sum(row), 2**places), len(row))
    return sums


@given(clusters)
def test_the_clustered_error_is_the_naive_double_sum(rows):
    count, groups = sum(map(len, rows)), len(rows)
    mean = Fraction(sum(map(sum, rows)), count)
    double = sum((x - mean) * (y - mean) for row in rows for x in row for y in row)
    sums = _sums(rows)
    assert sums.mean() == mean
    assert sums.variance_of_mean() == double * Fraction(groups, groups - 1) / count**2
    found = cluster_mean(sums)
    assert (found.value, found.attempts, found.rows) == (float(mean), count, groups)
    assert found.standard_error == pytest.approx(float(sums.variance_of_mean()) ** 0.5, rel=1e-15)
    if double:
        half = t_quantile(0.975, groups - 1) * found.standard_error
        assert (found.low, found.high) == pytest.approx((mean - half, mean + half))
        assert found.method == "cluster-t"
    else:
        assert (found.low, found.high, found.method) == (None, None, "none")


@given(st.integers(1, 5), st.lists(st.integers(-99, 99), min_size=2, max_size=20), st.data())
def test_rows_of_one_size_have_the_t_interval_of_their_means(size, seeds, data):
    rows = [[seed + data.draw(st.integers(-9, 9)) for _ in range(size)] for seed in seeds]
    means = [statistics.mean(row) for row in rows]
    found = cluster_mean(_sums(rows))
    assert found.standard_error == pytest.approx(
        statistics.stdev(means) / math.sqrt(len(means)), rel=1e-9, abs=1e-9
    )


@given(clusters, st.integers(0, 1074))
def test_smaller_steps_shrink_mean_and_error_alike(rows, places):
    whole, fine = _sums(rows), _sums(rows, places)
    assert fine.mean() == whole.mean() / 2**places
    assert fine.variance_of_mean() == whole.variance_of_mean() / 4**places


@pytest.mark.parametrize("interval", [cluster_mean, cluster_rate])
def test_fewer_than_two_rows_have_no_interval(interval):
    nothing = interval(ClusterSums())
    assert (nothing.value, nothing.low, nothing.high, nothing.standard_error) == (None,) * 4
    assert (nothing.attempts, nothing.rows, nothing.method) == (0, 0, "none")
    alone = interval(_sums([[1, 0, 1, 1]]))
    assert (alone.low, alone.high, alone.standard_error) == (None,) * 3
    assert (alone.value, alone.attempts, alone.rows, alone.method) == (0.75, 4, 1, "none")


def test_a_cluster_of_nothing_is_none():
    assert cluster_rate(_sums([[], [1], [], [0]])) == cluster_rate(_sums([[1], [0]]))


@pytest.mark.parametrize("value", [0, 1])
def test_at_the_border_rows_are_the_draws_of_a_wilson_interval(value):
    found = cluster_rate(_sums([[value] * 4] * 10))
    assert (found.low, found.high) == wilson(value, 10)
    assert (found.method, found.standard_error) == ("wilson-rows", 0.0)
    assert found.high - found.low > 0.2


def test_rows_that_are_all_alike_say_nothing_of_width_either():
    found = cluster_rate(_sums([[1, 0]] * 10))
    assert (found.low, found.high, found.method) == (*wilson(0.5, 10), "wilson-rows")


def test_an_interval_of_a_rate_by_hand():
    # One of four attempts at the last of five rows fails.
    found = cluster_rate(_sums([[1, 1, 1, 1]] * 4 + [[1, 1, 1, 0]]))
    assert found.standard_error == pytest.approx(0.05)
    # 0.95 * 0.05 / 0.05**2 = 19 draws, and t for 4 degrees is 2.7764451.
    square = 2.7764451051977987**2 / 19
    middle, half = 0.95 + square / 2, math.sqrt(square * (0.95 * 0.05 + square / 4))
    assert found.low == pytest.approx((middle - half) / (1 + square))
    assert found.high == pytest.approx((middle + half) / (1 + square))
    assert (found.method, found.attempts, found.rows) == ("cluster-wilson", 20, 5)


def test_an_interval_of_a_rate_stays_within_its_range():
    rows = [[1]] * 9 + [[0]]
    found = cluster_rate(_sums(rows))
    assert 0.5 < found.low < 0.9 < found.high < 1.0
    assert found.standard_error == cluster_mean(_sums(rows)).standard_error
    assert cluster_mean(_sums(rows)).high > 1.0


def test_one_failure_more_does_not_raise_the_interval():
    ends = [cluster_rate(_sums([[1]] * (30 - failed) + [[0]] * failed)) for failed in range(31)]
    assert [each.low for each in ends] == sorted((each.low for each in ends), reverse=True)
    assert [each.high for each in ends] == sorted((each.high for each in ends), reverse=True)


def test_rows_that_happen_to_be_alike_are_worth_no_more_than_their_attempts():
    alike = cluster_rate(_sums([[1, 1, 0, 0]] * 20 + [[1, 1, 1, 0]]))
    assert alike.standard_error < 0.02  # as of 600 draws and more
    t = t_quantile(0.975, 20)
    square = t * t / 84
    width = 2 * math.sqrt(square * (alike.value * (1 - alike.value) + square / 4)) / (1 + square)
    assert alike.high - alike.low == pytest.approx(width)


rates = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=2, max_size=12)


@given(rates)
def test_an_interval_of_a_rate_holds_it_and_mirrors(rows):
    found = cluster_rate(_sums(rows))
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.low < found.high
    other = cluster_rate(_sums([[1 - value for value in row] for row in rows]))
    assert (1 - other.high, 1 - other.low) == pytest.approx((found.low, found.high), abs=1e-12)
    assert other.method == found.method


def test_numbers_at_the_end_of_the_range_stay_numbers():
    largest = int(sys.float_info.max)
    found = cluster_mean(_sums([[largest], [-largest], [largest]]))
    assert found.value == pytest.approx(sys.float_info.max / 3)
    assert (found.low, found.high) == (-sys.float_info.max, sys.float_info.max)
    assert math.isfinite(found.standard_error)


@given(st.fractions(min_value=0))
def test_a_root_is_the_nearest_float_but_for_one(value):
    root = sqrt_float(value)
    if value == 0:
        assert root == 0
        return
    below, above = math.nextafter(root, 0), math.nextafter(root, math.inf)
    assert Fraction(below) ** 2 < value < Fraction(above) ** 2


@pytest.mark.parametrize("power", [-1074, -600, 0, 511, 1023])
def test_roots_of_squares_beyond_the_range_of_floats(power):
    assert sqrt_float(Fraction(2) ** (2 * power)) == 2.0**power
    assert sqrt_float(Fraction(2) ** 3000) == sys.float_info.max
    assert to_float(-(Fraction(2) ** 3000)) == -sys.float_info.max


def _normal_rows(rng, groups, size):
    for _ in range(groups):
        center = rng.gauss(0, 1)
        yield [round(1000 * (center + rng.gauss(0, 1))) for _ in range(size)]


@pytest.mark.parametrize(("groups", "size"), [(3, 4), (8, 3), (30, 2)])
def test_the_interval_of_a_mean_covers_the_truth_in_19_of_20_cases(groups, size):
    rng = random.Random(groups)
    draws = 2000
    hits = naive = 0
    for _ in range(draws):
        rows = list(_normal_rows(rng, groups, size))
        found = cluster_mean(_sums(rows))
        hits += found.low <= 0 <= found.high
        flat = [value for row in rows for value in row]
        half = t_quantile(0.975, len(flat) - 1) * statistics.pstdev(flat) / math.sqrt(len(flat))
        naive += abs(found.value) <= half
    assert 0.93 < hits / draws < 0.97
    assert naive / draws < 0.92  # what an interval covers that takes attempts for draws


@pytest.mark.parametrize("spread", [1, 9])
@pytest.mark.parametrize(
    ("groups", "rate"), [(5, 0.8), (10, 0.5), (10, 0.9), (20, 0.1), (40, 0.5), (100, 0.97)]
)
def test_the_interval_of_a_rate_covers_the_truth_as_often_as_documented(groups, rate, spread):
    rng = random.Random(groups)
    draws = 1000
    above = below = 0
    for _ in range(draws):
        sums = ClusterSums()
        for _ in range(groups):
            # Each row has a difficulty of its own; the smaller the spread, the more they differ.
            chance = rng.betavariate(rate * spread, (1 - rate) * spread)
            sums.add(sum(rng.random() < chance for _ in range(4)), 4)
        found = cluster_rate(sums)
        above += found.low > rate
        below += found.high < rate
    assert above + below < 0.09 * draws
    # It errs to both sides, and not only where the rate is nearly 0 or 1.
    assert max(above, below) < 0.06 * draws


means = st.builds(Fraction, st.integers(-9, 9), st.integers(1, 5))


@given(st.lists(st.tuples(means, means), min_size=2, max_size=9))
def test_paired_sums_are_those_of_the_fractions(pairs):
    sums = PairedSums()
    for a, b in pairs:
        sums.add(a / 8, b / 8)
    left, right = ([pair[run] / 8 for pair in pairs] for run in (0, 1))
    assert sums.means() == (statistics.mean(left), statistics.mean(right))
    changes = [b - a for a, b in zip(left, right, strict=True)]
    assert sums.variance_of_difference() == statistics.variance(changes) / len(changes)


def test_a_paired_difference_by_hand():
    sums = PairedSums()
    for left, right in ((0, 2), (1, 1), (0, 1), (1, 3)):
        sums.add(Fraction(left, 4), Fraction(right, 4))
    found = paired_difference(sums)
    assert (found.a, found.b, found.difference) == (0.125, 0.4375, 0.3125)
    # The differences are 2, 0, 1, 2 quarters: their deviation is sqrt(11 / 12) quarters.
    error = math.sqrt(11 / 12) / 4 / 2
    assert found.standard_error == pytest.approx(error)
    assert found.low == pytest.approx(0.3125 - 3.182446305284263 * error)
    assert found.high == pytest.approx(0.3125 + 3.182446305284263 * error)
    assert (found.method, found.rows) == ("paired-t", 4)
    assert paired_difference(sums, (-0.5, 0.5)).high == 0.5


@given(st.integers(0, 6), st.integers(0, 6))
def test_the_sign_test_counts_all_splits(up, down):
    changed = up + down
    splits = [bits.bit_count() for bits in range(2**changed)]
    uneven = abs(up - down)
    share = sum(abs(changed - 2 * j) >= uneven for j in splits) / len(splits)
    assert sign_test(up, down) == pytest.approx(share)
    assert sign_test(up, down) == sign_test(down, up)


@pytest.mark.parametrize(
    ("up", "down"), [(500, 501), (480, 530), (400, 700), (0, 1001), (10, 4000)]
)
def test_the_sign_test_of_many_rows_keeps_its_digits(up, down):
    changed = up + down
    tail = sum(comb(changed, j) for j in range(min(up, down) + 1))
    exact = min(Fraction(1), Fraction(2 * tail, 2**changed))
    assert sign_test(up, down) == pytest.approx(float(exact), rel=1e-9, abs=1e-300)


def test_the_sign_test_of_a_million_rows():
    assert sign_test(500_000, 500_000) == 1.0
    # By the normal distribution with a correction for continuity.
    normal = 2 * statistics.NormalDist().cdf((499_000.5 - 500_000) / 500)
    assert sign_test(499_000, 501_000) == pytest.approx(normal, rel=1e-3)
    assert sign_test(0, 10**6) == 0.0
