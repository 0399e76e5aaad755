"""A server's feed by itself: what it takes to write, in which order, and what is noted as told."""

from __future__ import annotations

import json
import math

import pytest
import trio
from attrs import define, field

from rollout.errors import FieldProblem, InvalidBodyError
from rollout.rules import PollingLease, RolloutRecord, SeenState
from rollout.server.feed import _CHUNK_BYTES, MAX_CLAIMS, Feed, read_claims
from rollout.types import RolloutResultResponse, RolloutStatus


@define(eq=False)
class Entry:
    """What a feed asks of an entry."""

    rollout_id: str
    body: bytes = b"{}"
    record: RolloutRecord = field(init=False)
    feed: Feed | None = None

    def __attrs_post_init__(self) -> None:
        self.record = RolloutRecord(self.rollout_id, PollingLease.starting(0.0, 120.0))

    def current_body(self) -> bytes:
        return self.body

    def runs(self) -> Entry:
        self.record.advance(RolloutStatus.RUNNING)
        return self

    def succeeds(self) -> Entry:
        end = RolloutResultResponse(rollout_id=self.rollout_id, status=RolloutStatus.SUCCESS)
        self.record.finish(end, 1.0)
        return self


@pytest.fixture
def told():
    return []


@pytest.fixture
def feed(told):
    return Feed(lambda entry, state: told.append((entry.rollout_id, str(state.status))))


RUNNING = SeenState(RolloutStatus.RUNNING)
NOTICE = b'{"taken_over":["a"]}'


@pytest.mark.parametrize(
    ("leases", "field", "reason"),
    [
        (None, "leases", f"must be a list of at most {MAX_CLAIMS} objects"),
        ([{}], "leases.0", "must have the strings rollout_id and polling_lease_token"),
        (
            [{"rollout_id": "a", "polling_lease_token": "t", "seen": 1}],
            "leases.0.seen",
            "must be a string",
        ),
    ],
)
def test_claims_of_another_form_are_named(leases, field, reason):
    with pytest.raises(InvalidBodyError) as caught:
        read_claims({"leases": leases})
    assert caught.value.problems == (FieldProblem((field,), reason, "type_error"),)


def test_a_feed_takes_as_many_claims_as_the_bound_says():
    claim = {"rollout_id": "a", "polling_lease_token": "t"}
    assert len(read_claims({"leases": [claim] * MAX_CLAIMS})) == MAX_CLAIMS


def test_lines_come_in_the_order_of_the_changes_and_only_of_what_is_news(feed):
    for name in "abcd":
        feed.attach(Entry(name, name.encode()).runs(), RUNNING if name == "b" else SeenState())
    feed.mark(feed.entries["b"])
    feed.mark(feed.entries["c"])  # is marked already
    pieces, taken = feed.take()
    assert pieces == [b"a\nc\nd\n"]
    assert [entry.rollout_id for entry, _ in taken] == ["a", "c", "d"]
    assert feed.take() == ([], [])


def test_what_has_no_news_does_not_end_a_piece(feed):
    quiet, loud = Entry("a").runs(), Entry("b", b"b").runs()
    feed.attach(quiet, RUNNING)
    feed.mark(quiet)
    feed.attach(loud, SeenState())
    assert feed.take()[0] == [b"b\n"]


def test_a_piece_ends_when_it_is_full(feed):
    for name, length in (("a", _CHUNK_BYTES - 1), ("b", 1), ("c", 1)):
        feed.attach(Entry(name, name.encode() * length).runs(), SeenState())
    assert [entry.rollout_id for entry, _ in feed.take()[1]] == ["a", "b"]
    assert feed.take()[0] == [b"c\n"]


@pytest.mark.parametrize(("length", "pieces"), [(_CHUNK_BYTES - 1, 1), (_CHUNK_BYTES, 3)])
def test_a_large_line_is_a_piece_of_its_own(feed, length, pieces):
    feed.attach(Entry("a", b"a").runs(), SeenState())
    feed.attach(Entry("b", b"b" * length).runs(), SeenState())
    taken, _ = feed.take()
    assert b"".join(taken) == b"a\n" + b"b" * length + b"\n"
    assert len(taken) == pieces


async def test_what_another_feed_takes_over_is_said_once_and_at_once(feed, autojump_clock):
    other = Feed(lambda entry, state: None)
    for name in "ab":
        entry = Entry(name)
        feed.attach(entry, SeenState())
        other.attach(entry, SeenState())
        await feed.wait(math.inf)
        assert json.loads(feed.take()[0][0]) == {"taken_over": [name]}
        assert (feed.entries, entry.feed) == ({}, other)
    with trio.move_on_after(1) as scope:
        await feed.wait(math.inf)
    assert scope.cancelled_caught  # nothing is left to say


def test_what_is_news_and_what_is_taken_over_are_said_together(feed):
    other = Feed(lambda entry, state: None)
    taken_over = Entry("a")
    feed.attach(taken_over, SeenState())
    feed.attach(Entry("b", b"b").runs(), SeenState())
    other.attach(taken_over, SeenState())
    pieces, _ = feed.take()
    assert b"".join(pieces).splitlines() in ([b"b", NOTICE], [NOTICE, b"b"])


def test_only_what_is_still_attached_is_noted_as_told(feed, told):
    gone, ended, moved = Entry("gone").runs(), Entry("ended").succeeds(), Entry("moved").runs()
    for entry in (gone, ended, moved):
        feed.attach(entry, SeenState())
    _, taken = feed.take()
    feed.detach(gone)
    feed.detach(gone)
    moved.succeeds()  # while the lines are written
    feed.mark(moved)
    feed.sent(taken)
    assert told == [("ended", "success"), ("moved", "running")]
    assert list(feed.entries) == ["moved"]
    assert [state.status for _, state in feed.take()[1]] == ["success"]


def test_what_is_attached_again_while_it_is_written_is_told_anew(feed, told):
    ended, moved = Entry("ended").succeeds(), Entry("moved").runs()
    for entry in (ended, moved):
        feed.attach(entry, SeenState())
    _, taken = feed.take()
    for entry in (ended, moved):
        feed.attach(entry, SeenState())  # its admission came again
    feed.sent(taken)
    assert told == []
    _, taken = feed.take()
    assert [str(state.status) for _, state in taken] == ["success", "running"]
    feed.sent(taken)
    assert told == [("ended", "success"), ("moved", "running")]
    assert list(feed.entries) == ["moved"]
