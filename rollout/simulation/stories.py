"""What a person has to know to follow what went wrong: some events, in order, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollout.simulation.trace import Event, Trace

__all__ = ["story_of"]

_MILESTONES = {
    "admitted",
    "execution-started",
    "workflow-started",
    "stop-requested",
    "finished",
    "workflow-ended",
    "grader-ended",
    "execution-ended",
}
_LEAST_CUT = 2
"""So many polls without news, besides the last one of them, are told in one line."""


def story_of(trace: Trace, rollout_id: str, at: float) -> list[Event]:
    """Tell what led to something that was plain to see at some time.

    Args:
        trace: What happened.
        rollout_id: About which rollout; empty for the server as a whole, whose story is that of
            the rollouts that had not ended by then.
        at: When it was plain to see. What came later is left out.
    """
    events = [event for event in trace if event.time <= at]
    if not rollout_id:
        over = {
            event.rollout_id
            for event in events
            if event.what == "execution-ended" and event.time < at
        }
        return [
            event
            for event in events
            if event.who == "world" or (event.what in _MILESTONES and event.rollout_id not in over)
        ]
    return list(_without_idle_polls(_about(events, rollout_id)))


def _about(events: Sequence[Event], rollout_id: str) -> list[Event]:
    """Return the events of a rollout, and those of the world since its beginning."""
    told: list[Event] = []
    process: Event | None = None
    for event in events:
        if event.rollout_id == rollout_id:
            if not told and process is not None:
                told.append(process)
            told.append(event)
        elif event.who == "world" and not event.rollout_id:
            if told:
                told.append(event)
            elif event.what == "server-up":
                process = event
    return told


def _without_idle_polls(events: Sequence[Event]) -> Iterator[Event]:
    """Tell of polls that went well and brought no news only once in a row."""
    idle = _idle_polls(events)
    held: dict[int, list[Event]] = {}
    latest = 0
    for event in events:
        request = event.detail.get("request")
        if request in idle:
            latest = request
            held.setdefault(request, []).append(event)
        elif event.what == "lease-renewed" and held:
            held[latest].append(event)
        else:
            yield from _told(held)
            held = {}
            yield event
    yield from _told(held)


def _told(held: dict[int, list[Event]]) -> Iterator[Event]:
    *earlier, last = held.values() if held else [[]]
    if len(earlier) < _LEAST_CUT:
        for events in earlier:
            yield from events
    else:
        first = earlier[0][0]
        until = earlier[-1][-1].time
        yield Event(
            first.time,
            "client",
            "polled-without-news",
            first.rollout_id,
            {"times": len(earlier), "until": round(until, 3)},
        )
    yield from last


def _idle_polls(events: Sequence[Event]) -> set[int]:
    """Return the requests that are polls which went well, and told their client nothing new."""
    known: dict[int, tuple[object, object]] = {}
    smooth: set[int] = set()
    idle: set[int] = set()
    for event in events:
        if event.detail.get("route") != "poll":
            continue
        request = event.detail["request"]
        if event.what == "sent" and event.detail["fault"] == "none":
            smooth.add(request)
        elif event.what == "answered":
            client = event.detail.get("client", 1)
            news = (event.detail.get("state"), event.detail.get("started"))
            if request in smooth and news[0] is not None and known.get(client) == news:
                idle.add(request)
            known[client] = news
    return idle
