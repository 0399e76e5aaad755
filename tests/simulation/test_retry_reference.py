"""The retry rule against a reference that replays the whole schedule, for all small cases.

The reference knows the rule as the specification words it, and nothing of the code: it takes
a result GET from its first attempt on, failure by failure, and writes down when attempts start
and when they give up. Then the polling loop of the client has to do the same on a mock clock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import httpx
import pytest
import trio
from attrs import define, field
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from rollout.client.answers import Admitted
from rollout.client.polling import Poller
from rollout.client.wire import Wire
from rollout.errors import RolloutProtocolError
from rollout.rules import ResultRetrySchedule
from rollout.rules.retry import FailureKind
from rollout.simulation.strategies import durations
from rollout.types import RolloutInitResponse

T, G = FailureKind.TRANSPORT, FailureKind.GATEWAY

CLOCKS = (0.0, 12345.678, 1e12)
"""When the GET starts. At 1e12 adjacent floats are 1.2e-4 apart, and every sum is rounded."""

WAITS_AND_LEASES = ((30.0, 120.0), (30.0, 40.0), (30.0, 40.1), (30.0, 40.25), (1.0, 12.0))


# --- the reference ------------------------------------------------------------------------------


def backoff(kinds):
    """The backoff after the last of these failures, ``None`` where there is no retry left."""
    nth = sum(kind is kinds[-1] for kind in kinds)
    if kinds[-1] is T:
        return {1: 0.1, 2: 0.5}.get(nth)
    return 0.25 * 2.0 ** (nth - 1) if nth <= 6 else None


def reference(begin, failures, request, deadline):
    """When the attempts of one GET start, and when it gives up (``None``: it need not).

    *failures* are the kind of each attempt's failure and how long that attempt took.
    """
    starts = [begin]
    for count, (_, took) in enumerate(failures, start=1):
        failed = starts[-1] + took
        delay = backoff([kind for kind, _ in failures[:count]])
        if delay is None or not failed + delay + request < deadline:
            return starts, failed
        starts.append(failed + delay)
    return starts, None


def test_the_reference_knows_the_delays_of_the_specification():
    assert [backoff([T] * n) for n in (1, 2, 3)] == [0.1, 0.5, None]
    assert [backoff([G] * n) for n in range(1, 8)] == [0.25, 0.5, 1, 2, 4, 8, None]
    assert reference(0.0, [(T, 1.0), (G, 0.0), (T, 2.0)], 40.0, 120.0) == (
        [0.0, 1.1, 1.35, 3.85],
        None,
    )
    assert reference(5.0, [(G, 0.0), (G, 1.0)], 40.0, 46.75) == ([5.0, 5.25], 6.25)


def exactly(begin, failures, request, deadline):
    """How far the last failure of these is from giving up, without any rounding, in seconds."""
    now = Fraction(begin)
    left = None
    for count, (_, took) in enumerate(failures, start=1):
        now += Fraction(took)
        delay = Fraction(backoff([kind for kind, _ in failures[:count]]))
        left = Fraction(deadline) - now - delay - Fraction(request)
        now += delay
    return left


# --- the rule -----------------------------------------------------------------------------------


def replay(begin, failures, request, deadline):
    """The same as `reference`, by the rule of the library."""
    schedule = ResultRetrySchedule(request, deadline)
    starts = [begin]
    for kind, took in failures:
        failed = starts[-1] + took
        delay = schedule.delay_after(kind, failed)
        if delay is None:
            return starts, failed
        assert schedule.may_start(failed + delay)  # if the backoff took as long as it should
        starts.append(failed + delay)
    return starts, None


def borders(begin, failures, request) -> Iterator[float]:
    """Deadlines at which just one of the retries fits no longer, and their neighbours."""
    starts, _ = reference(begin, failures, request, math.inf)
    for start in starts:
        border = start + request
        yield from (border, math.nextafter(border, -math.inf), math.nextafter(border, math.inf))


def cases(length, took):
    return itertools.product(itertools.product([T, G], took), repeat=length)


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("request_sec", [11.0, 40.0])
def test_all_small_cases_at_the_borders_of_their_deadlines(clock, request_sec):
    """Every sequence of up to four failures, every deadline at which something changes."""
    outcomes = set()
    for length in range(1, 5):
        for failures in cases(length, (0.0, 0.7, request_sec)):
            for deadline in borders(clock, failures, request_sec):
                expected = reference(clock, failures, request_sec, deadline)
                assert replay(clock, failures, request_sec, deadline) == expected
                outcomes.add((len(expected[0]), expected[1] is None))
    assert len(outcomes) >= 7  # gave up after 1 to 4 attempts, or need not after 2 to 5


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize(("wait", "lease"), WAITS_AND_LEASES)
def test_all_small_cases_of_real_leases(clock, wait, lease):
    """Every sequence of five failures, at the moments at which a failure comes too late."""
    request = wait + 10.0
    deadline = clock + lease
    first = {deadline - request - delay - clock for delay in (0.1, 0.5, 0.25, 1.0)}
    first |= {math.nextafter(took, math.inf) for took in first} | {request}
    for took in (took for took in first if took >= 0):
        for failures in cases(4, (0.0, 9.75)):
            for kind in (T, G):
                every = ((kind, took), *failures)
                assert replay(clock, every, request, deadline) == reference(
                    clock, every, request, deadline
                )


@pytest.mark.parametrize("clock", CLOCKS)
def test_all_orders_of_failures_until_both_schedules_are_used_up(clock):
    used_up = 0
    for length in range(1, 11):
        for kinds in itertools.product([T, G], repeat=length):
            failures = [(kind, 0.0) for kind in kinds]
            expected = reference(clock, failures, 40.0, math.inf)
            assert replay(clock, failures, 40.0, math.inf) == expected
            used_up += expected[1] is not None
            # Two of one kind and six of the other are all that anyone gets.
            assert len(expected[0]) <= 1 + 2 + 6
    assert used_up > 100


clocks = st.sampled_from(CLOCKS) | st.floats(0.0, 1e12)
kinds = st.sampled_from([T, G])


@given(
    clock=clocks,
    failures=st.lists(st.tuples(kinds, durations(longest_sec=130.0)), min_size=1, max_size=10),
    request_sec=durations(longest_sec=130.0),
    lease=durations(),
)
@example(0.0, [(G, 0.0)] * 7, 40.0, 1000.0)
@example(1e12, [(G, 0.0)] * 7, 40.0, 1000.0)
@settings(max_examples=500)
def test_drawn_cases(clock, failures, request_sec, lease):
    deadline = clock + lease
    assert replay(clock, failures, request_sec, deadline) == reference(
        clock, failures, request_sec, deadline
    )


@given(
    clock=clocks,
    failures=st.lists(st.tuples(kinds, durations(longest_sec=60.0)), min_size=1, max_size=8),
    request_sec=durations(longest_sec=60.0),
    late=st.integers(-3, 3),
    retry=st.integers(0, 7),
)
@settings(max_examples=500)
def test_drawn_cases_right_at_the_deadline(clock, failures, request_sec, late, retry):
    starts, _ = reference(clock, failures, request_sec, math.inf)
    deadline = starts[retry % len(starts)] + request_sec
    for _ in range(abs(late)):
        deadline = math.nextafter(deadline, math.copysign(math.inf, late))
    expected = reference(clock, failures, request_sec, deadline)
    assert replay(clock, failures, request_sec, deadline) == expected
    assert all(start + request_sec < deadline for start in expected[0][1:])


@given(
    clock=clocks,
    failures=st.lists(st.tuples(kinds, durations(longest_sec=60.0)), min_size=1, max_size=8),
    lease=durations(longest_sec=200.0),
)
@settings(max_examples=300)
def test_rounding_decides_only_what_is_within_rounding(clock, failures, lease):
    """Reckoned with fractions the answers are the same, unless it is a matter of single floats."""
    deadline = clock + lease
    starts, gave_up = replay(clock, failures, 40.0, deadline)
    retried = failures[: len(starts) - 1]
    slack = 40 * math.ulp(max(clock, deadline))
    if retried:
        assert exactly(clock, retried, 40.0, deadline) > -slack
    if gave_up is not None:
        tried = failures[: len(starts)]
        if backoff([kind for kind, _ in tried]) is not None:
            assert exactly(clock, tried, 40.0, deadline) <= slack


# --- the loop that applies it -------------------------------------------------------------------

ADMISSION = RolloutInitResponse(
    rollout_id="r",
    status="queued",
    polling_lease_token="token",
    result_wait_timeout_sec=30.0,
    polling_lease_timeout_sec=120.0,
)
REQUEST_SEC = 40.0
DONE = b'{"rollout_id":"r","status":"success"}'
RUNNING = b'{"rollout_id":"r","status":"running"}'
TRANSPORT_ERRORS = itertools.cycle(
    [httpx.ReadError, httpx.RemoteProtocolError, httpx.ReadTimeout, httpx.ConnectError]
)
GATEWAY_STATUSES = itertools.cycle([502, 503, 504])


@define
class Scripted(httpx.AsyncBaseTransport):
    """Fails as written down, then answers; notes when requests begin and when they end."""

    script: list
    begun: list[float] = field(factory=list)
    ended: list[float] = field(factory=list)

    async def handle_async_request(self, request):
        self.begun.append(trio.current_time())
        what, took = self.script.pop(0)
        try:
            await trio.sleep(took)
        finally:
            self.ended.append(trio.current_time())
        if what is T:
            raise next(TRANSPORT_ERRORS)("as planned", request=request)
        if what is G:
            return httpx.Response(next(GATEWAY_STATUSES), text="upstream")
        return httpx.Response(200, content=what)


async def poll(clock, script, lease_left):
    """Run the client's loop through a script.

    Returns what the network noted, the loop's error, the deadline of its lease, and its end.
    """
    trio.lowlevel.current_clock().jump(clock)
    transport = Scripted(list(script))
    deadline = trio.current_time() + lease_left
    failure = None
    async with httpx.AsyncClient(transport=transport) as http:
        poller = Poller(Wire("http://test", http), Admitted(ADMISSION, 0.0), lambda _: None)
        poller.lease_deadline = deadline
        try:
            await poller.run()
        except (httpx.TransportError, RolloutProtocolError) as error:
            failure = error
    return transport, failure, poller.lease_deadline, trio.current_time()


def run_poll(clock, script, lease_left):
    return trio.run(poll, clock, script, lease_left, clock=MockClock(autojump_threshold=0))


def is_of(error, kind):
    """Whether an error is what a failure of that kind is raised as in the end."""
    return isinstance(error, httpx.TransportError if kind is T else RolloutProtocolError)


def check_loop(clock, failures, lease_left):
    """Run one GET that fails like that, and succeeds then; compare it with the reference."""
    script = [*failures, (DONE, 0.5)]
    transport, failure, _, end = run_poll(clock, script, lease_left)
    starts, gave_up = reference(clock, failures, REQUEST_SEC, clock + lease_left)
    tick = 4 * math.ulp(clock + 1000.0)  # each jump of the mock clock is rounded
    assert transport.begun == pytest.approx(starts, rel=0, abs=tick)
    if gave_up is None:
        assert failure is None
    else:
        assert end == pytest.approx(gave_up, rel=0, abs=tick)  # at once, without the backoff
        assert is_of(failure, failures[len(starts) - 1][0])


@pytest.mark.parametrize("clock", [0.0, 1e12])
@pytest.mark.parametrize("off", [-0.015625, 0.015625])
def test_the_loop_in_all_small_cases_around_its_deadlines(clock, off):
    """Up to three failures, and a deadline just before and just after a retry would fit."""
    for length in (1, 2, 3):
        for failures in cases(length, (0.0, 9.75)):
            starts, _ = reference(clock, failures, REQUEST_SEC, math.inf)
            for start in starts[1:]:
                check_loop(clock, failures, start + REQUEST_SEC + off - clock)


@pytest.mark.parametrize("clock", [0.0, 1e12])
def test_the_loop_right_at_the_deadline(clock):
    """Backoffs of gateways are whole fractions, so that nothing is rounded on the way."""
    for length in range(1, 6):
        failures = [(G, 0.25)] * length
        starts, _ = reference(clock, failures, REQUEST_SEC, math.inf)
        deadline = starts[-1] + REQUEST_SEC
        transport, failure, *_ = run_poll(clock, [*failures, (DONE, 0.0)], deadline - clock)
        assert transport.begun == starts[:-1]
        assert is_of(failure, G)
        later = math.nextafter(deadline, math.inf)
        if clock:  # one float more is a difference that the lease can hold there
            transport, failure, *_ = run_poll(clock, [*failures, (DONE, 0.0)], later - clock)
            assert transport.begun == starts
            assert failure is None


@given(
    clock=st.sampled_from(CLOCKS) | st.integers(0, 10**12).map(float),
    failures=st.lists(st.tuples(kinds, durations(longest_sec=REQUEST_SEC)), max_size=9),
    lease=durations(),
)
@settings(max_examples=150)
def test_the_loop_in_drawn_cases(clock, failures, lease):
    starts, _ = reference(clock, failures, REQUEST_SEC, math.inf)
    deadline = clock + lease
    # What hinges on single floats depends on how the mock clock rounds its jumps.
    margin = 64 * math.ulp(clock + 1000.0)
    assume(all(abs(deadline - start - REQUEST_SEC) > margin for start in starts))
    # A first attempt may take as long as the lease that it renews.
    check_loop(clock, failures, lease)


@given(
    ended=st.lists(st.integers(0, 30), max_size=4),
    failures=st.lists(st.tuples(kinds, st.integers(0, 40).map(float)), max_size=8),
)
@settings(max_examples=100)
def test_only_a_valid_answer_moves_the_deadline(ended, failures):
    """After some good polls the retries are measured from the moment the last one was sent."""
    good = [(RUNNING, float(took)) for took in ended]
    transport, failure, deadline, _ = run_poll(0.0, [*good, *failures, (DONE, 0.0)], 120.0)
    last_good = transport.begun[len(good) - 1] if good else None
    confirmed = 120.0 if last_good is None else last_good + 120.0
    mine = transport.begun[len(good) :]
    starts, gave_up = reference(mine[0], failures, REQUEST_SEC, confirmed)
    margin = [start + REQUEST_SEC - confirmed for start in starts]
    assume(all(abs(gap) > 1e-9 for gap in margin))
    assert mine == pytest.approx(starts, rel=0, abs=1e-9)
    assert (failure is None) is (gave_up is None)
    assert deadline == (confirmed if failure else mine[-1] + 120.0)


@pytest.mark.parametrize("kind", [T, G])
def test_a_retry_is_cut_off_at_the_deadline(kind):
    """A retry that takes longer than it should ends with the lease, with the error before it."""
    script = [(kind, 1.0), (DONE, 1000.0)]
    transport, failure, *_ = run_poll(0.0, script, 50.0)
    assert transport.begun == [0.0, 1.0 + backoff([kind])]
    assert transport.ended[-1] == 50.0
    assert is_of(failure, kind)


# --- does the comparison bite? ------------------------------------------------------------------


def at_the_deadline(self, now, *, delay_sec=0.0):
    return now + delay_sec + self.request_sec <= self.lease_deadline


def without_the_backoff(self, now, *, delay_sec=0.0):
    return now + self.request_sec < self.lease_deadline


def without_the_request(self, now, *, delay_sec=0.0):
    return now + delay_sec < self.lease_deadline


def in_another_order(self, now, *, delay_sec=0.0):
    return now + (delay_sec + self.request_sec) < self.lease_deadline


@pytest.mark.parametrize(
    "broken", [at_the_deadline, without_the_backoff, without_the_request, in_another_order]
)
def test_a_broken_rule_is_found(monkeypatch, broken):
    """Also one that differs by rounding alone, which the large clock brings out."""
    monkeypatch.setattr(ResultRetrySchedule, "may_start", broken)
    with pytest.raises(AssertionError):
        for clock in CLOCKS:
            test_all_small_cases_at_the_borders_of_their_deadlines(clock, 40.0)


def delay_after_extending(self, kind, now):
    self.lease_deadline = now + 120.0
    return original_delay_after(self, kind, now)


def delay_after_sharing(self, kind, now):
    for each in FailureKind:
        if each is not kind:
            self.failures[each] += 1
    return original_delay_after(self, kind, now)


original_delay_after = ResultRetrySchedule.delay_after


@pytest.mark.parametrize("broken", [delay_after_extending, delay_after_sharing])
def test_a_broken_schedule_is_found_in_the_loop(monkeypatch, broken):
    monkeypatch.setattr(ResultRetrySchedule, "delay_after", broken)
    with pytest.raises(AssertionError):
        test_the_loop_in_all_small_cases_around_its_deadlines(0.0, -0.015625)
