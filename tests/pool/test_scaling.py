"""The number of workers follows the load, by a rule that knows nothing of what a worker is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.pool.scaling import Scaling


@pytest.mark.parametrize(
    ("load", "capacity", "wanted"),
    [
        (0, 4, 1),
        (1, 4, 1),
        (4, 4, 1),
        (5, 4, 2),
        (16, 4, 4),
        (1000, 4, 5),
        (1000, math.inf, 1),
        (0, math.inf, 1),
    ],
)
def test_as_many_workers_as_the_load_needs_within_the_bounds(load, capacity, wanted):
    rule = Scaling(least=1, most=5, idle_sec=60)
    assert rule.wanted(0, current=1, load=load, capacity=capacity) == wanted


def test_without_a_least_number_the_first_rollout_brings_the_first_worker():
    rule = Scaling(least=0, most=5, idle_sec=60)
    assert rule.wanted(0, current=0, load=0, capacity=math.inf) == 0
    assert rule.wanted(1, current=0, load=9, capacity=math.inf) == 1
    assert rule.wanted(2, current=1, load=9, capacity=4) == 3


def test_fewer_workers_once_fewer_have_sufficed_for_the_idle_time():
    rule = Scaling(least=1, most=5, idle_sec=60)
    assert rule.wanted(0, current=1, load=20, capacity=4) == 5
    assert rule.wanted(10, current=5, load=3, capacity=4) == 5
    assert rule.wanted(50, current=5, load=7, capacity=4) == 5
    # All five were needed within the first window, two of them within the next one.
    assert rule.wanted(60, current=5, load=3, capacity=4) == 5
    assert rule.wanted(100, current=5, load=7, capacity=4) == 5
    assert rule.wanted(120, current=5, load=3, capacity=4) == 2
    assert rule.wanted(179, current=2, load=0, capacity=4) == 2
    assert rule.wanted(240, current=2, load=0, capacity=4) == 1


looks = st.lists(st.tuples(st.floats(0, 50), st.integers(0, 40)), min_size=1, max_size=40)


@given(looks, st.integers(0, 3), st.integers(0, 5), st.integers(1, 8))
def test_what_was_needed_lately_is_kept(seen, least, more, capacity):
    most = max(least + more, 1)
    rule = Scaling(least=least, most=most, idle_sec=60)
    now, current = 0.0, least
    needs: list[tuple[float, int]] = []
    for pause, load in seen:
        now += pause
        needs.append((now, min(math.ceil(load / capacity), most)))
        before = current
        current = rule.wanted(now, current=current, load=load, capacity=capacity)
        assert least <= current <= most
        assert current >= needs[-1][1]
        if current < before:
            assert current >= max(need for at, need in needs if now - at < 60)
        if current > before:
            assert current == max(needs[-1][1], least)


@given(st.integers(0, 40), st.integers(1, 8), st.integers(1, 9))
def test_a_load_that_stays_has_what_it_needs_after_twice_the_idle_time(load, capacity, current):
    rule = Scaling(least=1, most=9, idle_sec=60)
    for now in range(0, 130, 10):
        current = rule.wanted(now, current=current, load=load, capacity=capacity)
    assert current == min(max(math.ceil(load / capacity), 1), 9)
