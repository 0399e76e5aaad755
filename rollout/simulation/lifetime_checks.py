"""Checks of leases, of the retention of results, and of the stages of a shutdown."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rollout.simulation.history import (
    EPSILON_SEC,
    Checked,
    Finding,
    History,
    ServedRollout,
    is_own_poll,
    is_own_renewal,
)
from rollout.simulation.trace import Event

__all__ = ["check_leases", "check_retention", "check_shutdown"]


_EXPIRY_SEC = 0.001
"""How much later than its deadline an expiry may be noticed."""

_FORGETTING_SEC = 1.5
"""How much later than its time a result may be forgotten."""

_MISSED_SHARE = 1 / 30
"""How much of a pause of all processes a server may miss, as a share of the lease."""

_BETWEEN_POLLS_SEC = 5.0
"""How long after its last request a caller counts as one who still reads."""

_SLACK_SEC = 1.0
_OK = 200
_INSIDE = {"server", "workflow", "grader"}
_REFUSALS = {409, 503}
_BUSY = 429


# --- leases -------------------------------------------------------------------------------------


def check_leases(checked: Checked) -> Iterator[Finding]:
    """Check that polls keep a lease, and that silence ends it and stops the rollout in time."""
    history, lease = checked.history, checked.options.polling_lease_timeout_sec
    for rollout in history.rollouts:
        ended = min(rollout.time_of("finished"), rollout.lost_at)
        if rollout.expired:
            earliest = _held_for_sure(history, rollout, lease)
            if ended < earliest - EPSILON_SEC:
                message = f"lost its lease {earliest - ended:.3f} s before its end"
                yield Finding(rollout.rollout_id, message, ended)
        latest, contact = _held_at_most(history, rollout, lease)
        due = contact + lease
        late = due + EPSILON_SEC < ended < rollout.lost_at and not rollout.expired
        if late and not history.paused_sec(contact, due - EPSILON_SEC):
            yield Finding(rollout.rollout_id, "its result came after its lease had ended", ended)
        if ended > latest and history.ends_at > latest:
            message = f"nobody has polled in time since {contact:.3f}, and its lease has not ended"
            yield Finding(rollout.rollout_id, message, latest)
        stopped_at = min(rollout.over_at, rollout.time_of("stop-requested"))
        if rollout.expired and stopped_at > ended + EPSILON_SEC:
            message = "its lease ended, and its execution was not stopped"
            yield Finding(rollout.rollout_id, message, ended)
        if rollout.expired:
            yield from _check_final(rollout, ended)
        yield from _check_renewals(rollout, ended)
    yield from _check_together(history)


def _check_together(history: History) -> Iterator[Finding]:
    """Check that leases which one request renewed end together, before a freed slot is used."""
    groups: dict[tuple[int, int], list[ServedRollout]] = {}
    for rollout in history.rollouts:
        if rollout.expired:
            groups.setdefault((rollout.process, rollout.renewed_by), []).append(rollout)
    for rollouts in groups.values():
        first = min(rollout.time_of("finished") for rollout in rollouts)
        for rollout in rollouts:
            began = rollout.time_of("workflow-started")
            if first < began < math.inf:
                message = "its agent began when leases of the same request had ended"
                yield Finding(rollout.rollout_id, message, began)


def _check_final(rollout: ServedRollout, ended: float) -> Iterator[Finding]:
    """Check that a lease that has ended is not revived."""
    for answer in rollout.answers:  # but for one that was being written as it ended
        if answer.time > ended + EPSILON_SEC and answer.detail.get("category") != "lease_expired":
            message = f"its lease had ended, and a poll was answered {answer.detail['state']}"
            yield Finding(rollout.rollout_id, message, answer.time)


def _check_renewals(rollout: ServedRollout, ended: float) -> Iterator[Finding]:
    """Check that a request that opens or renews a feed renews the leases that it proves."""
    waiting: dict[int, int] = {}
    renewed = 0
    for event in rollout.events:
        if is_own_renewal(event) and event.time < ended:
            waiting[event.detail["request"]] = renewed
        elif event.what in {"lease-renewed", "lease-refused"}:
            renewed += 1
        elif event.what == "server-answered":
            before = waiting.pop(event.detail["request"], None)
            taken = event.detail["status"] == _OK and not event.detail.get("refused")
            if before == renewed and taken and event.time < ended:
                message = f"a request to {event.detail['route']} did not renew its lease"
                yield Finding(rollout.rollout_id, message, event.time)


def _held_for_sure(history: History, rollout: ServedRollout, lease: float) -> float:
    """Return the earliest time at which the lease may end."""
    missed = lease * _MISSED_SHARE

    def held(contact: float, now: float) -> float:
        over = history.paused_within(contact, now)
        return contact + lease + sum(max(0.0, length - missed) for length in over)

    contact = rollout.contacts[0]
    for moment in rollout.contacts:
        # A poll that waits for the server to go on may be seen after the end.
        hair = missed if history.paused_sec(moment, moment) else EPSILON_SEC
        if moment < held(contact, moment) - (hair if history.pauses else 0.0):
            contact = moment
    return held(contact, rollout.time_of("finished"))


def _held_at_most(history: History, rollout: ServedRollout, lease: float) -> tuple[float, float]:
    """Return the latest time at which the lease must end, and the poll that it counts from.

    A poll that comes at the deadline or later does not revive the lease, unless the server
    stood still meanwhile: that is not held against the caller.
    """
    hair = EPSILON_SEC if history.pauses else 0.0
    contact, until = -math.inf, math.inf
    for moment in rollout.contacts:
        if moment < until + history.paused_sec(contact, moment) + hair:
            contact, until = moment, moment + lease
    return history.delayed(contact, until + _EXPIRY_SEC), contact


# --- retention ----------------------------------------------------------------------------------


def check_retention(checked: Checked) -> Iterator[Finding]:
    """Check that a result stays readable for its time, and its id reserved until all is over."""
    history = checked.history
    for rollout in history.rollouts:
        retention = checked.retention_sec(rollout)
        yield from _check_answers(checked, rollout)
        finished = rollout.time_of("finished")
        forgotten = rollout.time_of("forgotten")
        if finished == math.inf:
            if forgotten < rollout.lost_at:
                yield Finding(rollout.rollout_id, "was forgotten before its end", forgotten)
            continue
        until = max(finished + retention, rollout.over_at)
        if forgotten < until - EPSILON_SEC:
            message = f"was forgotten {until - forgotten:.3f} s too early"
            yield Finding(rollout.rollout_id, message, forgotten)
        late = history.delayed(finished, until + _FORGETTING_SEC)
        if min(forgotten, rollout.closed_at) > late and history.ends_at > late:
            yield Finding(rollout.rollout_id, "its id was not given back in time", late)


def _check_answers(checked: Checked, rollout: ServedRollout) -> Iterator[Finding]:
    """Check what polls and admissions of its id were answered while it was known."""
    readable_until = rollout.time_of("finished") + checked.retention_sec(rollout)
    forgotten = rollout.time_of("forgotten")
    came: dict[int, Event] = {}
    for event in rollout.events:
        if event.what == "arrived":
            came[event.detail["request"]] = event
        if event.what != "server-answered" or event.detail["request"] not in came:
            continue
        arrival = came.pop(event.detail["request"])
        route, status = event.detail["route"], event.detail["status"]
        handled = arrival.time + checked.history.paused_sec(arrival.time, event.time)
        if route == "poll" and arrival.detail["lease"] == "own":
            in_time = handled < min(readable_until - EPSILON_SEC, rollout.lost_at)
            if in_time and status != _OK:
                message = f"a poll within its time was answered {status}"
                yield Finding(rollout.rollout_id, message, event.time)
            too_late = rollout.first("forgotten") and arrival.time > forgotten + EPSILON_SEC
            if "digest" in event.detail and too_late:
                yield Finding(rollout.rollout_id, "could be read after its time", event.time)
        known = handled < min(forgotten, rollout.lost_at) - EPSILON_SEC
        if route not in {"admit", "batch"} or not known or rollout.is_replay(arrival):
            continue
        # One that is in the state alone is found once there is room.
        if status not in _REFUSALS and not (status == _BUSY and checked.options.durable):
            message = f"an admission of its id was answered {status}, not 409"
            yield Finding(rollout.rollout_id, message, event.time)


# --- shutdown -----------------------------------------------------------------------------------


def check_shutdown(checked: Checked) -> Iterator[Finding]:
    """Check that every stage ends within its budget, and that nothing outlives the server."""
    history = checked.history
    yield from _check_outlived(checked)
    for begin in history.world:
        if begin.what != "shutdown-begins":
            continue
        process = begin.detail["process"]
        end = min(
            (
                event.time
                for event in history.world
                if event.what in {"shutdown-ends", "server-crashed"}
                and event.detail["process"] == process
                and event.time >= begin.time
            ),
            default=math.inf,
        )
        budget = checked.options.shutdown.total_sec
        latest = history.delayed(begin.time, begin.time + budget + EPSILON_SEC)
        if min(end, history.ends_at) > latest:
            message = f"the shutdown took longer than the {budget:g} s of its budget"
            yield Finding("", message, latest)
        rollouts = [rollout for rollout in history.rollouts if rollout.process == process]
        for rollout in rollouts:
            yield from _check_stages(checked, rollout, begin.time, end)
        crashed = any(
            event.what == "server-crashed" and event.time == end for event in history.world
        )
        if not crashed and not history.paused_sec(begin.time, min(end, history.ends_at)):
            yield from _check_delivery(checked, rollouts, begin.time, end)


def _check_stages(
    checked: Checked, rollout: ServedRollout, begin: float, end: float
) -> Iterator[Finding]:
    budget = checked.options.shutdown
    slack = EPSILON_SEC + checked.history.paused_sec(begin, min(end, checked.history.ends_at))
    admitted = rollout.time_of("admitted")
    # With a state, it may have been admitted before, and be kept in this moment.
    if admitted > begin + (EPSILON_SEC if checked.options.durable else 0.0):
        yield Finding(rollout.rollout_id, "was admitted during the shutdown", admitted)
        return
    over, finished = rollout.over_at, rollout.time_of("finished")
    asked = rollout.time_of("stop-requested")
    drained = begin + budget.drain_sec
    if min(over, end) > drained + slack and asked > drained + slack:
        yield Finding(rollout.rollout_id, "was not asked to stop after the drain", drained + slack)
    early = begin <= asked < drained - EPSILON_SEC and not rollout.expired
    if early and not checked.history.was_cancelled(rollout, asked):
        yield Finding(rollout.rollout_id, "was asked to stop within the drain", asked)
    forced = drained + budget.cleanup_sec
    given_up = forced + budget.forced_sec
    gave_up = begin < finished < min(over, given_up) - EPSILON_SEC
    if gave_up and not rollout.expired:
        message = "was given up before cleanup and force had had their time"
        yield Finding(rollout.rollout_id, message, finished)
    if min(finished, rollout.lost_at) > given_up + slack and end > given_up + slack:
        yield Finding(rollout.rollout_id, "had no end after all stages", given_up + slack)
    if over > end + EPSILON_SEC and end < given_up - EPSILON_SEC and end < rollout.lost_at:
        yield Finding(rollout.rollout_id, "was left behind before its time was up", end)


def _check_delivery(
    checked: Checked, rollouts: list[ServedRollout], begin: float, end: float
) -> Iterator[Finding]:
    """Check that the shutdown waits for callers that still read, and for no others."""
    budget = checked.options.shutdown
    given_up = begin + budget.drain_sec + budget.cleanup_sec + budget.forced_sec
    here = [
        rollout
        for rollout in rollouts
        if rollout.over_at >= begin or rollout.time_of("forgotten") > begin
    ]
    work = [rollout.over_at for rollout in here if rollout.over_at >= begin]
    ended = min(max(work, default=begin), given_up)
    latest = ended + budget.delivery_sec
    last = ended
    for rollout in here:
        if rollout.time_of("finished") > end or rollout.time_of("admitted") > begin:
            continue
        least, most = _awaited_until(checked.history, rollout, ended, end)
        last = max(last, min(latest, most))
        if end < min(latest, least) - EPSILON_SEC:
            message = "the shutdown did not wait for who still read its result"
            yield Finding(rollout.rollout_id, message, end)
    # Who reads a result that a process before it has left is not among these, nor is one who was
    # cancelled before it arrived.
    complete = not checked.options.durable and not checked.history.early_cancels
    # The backend of a front lets its workers hear of the last cancel requests.
    slack = _SLACK_SEC + (budget.backend_sec if checked.history.is_front else 0.0)
    if last + slack < end < math.inf and complete:
        yield Finding("", f"the shutdown waited for nobody since {last:.3f}", end)


def _awaited_until(
    history: History, rollout: ServedRollout, ended: float, end: float
) -> tuple[float, float]:
    """Return the earliest and the latest end of the wait for a result to be fetched."""
    least = most = -math.inf
    feed, held, gone = False, set[int](), set[int]()
    for event in (event for event in rollout.events if event.time <= end):
        detail = event.detail
        route, later = detail.get("route"), event.time + _BETWEEN_POLLS_SEC
        polled = is_own_poll(event) or is_own_renewal(event) or rollout.is_replay(event)
        if event.what == "admitted" or polled:
            least = most = later
            if route == "poll":
                held.add(detail["request"])
        elif event.what == "server-answered" and route in {"poll", "feed"} and "state" in detail:
            written = event.time + history.write_secs.get(detail["request"], 0.0)
            if history.lost_feeds.get(detail["request"], math.inf) <= written + EPSILON_SEC:
                least, most, feed = -math.inf, max(most, later), False  # it may have arrived
            elif "digest" in detail:
                waits = route == "feed" and written < rollout.time_of("forgotten")
                told = any(  # by a poll, at the same time
                    other.what == "server-answered"
                    and other.detail.get("route") == "poll"
                    and "digest" in other.detail
                    and other.time <= end
                    for other in rollout.events
                )
                return (written if waits and not told else -math.inf), max(ended, written)
            else:
                least, most = later, written + _BETWEEN_POLLS_SEC
            held.discard(detail["request"])
        if route == "feed" and detail.get("refused") is False:
            feed = detail["request"] not in gone  # it may open in the moment in which it is lost
        elif event.what == "disconnected":
            gone.add(detail["request"])
            most = later
            answered = route == "poll" and rollout.time_of("finished") <= event.time
            least = -math.inf if answered else least  # it may have been, in that moment
            feed = feed and route != "feed"
            held.discard(detail["request"])
    if feed or held:
        least = most = math.inf
    return (-math.inf if rollout.time_of("forgotten") < end else least), most


def _check_outlived(checked: Checked) -> Iterator[Finding]:
    """Check that nothing of a server process happens once it is gone."""
    gone: set[int] = set()
    for event in checked.history.trace:
        if event.who == "world":
            if event.what == "server-gone":
                gone.add(event.detail["process"])
        elif gone and event.who in _INSIDE and event.detail.get("process") in gone:
            yield Finding(event.rollout_id, f"{event.what} after its server was gone", event.time)
