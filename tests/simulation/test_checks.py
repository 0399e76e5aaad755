"""Each check, on small traces: good ones, and some that are bad in one way."""

from __future__ import annotations

import pytest
from attrs import evolve
from simulation.written_traces import (
    CANCELLED,
    HANDLE,
    LONG,
    NOT_FOUND,
    PAUSED,
    PLAN,
    QUEUED,
    RETRIED,
    RUNNING,
    SILENT,
    STOPPED,
    STUCK,
    SUCCESS,
    WELL,
    Bad,
    changed,
    poll,
    trace_of,
    violations,
)

from rollout.server import ShutdownBudget
from rollout.simulation import Course, RolloutPlan, ServerOptions, check_trace
from rollout.simulation.history import History

SILENT_TO_THE_END = changed(SILENT, without="910", plus="1021 server forgotten r status=failure")
GIVEN_UP = changed(
    WELL,
    without="3\n9\n909\n910",
    plus="""
        5 world shutdown-begins process=1
        7 server stop-requested r status=running
        15 server finished r status=cancelled category=null
        15.5 world shutdown-ends process=1
        55 workflow workflow-ended r
        55 server execution-ended r status=cancelled
        55 world server-gone process=1
        55 world server-down process=1
    """,
)
"""A workflow that ignores its deadline, and is given up by a short shutdown."""

HASTY = ServerOptions(shutdown=ShutdownBudget(drain_sec=2, cleanup_sec=5, forced_sec=3))
TIMED_OUT = RolloutPlan(rollout_id="r", agent=Course.SWALLOW, agent_sec=50.0, agent_timeout_sec=4.0)

CRASHED = changed(
    WELL,
    without="3\n9\n909\n910",
    plus="""
        100 world server-crashed process=1
        125 workflow workflow-ended r
        125 server finished r status=failure category=lease_expired
        125 server execution-ended r status=failure
        125 world server-gone process=1
    """,
)
"""A crash, and a workflow that goes on for a while in what is left of the process."""

CUT_OFF = changed(
    WELL,
    without="3\n9 network\n9 client\n9 caller\n909\n910",
    plus="""
        10 client sent r route=poll request=3 fault=lost-during
        10 network arrived r route=poll request=3 lease=own
        10 network disconnected r route=poll request=3
        10 client failed r route=poll request=3 error=ReadError
        10 server lease-renewed r status=success
        10 world shutdown-begins process=1
        10 world shutdown-ends process=1
        10 world server-gone process=1
        10 world server-down process=1
    """,
)
"""A poll whose connection is lost as the server answers it, just before a shutdown."""

GOOD = {
    "well": (WELL, None, ()),
    "silent": (SILENT_TO_THE_END, None, (LONG,)),
    "paused": (PAUSED, ServerOptions(result_retention_sec=1e6), (LONG,)),
    "stopped": (STOPPED, None, (LONG,)),
    "stuck": (STUCK, None, (RolloutPlan(rollout_id="another"),)),
    "handle": (HANDLE, None, ()),
    "cancelled": (CANCELLED, None, (evolve(PLAN, agent=Course.SWALLOW),)),
    "retried": (RETRIED, None, ()),
    "given up": (GIVEN_UP, HASTY, (TIMED_OUT,)),
    "crashed": (CRASHED, None, (evolve(LONG, agent=Course.SWALLOW),)),
    "cut off": (CUT_OFF, None, ()),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_trace_has_no_violation(name):
    text, options, plans = GOOD[name]
    assert violations(text, options, *plans) == []


BAD = [
    Bad("one-execution", "admitted a second", changed(WELL, plus="5 server admitted r status=q")),
    Bad(
        "one-execution",
        "executed twice at a time",
        changed(
            WELL,
            without="9\n909",
            plus="""
                6 server finished r status=failure category=null
                7 server forgotten r status=failure
                8 server admitted r status=queued
                9 server execution-ended r status=failure
            """,
        ),
    ),
    Bad(
        "one-execution",
        "workflow-started more",
        changed(WELL, plus="5 workflow workflow-started r"),
    ),
    Bad(
        "one-execution",
        "finished more than once",
        changed(WELL, plus="10 server finished r status=failure category=null"),
    ),
    Bad(
        "one-execution",
        "its terminal result changed",
        changed(WELL, plus=poll(20, 4, SUCCESS.replace("d1", "d2"))),
    ),
    Bad(
        "one-execution",
        "ended as success, and was reported as",
        changed(WELL, plus=poll(20, 4, SUCCESS.replace("success", "failure"))),
    ),
    Bad(
        "forward-only", "went back to queued", changed(WELL, plus="5 server status r status=queued")
    ),
    Bad(
        "forward-only",
        "went back to running",
        changed(WELL, plus="10 server status r status=running"),
    ),
    Bad(
        "forward-only",
        "its agent started twice",
        changed(WELL, plus="5 server agent-started r status=running"),
    ),
    Bad("forward-only", "was reported as queued", changed(WELL, plus=poll(2.5, 9, QUEUED))),
    Bad(
        "forward-only",
        "its start time changed from T to U",
        changed(WELL, plus=poll(20, 4, SUCCESS.replace("=T", "=U"))),
    ),
    Bad(
        "forward-only",
        "its caller saw it go back to running",
        changed(
            WELL,
            plus="""
                4 caller saw-status r state=grading started=T
                5 caller saw-status r state=running started=T
            """,
        ),
    ),
    Bad(
        "forward-only",
        "its caller saw the start time change",
        changed(WELL, plus="4 caller saw-status r state=running started=U"),
    ),
    Bad(
        "lease-safety",
        "lost its lease 20.000 s before its end",
        changed(
            SILENT,
            without="121",
            plus="""
                101 server finished r status=failure category=lease_expired
                101 server stop-requested r status=failure
            """,
        ),
    ),
    Bad(
        "lease-safety",
        "lost its lease",
        changed(PAUSED, without="221 server finished")
        + "\n160 server finished r status=failure category=lease_expired",
    ),
    Bad(
        "lease-safety",
        "nobody has polled in time since 1.000",
        changed(SILENT, without="121", plus="800 workflow workflow-ended r"),
    ),
    Bad(
        "lease-safety",
        "nobody has polled in time since 1.000",
        changed(SILENT, without="121", plus=poll(121, 4, RUNNING)),
    ),
    Bad(
        "lease-safety",
        "nobody has polled in time since 1.000",
        changed(SILENT, without="121", plus=poll(100, 4, "status=403", lease="other")),
    ),
    Bad(
        "lease-safety",
        "its execution was not stopped",
        changed(
            SILENT,
            without="121 server stop\n121 workflow\n121 server execution",
            plus="200 server execution-ended r status=failure",
        ),
    ),
    Bad(
        "lease-safety",
        "its lease had ended, and a poll was answered running",
        changed(SILENT, plus=poll(130, 4, RUNNING)),
    ),
    Bad(
        "disconnect",
        "was cancelled, and nobody had asked",
        changed(
            WELL.replace("success", "cancelled"),
            plus="4 network disconnected r route=poll request=3",
        ),
    ),
    Bad(
        "disconnect",
        "was asked to stop, by nobody",
        changed(WELL, plus="4 server stop-requested r status=running"),
    ),
    Bad(
        "disconnect",
        "a poll after a disconnect was answered 404",
        changed(
            WELL,
            plus="4 network disconnected r route=poll request=3" + poll(20, 4, NOT_FOUND),
        ),
    ),
    Bad(
        "disconnect",
        "ended as failure (agent_error), which its plan does not lead to",
        WELL.replace("success category=null", "failure category=agent_error"),
    ),
    Bad("disconnect", "its reward is 1.0, not None", WELL.replace("reward=null", "reward=1.0")),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.invariant}: {bad.says}")
def test_a_bad_trace_has_its_violation(bad: Bad):
    found = violations(bad.text, bad.options, *bad.plans)
    assert any(v.invariant == bad.invariant and bad.says in v.message for v in found), found


def test_a_pause_reaches_to_its_last_moment_whatever_floats_add_up_to():
    trace = trace_of("0.6 world paused seconds=0.1")
    end = 0.6 + 0.1 + 2e-16
    assert end - 0.1 > 0.6, "the sum is a hair too large"
    assert History(trace).paused_sec(end, end) == 0.1
    assert History(trace).paused_sec(end + 0.001, end + 1) == 0.0


def test_what_a_killed_process_does_while_it_is_taken_down_is_not_an_end():
    """Its workflow may come to an end late, and after its lease."""
    text = changed(
        SILENT,
        plus="""
            50 world server-crashed process=1
            910 server finished r process=1 status=failure category=lease_expired
        """,
        without="101\n910\n1021",
    )
    found = [each for each in violations(text, None, LONG) if each.invariant == "lease-safety"]
    assert found == []


def test_an_empty_trace_is_a_good_one():
    assert violations("") == []


def test_without_plans_outcomes_and_slots_are_not_checked():
    text = WELL.replace("success category=null", "failure category=agent_error")
    text = text.replace(
        "state=success started=T about=r category=null",
        "state=failure started=T about=r category=agent_error",
    )
    assert check_trace(trace_of(text), ServerOptions(max_concurrent=1)) == []
