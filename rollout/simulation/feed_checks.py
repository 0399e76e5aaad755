"""A check of the result feed: who is attached to one is told its result."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attrs import define

from rollout.simulation.findings import EPSILON_SEC, Checked, Finding
from rollout.simulation.lives import Life
from rollout.simulation.trace import Event

__all__ = ["check_told"]

_WRITES = 2
"""A result is told once the write that is under way is over."""


@define
class _Attachment:
    """A feed that reports a rollout.

    Attributes:
        request: The request that opened it.
        since: Since when.
        write_sec: How long each of its writes takes, in seconds.
        until: Until when it did.
        told_at: When it told the result.
    """

    request: int
    since: float
    write_sec: float
    until: float = math.inf
    told_at: float = math.inf


def check_told(checked: Checked) -> Iterator[Finding]:
    """A feed tells the result of every rollout that it was opened for, while it is open."""
    history = checked.history
    shutdowns = {
        event.detail["process"]: event.time
        for event in history.world
        if event.what == "shutdown-begins"
    }
    for life in history.lives:
        finished = life.time_of("finished")
        for attachment in _attachments(life):
            began = max(attachment.since, finished)
            due = history.delayed(began, began + _WRITES * attachment.write_sec + EPSILON_SEC)
            over = (attachment.until, life.lost_at, shutdowns.get(life.process, math.inf))
            if attachment.told_at > due and min(*over, history.ends_at) > due:
                message = "a feed that reports it did not tell its result"
                yield Finding(life.rollout_id, message, due)


def _attachments(life: Life) -> Iterator[_Attachment]:
    """Return the feeds that were opened for a rollout, in order."""
    current: _Attachment | None = None
    for event in life.events:
        detail = event.detail
        if detail.get("route") != "feed":
            continue
        if _opens(event):
            if current is not None:
                current.until = min(current.until, event.time)
                yield current
            current = _Attachment(detail["request"], event.time, detail["write_sec"])
        elif current is not None and detail["request"] == current.request:
            if event.what == "disconnected":
                current.until = event.time
            elif "digest" in detail:
                current.told_at = min(current.told_at, event.time)
    if current is not None:
        yield current


def _opens(event: Event) -> bool:
    return event.what == "server-answered" and event.detail.get("refused") is False
