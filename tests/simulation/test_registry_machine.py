"""A rule-based state machine for the registry of a server, against a small model of it.

The machine decides what happens and when, and the model says at once what must come of it.
All steps are then executed against the real `RolloutRegistry` in one deterministic run on a
mock clock, and after each of them everything that can be seen is compared.
"""

from __future__ import annotations

import math

import pytest
import trio
from attrs import evolve
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulation.registry_model import GRID, IDS, MODES, OUTCOMES, RANK, RETENTIONS, Life, Model
from simulation.registry_steps import Step, execute

from rollout.rules import PollingLease, RolloutRecord
from rollout.server.entry import Entry
from rollout.server.registry import RolloutRegistry
from rollout.simulation import deterministic_run

ORDERS = (0, 1, 2)
"""Seeds for the order of tasks that are ready at the same moment. Several, so that a failure
which depends on the order does not vanish while Hypothesis shrinks it."""

# A moment: what it is counted from, how many eighths of a second from there, and whether the
# step need not wait until all else that is due then is done.
NOW = ("later", 0, False)
SHORTLY = [NOW, *(("later", eighths, False) for eighths in (1, 2, 4, 8, 16))]
BORDERS = [
    *[("deadline", 0, True)] * 4,
    ("deadline", 0, False),
    ("deadline", -1, False),
    ("deadline", 1, False),
    ("retention", 0, True),
    ("retention", -1, False),
]
MUCH_LATER = [("later", eighths, False) for eighths in (17, 40, 8 * 15, 8 * 40)]
SELECTORS = [
    *({"ids": [each]} for each in IDS),
    {"ids": ["a", "b"]},
    {"ids": ["c", "nobody", "a"]},
    {"prefix": "ab"},
    {"prefix": "a"},
    {"all_": True},
    {"how": "stop"},
    {"how": "force"},
    {"how": "abandon"},
]
SEEN = [
    None,
    *(
        (status, started)
        for status in ("queued", "running", "grading")
        for started in (False, True)
    ),
]

# One choice for each thing to decide, so that Hypothesis can take a step out as it shrinks.
# Mostly little time passes, or else nothing would be alive for long. What meets a deadline, and
# polls that have seen all there is and so wait, are rare unless they are drawn on purpose.
short_moments = st.sampled_from(SHORTLY)
moments = st.sampled_from([*SHORTLY, *[NOW] * 10, *SHORTLY, *BORDERS, *MUCH_LATER])
seen_states = st.sampled_from([*SEEN, *[None] * 5, *["current"] * 5])
selectors = st.sampled_from(SELECTORS)
choices = st.sampled_from([0, 0, 0, 1, 2, 3])


class RegistryMachine(RuleBasedStateMachine):
    """Decides on steps, and writes down with each what the model makes of it."""

    def __init__(self):
        super().__init__()
        self.steps = []
        self.model = Model(RETENTIONS[0], 2, reports_start=True)

    @initialize(
        retention=st.sampled_from(RETENTIONS),
        capacity=st.integers(1, 3),
        reports_start=st.booleans(),
        mode=st.sampled_from(MODES),
    )
    def set_up(self, retention, capacity, reports_start, mode):
        self.model = Model(retention, capacity, reports_start)
        self.admit(NOW, IDS[0], mode, "admit")

    # --- when -----------------------------------------------------------------------------------

    def until(self, moment, life):
        """When a moment is; one that has passed is now."""
        kind, shift, _ = moment
        now = self.model.now
        if kind == "later":
            return now + shift * GRID
        lives = [life] if life else list(self.model.lives.values())[:1]
        if kind == "deadline":
            return max([now, *(each.deadline + shift * GRID for each in lives)])
        # Retention ends between two steps, or right at one if nothing is retained at all.
        ends = [each.retained_until for each in lives if each.retained_until < math.inf]
        return max([now, *((math.ceil(end / GRID) + shift) * GRID for end in ends)])

    def wait(self, moment, life=None):
        """Let time pass up to a moment, which may be one of the given rollout; return how long."""
        begin = self.model.now
        self.model.let_pass(self.until(moment, life))
        return self.model.now - begin

    def write(self, wait, what, *arguments, outcomes=(None,), at_once=False):
        self.model.settle()
        self.steps.append(Step(wait, at_once, what, arguments, list(outcomes), self.model.sight()))

    # --- what -----------------------------------------------------------------------------------

    @rule(
        moment=short_moments,
        rollout_id=st.sampled_from(IDS),
        mode=st.sampled_from(MODES),
        how=st.sampled_from(["admit", "admit", "admit", "admit_and_cancel", "admit_while_closed"]),
    )
    def admit(self, moment, rollout_id, mode, how):
        wait = self.wait(moment)
        if how == "admit_while_closed":
            self.write(wait, how, rollout_id, outcomes=["closed"])
            return
        outcome = life = self.model.admit(rollout_id, mode)
        if isinstance(life, Life):
            outcome = "admitted"
            if how == "admit_and_cancel":
                # The request to stop comes before the execution has had a chance to begin.
                outcome = {rollout_id: self.model.stop(life)}
                if mode == "stubborn":  # it never got to be stubborn
                    life.executing = False
                    self.model.end(life, "cancelled", None)
            if life.executing:
                self.model.begin(life)
        self.write(wait, how, rollout_id, mode, outcomes=[outcome])

    @precondition(lambda self: self.model.executing)
    @rule(
        moment=short_moments,
        choice=choices,
        command=st.sampled_from(["running", "start", "grading", "queued"]),
    )
    def report(self, moment, choice, command):
        life = self.model.executing[choice % len(self.model.executing)]
        wait = self.wait(moment, life)
        if not life.executing:
            self.write(wait, "wait")
            return
        if command == "start":
            self.model.start(life)
        else:
            self.model.advance(life, command)
        self.write(wait, "command", life.rollout_id, command)

    @precondition(lambda self: self.model.executing)
    @rule(
        moment=moments,
        choice=choices,
        outcome=st.sampled_from(list(OUTCOMES)),
    )
    def complete(self, moment, choice, outcome):
        """The execution ends before, at or after the deadline of its lease."""
        life = self.model.executing[choice % len(self.model.executing)]
        wait = self.wait(moment, life)
        if life.executing:
            self.model.complete(life, *OUTCOMES[outcome])
            self.write(wait, "command", life.rollout_id, outcome, at_once=moment[2])
        elif moment[2]:  # its lease ended at this moment or before, and so did the execution
            self.write(wait, "command", life.rollout_id, outcome, at_once=True)
        else:
            self.write(wait, "wait")

    @precondition(lambda self: self.model.lives)
    @rule(moment=moments, choice=choices, seen=seen_states)
    def poll(self, moment, choice, seen):
        alive_first = sorted(self.model.lives.values(), key=lambda life: life.ended)
        life = alive_first[choice % len(alive_first)]
        wait = self.wait(moment, life)
        if seen == "current":
            seen = None if life.ended else (life.status, life.started is not None)
        if self.model.lives.get(life.rollout_id) is life:
            self.model.poll(life, seen)
        elif moment[2] and wait:
            # Forgotten at this moment, or before: where at this moment, the poll may come first.
            self.model.refuse_poll("unknown", life.answer())
        else:
            self.model.refuse_poll("unknown")
        self.write(wait, "poll", life.rollout_id, life.number, seen, at_once=moment[2])

    @precondition(lambda self: self.model.lives)
    @rule(moment=moments, rollout_id=st.sampled_from(IDS), choice=st.none() | choices)
    def poll_with_another_token(self, moment, rollout_id, choice):
        """A token of nobody's, of another rollout, or of an earlier one with the same id."""
        wait = self.wait(moment)
        life = self.model.lives.get(rollout_id)
        tokens = [each.number for each in self.model.admissions if each is not life]
        number = None if choice is None or not tokens else tokens[choice % len(tokens)]
        self.model.refuse_poll("unknown" if life is None else "invalid lease")
        self.write(wait, "poll", rollout_id, number, None)

    @precondition(lambda self: self.model.polls)
    @rule(moment=short_moments, choice=choices)
    def disconnect(self, moment, choice):
        key = list(self.model.polls)[choice % len(self.model.polls)]
        wait = self.wait(moment)
        if key in self.model.polls:
            del self.model.polls[key]
            self.model.answers[key] = ["disconnected"]
        self.write(wait, "disconnect", key)

    @precondition(lambda self: self.model.lives)
    @rule(moment=moments, selector=selectors)
    def cancel(self, moment, selector):
        before = {each: evolve(life) for each, life in self.model.lives.items() if not life.ended}
        at_once = moment[2] and "ids" in selector  # who is there to match may change at a moment
        wait = self.wait(moment, before.get(selector["ids"][0]) if "ids" in selector else None)
        if "how" in selector:
            self.shut_down(wait, selector["how"])
            return
        lives = {each: self.model.lives.get(each) for each in selector.get("ids", self.model.lives)}
        expected = {
            each: "not_found" if life is None or life.ended else self.model.stop(life)
            for each, life in lives.items()
            if each.startswith(selector.get("prefix", ""))
        }
        outcomes = [expected]
        for each, life in before.items() if at_once and wait else ():
            if expected.get(each) == "not_found" and life.deadline == self.model.now:
                # Whether the request or the expiry comes first, its end is the expiry.
                early = self.model.stop(life)
                outcomes += [{**other, each: early} for other in outcomes]
        self.write(wait, "cancel", selector, outcomes=outcomes, at_once=at_once)

    def shut_down(self, wait, how):
        """Do what the stages of a shutdown do to the executions."""
        executing = self.model.executing
        for life in executing:
            if how == "abandon":
                self.model.end(life, "cancelled", None)
            else:
                self.model.stop(life, force=how == "force")
        ids = sorted(life.rollout_id for life in executing)
        self.write(wait, "shut_down", how, outcomes=[ids if how == "abandon" else None])

    def teardown(self):
        for seed in ORDERS:
            wrong = deterministic_run(execute, self.steps, self.model, seed=seed)
            assert wrong is None, wrong


RegistryMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestRegistry = RegistryMachine.TestCase


# --- does it bite? ------------------------------------------------------------------------------


def renewal_revives(self, now):
    self.deadline = max(self.deadline, now + self.timeout_sec)
    return True


def deadline_is_not_past(self, now):
    return now > self.deadline


def starts_twice(self, when):
    self.agent_started_at = when
    return True


def goes_backwards(self, status):
    if self.result is None:
        self.status = status
    return self.result is None


def keeps_the_slot(self, entry):
    pass


def forgets_while_it_executes(self, entry):
    if entry.retained_until <= trio.current_time() and entry.rollout_id in self._entries:
        del self._entries[entry.rollout_id]
        entry.emit("forgotten")


def forgets_when_the_execution_ends(self, entry):
    if not entry.executing and self._entries.get(entry.rollout_id) is entry:
        del self._entries[entry.rollout_id]
        entry.emit("forgotten")


def never_forgets(self, entry):
    pass


def reports_no_start(self, seen):
    return self.result is not None or RANK[self.status] > RANK[seen.status]


def notes_no_answer(self, *_):
    pass


def expires_without_a_stop(self, entry, now):
    if not entry.concluded and entry.record.lease.expired(self._clock.time(now)):
        self._conclude(entry, entry.record.expiry())


def expires_only_when_polled(self, entry, now):
    if entry.record.result is not None:
        self._forget_if_over(entry)


def wakes_no_poll(self, *_):
    pass


def stops_whatever_the_backend_says(self, entry):
    entry.disposition = entry.disposition or "cancelled_running"
    entry.call.cancel()
    return entry.disposition


BROKEN = [
    (PollingLease, "renew", renewal_revives),
    (PollingLease, "expired", deadline_is_not_past),
    (RolloutRecord, "mark_agent_started", starts_twice),
    (RolloutRecord, "advance", goes_backwards),
    (RolloutRecord, "has_news", reports_no_start),
    (RolloutRecord, "answered", notes_no_answer),
    (RolloutRegistry, "_release", keeps_the_slot),
    (RolloutRegistry, "_forget_if_over", forgets_while_it_executes),
    (RolloutRegistry, "_forget_if_over", forgets_when_the_execution_ends),
    (RolloutRegistry, "_forget_if_over", never_forgets),
    (RolloutRegistry, "_expire", expires_without_a_stop),
    (RolloutRegistry, "_due", expires_only_when_polled),
    (RolloutRegistry, "_request_stop", stops_whatever_the_backend_says),
    (Entry, "notify", wakes_no_poll),
]


@pytest.mark.parametrize(
    ("where", "name", "broken"), BROKEN, ids=[broken.__name__ for _, _, broken in BROKEN]
)
def test_a_broken_registry_is_found(monkeypatch, where, name, broken):
    monkeypatch.setattr(where, name, broken)
    quick = settings(
        RegistryMachine.TestCase.settings,
        max_examples=400,
        stateful_step_count=24,  # finds them with the least work
        phases=[Phase.generate],
        derandomize=True,
        database=None,
    )
    with pytest.raises(AssertionError, match=r"expected|after its end|while"):
        run_state_machine_as_test(RegistryMachine, settings=quick)


def test_a_failing_machine_tells_a_short_story(monkeypatch):
    """Shrunk to what it takes: a rollout, and whatever comes right at the deadline of its lease."""
    monkeypatch.setattr(PollingLease, "expired", deadline_is_not_past)
    thorough = settings(
        RegistryMachine.TestCase.settings,
        stateful_step_count=10,
        phases=[Phase.generate, Phase.shrink],
        derandomize=True,
        database=None,
    )
    with pytest.raises(AssertionError) as caught:
        run_state_machine_as_test(RegistryMachine, settings=thorough)
    story = [line.strip() for line in str(caught.value).strip().splitlines()]
    verdict = next(number for number, line in enumerate(story) if " later" not in line)
    assert verdict <= 5
    assert story[0].startswith("0 s later: admit('a'")
    assert story[verdict].startswith("15 s: ")
