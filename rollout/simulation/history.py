"""A trace, sorted by what the checks look at: rollouts on the server, and calls of clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

from attrs import define, field, frozen

from rollout.simulation.trace import Event, Trace
from rollout.simulation.workload import RolloutPlan
from rollout.simulation.world import ServerOptions

__all__ = [
    "EPSILON_SEC",
    "Call",
    "Checked",
    "EarlyCancel",
    "Finding",
    "History",
    "ServedRollout",
    "is_own_poll",
    "is_own_renewal",
    "rank",
]

EPSILON_SEC = 1e-6
"""Simulated times are sums of floats; anything closer than this is the same moment."""

_SERVER_SIDE = {"server", "network", "pool", "workflow", "grader"}
_CALLS = {"called", "repeats", "takes-over"}
_ORDER = ("queued", "running", "grading")


def rank(state: str) -> int:
    """Return the position of a status in the order of statuses; terminal ones share the last."""
    return _ORDER.index(state) if state in _ORDER else len(_ORDER)


@frozen
class Checked:
    """A run, as checks see it.

    Attributes:
        history: The trace, sorted.
        options: How the server was set up.
        plans: The workload, by id; empty for a scenario of a user's own.
    """

    history: History
    options: ServerOptions
    plans: Mapping[str, RolloutPlan]

    def __attrs_post_init__(self) -> None:
        if self.options.durable:
            for rollout in self.history.rollouts:
                over = rollout.time_of("finished") + self.retention_sec(rollout)
                rollout.dropped_at = max(over, rollout.over_at)

    def retention_sec(self, rollout: ServedRollout) -> float:
        """Return how long a result stays readable: with a key, for at least a lease."""
        retention = self.options.result_retention_sec
        if rollout.keys <= {None}:
            return retention
        return max(retention, self.options.polling_lease_timeout_sec)


@frozen
class Finding:
    """A thing that should not have happened.

    Attributes:
        rollout_id: To which rollout; empty if to the server as a whole.
        message: What happened.
        at: When it showed.
    """

    rollout_id: str
    message: str
    at: float


@define(eq=False)
class EarlyCancel:
    """A rollout that was cancelled by the key of its admission, before its agent had started.

    Attributes:
        process: Which server process answered the cancel request.
        key: The key.
        came_at: When the request came.
        answered_at: When it was answered.
        lost_at: When a cut of the power took it back, if one did.
    """

    process: int
    key: int
    came_at: float
    answered_at: float
    lost_at: float = math.inf

    def holds(self, at: float, process: int, options: ServerOptions) -> bool:
        """Whether it is to be known to a process at some time."""
        until = min(self.came_at + options.polling_lease_timeout_sec - EPSILON_SEC, self.lost_at)
        return (options.durable or process == self.process) and self.answered_at <= at < until


@define(eq=False)
class ServedRollout:
    """One rollout in one server process, from its admission until it is forgotten.

    Attributes:
        process: Which server process.
        rollout_id: Which rollout.
        events: Its events on the server's side, in order.
        answers: Among them, the polls that the server answered with a state.
        contacts: When its caller showed itself before the end: its admission, every poll with
            its token that arrived, and every renewal by a request about a feed that arrived.
        renewed_by: The latest request that renewed its lease, or admitted it.
        keys: The admission keys of the requests for it that were under way at its admission.
        shutdown_at: When the shutdown of its process began, if it did.
        lost_at: When its process was gone with it, if it was.
        dropped_at: With a state, when its id may be taken again: it need not be in memory then, and
            nothing says that it is forgotten.
        closed_at: When the shutdown of its process was over, if it was; from then on the
            process waits for nothing but what ignores its end.
    """

    process: int
    rollout_id: str
    events: list[Event] = field(factory=list)
    answers: list[Event] = field(factory=list)
    contacts: list[float] = field(factory=list)
    renewed_by: int = 0
    keys: frozenset[int | None] = frozenset()
    shutdown_at: float = math.inf
    lost_at: float = math.inf
    dropped_at: float = math.inf
    closed_at: float = math.inf
    _by_kind: dict[str, list[Event]] = field(factory=dict)
    _to_be_renewed: bool = False

    def add(self, event: Event) -> None:
        """Add the next event."""
        self.events.append(event)
        self._by_kind.setdefault(event.what, []).append(event)
        match event.what:
            case "server-answered":
                if event.detail["route"] in {"poll", "feed"} and "state" in event.detail:
                    self.answers.append(event)
            case "admitted":
                self._contact(event)
            case "arrived" if is_own_poll(event):
                self._contact(event)
            case "arrived" if is_own_renewal(event) or self.is_replay(event):
                self._to_be_renewed = True
                self.renewed_by = event.detail["request"]
            case "lease-renewed" if self._to_be_renewed:
                self._to_be_renewed = False
                if "finished" not in self._by_kind:
                    self.contacts.append(event.time)

    def end(self, at: float) -> None:
        """Drop the events from some time on: they are about another admission of its id."""
        for events in (self.events, self.answers, *self._by_kind.values()):
            events[:] = [event for event in events if event.time < at]

    def _contact(self, event: Event) -> None:
        if "finished" not in self._by_kind:
            self.contacts.append(event.time)
            self.renewed_by = event.detail.get("request", self.renewed_by)

    @property
    def key(self) -> int | None:
        """Its admission key; ``None`` without one, or where it could be one of several."""
        return next(iter(self.keys)) if len(self.keys) == 1 else None

    def is_replay(self, event: Event) -> bool:
        """Whether a request arrives that asks for its admission again."""
        key = event.detail.get("key")
        return event.what == "arrived" and key is not None and key in self.keys

    def all(self, what: str) -> Sequence[Event]:
        """Return the events of a kind, in order."""
        return self._by_kind.get(what, ())

    def first(self, what: str) -> Event | None:
        """Return the first event of a kind."""
        return next(iter(self.all(what)), None)

    def time_of(self, what: str) -> float:
        """Return when something happened first; infinity if it never did."""
        events = self._by_kind.get(what)
        if not events:
            return self.dropped_at if what == "forgotten" else math.inf
        return events[0].time

    @property
    def expired(self) -> bool:
        """Whether the end of its lease ended it, while its process lived."""
        finished = self.first("finished")
        return (
            finished is not None
            and finished.time <= self.lost_at
            and finished.detail.get("category") == "lease_expired"
        )

    @property
    def given_up(self) -> bool:
        """Whether a shutdown published its end, as its execution did not stop in time."""
        finished = self.time_of("finished")
        return self.shutdown_at <= finished < self.over_at - EPSILON_SEC

    @property
    def grading(self) -> bool:
        """Whether it reached its grading, even if its grader never began."""
        return any(event.detail["status"] == "grading" for event in self.all("status"))

    @property
    def over_at(self) -> float:
        """When its execution ended, in whatever way."""
        return min(self.time_of("execution-ended"), self.lost_at)


def is_own_poll(event: Event) -> bool:
    """Whether a poll with the token of the rollout arrives."""
    detail = event.detail
    return event.what == "arrived" and detail["route"] == "poll" and detail["lease"] == "own"


def is_own_renewal(event: Event) -> bool:
    """Whether a request arrives that opens or renews a feed with a proof of the rollout's lease."""
    if event.what != "arrived" or event.detail["lease"] != "own":
        return False
    return event.detail["route"] in {"feed", "renew"}


@define(eq=False)
class Call:
    """One call of a caller, from its first request on.

    Attributes:
        rollout_id: Which rollout.
        events: What its caller and its client did, in order.
    """

    rollout_id: str
    events: list[Event] = field(factory=list)

    def of(self, *whats: str, route: str | None = None) -> list[Event]:
        """Return events of these kinds, to one route or to all."""
        return [
            event
            for event in self.events
            if event.what in whats and route in {None, event.detail.get("route")}
        ]


@define(eq=False, slots=False)
class History:
    """A trace, sorted.

    Attributes:
        trace: The trace.
        rollouts: Every admission on a server, in order.
        calls: Every call, by its beginning.
        world: What happened to the world as a whole.
        cancels: Every cancel request that arrived: in which process, and for which ids; empty
            for one that gave no ids.
        early_cancels: What was cancelled by the key of its admission, by id.
    """

    trace: Trace
    rollouts: list[ServedRollout] = field(factory=list)
    calls: list[Call] = field(factory=list)
    world: list[Event] = field(factory=list)
    cancels: list[tuple[int, Event]] = field(factory=list)
    early_cancels: dict[str, list[EarlyCancel]] = field(factory=dict)
    _stopped: dict[tuple[int, str], Event] = field(factory=dict)
    _asking: dict[tuple[int, str], dict[int, Event]] = field(factory=dict)
    _shutdowns: dict[int, float] = field(factory=dict)
    _current: dict[tuple[int, str], ServedRollout] = field(factory=dict)
    _earlier: dict[tuple[int, str], ServedRollout] = field(factory=dict)
    _current_calls: dict[tuple[int, str], Call] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for event in self.trace:
            if event.who == "world":
                self.world.append(event)
                self._close(event)
                for cancel in self.early_cancels.get(event.rollout_id, ()):
                    cancel.lost_at = min(cancel.lost_at, event.time)
            elif event.who in _SERVER_SIDE:
                self._add_to_server(event)
            elif event.rollout_id:
                self._add_to_call(event)

    @property
    def ends_at(self) -> float:
        """When the trace ends."""
        return self.trace.events[-1].time if self.trace.events else 0.0

    @cached_property
    def is_front(self) -> bool:
        """Whether the server is the front of a pool."""
        return any(event.who == "pool" for event in self.trace)

    @cached_property
    def pauses(self) -> list[tuple[float, float]]:
        """When everything stood still, and for how long."""
        return [
            (event.time, event.detail["seconds"]) for event in self.world if event.what == "paused"
        ]

    @cached_property
    def write_secs(self) -> dict[int, float]:
        """How long each write of a feed takes, by the request that opened it."""
        return {
            event.detail["request"]: event.detail["write_sec"]
            for event in self.trace
            if "write_sec" in event.detail
        }

    @cached_property
    def lost_feeds(self) -> dict[int, float]:
        """When the connection of each feed was lost, by the request that opened it."""
        return {
            event.detail["request"]: event.time
            for event in self.trace
            if event.what == "disconnected" and event.detail["route"] == "feed"
        }

    def paused_sec(self, since: float, until: float) -> float:
        """Return an upper bound of the time that everything stood still around a span of time."""
        return sum(
            length
            for moment, length in self.pauses
            if since - length - EPSILON_SEC <= moment <= until
        )

    def delayed(self, since: float, until: float) -> float:
        """Return the latest time of something due at *until*, given the pauses since *since*."""
        latest, before = until, -math.inf
        while latest > before:
            before, latest = latest, until + self.paused_sec(since, latest)
        return latest

    def paused_within(self, since: float, until: float) -> list[float]:
        """Return the lengths of the pauses that lie within a span of time as a whole."""
        return [
            length
            for moment, length in self.pauses
            if since < moment and moment + length <= until + EPSILON_SEC
        ]

    def was_cancelled(self, rollout: ServedRollout, by: float) -> bool:
        """Whether a caller had asked for a rollout to be cancelled by some time."""
        return any(
            process == rollout.process
            and request.time <= by
            and (not request.rollout_id or rollout.rollout_id in request.rollout_id.split(","))
            for process, request in self.cancels
        )

    def _add_to_server(self, event: Event) -> None:
        key = (event.detail.get("process", 0), event.rollout_id)
        current = self._current
        if event.what == "admitted":
            self._admit(key)
        elif event.what == "stop-requested" and self._over(key):
            self._stopped[key] = event  # while its admission is being kept
            return
        elif event.what == "arrived" and event.detail["route"] in {"admit", "batch"}:
            self._asking.setdefault(key, {})[event.detail["request"]] = event
        elif event.what == "arrived" and event.detail["route"] == "cancel":
            self.cancels.append((key[0], event))
        elif event.what == "server-answered" and event.detail["route"] == "cancel":
            self._add_early_cancels(event)
        elif event.what == "server-answered" and key in self._asking:
            self._asking[key].pop(event.detail["request"], None)
        if event.detail.get("earlier") and key in self._earlier:
            self._earlier[key].add(event)  # the id was in use again before a feed told of its end
        elif key in current:
            current[key].add(event)

    def _admit(self, key: tuple[int, str]) -> None:
        if key in self._current:
            self._earlier[key] = self._current[key]
        asking = self._asking.get(key, {})
        rollout = ServedRollout(
            *key,
            renewed_by=max(asking, default=0),
            keys=frozenset(request.detail.get("key") for request in asking.values()),
            shutdown_at=self._shutdowns.get(key[0], math.inf),
        )
        self._current[key] = rollout
        self.rollouts.append(rollout)
        if key in self._stopped:
            rollout.add(self._stopped.pop(key))

    def _over(self, key: tuple[int, str]) -> bool:
        current = self._current.get(key)
        return current is None or current.first("execution-ended") is not None

    def _add_early_cancels(self, answer: Event) -> None:
        dispositions = answer.detail.get("dispositions") or {}
        process, request = answer.detail["process"], answer.detail["request"]
        for where, arrival in reversed(self.cancels if dispositions else []):
            if (where, arrival.detail["request"]) != (process, request):
                continue
            for rollout_id, key in arrival.detail.get("keys", {}).items():
                if dispositions.get(rollout_id) == "cancelled_queued":
                    self._forget(process, rollout_id, arrival.time)
                    cancel = EarlyCancel(process, key, arrival.time, answer.time)
                    self.early_cancels.setdefault(rollout_id, []).append(cancel)
            return

    def _forget(self, process: int, rollout_id: str, by: float) -> None:
        """Let what follows be about what was cancelled early, not about what had ended before."""
        current = self._current.get((process, rollout_id))
        if current is not None and current.time_of("finished") < by:
            del self._current[process, rollout_id]
            current.end(by - EPSILON_SEC)

    def _add_to_call(self, event: Event) -> None:
        key = (event.detail.get("client", 1), event.rollout_id)
        if event.what in _CALLS or key not in self._current_calls:
            self._current_calls[key] = Call(event.rollout_id)
            self.calls.append(self._current_calls[key])
        self._current_calls[key].events.append(event)

    def _close(self, event: Event) -> None:
        """Note for the rollouts of a process how its end goes."""
        here = [each for each in self.rollouts if each.process == event.detail.get("process")]
        if event.what == "shutdown-begins":
            self._shutdowns[event.detail["process"]] = event.time
            for rollout in here:
                rollout.shutdown_at = event.time
        elif event.what in {"server-crashed", "server-down", "shutdown-ends"}:
            for rollout in here:
                rollout.closed_at = min(rollout.closed_at, event.time)
                if event.what != "shutdown-ends":
                    rollout.lost_at = min(rollout.lost_at, event.time)
