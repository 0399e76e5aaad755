"""Confidence sequences: coverage by simulation, exact cases, and which run is ahead."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from evaluation.metrics.attempts import attempt, failed
from evaluation.metrics.folders import run_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import EvaluationDamagedError, EvaluationError
from rollout.evaluation import compare_runs
from rollout.evaluation.index import AttemptIndex
from rollout.evaluation.intervals import wilson
from rollout.evaluation.sequential import (
    ConfidenceSequence,
    Stopping,
    drawn_order,
    lockstep_order,
    replay,
    selected_rows,
)

RUNS = 100
MOST_MISSES = 12
"""More than that in 100 runs have a chance of 0.15% if each misses with 5%."""


def looks(draw: random.Random, population: int | None, rows: int):
    """One run of mixed rows, four attempts each: the truth, and the ends after each row."""
    drawn = population or rows
    chances = [draw.betavariate(1.0, 0.7) for _ in range(drawn)]
    passed = [sum(draw.random() < chance for _ in range(4)) for chance in chances]
    truth = sum(passed) / (4 * drawn) if population else 1 / 1.7
    sequence = ConfidenceSequence(population, resolution=100)
    seen = 0
    for row in range(rows):
        sequence.add(Fraction(passed[row], 4))
        seen += passed[row]
        yield truth, (sequence.low, sequence.high), wilson(seen / (4 * (row + 1)), 4 * (row + 1))


@pytest.mark.parametrize("population", [None, 100])
def test_a_sequence_holds_the_truth_at_all_times_where_an_interval_does_not(population):
    draw = random.Random(1)
    misses = fixed = 0
    for _ in range(RUNS):
        ends = list(looks(draw, population, 100))
        misses += any(not low <= truth <= high for truth, (low, high), _ in ends)
        fixed += any(not low <= truth <= high for truth, _, (low, high) in ends)
    assert misses <= MOST_MISSES
    assert fixed > MOST_MISSES  # so that the bound is one that can be missed


def test_at_the_end_of_the_dataset_only_the_grid_is_left():
    sequence = ConfidenceSequence(40)
    for row in range(40):
        sequence.add(row % 4 != 0)
    assert sequence.value == 0.75
    assert sequence.low <= 0.75 <= sequence.high
    assert sequence.half_width <= 0.001


def test_rows_that_count_in_part_lead_to_the_rate_of_all_attempts():
    draw = random.Random(2)
    rows = [(Fraction(draw.randint(0, k), 4), Fraction(k, 4)) for k in (0, 1, 2, 3, 4) * 10]
    draw.shuffle(rows)
    truth = sum(p for p, _ in rows) / sum(c for _, c in rows)
    sequence = ConfidenceSequence(50)
    for passed, counted in rows:
        sequence.add(passed, counted)
        assert sequence.low <= truth <= sequence.high
    assert sequence.counted == 40
    assert sequence.value == float(truth)
    assert sequence.half_width <= 0.001


def test_rows_that_do_not_end_leave_something_open():
    endless, finite = (ConfidenceSequence(rows, resolution=200) for rows in (None, 100))
    for row in range(100):
        endless.add(row % 2)
        finite.add(row % 2)
    assert endless.half_width > 0.1 > finite.half_width


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)).map(sorted), max_size=30),
    st.booleans(),
)
def test_a_sequence_never_widens_and_mirrors(rows, finite):
    population = len(rows) + 5 if finite else None
    sequence = ConfidenceSequence(population, resolution=20)
    mirrored = ConfidenceSequence(population, resolution=20)
    low, high = 0.0, 1.0
    for passed, counted in rows:
        sequence.add(Fraction(passed, 3), Fraction(counted, 3))
        mirrored.add(Fraction(counted - passed, 3), Fraction(counted, 3))
        assert low <= sequence.low < sequence.high <= high
        low, high = sequence.low, sequence.high
        assert sequence.half_width == pytest.approx((high - low) / 2)
    # One end is moved before the other, which matters once they meet; a capital may be rounded.
    if sequence.half_width > 0.05:
        assert mirrored.low == pytest.approx(1 - high, abs=0.051)
        assert mirrored.high == pytest.approx(1 - low, abs=0.051)


def manifest(rows: int, **run):
    dataset = {"rows": rows, "selected": rows, "selection": None, "limit": None}
    return {"dataset": dataset, "run": {"n": 2, "until": 0.25, "seed": 5, **run}}


@settings(max_examples=20)
@given(st.permutations(range(30)), st.randoms(use_true_random=False))
def test_the_order_in_which_attempts_end_does_not_matter(ends, draw):
    index, records = AttemptIndex(), []
    for row in ends:
        passes = [float(row % 3 != 0), float(row % 5 != 0)]
        draw.shuffle(passes)  # which of a row's attempts passes does not matter either
        records += [attempt(row, number, passed) for number, passed in enumerate(passes)]
    draw.shuffle(records)
    ordered = AttemptIndex()
    for row in range(30):
        ordered.add(attempt(row, 0, float(row % 3 != 0)))
        ordered.add(attempt(row, 1, float(row % 5 != 0)))
    live = Stopping.of(manifest(30, until=0.3))
    stopped = None
    for record in records:
        index.add(record)
        if live.advance(index) and stopped is None:
            stopped = live.position
    again = Stopping.of(manifest(30, until=0.3))
    again.advance(ordered)
    assert stopped == live.position == again.position
    assert live.estimate == again.estimate


def test_rows_behind_those_that_were_enough_are_dropped():
    index = AttemptIndex()
    for row in range(60):
        for number in (0, 1):
            index.add(attempt(row, number) if row % 9 else failed(row, number))
    stopping = replay(manifest(60), index)
    assert stopping.early
    kept = sorted(score.row for score in index.rows())
    assert kept == sorted(stopping.order[: stopping.position])
    assert stopping.estimate.attempts == 2 * len(kept)


def test_the_order_is_that_of_the_seed_and_grows_in_place():
    order = drawn_order(range(1000), 7)
    assert order[:5] == [203, 930, 430, 770, 232]
    assert sorted(order) == list(range(1000))
    assert [row for row in order if row < 500] == drawn_order(range(500), 7)
    assert drawn_order(range(1000), 8) != order


def test_selected_rows_are_those_of_the_manifest():
    dataset = {"rows": 10, "selected": 3, "selection": "2-4,7-", "limit": 4}
    assert selected_rows({"dataset": dataset}) == [2, 3, 4, 7]
    for wrong in ({"rows": None}, {"limit": 0}, {"selection": "x"}, {"selection": 3}):
        with pytest.raises(EvaluationDamagedError):
            selected_rows({"dataset": {**dataset, **wrong}})


def test_rows_are_compared_in_lockstep():
    rows = range(50)
    a, b = drawn_order(rows, 1), drawn_order(rows, 2)
    order = lockstep_order(rows, 1, 2)
    known = [max(a.index(row), b.index(row)) for row in order]
    assert known == sorted(known)
    assert lockstep_order(rows, 1, None) == lockstep_order(rows, 1, 1) == a
    assert sorted(lockstep_order(rows, None, None)) == list(rows) != lockstep_order(rows, 1, 2)


def two_runs(tmp_path, a, b, *, seeds=(5, 5), rows=400):
    folders = []
    for name, values, seed in zip("ab", (a, b), seeds, strict=True):
        records = [attempt(row, reward=float(passed)) for row, passed in values.items()]
        dataset = {"rows": rows, "selected": rows}
        folders.append(run_folder(tmp_path / name, records, dataset=dataset, run={"seed": seed}))
    return folders


@pytest.mark.parametrize("seeds", [(5, 5), (5, None), (None, None), (5, 6)])
def test_the_better_run_is_ahead(tmp_path, seeds):
    a = {row: row % 2 == 0 for row in range(400)}
    b = {row: row % 2 == 0 or row % 3 == 0 for row in range(400)}
    found = compare_runs(*two_runs(tmp_path, a, b, seeds=seeds), sequential=True).sequential
    assert (found.ahead, found.rows, found.common) == ("b", 400, 400)
    assert 0 < found.low < found.difference < found.high
    back = compare_runs(tmp_path / "b", tmp_path / "a", sequential=True).sequential
    assert back.ahead == "a"
    assert back.high == pytest.approx(-found.low)


def test_runs_that_go_on_are_compared_on_the_rows_drawn_in_both(tmp_path):
    a = {row: row % 2 == 0 for row in drawn_order(range(400), 5)[:90]}
    b = {row: row % 2 == 0 for row in drawn_order(range(400), 5)[:70]}
    a |= dict.fromkeys(drawn_order(range(400), 5)[95:], False)  # these overtook five
    found = compare_runs(*two_runs(tmp_path, a, b), sequential=True).sequential
    assert (found.ahead, found.difference, found.rows, found.common) == (None, 0.0, 70, 400)


def test_an_incomplete_run_in_the_order_of_its_file_is_refused(tmp_path):
    a = dict.fromkeys(range(400), True)
    b = dict.fromkeys(range(399), True)
    folders = two_runs(tmp_path, a, b, seeds=(None, None))
    with pytest.raises(EvaluationError, match=r"b is not complete and runs its rows in the order"):
        compare_runs(*folders, sequential=True)
    assert compare_runs(*folders).sequential is None
