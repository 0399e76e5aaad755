"""The two retry schedules of a result GET, against a reference that is written differently."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout.rules import ResultRetrySchedule
from rollout.rules.retry import FailureKind, fits

T, G = FailureKind.TRANSPORT, FailureKind.GATEWAY


def reference(failures, request, deadline):
    """Replay a whole result GET; yield the backoff after each failure, ``None`` for the end.

    Each schedule is a list from which delays are taken; nothing is counted. Times are exact
    multiples of 1/64 s, so that no rounding hides an off-by-one at the deadline.
    """
    left = {
        T: [Fraction(1, 10), Fraction(1, 2)],
        G: [Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4), Fraction(8)],
    }
    for kind, now in failures:
        if not left[kind]:
            yield None
            return
        delay = left[kind].pop(0)
        if deadline - now - delay <= request:
            yield None
            return
        yield delay


ticks = st.integers(0, 64 * 200).map(lambda n: Fraction(n, 64))


@given(
    kinds=st.lists(st.sampled_from([T, G]), min_size=1, max_size=12),
    gaps=st.lists(st.integers(0, 64 * 20).map(lambda n: Fraction(n, 64)), min_size=12),
    request_sec=ticks,
    deadline=ticks,
)
@example([T, T, T], [Fraction(0)] * 12, Fraction(10), Fraction(100))
@example([G] * 7, [Fraction(0)] * 12, Fraction(10), Fraction(100))
def test_delays_are_those_of_the_reference(kinds, gaps, request_sec, deadline):
    now = Fraction(0)
    failures = []
    for kind, gap in zip(kinds, gaps, strict=False):
        now += gap
        failures.append((kind, now))
    expected = list(reference(failures, request_sec, deadline))
    schedule = ResultRetrySchedule(float(request_sec), float(deadline))
    for (kind, at), delay in zip(failures, expected, strict=False):
        # 0.1 has no exact float: leave out what hinges on its last bit.
        if abs(deadline - at - Fraction(1, 10) - request_sec) < Fraction(1, 10**9):
            return
        assert schedule.delay_after(kind, float(at)) == (None if delay is None else float(delay))


@given(kinds=st.lists(st.sampled_from([T, G]), max_size=30))
def test_the_schedules_are_independent(kinds):
    schedule = ResultRetrySchedule(10.0, math.inf)
    allowed = [schedule.delay_after(kind, 0.0) for kind in kinds]
    for kind, delays in ((T, (0.1, 0.5)), (G, (0.25, 0.5, 1.0, 2.0, 4.0, 8.0))):
        mine = [delay for delay, k in zip(allowed, kinds, strict=True) if k is kind]
        padded = [*delays, *[None] * len(kinds)]
        assert mine == padded[: len(mine)]
    assert schedule.attempts == len(kinds)


@given(kinds=st.lists(st.sampled_from([T, G]), max_size=10), now=ticks)
def test_failed_attempts_never_move_the_deadline(kinds, now):
    schedule = ResultRetrySchedule(40.0, 120.0)
    for kind in kinds:
        schedule.delay_after(kind, float(now))
        assert schedule.lease_deadline == 120.0
        assert schedule.request_sec == 40.0


def test_a_retry_fits_strictly_before_the_deadline():
    assert fits(10, delay_sec=0.25, request_sec=40, lease_deadline=50.3)
    assert not fits(10, delay_sec=0.25, request_sec=40, lease_deadline=50.25)
    assert not fits(10, delay_sec=0.25, request_sec=40, lease_deadline=50.2)


def test_a_backoff_that_took_longer_is_noticed():
    schedule = ResultRetrySchedule(40.0, 50.0)
    assert schedule.delay_after(T, 9.5) == 0.1
    assert schedule.may_start(9.6)
    assert not schedule.may_start(10.0)


def test_a_used_up_schedule_leaves_the_other_one():
    schedule = ResultRetrySchedule(1.0, 1000.0)
    assert [schedule.delay_after(T, 0.0) for _ in range(3)] == [0.1, 0.5, None]
    assert schedule.delay_after(G, 0.0) == 0.25


def test_schedules_share_nothing():
    used = ResultRetrySchedule(1.0, 1000.0)
    used.delay_after(T, 0.0)
    assert ResultRetrySchedule(1.0, 1000.0).attempts == 0


@pytest.mark.parametrize("deadline", [0.0, -1.0])
def test_nothing_fits_a_lease_that_has_ended(deadline):
    assert ResultRetrySchedule(1.0, deadline).delay_after(G, 0.0) is None
