"""Checks of leases: who polls keeps one, who is silent loses it in time."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rollout.simulation.findings import EPSILON_SEC, Checked, Finding
from rollout.simulation.lives import History, Life, is_own_renewal

__all__ = ["check_leases"]

_TICK_SEC = 0.001
"""How much later than its deadline an expiry may be noticed."""

_OK = 200
_MISSED_SHARE = 1 / 30
"""How much of a pause of all processes a server may miss, as a share of the lease."""


def check_leases(checked: Checked) -> Iterator[Finding]:
    """Who polls within the lease keeps it; silence ends it at its deadline, and says stop."""
    history, lease = checked.history, checked.options.polling_lease_timeout_sec
    for life in history.lives:
        ended = min(life.time_of("finished"), life.lost_at)
        if life.expired:
            earliest = _held_for_sure(history, life, lease)
            if ended < earliest - EPSILON_SEC:
                message = f"lost its lease {earliest - ended:.3f} s before its end"
                yield Finding(life.rollout_id, message, ended)
        latest, contact = _held_at_most(history, life, lease)
        due = contact + lease
        late = due + EPSILON_SEC < ended < life.lost_at and not life.expired
        if late and not history.paused_sec(contact, due - EPSILON_SEC):
            yield Finding(life.rollout_id, "its result came after its lease had ended", ended)
        if ended > latest and history.ends_at > latest:
            message = f"nobody has polled in time since {contact:.3f}, and its lease has not ended"
            yield Finding(life.rollout_id, message, latest)
        stopped_at = min(life.over_at, life.time_of("stop-requested"))
        if life.expired and stopped_at > ended + EPSILON_SEC:
            message = "its lease ended, and its execution was not stopped"
            yield Finding(life.rollout_id, message, ended)
        if life.expired:
            yield from _check_final(life, ended)
        yield from _check_renewals(life, ended)
    yield from _check_together(history)


def _check_together(history: History) -> Iterator[Finding]:
    """Leases that one request renewed end together: no agent starts in a slot of another one."""
    groups: dict[tuple[int, int], list[Life]] = {}
    for life in history.lives:
        if life.expired:
            groups.setdefault((life.process, life.renewed_by), []).append(life)
    for lives in groups.values():
        first = min(life.time_of("finished") for life in lives)
        for life in lives:
            began = life.time_of("workflow-started")
            if first < began < math.inf:
                message = "its agent began when leases of the same request had ended"
                yield Finding(life.rollout_id, message, began)


def _check_final(life: Life, ended: float) -> Iterator[Finding]:
    """A lease that has ended is not revived."""
    for answer in life.answers:  # but for one that was being written as it ended
        if answer.time > ended + EPSILON_SEC and answer.detail.get("category") != "lease_expired":
            message = f"its lease had ended, and a poll was answered {answer.detail['state']}"
            yield Finding(life.rollout_id, message, answer.time)


def _check_renewals(life: Life, ended: float) -> Iterator[Finding]:
    """What opens or renews a feed renews every lease that it proves, if it is answered so."""
    waiting: dict[int, int] = {}
    renewed = 0
    for event in life.events:
        if is_own_renewal(event) and event.time < ended:
            waiting[event.detail["request"]] = renewed
        elif event.what in {"lease-renewed", "lease-refused"}:
            renewed += 1
        elif event.what == "server-answered":
            before = waiting.pop(event.detail["request"], None)
            taken = event.detail["status"] == _OK and not event.detail.get("refused")
            if before == renewed and taken and event.time < ended:
                message = f"a request to {event.detail['route']} did not renew its lease"
                yield Finding(life.rollout_id, message, event.time)


def _held_for_sure(history: History, life: Life, lease: float) -> float:
    """Return until when the lease certainly holds, by the polls that certainly renewed it."""
    missed = lease * _MISSED_SHARE

    def held(contact: float, now: float) -> float:
        over = history.paused_within(contact, now)
        return contact + lease + sum(max(0.0, length - missed) for length in over)

    contact = life.contacts[0]
    for moment in life.contacts:
        # A poll that waits for the server to go on may be seen after the end.
        hair = missed if history.paused_sec(moment, moment) else EPSILON_SEC
        if moment < held(contact, moment) - (hair if history.pauses else 0.0):
            contact = moment
    return held(contact, life.time_of("finished"))


def _held_at_most(history: History, life: Life, lease: float) -> tuple[float, float]:
    """Return until when the lease may hold, and from which poll on.

    A poll that comes at the deadline or later does not revive the lease, unless the server
    stood still meanwhile: that is not held against the caller.
    """
    hair = EPSILON_SEC if history.pauses else 0.0
    contact, until = -math.inf, math.inf
    for moment in life.contacts:
        if moment < until + history.paused_sec(contact, moment) + hair:
            contact, until = moment, moment + lease
    return history.delayed(contact, until + _TICK_SEC), contact
