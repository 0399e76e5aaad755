"""A rollout's record under any sequence of events."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.rules import PollingLease, RolloutRecord, SeenState
from rollout.rules.status import is_terminal
from rollout.types import RolloutErrorCategory, RolloutResultResponse, RolloutStatus

LEASE = 120.0
RANK = {RolloutStatus.QUEUED: 0, RolloutStatus.RUNNING: 1, RolloutStatus.GRADING: 2}
START = datetime(2026, 1, 1, tzinfo=UTC)


class RecordMachine(RuleBasedStateMachine):
    """Drives a record with events and keeps a model of what may be observed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.record = RolloutRecord("a", PollingLease.starting(0, LEASE))
        self.deadline = LEASE
        self.seen = SeenState()
        self.ranks: list[int] = [0]
        self.started: datetime | None = None
        self.settled: RolloutResultResponse | None = None
        self.result: RolloutResultResponse | None = None

    @rule(seconds=st.sampled_from([0.0, 0.5, 29.0, 30.0, 119.0, LEASE, 121.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(status=st.sampled_from(RolloutStatus))
    def the_backend_reports(self, status: RolloutStatus) -> None:
        before = self.record.status
        changed = self.record.advance(status)
        assert changed == (self.record.status is not before)
        if changed:
            assert self.record.status is status
            assert not is_terminal(status)

    @rule(later=st.integers(min_value=0, max_value=100))
    def the_agent_starts(self, later: int) -> None:
        when = START + timedelta(seconds=later)
        counted = self.record.mark_agent_started(when)
        assert counted == (self.started is None and self.record.end is None)
        if counted:
            self.started = when

    @rule()
    def the_watch_looks(self) -> None:
        due = self.result is None and self.now >= self.deadline
        assert self.record.expire(self.now) == due
        if due:
            self._ended(RolloutErrorCategory.LEASE_EXPIRED)

    @rule(status=st.sampled_from(["success", "failure", "cancelled"]))
    def the_execution_ends(self, status: str) -> None:
        given = RolloutResultResponse(
            rollout_id="a",
            status=RolloutStatus(status),
            agent_started_at=START - timedelta(days=1),  # the record knows better
        )
        expired = self.now >= self.deadline
        decided = self.record.finish(given, self.now)
        assert decided == (self.result is None and not expired)
        if self.result is None:
            self._ended(RolloutErrorCategory.LEASE_EXPIRED if expired else None)
            if decided and self.settled is None:
                assert self.record.status is RolloutStatus(status)

    @rule(status=st.sampled_from(["success", "failure", "cancelled"]))
    def the_execution_settles(self, status: str) -> None:
        given = RolloutResultResponse(rollout_id="a", status=RolloutStatus(status))
        end = self.record.settle(given, self.now)
        assert end is self.record.end
        if self.settled is None and self.result is None:
            self.settled = end
            expired = self.now >= self.deadline
            assert end.err_category is (RolloutErrorCategory.LEASE_EXPIRED if expired else None)
            assert expired or end.status == status
        assert end == (self.result or self.settled)

    def _ended(self, category: RolloutErrorCategory | None) -> None:
        self.result = self.record.result
        assert self.result is not None
        if self.settled is not None:
            assert self.result == self.settled
            return
        assert self.result.err_category is category
        assert self.result.agent_started_at == self.started

    @rule()
    def a_poll_comes(self) -> None:
        in_time = self.result is not None or self.now < self.deadline
        assert self.record.renew(self.now) == in_time
        if not in_time:
            self.the_watch_looks()
        elif self.result is None:
            self.deadline = self.now + LEASE

    @rule()
    def a_poll_is_answered(self) -> None:
        news = self.record.has_news(self.seen)
        record = self.record
        record.answered()
        now_seen = SeenState(record.status, record.agent_started_at is not None)
        assert is_terminal(record.status) == (record.result is not None)
        assert news == (now_seen != self.seen or is_terminal(record.status))
        self.seen = now_seen
        assert self.record.reported == now_seen
        assert record.delivered == is_terminal(record.status)
        if not is_terminal(record.status):
            assert not record.has_news(self.seen)

    @precondition(lambda self: self.seen.status is not RolloutStatus.QUEUED)
    @rule()
    def an_answer_was_lost(self) -> None:
        assert self.record.has_news(SeenState())

    @invariant()
    def statuses_only_move_forward(self) -> None:
        rank = RANK.get(self.record.status, 3)
        assert rank >= self.ranks[-1]
        self.ranks.append(rank)

    @invariant()
    def the_result_and_the_start_never_change(self) -> None:
        assert self.record.result is self.result
        assert self.record.agent_started_at == self.started
        assert is_terminal(self.record.status) == (self.result is not None)

    @invariant()
    def the_lease_follows_the_polls_alone(self) -> None:
        assert self.record.lease.deadline == self.deadline


RecordMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRecord: Any = RecordMachine.TestCase


def test_what_was_seen_survives_the_header():
    for status in RolloutStatus:
        for started in (True, False):
            state = SeenState(status, started)
            assert SeenState.from_header(state.to_header()) == state
