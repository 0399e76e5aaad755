"""Checks of what a server made of its rollouts: executions, results, statuses, disconnects."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rollout.simulation.findings import EPSILON_SEC, Checked, Finding, rank
from rollout.simulation.lives import Life
from rollout.simulation.trace import Event
from rollout.simulation.workload import RolloutPlan, expected_outcomes

__all__ = ["check_disconnects", "check_executions", "check_published_statuses"]

OK = 200


def check_executions(checked: Checked) -> Iterator[Finding]:
    """At most one execution for an id in a process; one result, which never changes."""
    current: dict[tuple[int, str], Life] = {}
    for life in checked.history.lives:
        key = (life.process, life.rollout_id)
        began = life.time_of("admitted")
        before = current.get(key)
        if before is not None and before.time_of("forgotten") > began:
            yield Finding(life.rollout_id, "was admitted a second time", began)
        if before is not None and before.over_at > began:
            yield Finding(life.rollout_id, "was executed twice at a time", began)
        current[key] = life
        for what in ("execution-started", "workflow-started", "grader-started", "finished"):
            events = life.all(what)
            if len(events) > 1:
                yield Finding(life.rollout_id, f"{what} more than once", events[1].time)
        yield from _check_result(life)


def _check_result(life: Life) -> Iterator[Finding]:
    published = life.first("finished")
    first: Event | None = None
    for answer in life.answers:
        detail = answer.detail
        if "digest" not in detail:
            continue
        if published is not None and (detail["state"], detail["category"]) != (
            published.detail["status"],
            published.detail["category"],
        ):
            message = f"ended as {published.detail['status']}, and was reported as {detail}"
            yield Finding(life.rollout_id, message, answer.time)
        if first is not None and detail["digest"] != first.detail["digest"]:
            yield Finding(life.rollout_id, "its terminal result changed", answer.time)
        first = first or answer


def check_published_statuses(checked: Checked) -> Iterator[Finding]:
    """What the server publishes only moves forward, and the start time is set once."""
    for life in checked.history.lives:
        at = -1
        for event in life.events:
            if event.what in {"status", "finished"}:
                state = event.detail["status"]
                if rank(state) <= at:
                    yield Finding(life.rollout_id, f"went back to {state}", event.time)
                at = max(at, rank(state))
        marks = life.all("agent-started")
        if len(marks) > 1:
            yield Finding(life.rollout_id, "its agent started twice", marks[1].time)
        yield from _forward(life)


def _forward(life: Life) -> Iterator[Finding]:
    """Check what each client was answered, in order; one client sends one poll at a time."""
    at: dict[int, int] = {}
    started = None
    for answer in life.answers:
        client, state = answer.detail.get("client", 1), answer.detail["state"]
        if rank(state) < at.get(client, -1):
            message = f"was reported as {state} after it was past that"
            yield Finding(life.rollout_id, message, answer.time)
        at[client] = max(at.get(client, -1), rank(state))
        reported = answer.detail["started"]
        if started is not None and reported != started and client == 1:
            message = f"its start time changed from {started} to {reported}"
            yield Finding(life.rollout_id, message, answer.time)
        started = started or reported


def _late_outcomes(plan: RolloutPlan) -> set[tuple[str, str | None]]:
    """Return what else may come out where everything stood still for a while."""
    limited = plan.agent_timeout_sec is not None or plan.grader_timeout_sec is not None
    return {("failure", "timeout")} if limited else set()


def check_disconnects(checked: Checked) -> Iterator[Finding]:
    """What came out of a rollout is what it was going to be, whoever disconnected meanwhile."""
    shutdowns = {
        event.detail["process"]: event.time
        for event in checked.history.world
        if event.what == "shutdown-begins"
    }
    for life in checked.history.lives:
        shutdown = shutdowns.get(life.process, math.inf)
        yield from _check_stop(checked, life, shutdown)
        yield from _check_still_there(checked, life)
        finished = life.first("finished")
        if finished is not None and finished.time < min(life.lost_at, shutdown):
            yield from _check_outcome(checked, life, finished)


def _check_stop(checked: Checked, life: Life, shutdown: float) -> Iterator[Finding]:
    """A rollout is asked to stop by a cancel request, its lease or a shutdown, by nothing else."""
    asked = life.time_of("stop-requested")
    expired = life.expired and life.time_of("finished") <= asked
    if asked < shutdown and not expired and not checked.history.was_cancelled(life, asked):
        yield Finding(life.rollout_id, "was asked to stop, by nobody", asked)


def _check_still_there(checked: Checked, life: Life) -> Iterator[Finding]:
    """After a disconnect, polls are answered as before."""
    gone_at = life.time_of("disconnected")
    if gone_at == math.inf:
        return
    until = life.time_of("finished") + checked.options.result_retention_sec
    came: dict[int, float] = {}
    for event in life.events:
        if event.what == "arrived" and event.detail["lease"] == "own":
            if event.detail["route"] != "renew":
                came[event.detail["request"]] = event.time
        elif event.what == "server-answered" and (
            event.detail["status"] != OK or event.detail.get("refused")
        ):
            at = came.get(event.detail["request"], math.inf)
            if gone_at <= at < min(until - EPSILON_SEC, life.lost_at):
                route, status = event.detail["route"], event.detail["status"]
                message = f"a {route} after a disconnect was answered {status}"
                yield Finding(life.rollout_id, message, event.time)


def _check_outcome(checked: Checked, life: Life, finished: Event) -> Iterator[Finding]:
    status, category = finished.detail["status"], finished.detail.get("category")
    stopped = life.time_of("stop-requested") <= finished.time
    if status == "cancelled" and not stopped:
        yield Finding(life.rollout_id, "was cancelled, and nobody had asked", finished.time)
    plan = checked.plans.get(life.rollout_id)
    if plan is None or category == "lease_expired" or stopped:
        return
    expected = expected_outcomes(plan)
    if checked.history.paused_sec(life.time_of("admitted"), finished.time):
        expected |= _late_outcomes(plan)
    if (status, category) not in expected:
        message = f"ended as {status} ({category}), which its plan does not lead to"
        yield Finding(life.rollout_id, message, finished.time)
    reward = plan.reward if plan.grade and status == "success" else None
    for answer in life.answers:
        if "digest" in answer.detail and answer.detail["reward"] != reward:
            message = f"its reward is {answer.detail['reward']}, not {reward}"
            yield Finding(life.rollout_id, message, answer.time)
