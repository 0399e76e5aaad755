"""Checks of concurrency slots and of the queue in front of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

from attrs import define, field

from rollout.simulation.findings import EPSILON_SEC, Checked, Finding
from rollout.simulation.lives import History, Life
from rollout.simulation.trace import Event
from rollout.simulation.workload import Course, RolloutPlan, longest_swallow_sec

__all__ = ["check_slots"]

_BUSY = 429


def check_slots(checked: Checked) -> Iterator[Finding]:
    """Slots never exceed the limit, none leaks, and the queue is cut where it should be."""
    if not checked.plans:
        return
    yield from _check_work(checked)
    options = checked.options
    limit = math.inf if options.max_concurrent is None else options.max_concurrent
    depth = math.inf if options.max_queue_depth is None else options.max_queue_depth
    graders = math.inf if options.max_graders is None else options.max_graders
    there = _Occupancy(limit, limit + depth, graders)
    since = -math.inf
    for event in checked.history.trace:
        if event.time > since + EPSILON_SEC:
            yield from there.waiting_for_nothing(event.time)
            since = event.time
        if event.who != "world":
            yield from there.take(event)
        elif event.what == "paused":  # who was about to take a slot does so after it
            since = event.time + event.detail["seconds"]
        elif event.what in {"server-crashed", "server-up", "server-gone"}:
            there = _Occupancy(limit, limit + depth, graders, event.detail["process"])


def _check_work(checked: Checked) -> Iterator[Finding]:
    """An execution ends once its work does, and a caller gets an answer at some time."""
    history = checked.history
    for life in history.lives:
        plan = checked.plans.get(life.rollout_id)
        until = math.inf if plan is None else _held_until(history, life, plan)
        if until < min(life.over_at, history.ends_at):
            yield Finding(life.rollout_id, "held its slot for longer than its work took", until)
    for event in history.world:
        if event.what == "callers-given-up":
            yield Finding("", "callers still waited long after all work was over", event.time)


def _held_until(history: History, life: Life, plan: RolloutPlan) -> float:
    """Return by when the slot is free: after the code that runs, unless a grader is to follow."""
    graded = life.time_of("grader-started")
    if graded < math.inf:
        began, course, work_sec = graded, plan.grader, plan.grader_sec
    elif life.grading:
        return math.inf
    else:
        began, course, work_sec = life.time_of("workflow-started"), plan.agent, plan.agent_sec
    longest = work_sec + (longest_swallow_sec(work_sec) if course is Course.SWALLOW else 0.0)
    return history.delayed(began, began + longest + EPSILON_SEC)


@define
class _Occupancy:
    """Who is in a server process at one moment.

    Attributes:
        limit: How many slots there are.
        room: How many rollouts may be admitted at a time.
        graders: How many graders may run at a time.
        process: Which process it is.
        admitted: Whose execution has not ended.
        waiting: Among them, whose workflow has not started.
        working: Who has a slot: the workflow has started, and not all has ended.
        grading: Who waits for a place among the graders.
        at_grader: Whose grader runs.
        code: How many phases of user code each rollout is in.
        asking: For each admission that is not answered yet, how many were admitted meanwhile
            at the most.
        told: Who was found to wait for nothing.
    """

    limit: float
    room: float
    graders: float
    process: int = 0
    admitted: dict[str, None] = field(factory=dict)
    waiting: dict[str, None] = field(factory=dict)
    working: dict[str, None] = field(factory=dict)
    grading: dict[str, None] = field(factory=dict)
    at_grader: dict[str, None] = field(factory=dict)
    code: Counter[str] = field(factory=Counter)
    asking: dict[int, int] = field(factory=dict)
    told: set[str] = field(factory=set)

    def waiting_for_nothing(self, now: float) -> Iterator[Finding]:
        """Find those who wait although a slot has been free."""
        for waiting, taken, limit, what in (
            (self.waiting, self.working, self.limit, "a slot"),
            (self.grading, self.at_grader, self.graders, "a grader's place"),
        ):
            free = limit - len(taken)
            for rollout_id in waiting if free > 0 else ():
                if rollout_id not in self.told:
                    self.told.add(rollout_id)
                    message = f"waits for {what} although {free} of {limit} should be free"
                    yield Finding(rollout_id, message, now)

    def take(self, event: Event) -> Iterator[Finding]:
        """Take the next event."""
        handler = _HANDLERS.get(event.what)
        if handler is not None and event.detail.get("process") == self.process:
            message = handler(self, event)
            if message is not None:
                yield Finding(event.rollout_id, message, event.time)

    def on_admitted(self, event: Event) -> str | None:
        self.admitted[event.rollout_id] = self.waiting[event.rollout_id] = None
        for request, most in self.asking.items():
            self.asking[request] = max(most, len(self.admitted))
        if len(self.admitted) <= self.room:
            return None
        return f"was admitted where {self.room} were there already"

    def on_start(self, event: Event) -> str | None:
        self.waiting.pop(event.rollout_id, None)
        self.working[event.rollout_id] = None
        self.code[event.rollout_id] += 1
        if len(self.code) <= self.limit:
            return None
        return f"{len(self.code)} slots of {self.limit} are taken: {', '.join(self.code)}"

    def on_status(self, event: Event) -> None:
        if event.detail["status"] == "grading":
            self.grading[event.rollout_id] = None

    def on_grader(self, event: Event) -> str | None:
        self.grading.pop(event.rollout_id, None)
        self.at_grader[event.rollout_id] = None
        if len(self.at_grader) > self.graders:
            return f"{len(self.at_grader)} graders run where {self.graders} may"
        return self.on_start(event)

    def on_end(self, event: Event) -> None:
        if event.what == "grader-ended":
            self.at_grader.pop(event.rollout_id, None)
        self.code[event.rollout_id] -= 1
        if self.code[event.rollout_id] <= 0:
            del self.code[event.rollout_id]
        self._leaves(event.rollout_id)

    def on_over(self, event: Event) -> None:
        self.admitted.pop(event.rollout_id, None)
        self.waiting.pop(event.rollout_id, None)
        self.grading.pop(event.rollout_id, None)
        self._leaves(event.rollout_id)

    def _leaves(self, rollout_id: str) -> None:
        """Give the slot back once execution and user code have both ended."""
        if rollout_id not in self.admitted and rollout_id not in self.code:
            self.working.pop(rollout_id, None)

    def on_arrival(self, event: Event) -> None:
        if event.detail["route"] in {"admit", "batch"}:
            self.asking[event.detail["request"]] = len(self.admitted)

    def on_answer(self, event: Event) -> str | None:
        most = self.asking.get(event.detail["request"], math.inf)
        if event.detail["route"] != "batch":  # which answers each of its rollouts
            self.asking.pop(event.detail["request"], None)
        if event.detail["status"] != _BUSY or most >= self.room:
            return None
        return f"was refused although {self.room - most} places were free"


_HANDLERS: dict[str, Callable[[_Occupancy, Event], str | None]] = {
    "admitted": _Occupancy.on_admitted,
    "workflow-started": _Occupancy.on_start,
    "grader-started": _Occupancy.on_grader,
    "status": _Occupancy.on_status,
    "workflow-ended": _Occupancy.on_end,
    "grader-ended": _Occupancy.on_end,
    "execution-ended": _Occupancy.on_over,
    "arrived": _Occupancy.on_arrival,
    "server-answered": _Occupancy.on_answer,
}
