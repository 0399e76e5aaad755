"""Polling leases."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from rollout.rules import PollingLease, ServingClock

times = st.integers(0, 1000)


def test_the_deadline_itself_is_past_it():
    lease = PollingLease.starting(10, 120)
    assert lease.deadline == 130
    assert not lease.expired(129.999)
    assert lease.expired(130)
    assert lease.expired(131)


def test_a_renewal_in_time_counts_from_its_own_moment():
    lease = PollingLease.starting(0, 120)
    assert lease.renew(119)
    assert lease.deadline == 239


def test_a_renewal_that_comes_too_late_revives_nothing():
    lease = PollingLease.starting(0, 120)
    assert not lease.renew(120)
    assert lease.deadline == 120
    assert lease.expired(120)


def test_a_renewal_out_of_order_does_not_move_the_deadline_back():
    lease = PollingLease.starting(0, 120)
    assert lease.renew(50)
    assert lease.renew(20)
    assert lease.deadline == 170


@given(timeout=st.integers(1, 100), polls=st.lists(times, max_size=20))
def test_a_lease_lives_as_long_as_no_gap_is_as_long_as_it(timeout, polls):
    polls = sorted(polls)
    lease = PollingLease.starting(0, timeout)
    alive_until = timeout
    for now in polls:
        assert lease.renew(now) == (now < alive_until)
        if now < alive_until:
            alive_until = now + timeout
    assert lease.deadline == alive_until


@given(
    timeout=st.integers(1, 50),
    polls=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)), max_size=20),
)
def test_the_deadline_of_the_client_is_never_the_later_one(timeout, polls):
    """The client counts from when it sent, the server from when it received."""
    server = PollingLease.starting(3, timeout)
    client_deadline = 0 + timeout
    now = 3
    for gap, transit in polls:
        sent = now + gap
        received = sent + transit
        if server.renew(received):
            client_deadline = sent + timeout
        now = received
        assert client_deadline <= server.deadline


@given(
    serving=st.floats(0, 1e12),
    stalls=st.lists(st.floats(0.001, 1e4), max_size=4),
)
def test_at_is_the_first_moment_of_a_serving_time(serving, stalls):
    clock = ServingClock(1.0, stalled_sec=sum(stalls))
    moment = clock.at(serving)
    assert clock.time(moment) >= serving
    assert clock.time(math.nextafter(moment, -math.inf)) <= serving


def test_adding_and_subtracting_a_stall_may_lose_a_hair():
    # What made a watcher wake up for one deadline again and again, found by simulation.
    stalled, deadline = 37.77, 120.1
    naive = [s + stalled - stalled < s for s in (deadline + n / 7 for n in range(1000))]
    assert any(naive)
    clock = ServingClock(1.0, stalled_sec=stalled)
    for number in range(1000):
        serving = deadline + number / 7
        assert clock.time(clock.at(serving)) >= serving


def test_a_tick_is_never_due_before_now():
    clock = ServingClock(5.0)
    assert clock.tick(10.0, at_most=3.0) == 10.0
    assert clock.time(10.0) == 10.0  # so that the time until then is no stall
    assert clock.tick(10.0, at_most=12.0) == 12.0
    assert clock.tick(12.0, at_most=100.0) == 17.0


def test_a_stall_counts_although_the_clock_is_stopped_at_its_end():
    clock = ServingClock(1.0)
    clock.tick(0.0, at_most=100.0)
    clock.stop(5.0)
    assert clock.stalled_sec == 4.0
    assert (clock.time(5.0), clock.time(50.0)) == (1.0, 46.0)
