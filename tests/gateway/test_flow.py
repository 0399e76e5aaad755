"""The rules of the flow to upstreams: windows, turns, failures and retries, without a clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.gateway.flow import Bounds, Caller, Flow, Ticket
from rollout.gateway.retries import Outcome, Retries

ANSWER = Outcome.of_status(200)
TOO_MANY = Outcome.of_status(429)
GONE = Outcome(broken=True)


def one(maximum=None, minimum=1):
    """A flow to one upstream, and that."""
    flow = Flow(["a"], Bounds(minimum=minimum, maximum=maximum))
    return flow, flow.upstreams[0]


def ask(flow, caller=None, now=0.0):
    ticket = Ticket(Caller() if caller is None else caller)
    flow.ask(ticket, now)
    return ticket


def answer(flow, ticket, now=0.0, *, latency_sec=1.0, tokens=None):
    flow.end(ticket, Outcome(answered=True, latency_sec=latency_sec, tokens=tokens), now)


def busy(flow, windows):
    """Answer so many windows of calls while there are always more."""
    window = flow.upstreams[0].window
    flying = [ask(flow) for _ in range(int(window.limit) + 1)]
    for _ in range(windows):
        for _ in range(int(window.limit)):
            flying.append(ask(flow))
            answer(flow, flying.pop(0))
    for ticket in reversed(flying):
        flow.end(ticket, None, 0.0)


# --- the window ---------------------------------------------------------------------------------


def test_a_window_begins_at_its_maximum():
    flow, up = one(3)
    tickets = [ask(flow) for _ in range(4)]
    assert [each.upstream for each in tickets] == [up, up, up, None]
    assert (up.window.in_flight, flow.waiting) == (3, 1)
    answer(flow, tickets[0])
    assert tickets[3].upstream is up


def test_without_a_maximum_nothing_waits_until_the_first_refusal():
    flow, up = one()
    tickets = [ask(flow) for _ in range(500)]
    assert flow.waiting == 0
    assert up.window.limit == math.inf
    flow.end(tickets.pop(), TOO_MANY, 1.0)
    assert up.window.limit == pytest.approx(0.9 * 499)


def test_refusals_cut_the_window_to_below_what_is_accepted():
    flow, up = one(256)
    tickets = [ask(flow) for _ in range(256)]
    for ticket in tickets[8:]:
        flow.end(ticket, TOO_MANY, 1.0)
    assert up.window.in_flight == 8
    assert 7 <= up.window.limit <= 8


def cut(flow, accepted):
    """Refuse all but so many of the calls that the window lets through."""
    busy(flow, 1)
    tickets = [ask(flow) for _ in range(int(flow.upstreams[0].window.limit))]
    for ticket in reversed(tickets):
        flow.end(ticket, TOO_MANY if len(tickets) > accepted else None, 1.0)
        tickets.pop()


def test_a_cut_window_doubles_up_to_near_its_old_size_and_then_grows_by_one():
    flow, up = one(100)
    cut(flow, 10)
    limits = [up.window.limit]
    for _ in range(6):
        busy(flow, 1)
        limits.append(up.window.limit)
    assert limits[:4] == pytest.approx([9, 18, 36, 72], abs=1)
    assert limits[4] > 90
    assert limits[6] - limits[5] == pytest.approx(1, abs=0.1)


def test_a_window_that_is_not_used_does_not_grow():
    flow, up = one(100)
    cut(flow, 50)
    limit = up.window.limit
    for _ in range(200):
        answer(flow, ask(flow))
    assert up.window.limit == limit


@given(st.integers(1, 20), st.integers(1, 20), st.data())
def test_a_window_stays_within_its_bounds(first, second, data):
    minimum, maximum = sorted((first, second))
    flow, up = one(maximum, minimum)
    flying = []
    for step in data.draw(st.lists(st.sampled_from(["ask", "ok", "slow", "429", "502", "left"]))):
        if step == "ask":
            flying.append(ask(flow, now=len(flying)))
        elif flying:
            outcome = {
                "ok": Outcome(answered=True, latency_sec=1, tokens=9),
                "slow": Outcome(answered=True, latency_sec=99, tokens=1),
                "429": TOO_MANY,
                "502": GONE,
            }.get(step)
            flow.end(flying.pop(0), outcome, 1.0)
        assert minimum <= up.window.limit <= maximum
        assert up.window.in_flight == sum(each.upstream is not None for each in flying)
        assert up.window.in_flight <= maximum
        waiting = [each for each in flying if each.upstream is None]
        assert len(waiting) == flow.waiting
        # Whoever waits has a reason to.
        assert not waiting or not up.takes(1.0)


def test_a_maximum_that_changes_holds_for_the_next_calls():
    flow, up = one(4)
    tickets = [ask(flow) for _ in range(4)]
    up.window.bounds.maximum = 1
    for ticket in tickets[:3]:
        answer(flow, ticket)
        assert ask(flow).upstream is None
    answer(flow, tickets[3])
    assert up.window.in_flight == 1
    assert one(1, 5)[1].window.limit == 1


def test_an_endpoint_that_slows_down_gets_fewer_calls():
    flow, up = one(50)
    for now in range(10):
        for ticket in [ask(flow, now=now) for _ in range(40)]:
            answer(flow, ticket, now + 0.5, latency_sec=2.0, tokens=100)
    assert up.window.limit == 50
    limits = []
    for now in range(10, 14):
        for ticket in [ask(flow, now=now) for _ in range(int(up.window.limit))]:
            answer(flow, ticket, now + 0.5, latency_sec=20.0, tokens=100)
        limits.append(up.window.limit)
    assert 20 < limits[-1] < 45  # cut, once for the calls of a time
    for now in range(14, 44):
        for ticket in [ask(flow, now=now) for _ in range(int(up.window.limit))]:
            answer(flow, ticket, now + 0.5, latency_sec=2.0, tokens=100)
    assert up.window.limit == 50


def test_longer_answers_do_not_count_as_slow():
    flow, up = one(50)
    for now in range(20):
        for ticket in [ask(flow, now=now) for _ in range(40)]:
            answer(flow, ticket, now + 0.5, latency_sec=2.0 * (now + 1), tokens=100 * (now + 1))
    assert up.window.limit == 50


# --- who is next --------------------------------------------------------------------------------


def test_rollouts_that_have_called_go_before_new_ones():
    flow, _ = one(1)
    old = Caller()
    first = ask(flow, old)
    new, another = ask(flow), ask(flow)
    answer(flow, first)  # so the place goes to the first of the new ones
    assert new.upstream is not None
    again = ask(flow, old)
    answer(flow, new)
    assert (again.upstream is None, another.upstream is None) == (False, True)


def test_rollouts_take_turns():
    flow, _ = one(1)
    busy, modest = Caller(), Caller()
    for caller in (busy, modest):
        answer(flow, ask(flow, caller))
    flying = ask(flow)
    many = [ask(flow, busy) for _ in range(3)]
    few = ask(flow, modest)
    order = []
    waiting = {f"busy {n}": each for n, each in enumerate(many)} | {"modest": few}
    while waiting:
        answer(flow, flying)
        name, flying = next(pair for pair in waiting.items() if pair[1].upstream is not None)
        order.append(name)
        del waiting[name]
    assert order == ["busy 0", "modest", "busy 1", "busy 2"]


def test_the_other_calls_of_a_new_rollout_go_with_its_first():
    flow, _ = one(1)
    flying = ask(flow)
    caller = Caller()
    first, other = ask(flow, caller), ask(flow)
    second = ask(flow, caller)
    answer(flow, flying)
    answer(flow, first)
    assert (second.upstream is None, other.upstream is None) == (False, True)


def test_a_call_that_left_gives_its_place_or_its_turn_away():
    flow, up = one(1)
    flying, waiting, last = ask(flow), ask(flow), ask(flow)
    flow.end(waiting, None, 0.0)
    assert flow.waiting == 1
    flow.end(flying, None, 0.0)
    assert last.upstream is up
    assert last.waited_sec(7.0) == 0.0


def test_a_rollout_that_is_over_gets_no_place_any_more():
    flow, up = one(1)
    caller = Caller()
    flying, waiting, other = ask(flow, caller), ask(flow, caller), ask(flow)
    flow.leave(caller)
    flow.end(flying, None, 0.0)
    assert (waiting.upstream, other.upstream) == (None, up)
    flow.end(waiting, None, 0.0)
    assert (up.rollouts, flow.waiting) == (1, 0)


# --- several upstreams --------------------------------------------------------------------------


def test_new_rollouts_go_to_the_least_loaded_and_stay():
    flow = Flow("abc", Bounds())
    callers = [Caller() for _ in range(9)]
    for caller in callers:
        answer(flow, ask(flow, caller))
    assert [each.rollouts for each in flow.upstreams] == [3, 3, 3]
    for caller in callers:
        upstream = caller.upstream
        assert ask(flow, caller).upstream is upstream
    for caller in callers[:3]:
        flow.leave(caller)
    assert sum(each.rollouts for each in flow.upstreams) == 6
    loads = [each.load for each in flow.upstreams]
    newest = ask(flow)
    assert loads[flow.upstreams.index(newest.upstream)] == min(loads)


def test_a_rollout_without_a_place_moves_to_an_upstream_that_is_half_empty():
    flow = Flow("ab", Bounds(maximum=4))
    first, second = flow.upstreams
    callers = [Caller() for _ in range(8)]
    flying = [ask(flow, caller) for caller in callers]
    assert (first.window.in_flight, second.window.in_flight) == (4, 4)
    own = [each for each in flying if each.upstream is first]
    waiting = [ask(flow, each.caller) for each in own]
    others = [each for each in flying if each.upstream is second]
    answer(flow, others.pop())
    assert flow.waiting == 4
    answer(flow, others.pop())
    assert [each.upstream for each in waiting] == [second, None, None, None]
    assert waiting[0].caller.upstream is second
    assert (first.rollouts, second.rollouts) == (3, 5)


@given(st.integers(1, 3), st.none() | st.integers(1, 4), st.data())
def test_nothing_waits_for_idle_upstreams(count, maximum, data):
    flow = Flow(range(count), Bounds(maximum=maximum))
    callers = [Caller() for _ in range(5)]
    steps = st.lists(st.tuples(st.sampled_from([*range(5), "ok", "429", "hold", "gone", "leave"])))
    flying, now = [], 0.0
    for (step,) in data.draw(steps):
        opens, now = flow.opens_at(now), now + 0.3
        if opens <= now:
            flow.advance(now)  # as those that wait do then
        outcome = {"ok": ANSWER, "429": TOO_MANY, "hold": Outcome.of_status(429, 2.0)}
        if isinstance(step, int):
            flying.append(ask(flow, callers[step], now))
        elif flying:
            ticket = flying.pop(0)
            flow.end(ticket, outcome.get(step, GONE if step == "gone" else None), now)
        placed = [each for each in flying if each.upstream is not None]
        assert sum(each.window.in_flight for each in flow.upstreams) == len(placed)
        assert flow.waiting == len(flying) - len(placed)
    # Whatever has happened, everything comes to its end.
    while flying:
        ticket = next((each for each in flying if each.upstream is not None), None)
        if ticket is None:
            now = flow.opens_at(now)
            assert now < math.inf
            flow.advance(now)
        else:
            flying.remove(ticket)
            flow.end(ticket, ANSWER, now)
    for caller in callers:
        flow.leave(caller)
    assert {(each.rollouts, each.window.in_flight) for each in flow.upstreams} == {(0, 0)}


def test_a_rollout_moves_when_its_upstream_fails_and_new_ones_avoid_it():
    flow = Flow("ab", Bounds())
    caller = Caller()
    first = ask(flow, caller)
    failed = first.upstream
    flow.end(first, GONE, 10.0)
    assert flow.moves(caller, 10.0)
    assert ask(flow, caller, 10.0).upstream is not failed
    assert {ask(flow, now=10.5).upstream for _ in range(3)} == {caller.upstream}
    # Then one call finds out whether it is back.
    probe = ask(flow, now=11.5)
    assert probe.upstream is failed
    assert ask(flow, now=11.5).upstream is not failed
    flow.end(probe, ANSWER, 12.0)
    assert ask(flow, now=12.0).upstream is failed
    assert (failed.rollouts, failed.failures) == (2, 0)


def test_an_upstream_that_goes_on_failing_is_left_alone_for_longer():
    flow = Flow("ab", Bounds())
    failed = flow.upstreams[0]
    rests, now = [], 0.0
    for _ in range(8):
        caller = Caller()
        probe = ask(flow, caller, now)
        assert probe.upstream is failed
        flow.end(probe, GONE, now)
        flow.leave(caller)
        began = now
        while failed.avoided(now):
            now += 1
        rests.append(now - began)
    assert rests == [1, 2, 4, 8, 16, 32, 60, 60]


def test_calls_that_fail_together_are_one_failure():
    flow, up = one()
    for ticket in [ask(flow) for _ in range(9)]:
        flow.end(ticket, GONE, 5.0)
    assert up.failures == 1


def test_a_call_that_failed_does_not_find_out_whether_its_upstream_is_back():
    flow = Flow(["a", "b"], Bounds(maximum=1))
    first, other = flow.upstreams
    failed, busy_one, new = Caller(), Caller(), Caller()
    ticket, held = ask(flow, failed), ask(flow, busy_one)
    assert (ticket.upstream, held.upstream) == (first, other)
    flow.end(ticket, GONE, 1.0)
    again = ask(flow, failed, 10.0)  # the first might be back, but that is for others to see
    assert again.upstream is None
    probe = ask(flow, new, 10.0)
    assert probe.upstream is first
    flow.end(probe, GONE, 11.0)
    answer(flow, held, 12.0)
    assert again.upstream is other
    answer(flow, again, 13.0)
    flow.leave(busy_one)
    assert ask(flow, new, 13.0).upstream is other  # which has the place
    # It has been answered since, so its next call may be the one that finds out.
    assert ask(flow, failed, 60.0).upstream is first


def test_where_all_have_failed_calls_are_sent_all_the_same():
    flow = Flow("ab", Bounds())
    caller = Caller()
    for _ in range(2):
        flow.end(ask(flow, caller, 1.0), GONE, 1.0)
    assert not flow.moves(caller, 1.0)
    assert ask(flow, caller, 1.0).upstream is not None


def test_nothing_is_sent_before_the_time_that_an_endpoint_asks_for():
    flow, up = one()
    flow.end(ask(flow), Outcome.of_status(429, 3.0), 10.0)
    waiting = ask(flow, now=11.0)
    assert waiting.upstream is None
    assert flow.opens_at(11.0) == 13.0
    flow.advance(13.0)
    assert waiting.upstream is up
    assert waiting.waited_sec(20.0) == 2.0
    assert flow.opens_at(13.0) == math.inf


def test_a_short_hold_is_waited_for_and_a_long_one_is_not():
    flow = Flow("ab", Bounds())
    caller = Caller()
    flow.end(ask(flow, caller), Outcome.of_status(429, 1.0), 0.0)
    assert not flow.moves(caller, 0.0)
    held = ask(flow, caller)
    assert held.upstream is None
    flow.advance(1.0)
    flow.end(held, Outcome.of_status(503, 30.0), 2.0)
    assert flow.moves(caller, 2.0)


def test_requests_without_a_place_go_where_the_rollout_is():
    flow = Flow("ab", Bounds())
    caller = Caller()
    assert flow.of_other_requests(caller, 0.0) == "a"
    flow.end(ask(flow), GONE, 0.0)
    assert flow.of_other_requests(caller, 0.0) == "b"
    ask(flow, caller)
    assert flow.of_other_requests(caller, 0.0) == "b"


# --- retries ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "again"),
    [(429, True), (502, True), (503, True), (504, True), (529, True)]
    + [(status, False) for status in (200, 301, 400, 401, 404, 408, 500, 501)],
)
def test_what_is_sent_again(status, again):
    delay = Retries(1, 30).delay_sec(Outcome.of_status(status), 0.0, moves=False, draw=0.0)
    assert delay == (0.25 if again else None)


def test_retries_have_a_number_and_a_time():
    retries = Retries(2, 30)
    assert retries.delay_sec(GONE, 0.0, moves=False, draw=0.0) == 0.25
    assert retries.delay_sec(GONE, 1.0, moves=False, draw=1.0) == 0.75
    assert retries.delay_sec(GONE, 2.0, moves=False, draw=0.0) is None
    retries = Retries(9, 30)
    asked = Outcome.of_status(503, 20.0)
    assert retries.delay_sec(asked, 100.0, moves=False, draw=0.0) == 20.0
    assert retries.delay_sec(asked, 120.0, moves=False, draw=0.0) is None
    retries.waited(10.0)
    assert retries.delay_sec(asked, 120.0, moves=False, draw=0.0) == 20.0
    assert Retries(1, 0).delay_sec(asked, 0.0, moves=True, draw=0.0) == 0.0
    assert Retries(0, 9).delay_sec(asked, 0.0, moves=True, draw=0.0) is None


def test_a_client_error_after_a_failure_is_the_answer():
    retries = Retries(5, 30)
    assert retries.delay_sec(GONE, 0.0, moves=False, draw=0.0) is not None
    assert retries.delay_sec(Outcome.of_status(400), 0.0, moves=False, draw=0.0) is None
