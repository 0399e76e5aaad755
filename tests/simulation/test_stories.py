"""What a violation prints: the shortest story that a person can follow."""

from __future__ import annotations

from simulation.written_traces import (
    LONG,
    RUNNING,
    STOPPED,
    WELL,
    changed,
    lines,
    poll,
    violations,
)

from rollout.simulation import Violation

TOLD = """\
forward-only (r): went back to queued
         0.000  world    server-up process=1
         1.000  caller   called r caller=wait
         1.000  client   sent r route=admit request=1 fault=none
         1.000  network  arrived r route=admit request=1 lease= process=1
         1.000  server   admitted r status=queued process=1
         1.000  server   execution-started r status=queued process=1
         1.000  server   agent-started r status=running process=1
         1.000  server   status r status=running process=1
         1.000  workflow workflow-started r process=1
         1.000  network  server-answered r route=admit request=1 status=202 process=1
         1.000  client   answered r route=admit request=1 status=202
         2.000  client   sent r route=poll request=2 fault=none
         2.000  network  arrived r route=poll request=2 lease=own process=1
         2.000  server   lease-renewed r status=running process=1
         2.000  network  server-answered r route=poll request=2 status=200 \
state=running started=T about=r process=1
         2.000  client   answered r route=poll request=2 status=200 state=running started=T about=r
         3.000  client   sent r route=poll request=3 fault=none
         3.000  network  arrived r route=poll request=3 lease=own process=1
         3.000  server   lease-renewed r status=running process=1
         4.000  world    paused seconds=1.0
         5.000  server   status r status=queued process=1"""


def test_a_violation_tells_what_led_to_it_and_no_more():
    text = changed(
        WELL,
        plus="""
            0 world paused seconds=0.5
            3 caller called s caller=wait
            4 world paused seconds=1.0
            5 server status r status=queued
            6 server status r status=grading
        """,
    )
    violation = violations(text)[0]
    assert str(violation) == TOLD


def test_polls_without_news_are_told_in_one_line():
    idle = "".join(poll(100 * n, 10 + n, RUNNING, 100 * n + 30) for n in range(1, 5))
    text = changed(WELL, without="3\n9", plus=idle + "450 server status r status=queued")
    story = str(violations(text)[0])
    assert "100.000  client   polled-without-news r times=3 until=330.0" in story
    assert "request=13" not in story
    assert story.count("request=14") == len(lines(poll(400, 14, RUNNING)))
    assert story.count("request=2") == 4  # that one brought news


def test_a_poll_that_met_a_fault_is_told():
    idle = "".join(poll(100 * n, 10 + n, RUNNING, 100 * n + 30) for n in range(1, 5))
    idle = idle.replace("request=12 fault=none", "request=12 fault=late")
    text = changed(WELL, without="3\n9", plus=idle + "450 server status r status=queued")
    story = str(violations(text)[0])
    assert "polled-without-news" not in story
    assert "fault=late" in story


def test_the_story_of_a_server_is_that_of_who_was_still_there():
    text = changed(
        STOPPED,
        without="15\n16",
        plus="""
            1 server admitted early status=queued
            2 server execution-ended early status=success
            300 world shutdown-ends process=1
        """,
    )
    found = next(v for v in violations(text, None, LONG) if not v.rollout_id)
    assert found.invariant == "shutdown"
    story = str(found)
    assert "shutdown-begins" in story
    assert "admitted r" in story
    assert "early" not in story
    assert "shutdown-ends" not in story  # it came later


def test_a_violation_without_a_rollout_says_so_in_one_line():
    violation = Violation(invariant="shutdown", rollout_id="", message="took too long")
    assert str(violation) == "shutdown: took too long"
