"""Checks of admission keys: admissions that are sent again, and cancels that overtake them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attrs import define

from rollout.simulation.history import EPSILON_SEC, Call, Checked, Finding, ServedRollout
from rollout.simulation.trace import Event

__all__ = ["check_admission_keys", "check_admissions_not_replayed", "check_early_cancels"]

_ADMISSIONS = {"admit", "batch"}
_ADMITTED = 202
_BUSY = {429}
_NOT_TAKEN = {404, 405, 413, 429, 501}
"""What a batch is answered if none of its rollouts was admitted."""

_GATEWAY = {502, 503, 504}
_LONGEST_DELAY_SEC = 8.0


# --- clients ------------------------------------------------------------------------------------


@define
class _Asking:
    """How a client asks for one admission.

    Attributes:
        key: Its admission key.
        request: The latest request.
        under_way: Whether that has no end yet.
        may_ask: Whether another one may follow.
        lost_at: When the first request was sent of those in a row that got no answer.
        losses: How many those are.
        in_doubt: Whether one of them may have arrived.
        busy: Whether the latest request meets a gateway that has no room.
        failed_at: When the latest of them failed.
    """

    key: int | None = None
    request: int = 0
    under_way: bool = False
    may_ask: bool = True
    lost_at: float = math.inf
    losses: int = 0
    in_doubt: bool = False
    busy: bool = False
    failed_at: float = -math.inf
    sent_at: float = -math.inf

    @property
    def delay_sec(self) -> float:
        """The shortest backoff that has to follow."""
        return min(0.25 * 2.0 ** (self.losses - 1), _LONGEST_DELAY_SEC) / 2 if self.losses else 0.0

    def end(self, event: Event) -> None:
        """Take how the latest request ended."""
        route, status = event.detail["route"], event.detail.get("status")
        self.under_way = False
        if status in (_NOT_TAKEN if route == "batch" else _BUSY):
            self.may_ask = True
            self.failed_at = -math.inf
            if not (self.in_doubt and self.busy):
                self.lost_at, self.losses, self.in_doubt = math.inf, 0, False
            return
        lost = event.what == "failed" or status in _GATEWAY
        self.may_ask = lost and self.key is not None
        self.lost_at, self.failed_at = min(self.lost_at, self.sent_at), event.time
        self.losses += 1
        if event.what == "failed" and event.detail["error"] != "ConnectError":
            self.in_doubt = True


def check_admissions_not_replayed(checked: Checked) -> Iterator[Finding]:
    """Check that an admission is sent again only after a refusal, or with a key and in time."""
    for call in checked.history.calls:
        asking = _Asking()
        for event in call.of("sent", "failed", "answered", "gave-up"):
            if event.detail["route"] not in _ADMISSIONS:
                continue
            if event.what == "sent":
                yield from _check_request(checked, call, asking, event)
                asking.request, asking.under_way = event.detail["request"], True
                asking.key, asking.sent_at = event.detail.get("key"), event.time
                asking.busy = event.detail["fault"] == "busy"
            elif event.detail["request"] == asking.request:
                asking.end(event)


def _check_request(
    checked: Checked, call: Call, asking: _Asking, event: Event
) -> Iterator[Finding]:
    until = asking.lost_at + checked.options.polling_lease_timeout_sec + EPSILON_SEC
    if asking.under_way or not asking.may_ask:
        yield Finding(call.rollout_id, "its admission was sent again", event.time)
    elif asking.request and event.detail.get("key") != asking.key:
        yield Finding(call.rollout_id, "was asked for again with another key", event.time)
    elif event.time > until + checked.history.paused_sec(asking.failed_at, event.time):
        message = f"its admission was sent again, a lease after that of {asking.lost_at:.3f}"
        yield Finding(call.rollout_id, message, event.time)
    elif event.time < asking.failed_at + asking.delay_sec - EPSILON_SEC:
        message = f"its admission was sent again within {asking.delay_sec:g} s"
        yield Finding(call.rollout_id, message, event.time)


# --- servers ------------------------------------------------------------------------------------


def check_admission_keys(checked: Checked) -> Iterator[Finding]:
    """Check that a key starts one execution and has one token, and opens no other rollout."""
    executed: set[tuple[int, str, int]] = set()
    for rollout in checked.history.rollouts:
        if rollout.key is not None:
            admission = (rollout.process, rollout.rollout_id, rollout.key)
            if admission in executed:
                message = "was executed again for one admission key"
                yield Finding(rollout.rollout_id, message, rollout.time_of("admitted"))
            executed.add(admission)
        yield from _check_replays(checked, rollout)
    yield from _check_tokens(checked)


def _check_replays(checked: Checked, rollout: ServedRollout) -> Iterator[Finding]:
    """Check that admissions which come again are admitted, and renew the lease."""
    until = min(rollout.time_of("forgotten"), rollout.lost_at)
    came: dict[int, tuple[Event, int]] = {}
    renewals = 0
    for event in rollout.events:
        if rollout.is_replay(event):
            came[event.detail["request"]] = event, renewals
        elif event.what in {"lease-renewed", "lease-refused"}:
            renewals += 1
        elif event.what == "server-answered" and event.detail["request"] in came:
            arrival, before = came.pop(event.detail["request"])
            paused = checked.history.paused_sec(arrival.time, event.time)
            if rollout.key is None or arrival.time + paused >= until - EPSILON_SEC:
                continue
            status = event.detail["status"]
            if status != _ADMITTED:
                message = f"was asked for again with its key, and that was answered {status}"
                yield Finding(rollout.rollout_id, message, event.time)
            elif renewals == before:
                message = "was asked for again with its key, and its lease was not renewed"
                yield Finding(rollout.rollout_id, message, event.time)


def _check_tokens(checked: Checked) -> Iterator[Finding]:
    """Check that one key has one token, and no two keys have the same."""
    keys: dict[tuple[int, str, int], int] = {}
    tokens: dict[tuple[int, str, int], int] = {}
    owners: dict[int, tuple[int, str, int]] = {}
    for event in checked.history.trace:
        detail = event.detail
        if event.what == "arrived" and "key" in detail:
            keys[detail["request"], event.rollout_id, detail["process"]] = detail["key"]
        elif event.what == "server-answered" and "token" in detail:
            key = keys.get((detail["request"], event.rollout_id, detail["process"]))
            if key is None:
                continue
            process = 0 if checked.options.durable else detail["process"]
            owner, token = (process, event.rollout_id, key), detail["token"]
            if tokens.setdefault(owner, token) != token:
                message = "was given another token for the same admission key"
                yield Finding(event.rollout_id, message, event.time)
            elif owners.setdefault(token, owner) != owner:
                message = "was given a token that belongs to another admission key"
                yield Finding(event.rollout_id, message, event.time)


def check_early_cancels(checked: Checked) -> Iterator[Finding]:
    """Check that what was cancelled by its key before it had started never starts."""
    cancels, options = checked.history.early_cancels, checked.options
    for rollout in checked.history.rollouts if cancels else ():
        began = rollout.time_of("workflow-started")
        for cancel in cancels.get(rollout.rollout_id, ()):
            if rollout.key == cancel.key and cancel.holds(began, rollout.process, options):
                message = f"was started, though its key was cancelled at {cancel.came_at:.3f}"
                yield Finding(rollout.rollout_id, message, began)
    came: dict[tuple[int, str], Event] = {}
    for event in checked.history.trace if cancels else ():
        if event.rollout_id not in cancels or event.who != "network":
            continue
        about = (event.detail["request"], event.rollout_id)
        if event.what == "arrived" and "key" in event.detail:
            came[about] = event
        elif event.what == "server-answered" and about in came:
            yield from _check_answer(checked, came.pop(about), event)


def _check_answer(checked: Checked, arrival: Event, answer: Event) -> Iterator[Finding]:
    """Check that the admission of what was cancelled before is answered as if it came first."""
    status, process = answer.detail["status"], answer.detail["process"]
    for cancel in checked.history.early_cancels[arrival.rollout_id]:
        if arrival.detail["key"] != cancel.key or status == _ADMITTED:
            continue
        if cancel.holds(arrival.time, process, checked.options):
            message = f"was cancelled before its admission, and that was answered {status}"
            yield Finding(arrival.rollout_id, message, answer.time)
