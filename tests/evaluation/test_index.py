"""The index of attempts: which record counts, whatever the order of rows and attempts."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from evaluation.metrics.attempts import attempt, failed
from evaluation.run.cases import record
from hypothesis import given
from hypothesis import strategies as st

from rollout.evaluation.index import AttemptIndex, RowScore, state_of
from rollout.evaluation.records import AttemptOutcome, AttemptRecord

REWARDS = (1.0, 0.25, 3.0)


def _records():
    for row in range(0, 900, 3):
        for number in range(row % 7 + 1):
            if (row + number) % 5 == 0:
                yield failed(row, number)
            else:
                yield attempt(row, number, REWARDS[(row + number) % 3])


def _expected():
    rows = {}
    for each in _records():
        score = rows.setdefault(each.row, [0, 0, []])
        score[0] += 1
        score[1] += each.passed
        if each.reward is not None:
            score[2].append(each.reward)
    return [RowScore(row, *score, tuple(rewards)) for row, (*score, rewards) in rows.items()]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("order", ["as they are", "backwards", "by attempt", "shuffled"])
def test_scores_do_not_depend_on_the_order(seed, order):
    records = list(_records())
    match order:
        case "backwards":
            records.reverse()
        case "by attempt":
            records.sort(key=lambda record: record.attempt)
        case "shuffled":
            random.Random(seed).shuffle(records)
    assert list(AttemptIndex.of_final(records).rows()) == _expected()


def test_a_row_of_cancelled_attempts_has_a_score_of_nothing():
    index = AttemptIndex.of_final([attempt(5, 0, None, outcome="cancelled")])
    assert list(index.rows()) == [RowScore(5, 0, 0, ())]
    assert list(AttemptIndex().rows()) == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2000), st.integers(0, 2), st.sampled_from(AttemptOutcome), st.booleans()
        )
    ),
    st.booleans(),
)
def test_what_counts_of_each_attempt(steps, retry_failed):
    index = AttemptIndex()
    history: dict[tuple[int, int], list[tuple[int, AttemptRecord]]] = {}
    for place, (row, number, outcome, superseded) in enumerate(steps):
        entries = history.setdefault((row, number), [])
        entry = record(row, number, len(entries), outcome=outcome, superseded=superseded)
        entries.append((place, entry))
        index.add(entry, place)
    for key in {*history, (0, 0), (2001, 2)}:
        entries = history.get(key, [])
        counting = [entry for _, entry in entries if entry.counts]
        is_open = not counting or (retry_failed and counting[-1].failed)
        assert index.is_open(*key, retry_failed=retry_failed) == is_open
        assert index.records(*key) == len(entries)
        last = max((at for at, (_, entry) in enumerate(entries) if entry.counts), default=-1)
        since = [entry for _, entry in entries[last + 1 :]]
        assert index.setup_retries(*key) == sum(entry.superseded for entry in since)
    found = list(index)
    assert [(each.row, each.attempt) for each in found] == sorted(history)
    for each in found:
        entries = history[each.row, each.attempt]
        place, final = ([pair for pair in entries if pair[1].counts] or entries)[-1]
        assert (each.place, each.state, each.settled) == (place, state_of(final), final.counts)
        assert each.outcome == final.outcome
        assert list(each.others) == [at for at, _ in entries if at != place]
    outcomes = Counter(each.outcome for each in found if each.settled)
    assert outcomes.total() == sum(
        any(entry.counts for _, entry in entries) for entries in history.values()
    )
