"""The fair queue over runs, and the choice of a worker."""

from __future__ import annotations

from collections import Counter

import pytest
from attrs import define
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.pool.queue import FairQueue, most_room

NAMES = (None, "a", "b", "c")


def taken(queue: FairQueue[str], count: int) -> list[str | None]:
    return [queue.pop() for _ in range(count)]


def test_runs_take_turns_and_each_keeps_its_order():
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.push("a", f"a{number}")
    queue.push("b", "b0")
    queue.push(None, "n0")
    queue.push("b", "b1")
    assert taken(queue, 7) == ["a0", "b0", "n0", "a1", "b1", "a2", None]


def test_a_run_that_comes_late_gets_its_turn_at_once_and_no_more():
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.push("a", f"a{number}")
    taken(queue, 50)
    for number in range(100):
        queue.push("b", f"b{number}")
    next_ones = taken(queue, 20)
    assert "b0" in next_ones[:2]
    assert Counter(str(item)[0] for item in next_ones) == {"a": 10, "b": 10}


def test_a_run_is_capped_and_the_others_go_on():
    queue: FairQueue[str] = FairQueue(max_per_run=2)
    for number in range(3):
        queue.push("a", f"a{number}")
    queue.push("b", "b0")
    assert taken(queue, 4) == ["a0", "b0", "a1", None]
    assert len(queue) == 1
    queue.ended("a")
    assert taken(queue, 2) == ["a2", None]


def test_what_is_put_back_goes_first_within_its_run_and_loses_no_turn():
    queue: FairQueue[str] = FairQueue(max_per_run=1)
    queue.push("a", "a0")
    queue.push("a", "a1")
    queue.push("b", "b0")
    assert queue.pop() == "a0"
    queue.put_back("a", "a0")
    assert taken(queue, 3) in (["a0", "b0", None], ["b0", "a0", None])
    queue.ended("a")
    assert queue.pop() == "a1"


def test_a_run_whose_rollout_was_put_back_and_discarded_takes_its_turns_again():
    queue: FairQueue[str] = FairQueue()
    for item in ("a0", "a1", "b0", "b1", "b2", "b3"):
        queue.push(item[0], item)
    assert taken(queue, 6) == ["a0", "b0", "a1", "b1", "b2", "b3"]
    queue.put_back("a", "a1")
    assert queue.discard("a", "a1")
    queue.push("a", "a2")
    assert queue.pop() == "a2"


def test_what_is_discarded_is_never_taken_and_a_run_without_rollouts_is_forgotten():
    queue: FairQueue[str] = FairQueue()
    queue.push("a", "a0")
    queue.push("a", "a1")
    assert queue.discard("a", "a0")
    assert not queue.discard("a", "a0")
    assert taken(queue, 2) == ["a1", None]
    queue.ended("a")
    assert queue.runs == {}
    assert not queue.discard("a", "a1")


@given(
    weights=st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 10), min_size=2, max_size=3),
    turns=st.integers(20, 120),
)
def test_shares_are_in_proportion_to_weights(weights, turns):
    queue: FairQueue[str] = FairQueue(weights=weights)
    for name in weights:
        for number in range(turns):
            queue.push(name, f"{name}{number}")
    counts = Counter(str(item)[0] for item in taken(queue, turns))
    total = sum(weights.values())
    for name, weight in weights.items():
        # In a fair order no run is ever ahead or behind by more than a turn of each other run.
        assert abs(counts[name] - turns * weight / total) <= len(weights)


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=60))
def test_no_run_starves_whatever_the_others_send(pushed):
    """Between two turns of a run that waits, each other run has one turn at most."""
    queue: FairQueue[str] = FairQueue()
    queue.push("patient", "patient")
    for index, name in enumerate(pushed):
        queue.push(name, f"{name}{index}")
    before: Counter[str] = Counter()
    while (item := queue.pop()) != "patient":
        before[str(item).rstrip("0123456789")] += 1
        queue.push("a", f"more{len(before)}{sum(before.values())}")
    assert all(count <= 1 for count in before.values())


class Machine(RuleBasedStateMachine):
    """Nothing is lost or taken twice, caps hold, and what may go does."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue(max_per_run=2, weights={"a": 3.0, "b": 0.5})
        self.waiting: dict[int, str | None] = {}
        self.out: dict[int, str | None] = {}
        self.number = 0

    @rule(name=st.sampled_from(NAMES))
    def push_one(self, name):
        self.push(name)

    def push(self, name):
        self.number += 1
        self.queue.push(name, self.number)
        self.waiting[self.number] = name

    @rule()
    def pop(self):
        item = self.queue.pop()
        full = Counter(self.out.values())
        if item is None:
            assert all(full[name] >= 2 for name in self.waiting.values())
            return
        name = self.waiting.pop(item)
        assert full[name] < 2
        self.out[item] = name

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def end(self, data):
        item = data.draw(st.sampled_from(sorted(self.out)))
        self.queue.ended(self.out.pop(item))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def put_back(self, data):
        item = data.draw(st.sampled_from(sorted(self.out)))
        name = self.waiting[item] = self.out.pop(item)
        self.queue.put_back(name, item)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def put_back_and_replace(self, data):
        """A rollout that is to go elsewhere is cancelled, and its run sends another one."""
        item = data.draw(st.sampled_from(sorted(self.out)))
        name = self.out.pop(item)
        self.queue.put_back(name, item)
        assert self.queue.discard(name, item)
        self.push(name)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def discard(self, data):
        item = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.queue.discard(self.waiting.pop(item), item)

    @invariant()
    def counts_are_right(self):
        assert len(self.queue) == len(self.waiting)
        waiting, out = Counter(self.waiting.values()), Counter(self.out.values())
        assert self.queue.runs == {name: (waiting[name], out[name]) for name in {*waiting, *out}}

    def teardown(self):
        """What waits is taken once nothing is out."""
        for name in self.out.values():
            self.queue.ended(name)
        while self.waiting:
            item = self.queue.pop()
            self.queue.ended(self.waiting.pop(item))
        assert self.queue.runs == {}


TestQueue = Machine.TestCase
TestQueue.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@define
class Place:
    room: float
    in_flight: int = 0


def test_the_worker_with_most_room_is_chosen():
    small, large = Place(1), Place(3)
    assert most_room([small, large]) is large
    assert most_room([Place(0), small]) is small
    assert most_room([Place(0), Place(-1)]) is None
    assert most_room([]) is None


def test_among_workers_without_a_bound_the_one_with_the_fewest_rollouts_is_chosen():
    busy, idle = Place(float("inf"), 5), Place(float("inf"), 1)
    assert most_room([busy, idle]) is idle


@pytest.mark.parametrize("other_room", [1, 0])
def test_a_worker_that_is_avoided_is_chosen_only_if_no_other_has_room(other_room):
    avoided, other = Place(9), Place(other_room)
    chosen = other if other_room else avoided
    assert most_room([avoided, other], [avoided]) is chosen
