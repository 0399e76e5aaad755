"""The order of the statuses."""

from __future__ import annotations

from itertools import product

import pytest

from rollout.rules import is_terminal, may_follow, reached
from rollout.types import RolloutStatus as S

FOLLOWERS = {
    S.UNKNOWN: {S.QUEUED, S.RUNNING, S.GRADING, S.SUCCESS, S.FAILURE, S.CANCELLED},
    S.QUEUED: {S.RUNNING, S.GRADING, S.SUCCESS, S.FAILURE, S.CANCELLED},
    S.RUNNING: {S.GRADING, S.SUCCESS, S.FAILURE, S.CANCELLED},
    S.GRADING: {S.SUCCESS, S.FAILURE, S.CANCELLED},
    S.SUCCESS: set(),
    S.FAILURE: set(),
    S.CANCELLED: set(),
}


@pytest.mark.parametrize("old", S)
def test_followers(old):
    assert {new for new in S if may_follow(new, old)} == FOLLOWERS[old]


def test_three_statuses_are_terminal():
    assert {status for status in S if is_terminal(status)} == {S.SUCCESS, S.FAILURE, S.CANCELLED}


def test_nothing_follows_a_terminal_status():
    assert not any(may_follow(new, old) for new, old in product(S, S) if is_terminal(old))


def test_milestones():
    assert {status for status in S if reached(status, S.RUNNING)} == {
        S.RUNNING, S.GRADING, S.SUCCESS, S.FAILURE, S.CANCELLED,
    }  # fmt: skip
    assert {status for status in S if reached(status, S.GRADING)} == {
        S.GRADING, S.SUCCESS, S.FAILURE, S.CANCELLED,
    }  # fmt: skip
