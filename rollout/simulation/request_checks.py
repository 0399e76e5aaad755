"""Checks of what a server answers: polls with another token, cancel requests."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define, field

from rollout.simulation.findings import Checked, Finding
from rollout.simulation.trace import Event

__all__ = ["check_cancel_requests", "check_tokens"]

_FORBIDDEN = 403


def check_tokens(checked: Checked) -> Iterator[Finding]:
    """A poll or a feed with another token than that of the rollout is refused."""
    for life in checked.history.lives:
        others: set[int] = set()
        for event in life.events:
            if event.what == "arrived" and event.detail["lease"] == "other":
                others.add(event.detail["request"])
            elif event.what == "forgotten":
                break  # from here on there is no such rollout
            elif event.what == "server-answered" and event.detail["request"] in others:
                others.discard(event.detail["request"])
                route, status = event.detail["route"], event.detail["status"]
                if not (status == _FORBIDDEN if route == "poll" else event.detail.get("refused")):
                    message = f"a {route} with another token was answered {status}"
                    yield Finding(life.rollout_id, message, event.time)


@define
class _Target:
    """What a cancel request meets in one rollout.

    Attributes:
        running: Whether its agent has started.
        over: Whether it has its result.
        first: What the first request to stop it was worth.
        asked: For each cancel request that is not answered yet, what it may be answered with.
    """

    running: bool = False
    over: bool = False
    first: str | None = None
    asked: dict[int, set[str]] = field(factory=dict)

    @property
    def disposition(self) -> str:
        if self.over:
            return "not_found"
        return self.first or ("cancelled_running" if self.running else "cancelled_queued")

    def take(self, event: Event) -> str | None:
        message = None
        if event.what == "status" and event.detail["status"] != "queued":
            self.running = True
        elif event.what == "finished":
            self.over = True
        elif event.what == "stop-requested":
            message = None if self.first is None else "was asked to stop twice"
            self.first = "cancelled_running" if self.running else "cancelled_queued"
        for worth in self.asked.values():
            worth.add(self.disposition)
        return message


def check_cancel_requests(checked: Checked) -> Iterator[Finding]:
    """A cancel request is answered by what it meets; whoever it stops is asked to stop once."""
    targets: dict[tuple[int, str], _Target] = {}
    for event in checked.history.trace:
        process = event.detail.get("process", 0)
        if event.who == "server":
            key = (process, event.rollout_id)
            if event.what == "admitted":
                targets[key] = _Target()
            elif key in targets:
                message = targets[key].take(event)
                if message is not None:
                    yield Finding(event.rollout_id, message, event.time)
        elif event.who == "network" and event.detail["route"] == "cancel":
            yield from _take_cancel(targets, process, event)


def _take_cancel(
    targets: dict[tuple[int, str], _Target], process: int, event: Event
) -> Iterator[Finding]:
    request = event.detail["request"]
    dispositions = event.detail.get("dispositions") or {}
    for rollout_id in event.rollout_id.split(","):
        target = targets.get((process, rollout_id)) or _Target(over=True)
        if event.what == "arrived":
            target.asked[request] = {target.disposition}
        elif event.what == "server-answered" and dispositions:
            expected = target.asked.pop(request, {target.disposition})
            told = dispositions.get(rollout_id)
            if told not in expected:
                message = f"a cancel request was answered {told}, not {' or '.join(expected)}"
                yield Finding(rollout_id, message, event.time)
