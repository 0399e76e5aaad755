"""Checks of executions: at most one each, statuses, deadlines, slots, and disconnects."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from attrs import define, field, frozen

from rollout.simulation.history import EPSILON_SEC, Checked, Finding, History, ServedRollout, rank
from rollout.simulation.trace import Event
from rollout.simulation.workload import Course, RolloutPlan, expected_outcomes, longest_swallow_sec

__all__ = [
    "check_disconnects",
    "check_executions",
    "check_phases",
    "check_published_statuses",
    "check_slots",
]

_OK = 200
_BUSY = 429
_CANCELLED = ("cancelled", None)
_TIMEOUT = ("failure", "timeout")


def check_executions(checked: Checked) -> Iterator[Finding]:
    """Check that an id is executed at most once in a process, and its result never changes."""
    current: dict[tuple[int, str], ServedRollout] = {}
    for rollout in checked.history.rollouts:
        key = (rollout.process, rollout.rollout_id)
        began = rollout.time_of("admitted")
        before = current.get(key)
        if before is not None and before.time_of("forgotten") > began:
            yield Finding(rollout.rollout_id, "was admitted a second time", began)
        if before is not None and before.over_at > began:
            yield Finding(rollout.rollout_id, "was executed twice at a time", began)
        current[key] = rollout
        for what in ("execution-started", "workflow-started", "grader-started", "finished"):
            events = rollout.all(what)
            if len(events) > 1:
                yield Finding(rollout.rollout_id, f"{what} more than once", events[1].time)
        yield from _check_result(rollout)


def _check_result(rollout: ServedRollout) -> Iterator[Finding]:
    published = rollout.first("finished")
    first: Event | None = None
    for answer in rollout.answers:
        detail = answer.detail
        if "digest" not in detail:
            continue
        if published is not None and (detail["state"], detail["category"]) != (
            published.detail["status"],
            published.detail["category"],
        ):
            message = f"ended as {published.detail['status']}, and was reported as {detail}"
            yield Finding(rollout.rollout_id, message, answer.time)
        if first is not None and detail["digest"] != first.detail["digest"]:
            yield Finding(rollout.rollout_id, "its terminal result changed", answer.time)
        first = first or answer


def check_published_statuses(checked: Checked) -> Iterator[Finding]:
    """Check that published statuses only move forward, and the start time is set once."""
    for rollout in checked.history.rollouts:
        at = -1
        for event in rollout.events:
            if event.what in {"status", "finished"}:
                state = event.detail["status"]
                if rank(state) <= at:
                    yield Finding(rollout.rollout_id, f"went back to {state}", event.time)
                at = max(at, rank(state))
        marks = rollout.all("agent-started")
        if len(marks) > 1:
            yield Finding(rollout.rollout_id, "its agent started twice", marks[1].time)
        yield from _forward(rollout)


def _forward(rollout: ServedRollout) -> Iterator[Finding]:
    """Check what each client was answered, in order; one client sends one poll at a time."""
    at: dict[int, int] = {}
    started = None
    for answer in rollout.answers:
        client, state = answer.detail.get("client", 1), answer.detail["state"]
        if rank(state) < at.get(client, -1):
            message = f"was reported as {state} after it was past that"
            yield Finding(rollout.rollout_id, message, answer.time)
        at[client] = max(at.get(client, -1), rank(state))
        reported = answer.detail["started"]
        if started is not None and reported != started and client == 1:
            message = f"its start time changed from {started} to {reported}"
            yield Finding(rollout.rollout_id, message, answer.time)
        started = started or reported


def check_disconnects(checked: Checked) -> Iterator[Finding]:
    """Check that disconnects change no outcome, stop nothing and lose no result."""
    for rollout in checked.history.rollouts:
        yield from _check_stop(checked, rollout)
        yield from _check_still_there(checked, rollout)
        finished = rollout.first("finished")
        if finished is not None and finished.time < min(rollout.lost_at, rollout.shutdown_at):
            yield from _check_outcome(checked, rollout, finished)


def _check_stop(checked: Checked, rollout: ServedRollout) -> Iterator[Finding]:
    """Check that only a cancel request, the lease or a shutdown asks a rollout to stop."""
    asked = rollout.time_of("stop-requested")
    # With a state, its end is published a moment later, if its process lives that long.
    expired = rollout.expired and rollout.time_of("finished") <= asked + EPSILON_SEC
    expired = expired or (checked.options.durable and rollout.lost_at <= asked + EPSILON_SEC)
    by_shutdown = asked >= rollout.shutdown_at
    if (
        asked < math.inf
        and not by_shutdown
        and not expired
        and not checked.history.was_cancelled(rollout, asked)
    ):
        yield Finding(rollout.rollout_id, "was asked to stop, by nobody", asked)


def _check_still_there(checked: Checked, rollout: ServedRollout) -> Iterator[Finding]:
    """Check that polls after a disconnect are answered as before."""
    gone_at = rollout.time_of("disconnected")
    if gone_at == math.inf:
        return
    until = rollout.time_of("finished") + checked.options.result_retention_sec
    came: dict[int, float] = {}
    for event in rollout.events:
        if event.what == "arrived" and event.detail["lease"] == "own":
            if event.detail["route"] not in {"renew", "start"}:
                came[event.detail["request"]] = event.time
        elif event.what == "server-answered" and (
            event.detail["status"] != _OK or event.detail.get("refused")
        ):
            at = came.get(event.detail["request"], math.inf)
            if gone_at <= at < min(until - EPSILON_SEC, rollout.lost_at):
                route, status = event.detail["route"], event.detail["status"]
                message = f"a {route} after a disconnect was answered {status}"
                yield Finding(rollout.rollout_id, message, event.time)


def _check_outcome(checked: Checked, rollout: ServedRollout, finished: Event) -> Iterator[Finding]:
    status, category = finished.detail["status"], finished.detail.get("category")
    stopped = rollout.time_of("stop-requested") <= finished.time
    if status == "cancelled" and not stopped:
        yield Finding(rollout.rollout_id, "was cancelled, and nobody had asked", finished.time)
    plan = checked.plans.get(rollout.rollout_id)
    if plan is None or category == "lease_expired" or stopped:
        return
    expected = expected_outcomes(plan)
    limited = plan.agent_timeout_sec is not None or plan.grader_timeout_sec is not None
    if limited and checked.history.paused_sec(rollout.time_of("admitted"), finished.time):
        expected.add(_TIMEOUT)
    if (status, category) not in expected:
        message = f"ended as {status} ({category}), which its plan does not lead to"
        yield Finding(rollout.rollout_id, message, finished.time)
    reward = plan.reward if plan.grade and status == "success" else None
    for answer in rollout.answers:
        if "digest" in answer.detail and answer.detail["reward"] != reward:
            message = f"its reward is {answer.detail['reward']}, not {reward}"
            yield Finding(rollout.rollout_id, message, answer.time)


# --- deadlines ----------------------------------------------------------------------------------


def check_phases(checked: Checked) -> Iterator[Finding]:
    """Check that a phase ends at its deadline or at a request to stop, whichever is earlier.

    The agent's deadline counts from admission, so the time in the queue is part of it; the
    grader's counts from its start. What obeys is over at that moment.
    """
    for rollout in checked.history.rollouts:
        plan = checked.plans.get(rollout.rollout_id)
        over = min(rollout.over_at, checked.history.ends_at)
        paused = checked.history.pauses and checked.history.paused_sec(
            rollout.time_of("admitted"), over
        )
        if plan is not None and not paused:
            yield from _check_life(checked, rollout, plan)


@frozen
class _Phase:
    """One phase: when it began, and when its plan says that it ends.

    Attributes:
        began: When its code began; infinity if it never did.
        work_sec: How long it takes by itself.
        course: How it goes.
        deadline: When its time is over.
        stopped: When its execution was asked to stop.
    """

    began: float
    work_sec: float
    course: Course
    deadline: float
    stopped: float

    @property
    def interrupted_at(self) -> float:
        """When it is interrupted, unless it has ended before."""
        return min(self.deadline, self.stopped)

    @property
    def interrupted(self) -> bool:
        return self.began + self.work_sec > self.interrupted_at + EPSILON_SEC

    @property
    def undecided(self) -> bool:
        """Whether its own end and an interruption come at the same moment."""
        return abs(self.began + self.work_sec - self.interrupted_at) <= EPSILON_SEC

    @property
    def latest_end(self) -> float:
        """When its execution is over, if it is interrupted."""
        began = self.began < math.inf
        swallows = began and self.course is Course.SWALLOW
        return self.interrupted_at + (longest_swallow_sec(self.work_sec) if swallows else 0.0)

    @property
    def outcome(self) -> tuple[str, str | None]:
        return _TIMEOUT if self.deadline <= self.stopped else _CANCELLED


def _check_life(checked: Checked, rollout: ServedRollout, plan: RolloutPlan) -> Iterator[Finding]:
    stopped = rollout.time_of("stop-requested")
    limit = math.inf if plan.agent_timeout_sec is None else plan.agent_timeout_sec
    phase = _Phase(
        rollout.time_of("workflow-started"),
        plan.agent_sec,
        plan.agent,
        rollout.time_of("admitted") + max(limit, 0.0),
        stopped,
    )
    graded = rollout.time_of("grader-started")
    if graded == math.inf or phase.interrupted:
        yield from _check_phase(checked, rollout, phase, "agent")
    else:
        limit = math.inf if plan.grader_timeout_sec is None else plan.grader_timeout_sec
        phase = _Phase(graded, plan.grader_sec, plan.grader, graded + limit, stopped)
        yield from _check_phase(checked, rollout, phase, "grader")


def _check_phase(
    checked: Checked, rollout: ServedRollout, phase: _Phase, name: str
) -> Iterator[Finding]:
    at = phase.interrupted_at
    if at < phase.began < math.inf and phase.began - at > EPSILON_SEC:
        yield Finding(rollout.rollout_id, f"its {name} began after it was to end", phase.began)
    if phase.undecided:
        return
    finished = rollout.first("finished")
    outcome = finished and (finished.detail["status"], finished.detail["category"])
    until = min(rollout.over_at, rollout.closed_at, checked.history.ends_at)
    if phase.interrupted and until > phase.latest_end + EPSILON_SEC:
        what = "at its deadline" if phase.deadline <= phase.stopped else "as it was asked to"
        yield Finding(rollout.rollout_id, f"its {name} did not end {what}", phase.latest_end)
    elif finished is None or rollout.expired or rollout.given_up or phase.began == at:
        return
    elif phase.interrupted and outcome != phase.outcome and finished.time < rollout.closed_at:
        message = f"ended as {outcome}, not as {phase.outcome}, which came first in its {name}"
        yield Finding(rollout.rollout_id, message, finished.time)
    elif outcome == _TIMEOUT and finished.time < phase.deadline - EPSILON_SEC:
        if name == "agent" and rollout.grading:
            return  # its grader had no time at all
        yield Finding(rollout.rollout_id, f"its {name} timed out too early", finished.time)


# --- slots --------------------------------------------------------------------------------------


def check_slots(checked: Checked) -> Iterator[Finding]:
    """Check that slots never exceed the limit, that none leaks, and that the queue is bounded."""
    if not checked.plans:
        return
    yield from _check_work(checked)
    options = checked.options
    limit = math.inf if options.max_concurrent is None else options.max_concurrent
    depth = math.inf if options.max_queue_depth is None else options.max_queue_depth
    graders = math.inf if options.max_graders is None else options.max_graders
    there = _Occupancy(limit, limit + depth, graders, durable=options.durable)
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
            process = event.detail["process"]
            there = _Occupancy(limit, limit + depth, graders, process, options.durable)


def _check_work(checked: Checked) -> Iterator[Finding]:
    """Check that an execution ends with its work, and that every caller gets an answer."""
    history = checked.history
    for rollout in history.rollouts:
        plan = checked.plans.get(rollout.rollout_id)
        until = math.inf if plan is None else _held_until(history, rollout, plan)
        if until < min(rollout.over_at, history.ends_at):
            yield Finding(rollout.rollout_id, "held its slot for longer than its work took", until)
    for event in history.world:
        if event.what == "callers-given-up":
            yield Finding("", "callers still waited long after all work was over", event.time)


def _held_until(history: History, rollout: ServedRollout, plan: RolloutPlan) -> float:
    """Return the latest time at which its slot is free; infinity if a grader is to follow."""
    graded = rollout.time_of("grader-started")
    if graded < math.inf:
        began, course, work_sec = graded, plan.grader, plan.grader_sec
    elif rollout.grading:
        return math.inf
    else:
        began, course, work_sec = rollout.time_of("workflow-started"), plan.agent, plan.agent_sec
    longest = work_sec + (longest_swallow_sec(work_sec) if course is Course.SWALLOW else 0.0)
    return history.delayed(began, began + longest + EPSILON_SEC)


@define
class _Occupancy:
    """The rollouts that are in a server process at one moment.

    Attributes:
        limit: How many slots there are.
        room: How many rollouts may be admitted at a time.
        graders: How many graders may run at a time.
        process: Which process it is.
        durable: Whether an admission has a place from its arrival on, until it is kept.
        admitted: Whose execution has not ended.
        waiting: Among them, whose workflow has not started.
        working: Who has a slot: the workflow has started, and not all has ended.
        grading: Who waits for a place among the graders.
        at_grader: Whose grader runs.
        code: How many phases of user code each rollout is in.
        asking: For each admission that is not answered yet, how many were admitted meanwhile
            at the most.
        asked: How many rollouts each of these asks for.
        answered: For how many of them it has been answered.
        told: Who was found to wait for nothing.
    """

    limit: float
    room: float
    graders: float
    process: int = 0
    durable: bool = False
    admitted: dict[str, None] = field(factory=dict)
    waiting: dict[str, None] = field(factory=dict)
    working: dict[str, None] = field(factory=dict)
    grading: dict[str, None] = field(factory=dict)
    at_grader: dict[str, None] = field(factory=dict)
    code: Counter[str] = field(factory=Counter)
    asking: dict[int, int] = field(factory=dict)
    asked: Counter[int] = field(factory=Counter)
    answered: Counter[int] = field(factory=Counter)
    told: set[str] = field(factory=set)

    def waiting_for_nothing(self, now: float) -> Iterator[Finding]:
        """Find rollouts that wait although a slot has been free."""
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
        """Process the next event, if it is of this process."""
        if event.detail.get("process") == self.process:
            message = self._message(event)
            if message is not None:
                yield Finding(event.rollout_id, message, event.time)

    def _message(self, event: Event) -> str | None:
        """Return what is wrong with an event, if anything."""
        rollout_id = event.rollout_id
        match event.what:
            case "admitted":
                return self._admit(rollout_id)
            case "workflow-started":
                return self._start(rollout_id)
            case "status" if event.detail["status"] == "grading":
                self.grading[rollout_id] = None
            case "grader-started":
                return self._start_grader(rollout_id)
            case "workflow-ended" | "grader-ended":
                self._end_code(event)
            case "execution-ended":
                self.admitted.pop(rollout_id, None)
                self.waiting.pop(rollout_id, None)
                self.grading.pop(rollout_id, None)
                self._leave(rollout_id)
            case "arrived" if event.detail["route"] in {"admit", "batch"}:
                self.asking[event.detail["request"]] = len(self.admitted)
                self.asked[event.detail["request"]] += 1
            case "server-answered":
                return self._answer(event)
        return None

    def _admit(self, rollout_id: str) -> str | None:
        self.admitted[rollout_id] = self.waiting[rollout_id] = None
        for request, most in self.asking.items():
            self.asking[request] = max(most, len(self.admitted))
        if len(self.admitted) <= self.room:
            return None
        return f"was admitted where {self.room} were there already"

    def _start(self, rollout_id: str) -> str | None:
        self.waiting.pop(rollout_id, None)
        self.working[rollout_id] = None
        self.code[rollout_id] += 1
        if len(self.code) <= self.limit:
            return None
        return f"{len(self.code)} slots of {self.limit} are taken: {', '.join(self.code)}"

    def _start_grader(self, rollout_id: str) -> str | None:
        self.grading.pop(rollout_id, None)
        self.at_grader[rollout_id] = None
        if len(self.at_grader) > self.graders:
            return f"{len(self.at_grader)} graders run where {self.graders} may"
        return self._start(rollout_id)

    def _end_code(self, event: Event) -> None:
        if event.what == "grader-ended":
            self.at_grader.pop(event.rollout_id, None)
        self.code[event.rollout_id] -= 1
        if self.code[event.rollout_id] <= 0:
            del self.code[event.rollout_id]
        self._leave(event.rollout_id)

    def _leave(self, rollout_id: str) -> None:
        """Give the slot back once execution and user code have both ended."""
        if rollout_id not in self.admitted and rollout_id not in self.code:
            self.working.pop(rollout_id, None)

    def _answer(self, event: Event) -> str | None:
        request = event.detail["request"]
        most: float = self.asking.get(request, math.inf)
        if self.durable:  # what was admitted long ago takes a place, too, until that is found out
            most += sum(self.asked[each] for each in self.asking if each != request)
            most += self.asked[request] - 1
        self.answered[request] += 1
        if self.answered[request] == self.asked[request]:
            self.asking.pop(request, None)
        if event.detail["status"] != _BUSY or most >= self.room:
            return None
        return f"was refused although {self.room - most} places were free"
