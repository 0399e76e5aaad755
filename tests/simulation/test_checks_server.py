"""The checks of slots, ends and shutdowns, on small traces that are bad in one way."""

from __future__ import annotations

import pytest
from simulation.written_traces import (
    NOT_FOUND,
    ONE_SLOT,
    PLAN,
    SHORT,
    STOPPED,
    STUCK,
    SUCCESS,
    WELL,
    Bad,
    changed,
    poll,
    violations,
)

from rollout.simulation import RolloutPlan, ServerOptions

TWO = changed(
    WELL,
    plus="""
        4 server admitted s status=queued
        4 server execution-started s status=queued
        9 workflow workflow-started s
        17 workflow workflow-ended s
        17 server finished s status=success category=null
        17 server execution-ended s status=success
    """,
)
# The feed takes half a second to write the end, and the shutdown is over at once.
STOPPED_WITH_FEED = changed(
    STOPPED,
    without="16",
    plus="""
        3 network arrived r route=feed request=5 lease=own seen=running;agent-started
        3 network server-answered r route=feed request=5 status=200 refused=false write_sec=0.5
        15 network server-answered r route=feed request=5 status=200 state=cancelled started=T \
about=r category=null digest=d1 reward=null
        15 world shutdown-ends process=1
        15 world server-gone process=1
        15 world server-down process=1
    """,
)
SMALL = ServerOptions(max_concurrent=1, max_queue_depth=1, result_retention_sec=900.0)
BOTH = (PLAN, RolloutPlan(rollout_id="s", agent_sec=8.0, grade=False))

BAD = [
    Bad(
        "slots",
        "2 slots of 1 are taken: r, s",
        changed(
            TWO,
            without="9 workflow workflow-started s",
            plus="8 workflow workflow-started s",
        ),
        ONE_SLOT,
        BOTH,
    ),
    Bad(
        "slots",
        "waits for a slot although 1 of 1 should be free",
        TWO.replace("9 workflow workflow-started s", "12 workflow workflow-started s"),
        ONE_SLOT,
        BOTH,
    ),
    Bad(
        "slots",
        "was admitted where 2 were there already",
        changed(TWO, plus="5 server admitted t status=queued"),
        SMALL,
        BOTH,
    ),
    Bad(
        "slots",
        "was refused although 1 places were free",
        changed(
            WELL,
            plus="""
                5 network arrived s route=admit request=9 lease=
                5 network server-answered s route=admit request=9 status=429
            """,
        ),
        SMALL,
        BOTH,
    ),
    Bad(
        "slots",
        "held its slot for longer than its work took",
        WELL,
        None,
        (RolloutPlan(rollout_id="r", agent_sec=7.0, grade=False),),
    ),
    Bad(
        "slots",
        "callers still waited",
        changed(WELL, plus="909 world callers-given-up after_sec=900"),
    ),
    Bad(
        "retention",
        "was forgotten 1.000 s too early",
        WELL.replace("909 server forgotten", "908 server forgotten"),
    ),
    Bad(
        "retention",
        "was forgotten 3.000 s too early",
        changed(
            WELL,
            without="9\n909",
            plus="""
                6 server finished r status=cancelled category=null
                6 server stop-requested r status=cancelled
                6 server forgotten r status=cancelled
                9 server execution-ended r status=cancelled
            """,
        ),
        SHORT,
    ),
    Bad(
        "retention",
        "was forgotten before its end",
        changed(WELL, without="9\n909", plus="8 server forgotten r status=running"),
    ),
    Bad(
        "retention",
        "its id was not given back in time",
        changed(WELL, without="909\n910", plus="912 world shutdown-begins process=1"),
    ),
    Bad(
        "retention",
        "a poll within its time was answered 404",
        changed(WELL, plus=poll(500, 4, NOT_FOUND)),
    ),
    Bad(
        "retention",
        "a poll within its time was answered 404",
        changed(WELL, plus=poll(2.5, 4, NOT_FOUND)),
    ),
    Bad("retention", "could be read after its time", changed(WELL, plus=poll(909.5, 4, SUCCESS))),
    Bad(
        "retention",
        "an admission of its id was answered 202, not 409",
        changed(
            WELL,
            plus="""
                500 network arrived r route=admit request=9 lease=
                500 network server-answered r route=admit request=9 status=202
            """,
        ),
    ),
    Bad(
        "shutdown",
        "the shutdown took longer than the 210 s of its budget",
        WELL.replace("910 world shutdown-ends", "1121 world shutdown-ends").replace(
            "910 world server", "1121 world server"
        ),
    ),
    Bad(
        "shutdown",
        "was admitted during the shutdown",
        changed(STOPPED, plus="6 server admitted s status=queued"),
    ),
    Bad(
        "shutdown",
        "was not asked to stop after the drain",
        changed(
            STOPPED,
            without="15\n16",
            plus="""
                20 server stop-requested r status=running
                20 server finished r status=cancelled category=null
                20 server execution-ended r status=cancelled
                21 world shutdown-ends process=1
            """,
        ),
    ),
    Bad(
        "shutdown",
        "was asked to stop within the drain",
        STOPPED.replace("15 ", "5 "),
    ),
    Bad(
        "shutdown",
        "was given up before cleanup and force had had their time",
        STUCK.replace("145 ", "135 ").replace("146 ", "136 "),
    ),
    Bad(
        "shutdown",
        "had no end after all stages",
        changed(STUCK, without="145\n146\n150", plus="150 world shutdown-ends process=1"),
    ),
    Bad(
        "shutdown",
        "was left behind before its time was up",
        changed(STUCK, without="145\n146", plus="20 world shutdown-ends process=1"),
    ),
    Bad("shutdown", "did not wait for who still read its result", STOPPED_WITH_FEED),
    Bad(
        "shutdown",
        "workflow-ended after its server was gone",
        changed(STOPPED, without="15 workflow", plus="17 workflow workflow-ended r"),
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.invariant}: {bad.says}")
def test_a_bad_trace_has_its_violation(bad: Bad):
    found = violations(bad.text, bad.options, *bad.plans)
    assert any(v.invariant == bad.invariant and bad.says in v.message for v in found), found


def test_a_shutdown_need_not_wait_for_a_feed_whose_result_a_poll_has_told():
    end = "status=200 state=cancelled started=T about=r category=null digest=d1 reward=null"
    told = changed(STOPPED_WITH_FEED, plus=poll(14, 6, end, 15))
    assert [v for v in violations(told) if v.invariant == "shutdown"] == []
