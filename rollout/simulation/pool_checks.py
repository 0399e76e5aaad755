"""Checks of pools: of a front and its workers together, whatever of them dies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from attrs import define, field

from rollout.simulation.history import EPSILON_SEC, Finding, History, ServedRollout
from rollout.simulation.trace import Event, Trace
from rollout.simulation.world import ServerOptions
from rollout.types import WORKER_LOST

__all__ = [
    "Pool",
    "check_agents_start_once",
    "check_ends",
    "check_fairness",
    "check_goes_elsewhere",
    "check_lost_workers",
    "check_places",
]

_ADMISSIONS = {"admit", "batch"}
_MOST_ATTEMPTS = 10
"""A rollout may fail when so many workers have not started its agent."""

_MOST_OUT_OF_TURN = 3
"""So many rollouts of other runs may be handed out while the next one of a run waits."""

_SPARE_SEC = 60.0


@define(eq=False)
class Attempt:
    """A rollout on a worker.

    Attributes:
        worker: Which worker.
        rollout: The rollout as the worker served it.
    """

    worker: str
    rollout: ServedRollout

    @property
    def started_at(self) -> float:
        """When its agent started; infinity if it never did."""
        return self.rollout.time_of("workflow-started")


@define(eq=False)
class Pool:
    """What happened to a front and its workers, sorted.

    Attributes:
        front: The trace of the front.
        traces: The traces of the workers, by name.
        options: How the front was set up.
        worker_options: How each worker was.
        history: The front's history.
        attempts: For each rollout of the front, what became of it on workers.
    """

    front: Trace
    traces: dict[str, Trace]
    options: ServerOptions
    worker_options: ServerOptions
    history: History = field(init=False)
    attempts: dict[ServedRollout, list[Attempt]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.history = History(self.front)
        self.attempts = {rollout: [] for rollout in self.history.rollouts}
        for name, trace in self.traces.items():
            asked: dict[int, float] = {}
            for event in trace.select("sent"):
                if event.detail["route"] in _ADMISSIONS:
                    asked.setdefault(event.detail.get("key", 0), event.time)
            for served in History(trace).rollouts:
                at = max((asked[key] for key in served.keys if key in asked), default=math.inf)
                owner = self._owner(served.rollout_id.partition("-again-")[0], at)
                if owner is not None:
                    self.attempts[owner].append(Attempt(name, served))

    def _owner(self, rollout_id: str, at: float) -> ServedRollout | None:
        """Return the rollout of the front for which a worker was asked at some time."""
        owner = None
        for rollout in self.history.rollouts:
            if rollout.rollout_id == rollout_id and rollout.time_of("admitted") <= at:
                owner = rollout
        return owner

    def started(self, rollout: ServedRollout) -> list[Attempt]:
        """Return the attempts whose agents have started, in that order."""
        ran = [each for each in self.attempts[rollout] if each.started_at < math.inf]
        return sorted(ran, key=lambda attempt: attempt.started_at)

    def undisturbed(self, rollout: ServedRollout) -> bool:
        """Whether nobody but its workers has ended a rollout of the front."""
        finished = rollout.time_of("finished")
        return (
            finished < min(rollout.lost_at, rollout.shutdown_at)
            and not rollout.expired
            and rollout.time_of("stop-requested") > finished
        )


def check_agents_start_once(pool: Pool) -> Iterator[Finding]:
    """Check that an agent is started once at most, and that the front knows when."""
    lost = {event.rollout_id for event in pool.front.select("commit-lost")}
    before: dict[object, Attempt] = {}
    for rollout in pool.history.rollouts:
        admission: object = rollout
        if pool.options.durable and rollout.key is not None and rollout.rollout_id not in lost:
            admission = (rollout.rollout_id, rollout.key)  # in whatever process
        marked = rollout.first("agent-started")
        for attempt in pool.started(rollout):
            first = before.setdefault(admission, attempt)
            if first is not attempt:
                message = (
                    f"its agent started on worker {attempt.worker}, after it had started on "
                    f"worker {first.worker} at {first.started_at:.3f}"
                )
                yield Finding(rollout.rollout_id, message, attempt.started_at)
            told = attempt.rollout.first("agent-started")
            if marked is None or marked.time > attempt.started_at + EPSILON_SEC:
                message = f"its agent started on worker {attempt.worker} without the front"
                yield Finding(rollout.rollout_id, message, attempt.started_at)
            elif told is not None and _at(told) != _at(marked):
                message = f"its agent started at {_at(told)}, and the front says {_at(marked)}"
                yield Finding(rollout.rollout_id, message, marked.time)


def _at(started: Event) -> datetime:
    return datetime.fromisoformat(started.detail["at"])


def check_ends(pool: Pool) -> Iterator[Finding]:
    """Check that each rollout of the front ends, and soon after its worker has ended it.

    The worst case is an answer that trickles for the rest of a lease, and another lease in which
    the worker cannot be reached.
    """
    for event in pool.history.world:
        if event.what == "callers-given-up":
            yield Finding("", "callers still waited long after all work was over", event.time)
    settled = max((event.time for event in pool.front.select("places")), default=math.inf)
    late_sec = 2 * pool.worker_options.polling_lease_timeout_sec + _SPARE_SEC
    for rollout in pool.history.rollouts:
        end = min(rollout.time_of("finished"), rollout.lost_at, rollout.closed_at)
        if end > settled:
            yield Finding(rollout.rollout_id, "has no end", settled)
            continue
        for attempt in pool.started(rollout):
            over = min(attempt.rollout.time_of("finished"), attempt.rollout.lost_at)
            cut_sec = sum(
                event.detail["seconds"] for event in pool.traces[attempt.worker].select("cut-off")
            )
            latest = pool.history.delayed(attempt.started_at, over + late_sec + cut_sec)
            if latest < end < math.inf:
                message = f"its worker was through with it at {over:.3f}, and it has not ended"
                yield Finding(rollout.rollout_id, message, latest)


def check_goes_elsewhere(pool: Pool) -> Iterator[Finding]:
    """Check that no rollout fails for its workers before its agent has started.

    It may when one worker after the other has not started it.
    """
    for rollout in pool.history.rollouts:
        finished = rollout.first("finished")
        if finished is None or not pool.undisturbed(rollout) or rollout.first("agent-started"):
            continue
        if finished.detail["category"] not in {"internal_error", "validation_error"}:
            continue
        attempts = 1 + len(rollout.all("put-back"))
        if attempts < _MOST_ATTEMPTS:
            message = f"failed before its agent had started, after {attempts} attempts"
            yield Finding(rollout.rollout_id, message, finished.time)


def check_lost_workers(pool: Pool) -> Iterator[Finding]:
    """Check that a rollout whose agent was lost with its worker says so, and no other one."""
    for rollout in pool.history.rollouts:
        finished = rollout.first("finished")
        if finished is None or not pool.undisturbed(rollout):
            continue
        source = finished.detail.get("source")
        started = pool.started(rollout)
        for attempt in started:
            died = attempt.rollout.lost_at
            ended = attempt.rollout.time_of("finished") + EPSILON_SEC  # as it died
            lost = died < min(ended, finished.time) and finished.detail["status"] != "success"
            if lost and not pool.worker_options.durable and source != WORKER_LOST:
                message = f"its worker died with its agent at {died:.3f}, and its end is {source}"
                yield Finding(rollout.rollout_id, message, finished.time)
        if source != WORKER_LOST:
            continue
        if rollout.first("agent-started") is None:
            yield Finding(rollout.rollout_id, "was lost before its agent started", finished.time)
        elif not any(_troubled(pool, attempt, finished.time) for attempt in pool.attempts[rollout]):
            message = "was lost with its worker, to which nothing has happened"
            yield Finding(rollout.rollout_id, message, finished.time)


def _troubled(pool: Pool, attempt: Attempt, until: float) -> bool:
    """Whether something has happened to the worker of an attempt, or on the way to it."""
    return bool(pool.history.pauses) or any(
        event.what in {"server-crashed", "cut-off"}
        or (event.what == "sent" and event.detail["fault"] != "none")
        for event in pool.traces[attempt.worker]
        if event.time <= until
    )


def check_places(pool: Pool) -> Iterator[Finding]:
    """Check that neither the front nor a worker holds a place when all is over."""
    for name, trace in ({"the front": pool.front} | pool.traces).items():
        for event in trace.select("places"):
            if event.detail["held"]:
                where = name if trace is pool.front else f"worker {name}"
                message = f"{where} still has places taken: {', '.join(event.detail['held'])}"
                yield Finding("", message, event.time)


def check_fairness(pool: Pool) -> Iterator[Finding]:
    """Check that no run waits while many rollouts of other runs are handed out."""
    waiting: dict[str | None, list[str]] = {}
    passed: dict[str | None, int] = {}
    again: set[str] = set()
    for event in pool.front:
        if event.what == "server-up":
            waiting, passed, again = {}, {}, set()
        if event.who != "pool":
            continue
        run, rollout_id = event.detail["run"], event.rollout_id
        queue = waiting.setdefault(run, [])
        head = queue[:1]
        if event.what == "waits":
            queue.append(rollout_id)
        elif event.what == "put-back":
            queue.insert(0, rollout_id)
            again.add(rollout_id)
        elif rollout_id in queue:
            queue.remove(rollout_id)
            if event.what == "handed-out" and rollout_id not in again:
                yield from _passed_over(run, waiting, passed, event)
            again.discard(rollout_id)
        if queue[:1] != head:
            passed[run] = 0


def _passed_over(
    run: str | None,
    waiting: Mapping[str | None, Sequence[str]],
    passed: dict[str | None, int],
    event: Event,
) -> Iterator[Finding]:
    for other, queue in waiting.items():
        if other == run or not queue:
            continue
        passed[other] = passed.get(other, 0) + 1
        if passed[other] == _MOST_OUT_OF_TURN + 1:
            message = f"its run waits while one rollout of {run} after the other is handed out"
            yield Finding(queue[0], message, event.time)
