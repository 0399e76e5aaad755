"""The strategies give what they promise, reach the borders, and shrink to what a person expects."""

from __future__ import annotations

import math
import subprocess
import sys
from urllib.parse import quote

import pytest
from attrs import evolve
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from rollout.codec import dump_request, parse_json, structure
from rollout.errors import InvalidBodyError
from rollout.server.entry import check_times
from rollout.simulation import (
    Caller,
    Course,
    Fate,
    Fault,
    RolloutPlan,
    Route,
    ScriptedFaults,
    ServerOptions,
    simulate_workload,
)
from rollout.simulation.strategies import (
    durations,
    fates,
    fault_plans,
    latencies,
    request_bodies,
    requests,
    rollout_ids,
    rollout_plans,
    server_options,
    workloads,
)
from rollout.types import RolloutInitRequest
from rollout.types._fields import MAX_QUOTED_ID_LENGTH

LENGTHS = {"arrival_sec", "agent_sec", "grader_sec", "caller_sec"}
SIMPLEST = RolloutPlan(rollout_id="r0")
EFFORT = settings(
    max_examples=5000,
    database=None,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def simplest(strategy, wanted=lambda _: True):
    return find(strategy, wanted, settings=EFFORT)


# --- timings ------------------------------------------------------------------------------------


@given(durations(), latencies())
def test_times_are_finite_and_never_negative(duration, latency):
    assert 0.0 <= duration <= 1000.0
    assert 0.0 <= latency <= 10.0


@given(st.floats(0.0, 2000.0), st.data())
def test_no_time_is_longer_than_the_longest(longest, data):
    assert data.draw(durations(longest_sec=longest)) <= longest
    assert data.draw(latencies(longest_sec=longest)) <= longest


@pytest.mark.parametrize("border", [30.0, 40.0, 120.0, 900.0])
@pytest.mark.parametrize("shift", [-math.inf, -0.001, 0.0, 0.001, math.inf])
def test_the_borders_of_the_default_server_are_drawn(border, shift):
    near = math.nextafter(border, shift) if math.isinf(shift) else border + shift
    assert simplest(durations(), lambda duration: duration == near) == near


def test_the_borders_of_another_server_are_drawn():
    options = ServerOptions(result_wait_timeout_sec=7.25, polling_lease_timeout_sec=19.5)
    for border in (7.25, 17.25, 19.5):
        assert simplest(durations(options=options), lambda sec, at=border: sec == at) == border


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (lambda _: True, 0.0),
        (lambda sec: sec > 0, 1.0),
        (lambda sec: sec >= 30, 30.0),
        (lambda sec: sec > 120, 121.0),
    ],
)
def test_durations_shrink_to_whole_seconds(wanted, expected):
    assert simplest(durations(), wanted) == expected


def test_latencies_shrink_to_the_usual_one():
    assert simplest(latencies()) == Fate().out_sec
    assert simplest(latencies(), lambda sec: sec > 0.01) == 0.1


# --- requests -----------------------------------------------------------------------------------


@given(requests())
def test_requests_are_taken_by_a_server(request):
    assert structure(parse_json(dump_request(request)), RolloutInitRequest) == request


@given(rollout_ids())
def test_ids_are_taken_by_a_request(rollout_id):
    RolloutInitRequest(
        rollout_id=rollout_id, initial_messages=[], chat_completions_url="http://chat"
    )


@given(request_bodies(valid=True))
def test_valid_bodies_are_taken(body):
    assert isinstance(structure(parse_json(body), RolloutInitRequest), RolloutInitRequest)


@given(request_bodies(valid=False))
@settings(max_examples=300)
def test_invalid_bodies_are_refused(body):
    with pytest.raises(InvalidBodyError):
        structure(parse_json(body), RolloutInitRequest)


def is_taken(body):
    try:
        structure(parse_json(body), RolloutInitRequest)
    except InvalidBodyError:
        return False
    return True


def test_bodies_are_valid_and_not():
    valid = simplest(request_bodies())
    assert valid == dump_request(simplest(requests()))
    assert simplest(request_bodies(), lambda body: not is_taken(body)) == (
        valid.replace(b'"rollout_id":"r0",', b"")
    )


def test_the_simplest_request():
    assert simplest(requests()) == RolloutInitRequest(
        rollout_id="r0", initial_messages=[], chat_completions_url="http://model.invalid/v1"
    )


@pytest.mark.parametrize(
    "wanted",
    [
        lambda request: request.agent_timeout_sec == 0,
        lambda request: (request.agent_timeout_sec or 0) < 0,
        lambda request: (request.grader_timeout_sec or 0) > 1e300,
        lambda request: len(quote(request.rollout_id)) == MAX_QUOTED_ID_LENGTH,
        lambda request: "%" in request.rollout_id,
        lambda request: any("\ud800" <= char <= "\udfff" for char in request.label or ""),
        lambda request: repr(request.metadata).count("{") > 100,
    ],
)
def test_requests_reach_borders(wanted):
    request = simplest(requests(), wanted)
    assert wanted(request)
    assert structure(parse_json(dump_request(request)), RolloutInitRequest) == request


# --- plans and workloads ------------------------------------------------------------------------


def test_the_simplest_plan_is_the_default_one():
    assert simplest(rollout_plans()) == SIMPLEST
    assert simplest(rollout_plans("mine")) == RolloutPlan(rollout_id="mine")


@pytest.mark.parametrize(
    "expected",
    [
        {"agent": Course.ERROR},
        {"agent_sec": 121.0},
        {"grade": False, "arrival_sec": 40.0},
        {"grader": Course.SWALLOW, "grader_sec": 900.0},
        {"agent_timeout_sec": 0.0},
        {"caller": Caller.STOP, "caller_sec": 31.0},
        {"caller": Caller.FOLLOW, "reward": 0.5},
    ],
)
def test_plans_shrink_to_what_matters(expected):
    def matters(plan):
        return all(
            getattr(plan, name) >= value if name in LENGTHS else getattr(plan, name) == value
            for name, value in expected.items()
        )

    assert simplest(rollout_plans(), matters) == evolve(SIMPLEST, **expected)


@given(rollout_plans())
def test_times_of_a_plan_are_whole_microseconds(plan):
    for name in ("arrival_sec", "agent_sec", "grader_sec", "caller_sec", "agent_timeout_sec"):
        seconds = getattr(plan, name)
        assert seconds is None or seconds == round(seconds, 6)


@given(workloads(min_size=2, max_size=5))
def test_workloads_have_unique_ids(plans):
    assert [plan.rollout_id for plan in plans] == [f"r{n}" for n in range(len(plans))]
    assert 2 <= len(plans) <= 5


def test_the_simplest_workload_is_one_rollout():
    assert simplest(workloads()) == [SIMPLEST]
    assert simplest(workloads(min_size=0)) == []


@pytest.mark.parametrize("caller", [Caller.FOLLOW, Caller.CANCEL, list(Caller)[-1]])
def test_the_simplest_workload_with_a_caller_is_one_rollout(caller):
    workload = simplest(
        workloads(max_size=4), lambda plans: any(plan.caller is caller for plan in plans)
    )
    assert workload == [evolve(SIMPLEST, caller=caller)]


def test_the_simplest_workload_with_two_failures_is_two_rollouts():
    workload = simplest(
        workloads(), lambda plans: sum(plan.agent is Course.ERROR for plan in plans) == 2
    )
    failing = evolve(SIMPLEST, agent=Course.ERROR)
    assert workload == [failing, evolve(failing, rollout_id="r1")]


def test_plans_draw_the_borders_of_their_server():
    options = ServerOptions(polling_lease_timeout_sec=77.25)
    plans = simplest(
        workloads(options=options), lambda plans: any(plan.agent_sec == 77.25 for plan in plans)
    )
    assert plans == [evolve(SIMPLEST, agent_sec=77.25)]


# --- faults -------------------------------------------------------------------------------------


def test_the_simplest_fate_is_that_nothing_goes_wrong():
    assert simplest(fates()) == Fate()


def test_the_simplest_fault_plan_is_empty():
    assert simplest(fault_plans()) == ScriptedFaults([])


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.NONE])
def test_the_simplest_plan_with_a_fault_is_one_fate(fault):
    plan = simplest(fault_plans(), lambda plan: any(fate.fault is fault for fate in plan.fates))
    assert plan == ScriptedFaults([Fate(fault=fault)])


def test_what_comes_before_a_fault_shrinks_to_nothing_going_wrong():
    plan = simplest(
        fault_plans(),
        lambda plan: any(fate.fault is Fault.LOST_AFTER for fate in plan.fates[2:]),
    )
    assert plan == ScriptedFaults([Fate(), Fate(), Fate(fault=Fault.LOST_AFTER)])


def test_a_plan_is_unused_and_beyond_its_end_all_goes_well():
    plan = simplest(fault_plans(), lambda plan: len(plan.fates) == 1)
    assert plan.used == 0
    assert [plan.fate(Route.POLL) for _ in range(3)] == [Fate()] * 3


@given(fault_plans(max_size=3, faults=[Fault.NONE, Fault.GATEWAY]))
def test_only_the_given_faults_are_drawn(plan):
    assert len(plan.fates) <= 3
    assert {fate.fault for fate in plan.fates} <= {Fault.NONE, Fault.GATEWAY}


def test_the_first_of_the_given_faults_is_the_simplest():
    assert simplest(fates(faults=[Fault.LATE, Fault.NONE])) == Fate(fault=Fault.LATE)


def test_no_fault_at_all_is_a_mistake():
    with pytest.raises(ValueError, match=r"Fault\.NONE stands for none"):
        fates(faults=[])


# --- servers ------------------------------------------------------------------------------------


def test_the_simplest_server_has_its_defaults():
    assert simplest(server_options()) == ServerOptions()


@given(server_options())
def test_server_options_are_valid(options):
    check_times(
        options.result_wait_timeout_sec,
        options.polling_lease_timeout_sec,
        options.result_retention_sec,
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"max_concurrent": None},
        {"max_concurrent": 1},
        {"max_queue_depth": 1},
        {"result_retention_sec": 0.0},
        {"polling_lease_timeout_sec": math.nextafter(30.0, math.inf)},
    ],
)
def test_server_options_shrink_to_what_matters(changed):
    expected = ServerOptions(**changed)
    name, value = next(iter(changed.items()))
    found = simplest(server_options(), lambda options: getattr(options, name) == value)
    assert found == expected


# --- in use -------------------------------------------------------------------------------------


@given(plans=workloads(max_size=4), plan=fault_plans(), seed=st.integers(0, 9))
@settings(max_examples=40, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
def test_a_drawn_workload_runs_under_drawn_faults(plans, plan, seed):
    run = simulate_workload(seed, faults="none", plans=plans, plan=plan, options=ServerOptions())
    called = {event.rollout_id for event in run.trace.select("called")}
    assert called == {each.rollout_id for each in plans}
    assert plan.used == min(len(plan.fates), len(run.trace.select("sent")))
    assert run.violations == []


def test_a_failing_run_shrinks_to_one_rollout_and_one_fate():
    """What a user sees whose harness cannot bear that an answer is lost."""

    def loses_the_answer(drawn):
        plans, plan = drawn
        run = simulate_workload(0, faults="none", plans=plans, plan=plan, options=ServerOptions())
        return any(
            event.detail["error"] == "RemoteProtocolError" for event in run.trace.select("failed")
        )

    plans, plan = find(
        st.tuples(workloads(max_size=3), fault_plans(max_size=4)),
        loses_the_answer,
        settings=EFFORT,
    )
    assert plans == [SIMPLEST]
    assert plan.fates == [Fate(fault=Fault.LOST_AFTER)]


WITHOUT_HYPOTHESIS = """
import sys
sys.modules["hypothesis"] = None
import rollout.simulation
try:
    import rollout.simulation.strategies
except ImportError as error:
    print(error)
"""


def test_without_hypothesis_the_import_says_what_to_install():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HYPOTHESIS],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == (
        "rollout.simulation.strategies needs Hypothesis; install it with "
        'pip install "trio-rollout[simulation]"\n'
    )


def test_the_simulation_does_not_load_hypothesis():
    code = "import rollout.simulation, sys; print('hypothesis' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "False\n"
