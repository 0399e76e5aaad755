"""What is kept of the attempts: the same whatever the order, and however much room there was."""

from __future__ import annotations

import random

import pytest
from evaluation.metrics.attempts import attempt, failed

from rollout.evaluation._ledger import Ledger, RowScore

REWARDS = (1.0, 0.25, 3.0)


def _records():
    for row in range(0, 900, 3):
        for number in range(row % 7 + 1):
            if (row + number) % 5 == 0:
                yield failed(row, number)
            else:
                yield attempt(row, number, REWARDS[(row + number) % 3])


def _expected():
    """Rewards in quarters."""
    rows = {}
    for record in _records():
        score = rows.setdefault(record.row, [0, 0, 0, 0])
        score[0] += 1
        score[1] += record.passed
        if record.reward is not None:
            score[2] += 1
            score[3] += int(4 * record.reward)
    return [RowScore(row, *score) for row, score in sorted(rows.items())]


@pytest.mark.parametrize("stride", [1, 2, 7, 100])
@pytest.mark.parametrize("order", ["as they are", "backwards", "by attempt", "shuffled"])
def test_scores_depend_on_neither_order_nor_room(stride, order):
    records = list(_records())
    match order:
        case "backwards":
            records.reverse()
        case "by attempt":
            records.sort(key=lambda record: record.attempt)
        case "shuffled":
            random.Random(stride).shuffle(records)
    ledger = Ledger(stride)
    for record in records:
        ledger.add(record)
    assert ledger.places == 2
    assert list(ledger.scores()) == _expected()


def test_a_row_of_cancelled_attempts_has_a_score_of_nothing():
    ledger = Ledger()
    ledger.add(attempt(5, 0, None, outcome="cancelled"))
    assert list(ledger.scores()) == [RowScore(5, 0, 0, 0, 0)]
    assert list(Ledger().scores()) == []
