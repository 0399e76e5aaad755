"""Checks of what the server did."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attrs import define, field

from rollout.simulation.findings import EPSILON_SEC, Checked, Finding, rank
from rollout.simulation.lives import Life
from rollout.simulation.workload import RolloutPlan, expected_outcomes

__all__ = [
    "check_disconnects",
    "check_executions",
    "check_leases",
    "check_published_statuses",
    "check_retention",
    "check_shutdown",
    "check_slots",
]

_TICK_SEC = 1.5
"""How much later than its deadline an expiry may be noticed."""

OK = 200
CONFLICT = 409


def check_executions(checked: Checked) -> Iterator[Finding]:
    """At most one execution for an id in a process; one result, which never changes."""
    current: dict[tuple[int, str], Life] = {}
    for life in checked.history.lives:
        key = (life.process, life.rollout_id)
        began = life.time_of("admitted")
        before = current.get(key)
        if before is not None and before.time_of("forgotten") > began:
            yield Finding(life.rollout_id, "was admitted a second time", began)
        current[key] = life
        for what in ("execution-started", "workflow-started", "finished"):
            times = life.times(what)
            if len(times) > 1:
                yield Finding(life.rollout_id, f"{what} more than once", times[1])
        results = {}
        for answer in life.answers():
            if "digest" in answer.detail:
                results[answer.detail["digest"]] = answer.time
        if len(results) > 1:
            yield Finding(life.rollout_id, "its terminal result changed", max(results.values()))


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
        marks = life.times("agent-started")
        if len(marks) > 1:
            yield Finding(life.rollout_id, "its agent started twice", marks[1])
        yield from _forward(life.rollout_id, [(e.time, e.detail) for e in life.answers()])


def _forward(rollout_id: str, answers: list[tuple[float, dict[str, object]]]) -> Iterator[Finding]:
    at, started = -1, None
    for time, detail in answers:
        state = str(detail["state"])
        if rank(state) < at:
            yield Finding(rollout_id, f"was reported as {state} after it was past that", time)
        at = max(at, rank(state))
        if started is not None and detail["started"] != started:
            yield Finding(rollout_id, f"its start time changed to {detail['started']}", time)
        started = started or detail["started"]


def check_leases(checked: Checked) -> Iterator[Finding]:
    """Who polls within the lease keeps it; silence ends it at its deadline, and says stop."""
    history, lease = checked.history, checked.options.polling_lease_timeout_sec
    for life in history.lives:
        finished = life.first("finished")
        ended = min(life.time_of("finished"), life.lost_at)
        held_until, contact = -math.inf, -math.inf
        for moment in life.contacts():
            # A poll in time renews; one that comes too late does not revive the lease, unless
            # the server stood still meanwhile, which it does not hold against the caller.
            if contact == -math.inf or moment < held_until + history.paused_sec(contact, moment):
                contact, held_until = moment, moment + lease
            if moment >= ended:
                break
        expired = finished is not None and finished.detail.get("category") == "lease_expired"
        last = max((t for t in life.contacts() if t <= ended), default=contact)
        if expired and ended < min(held_until, last + lease) - EPSILON_SEC and last == contact:
            yield Finding(
                life.rollout_id,
                f"lost its lease {held_until - ended:.3f} s before its end "
                f"(last poll at {contact:.3f})",
                ended,
            )
        latest = held_until + _TICK_SEC + history.paused_sec(contact, held_until + _TICK_SEC)
        latest += history.paused_sec(held_until + _TICK_SEC, latest)
        if ended > latest and history.ends_at > latest:
            yield Finding(
                life.rollout_id,
                f"nobody has polled since {contact:.3f}, and its lease has not ended",
                latest,
            )
        if expired and life.over_at > ended + EPSILON_SEC:
            stops = life.times("stop-requested")
            if not stops or stops[0] > ended + EPSILON_SEC:
                yield Finding(
                    life.rollout_id, "its lease ended, and its execution was not stopped", ended
                )


@define
class _Occupancy:
    """Who is in a server process at one moment."""

    admitted: dict[str, None] = field(factory=dict)
    working: dict[str, None] = field(factory=dict)

    def take(self, what: str, rollout_id: str) -> None:
        if what == "admitted":
            self.admitted[rollout_id] = None
        elif what == "workflow-started":
            self.working[rollout_id] = None
        elif what == "execution-ended":
            self.admitted.pop(rollout_id, None)
            self.working.pop(rollout_id, None)


def check_slots(checked: Checked) -> Iterator[Finding]:
    """Slots never exceed the limit, none leaks, and the queue is cut where it should be."""
    limit = checked.options.max_concurrent
    if limit is None or not checked.plans:
        return
    depth = math.inf if checked.options.max_queue_depth is None else checked.options.max_queue_depth
    there = _Occupancy()
    process, since = 0, -math.inf
    for event in checked.history.trace:
        if event.time > since + EPSILON_SEC and len(there.working) < limit:
            for rollout_id in there.admitted.keys() - there.working.keys():
                free = limit - len(there.working)
                message = f"waits for a slot although {free} of {limit} should be free"
                yield Finding(rollout_id, message, event.time)
        since = max(since, event.time)
        if event.what in {"server-crashed", "server-up", "server-down"}:
            there, process = _Occupancy(), event.detail["process"]
        elif event.detail.get("process", process) == process:
            there.take(event.what, event.rollout_id)
        if len(there.working) > limit:
            names = ", ".join(there.working)
            message = f"{len(there.working)} slots of {limit} are taken: {names}"
            yield Finding(event.rollout_id, message, event.time)
        if len(there.admitted) > limit + depth:
            message = f"was admitted beyond {limit} slots and {depth} places in the queue"
            yield Finding(event.rollout_id, message, event.time)


def check_retention(checked: Checked) -> Iterator[Finding]:
    """A result stays readable for its time; its id is reserved until all is over."""
    history, retention = checked.history, checked.options.result_retention_sec
    for life in history.lives:
        finished = life.time_of("finished")
        if finished == math.inf:
            continue
        until = max(finished + retention, life.over_at)
        forgotten = life.time_of("forgotten")
        if forgotten < until - EPSILON_SEC:
            yield Finding(
                life.rollout_id, f"was forgotten {until - forgotten:.3f} s too early", forgotten
            )
        late = until + _TICK_SEC + history.paused_sec(finished, until + _TICK_SEC)
        if min(forgotten, life.lost_at) > late and history.ends_at > late:
            yield Finding(life.rollout_id, "its id was not given back in time", late)
    yield from _check_readable(checked)


def _check_readable(checked: Checked) -> Iterator[Finding]:
    retention = checked.options.result_retention_sec
    for life in checked.history.lives:
        finished = life.time_of("finished")
        arrived = {e.detail["request"]: e for e in life.events if e.what == "arrived"}
        for answer in life.events:
            if answer.what != "server-answered" or answer.detail["request"] not in arrived:
                continue
            came = arrived[answer.detail["request"]].time
            route, status = answer.detail["route"], answer.detail["status"]
            in_time = came < min(finished + retention - EPSILON_SEC, life.lost_at)
            if route == "poll" and in_time and status != OK:
                yield Finding(
                    life.rollout_id, f"a poll within its time was answered {status}", answer.time
                )
            known = life.time_of("admitted") < came < life.time_of("forgotten") - EPSILON_SEC
            if route == "admit" and known and status not in {CONFLICT, 503}:
                yield Finding(
                    life.rollout_id,
                    f"an admission of its id was answered {status}, not {CONFLICT}",
                    answer.time,
                )


def check_shutdown(checked: Checked) -> Iterator[Finding]:
    """Every stage ends within its budget, and nothing outlives the server."""
    history, budget = checked.history, checked.options.shutdown
    begins = history.trace.select("shutdown-begins")
    ends = history.trace.select("shutdown-ends")
    for begin in begins:
        end = next((e.time for e in ends if e.time >= begin.time), math.inf)
        process = begin.detail["process"]
        lives = [life for life in history.lives if life.process == process]
        if end - begin.time > budget.total_sec + EPSILON_SEC:
            yield Finding("", f"the shutdown took {end - begin.time:.3f} s", min(end, 1e300))
        for life in lives:
            if life.time_of("admitted") > begin.time:
                yield Finding(life.rollout_id, "was admitted during the shutdown", end)
            asked_by = begin.time + budget.drain_sec + EPSILON_SEC
            asked = min(life.time_of("stop-requested"), life.time_of("finished"))
            if min(life.over_at, end) > asked_by and asked > asked_by:
                yield Finding(life.rollout_id, "was not asked to stop after the drain", asked_by)
            running = life.time_of("execution-ended")
            if running > end + EPSILON_SEC:
                yield Finding(life.rollout_id, "its execution outlived the shutdown", end)
            forced_by = asked_by + budget.cleanup_sec + budget.forced_sec + EPSILON_SEC
            if life.time_of("finished") > forced_by and end > forced_by:
                yield Finding(life.rollout_id, "had no end after all stages", forced_by)
        late = [e for e in history.trace.select("workflow-started") if e.time > end + EPSILON_SEC]
        for event in late:
            yield Finding(event.rollout_id, "was started after the shutdown", event.time)


def _late_outcomes(plan: RolloutPlan) -> set[tuple[str, str | None]]:
    """Return what else may come out where everything stood still for a while."""
    limited = plan.agent_timeout_sec is not None or plan.grader_timeout_sec is not None
    return {("failure", "timeout")} if limited else set()


def check_disconnects(checked: Checked) -> Iterator[Finding]:
    """What came out of a rollout is what it was going to be, whoever disconnected meanwhile."""
    shutdown = min(
        (e.time for e in checked.history.trace.select("shutdown-begins")), default=math.inf
    )
    for life in checked.history.lives:
        finished = life.first("finished")
        if finished is None or finished.time >= min(life.lost_at, shutdown):
            continue
        status, category = finished.detail["status"], finished.detail.get("category")
        stopped = life.time_of("stop-requested") <= finished.time
        if status == "cancelled" and not stopped:
            yield Finding(life.rollout_id, "was cancelled, and nobody had asked", finished.time)
        plan = checked.plans.get(life.rollout_id)
        if plan is None or category == "lease_expired" or stopped:
            continue
        expected = expected_outcomes(plan)
        if checked.history.paused_sec(life.time_of("admitted"), finished.time):
            expected |= _late_outcomes(plan)
        if (status, category) not in expected:
            yield Finding(
                life.rollout_id,
                f"ended as {status} ({category}), which its plan does not lead to",
                finished.time,
            )
        for answer in life.answers():
            reward = plan.reward if plan.grade and status == "success" else None
            if "digest" in answer.detail and answer.detail["reward"] != reward:
                yield Finding(
                    life.rollout_id,
                    f"its reward is {answer.detail['reward']}, not {reward}",
                    answer.time,
                )
