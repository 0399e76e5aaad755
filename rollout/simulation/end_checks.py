"""Checks of ends: how long results stay, and how a server shuts down."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rollout.simulation.findings import EPSILON_SEC, Checked, Finding
from rollout.simulation.lives import Life, is_own_poll, is_own_renewal
from rollout.simulation.trace import Event

__all__ = ["check_retention", "check_shutdown"]

_TICK_SEC = 1.5
_BETWEEN_POLLS_SEC = 5.0
"""How long after its last request a caller counts as one who still reads."""

_SLACK_SEC = 1.0
_OK = 200
_INSIDE = {"server", "workflow", "grader"}
_REFUSALS = {409, 503}


# --- retention ----------------------------------------------------------------------------------


def check_retention(checked: Checked) -> Iterator[Finding]:
    """A result stays readable for its time; its id is reserved until all is over."""
    history, retention = checked.history, checked.options.result_retention_sec
    for life in history.lives:
        yield from _check_answers(checked, life)
        finished = life.time_of("finished")
        forgotten = life.time_of("forgotten")
        if finished == math.inf:
            if forgotten < life.lost_at:
                yield Finding(life.rollout_id, "was forgotten before its end", forgotten)
            continue
        until = max(finished + retention, life.over_at)
        if forgotten < until - EPSILON_SEC:
            message = f"was forgotten {until - forgotten:.3f} s too early"
            yield Finding(life.rollout_id, message, forgotten)
        late = history.delayed(finished, until + _TICK_SEC)
        if min(forgotten, life.closed_at) > late and history.ends_at > late:
            yield Finding(life.rollout_id, "its id was not given back in time", late)


def _check_answers(checked: Checked, life: Life) -> Iterator[Finding]:
    """Check what polls and admissions of its id were answered while it was known."""
    readable_until = life.time_of("finished") + checked.options.result_retention_sec
    forgotten = life.time_of("forgotten")
    came: dict[int, Event] = {}
    for event in life.events:
        if event.what == "arrived":
            came[event.detail["request"]] = event
        if event.what != "server-answered" or event.detail["request"] not in came:
            continue
        arrival = came.pop(event.detail["request"])
        route, status = event.detail["route"], event.detail["status"]
        handled = arrival.time + checked.history.paused_sec(arrival.time, event.time)
        if route == "poll" and arrival.detail["lease"] == "own":
            in_time = handled < min(readable_until - EPSILON_SEC, life.lost_at)
            if in_time and status != _OK:
                message = f"a poll within its time was answered {status}"
                yield Finding(life.rollout_id, message, event.time)
            if "digest" in event.detail and arrival.time > forgotten + EPSILON_SEC:
                yield Finding(life.rollout_id, "could be read after its time", event.time)
        known = handled < min(forgotten, life.lost_at) - EPSILON_SEC
        if route in {"admit", "batch"} and known and status not in _REFUSALS:
            message = f"an admission of its id was answered {status}, not 409"
            yield Finding(life.rollout_id, message, event.time)


# --- shutdown -----------------------------------------------------------------------------------


def check_shutdown(checked: Checked) -> Iterator[Finding]:
    """Every stage ends within its budget, and nothing outlives the server."""
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
        lives = [life for life in history.lives if life.process == process]
        for life in lives:
            yield from _check_stages(checked, life, begin.time, end)
        crashed = any(
            event.what == "server-crashed" and event.time == end for event in history.world
        )
        if not crashed and not history.paused_sec(begin.time, min(end, history.ends_at)):
            yield from _check_delivery(checked, lives, begin.time, end)


def _check_stages(checked: Checked, life: Life, begin: float, end: float) -> Iterator[Finding]:
    budget = checked.options.shutdown
    slack = EPSILON_SEC + checked.history.paused_sec(begin, min(end, checked.history.ends_at))
    if life.time_of("admitted") > begin:
        admitted = life.time_of("admitted")
        yield Finding(life.rollout_id, "was admitted during the shutdown", admitted)
        return
    over, finished = life.over_at, life.time_of("finished")
    asked = life.time_of("stop-requested")
    drained = begin + budget.drain_sec
    if min(over, end) > drained + slack and asked > drained + slack:
        yield Finding(life.rollout_id, "was not asked to stop after the drain", drained + slack)
    early = begin <= asked < drained - EPSILON_SEC and not life.expired
    if early and not checked.history.was_cancelled(life, asked):
        yield Finding(life.rollout_id, "was asked to stop within the drain", asked)
    forced = drained + budget.cleanup_sec
    given_up = forced + budget.forced_sec
    gave_up = begin < finished < min(over, given_up) - EPSILON_SEC
    if gave_up and not life.expired:
        message = "was given up before cleanup and force had had their time"
        yield Finding(life.rollout_id, message, finished)
    if min(finished, life.lost_at) > given_up + slack and end > given_up + slack:
        yield Finding(life.rollout_id, "had no end after all stages", given_up + slack)
    if over > end + EPSILON_SEC and end < given_up - EPSILON_SEC and end < life.lost_at:
        yield Finding(life.rollout_id, "was left behind before its time was up", end)


def _check_delivery(
    checked: Checked, lives: list[Life], begin: float, end: float
) -> Iterator[Finding]:
    """The shutdown waits for those who still read, and for nobody else."""
    budget = checked.options.shutdown
    given_up = begin + budget.drain_sec + budget.cleanup_sec + budget.forced_sec
    here = [life for life in lives if life.over_at >= begin or life.time_of("forgotten") > begin]
    work = [life.over_at for life in here if life.over_at >= begin]
    ended = min(max(work, default=begin), given_up)
    latest = ended + budget.delivery_sec
    last = ended
    for life in here:
        if life.time_of("finished") > end or life.time_of("admitted") > begin:
            continue
        least, most = _awaited_until(life, checked.history.write_secs, ended, end)
        last = max(last, min(latest, most))
        if end < min(latest, least) - EPSILON_SEC:
            message = "the shutdown did not wait for who still read its result"
            yield Finding(life.rollout_id, message, end)
    if last + _SLACK_SEC < end < math.inf:
        yield Finding("", f"the shutdown waited for nobody since {last:.3f}", end)


def _awaited_until(
    life: Life, write_secs: Mapping[int, float], ended: float, end: float
) -> tuple[float, float]:
    """Return until when a shutdown waits for somebody to fetch a result, at least and at most."""
    least = most = -math.inf
    feed, held = False, set[int]()
    for event in life.events:
        if event.time > end:
            break
        detail = event.detail
        route, later = detail.get("route"), event.time + _BETWEEN_POLLS_SEC
        if event.what == "admitted" or is_own_poll(event) or is_own_renewal(event):
            least = most = later
            if route == "poll":
                held.add(detail["request"])
        elif event.what == "server-answered" and route in {"poll", "feed"} and "state" in detail:
            if "digest" in detail:
                written = event.time + write_secs.get(detail["request"], 0.0)
                waits = route == "feed" and written < life.time_of("forgotten")
                return (written if waits else -math.inf), max(ended, written)
            least = most = later
            held.discard(detail["request"])
        if route == "feed" and detail.get("refused") is False:
            feed = True
        elif event.what == "disconnected":
            most = later  # it may have been answered in that moment
            feed = feed and route != "feed"
            held.discard(detail["request"])
    if feed or held:
        least = most = math.inf
    return (-math.inf if life.time_of("forgotten") < end else least), most


def _check_outlived(checked: Checked) -> Iterator[Finding]:
    """Nothing of a server process happens once it is gone."""
    gone: set[int] = set()
    for event in checked.history.trace:
        if event.who == "world":
            if event.what == "server-gone":
                gone.add(event.detail["process"])
        elif gone and event.who in _INSIDE and event.detail.get("process") in gone:
            yield Finding(event.rollout_id, f"{event.what} after its server was gone", event.time)
