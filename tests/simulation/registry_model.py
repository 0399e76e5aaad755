"""What a registry must do, told again: a small model with nothing of the registry's code.

All times are whole multiples of fractions of two, so that sums are exact and a deadline can be
met to the float. Waits and retentions end between the moments at which steps happen and leases
expire; where two things do happen at the same moment, both orders must come to the same end.
"""

from __future__ import annotations

import math

from attrs import define, field

GRID = 1 / 8
LEASE = 15.0
WAIT = 2 + 1 / 64
RETENTIONS = (5 + 1 / 32, 0.0, 40 + 1 / 32)
RANK = {"queued": 0, "running": 1, "grading": 2, "success": 3, "failure": 3, "cancelled": 3}

IDS = ("a", "ab", "b", "c")
OUTCOMES = {
    "success": ("success", None),
    "failure": ("failure", "agent_error"),
    "cancelled": ("cancelled", None),
    "ValueError": ("failure", "validation_error"),
    "TimeoutError": ("failure", "timeout"),
    "SystemExit": ("failure", "agent_error"),
    "nonsense": ("failure", "internal_error"),
    "unfinished": ("failure", "internal_error"),
}
MODES = ("obedient", "stubborn", "polite", "ending")
"""How an execution takes a request to stop: it ends at once; ignores it; its backend sees to it;
its backend says that it has ended already."""


@define(eq=False)
class Life:
    """One admission and what becomes of it."""

    rollout_id: str
    number: int
    mode: str
    deadline: float
    status: str = "queued"
    started: float | None = None
    category: str | None = None
    ended: bool = False
    executing: bool = True
    disposition: str | None = None
    retained_until: float = math.inf
    reported: tuple = ("queued", False)

    def answer(self):
        return (self.status, self.category, self.started)

    def news(self, seen):
        status, started = seen
        return (
            self.ended
            or RANK[self.status] > RANK[status]
            or (self.started is not None and not started)
        )


@define(eq=False)
class Poll:
    life: Life
    seen: tuple
    until: float


@define
class Model:
    """What a registry must do, told in the order in which things happen."""

    retention: float
    capacity: int
    reports_start: bool
    now: float = 0.0
    lives: dict = field(factory=dict)
    admissions: list = field(factory=list)
    polls: dict = field(factory=dict)
    answers: dict = field(factory=dict)

    @property
    def executing(self):
        return [life for life in self.lives.values() if life.executing]

    def let_pass(self, until):
        while (moment := self.next_event()) <= until:
            self.now = max(self.now, moment)
            self.settle()
        self.now = until

    def next_event(self):
        return min(
            [life.deadline for life in self.lives.values() if not life.ended]
            + [life.retained_until for life in self.lives.values() if not life.executing]
            + [poll.until for poll in self.polls.values()],
            default=math.inf,
        )

    def settle(self):
        """Do what is due now."""
        for life in list(self.lives.values()):
            if not life.ended and life.deadline <= self.now:
                self.expire(life)
        for number, poll in list(self.polls.items()):
            if poll.life.news(poll.seen) or poll.until <= self.now:
                del self.polls[number]
                self.answers[number] = [poll.life.answer()]
                poll.life.reported = (poll.life.status, poll.life.started is not None)
        for rollout_id, life in list(self.lives.items()):
            if life.retained_until <= self.now and not life.executing:
                del self.lives[rollout_id]

    def expire(self, life):
        self.end(life, "failure", "lease_expired")
        if life.executing:
            self.stop(life)

    def end(self, life, status, category):
        if not life.ended:
            life.ended, life.status, life.category = True, status, category
            life.retained_until = self.now + self.retention

    def stop(self, life, *, force=False):
        if life.disposition is None:
            queued = life.status == "queued" and life.mode in {"obedient", "stubborn"}
            life.disposition = "cancelled_queued" if queued else "cancelled_running"
            if life.mode == "ending":
                life.disposition = "not_found"
        if life.mode == "obedient" or (force and life.mode != "stubborn"):
            life.executing = False
            self.end(life, "cancelled", None)
        return life.disposition

    def admit(self, rollout_id, mode):
        if rollout_id in self.lives:
            return "duplicate"
        if len(self.executing) >= self.capacity:
            return "full"
        life = Life(rollout_id, len(self.admissions), mode, self.now + LEASE)
        self.lives[rollout_id] = life
        self.admissions.append(life)
        return life

    def begin(self, life):
        if not self.reports_start:
            self.start(life)

    def start(self, life):
        if not life.ended and life.started is None:
            life.started = self.now
        self.advance(life, "running")

    def advance(self, life, status):
        if RANK[status] > RANK[life.status]:
            life.status = status

    def complete(self, life, status, category):
        if not life.ended and self.now >= life.deadline:
            self.expire(life)
        life.executing = False
        self.end(life, status, category)

    def poll(self, life, seen):
        if not life.ended:
            if self.now >= life.deadline:
                self.expire(life)
            else:
                life.deadline = self.now + LEASE
        number = len(self.polls) + len(self.answers)
        self.polls[number] = Poll(life, seen or life.reported, self.now + WAIT)

    def refuse_poll(self, *outcomes):
        self.answers[len(self.polls) + len(self.answers)] = list(outcomes)

    def sight(self):
        """What can be seen of the registry now."""
        return {
            "executing": sorted(life.rollout_id for life in self.executing),
            "rollouts": {
                rollout_id: (*life.answer(), None if life.ended else life.deadline)
                for rollout_id, life in self.lives.items()
            },
            "waiting": sorted(self.polls),
            "answers": {number: list(answers) for number, answers in self.answers.items()},
        }
