"""Two runs, row by row."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import defaultdict
from fractions import Fraction

import attrs
import pytest
from evaluation.metrics.attempts import attempt, runs, table
from evaluation.metrics.folders import run_folder
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import EvaluationError
from rollout.evaluation.comparison import RowTable, compare, compare_runs
from rollout.evaluation.intervals import t_quantile


def test_two_runs_by_hand():
    a = table("P", "P", "w", "f", "P", "-", "P", "x")
    b = table("P", "f", "P", "w", "P", "P", "c", "P")
    found = compare(a, b)
    assert found.table == RowTable(
        both_pass=2, only_a=1, only_b=1, neither=1, better=1, worse=1, same=3
    )
    assert (found.pass_to_fail, found.fail_to_pass) == ((1,), (2,))
    assert (found.only_in_a, found.only_in_b) == ((6,), (5, 7))
    assert (found.pass_rate.a, found.pass_rate.b, found.pass_rate.difference) == (0.6, 0.6, 0.0)
    # The differences are 0, -1, 1, 0, 0.
    assert found.pass_rate.standard_error == pytest.approx(math.sqrt(0.5 / 5))
    assert found.pass_rate.high == pytest.approx(t_quantile(0.975, 4) * math.sqrt(0.1))
    # Rewards are there in both for rows 0, 2 and 4 alone.
    assert found.mean_reward.rows == 3
    assert found.mean_reward.a == pytest.approx(2 / 3)
    assert found.mean_reward.difference == pytest.approx(1 / 3)
    assert found.sign_test_p == 1.0
    assert found.differences == ()


@pytest.mark.parametrize(
    ("before", "after", "flip"),
    [
        ("PPw", "Pww", "lost"),
        ("Pww", "PPw", "won"),
        ("PPw", "PPP", None),
        ("www", "Pww", None),
        ("PPw", "Pw-", "lost"),  # half of the attempts is not more than half
        ("Pw-", "PPw", "won"),
        ("Pw-", "PPww", None),
    ],
)
def test_a_row_passes_if_more_than_half_of_its_attempts_do(before, after, flip):
    found = compare(table(before), table(after))
    assert found.pass_to_fail == ((0,) if flip == "lost" else ())
    assert found.fail_to_pass == ((0,) if flip == "won" else ())
    counted = found.table
    assert counted.only_a + counted.only_b == (flip is not None)
    assert counted.both_pass + counted.only_a + counted.only_b + counted.neither == 1


def test_a_changed_rate_counts_although_nothing_flips():
    found = compare(table("PPw", "www", "PP-"), table("PPP", "Pww", "PPP"))
    assert (found.table.better, found.table.worse, found.table.same) == (2, 0, 1)
    assert found.fail_to_pass == found.pass_to_fail == ()
    assert found.sign_test_p == 0.5


def test_runs_may_have_different_numbers_of_attempts():
    found = compare(table("Pw", "PP"), table("PPPw", "wwwP"))
    assert found.pass_rate.a == 0.75
    assert found.pass_rate.b == 0.5
    assert (found.table.better, found.table.worse) == (1, 1)


def test_differences_that_are_all_the_same_have_no_interval():
    run = table("Pw", "ww", "PP")
    found = compare(run, run)
    for change in (found.pass_rate, found.mean_reward):
        assert (change.difference, change.standard_error, change.rows) == (0.0, 0.0, 3)
        assert (change.low, change.high, change.method) == (None, None, "none")


def test_thirds_are_no_noise():
    # 1/3 to 2/3 and 2/3 to 3/3 are the same change, though not in floats.
    found = compare(table("Pww", "PPw"), table("PPw", "PPP"))
    assert found.pass_rate.difference == 1 / 3
    assert found.pass_rate.standard_error == 0.0


@pytest.mark.parametrize("words", [((), ()), (("P",), ()), (("P",), ("x",)), (("P",), ("P",))])
def test_too_few_rows_have_no_interval(words):
    found = compare(table(*words[0]), table(*words[1]))
    assert found.pass_rate.method == found.mean_reward.method == "none"
    assert (found.pass_rate.low, found.pass_rate.standard_error) == (None, None)
    assert found.sign_test_p == 1.0
    if words[1] != ("P",):
        assert found.pass_rate.difference is None
        assert found.only_in_a == ((0,) if words[0] else ())


def test_an_interval_of_rates_stays_within_its_range():
    found = compare(table("P", "w", "w"), table("w", "P", "P"))
    assert (found.pass_rate.low, found.pass_rate.high) == (-1.0, 1.0)
    assert found.mean_reward.high > 1.0


def _row_means(records):
    rates, rewards = defaultdict(list), defaultdict(list)
    for record in records:
        if record.failed:
            rates[record.row].append(0)
        elif record.outcome == "success" and not record.removed and record.reward is not None:
            rates[record.row].append(int(record.passed))
            rewards[record.row].append(Fraction(record.reward))
    return [
        {row: Fraction(sum(values), len(values)) for row, values in kind.items()}
        for kind in (rates, rewards)
    ]


@st.composite
def pairs(draw):
    records, _, _ = draw(runs(max_rows=8))
    other, _, _ = draw(runs(max_rows=8))
    # Lay rows of both runs upon each other, or else they hardly ever meet.
    moved = []
    for run in (records, other):
        indices = sorted({record.row for record in run})
        places = dict(zip(indices, draw(st.permutations(range(9))), strict=False))
        moved.append([attrs.evolve(record, row=places[record.row]) for record in run])
    return moved


@given(pairs())
def test_differences_are_those_of_naive_formulas(runs_of_both):
    a, b = runs_of_both
    found = compare(a, b)
    for change, left, right in zip(
        (found.pass_rate, found.mean_reward), _row_means(a), _row_means(b), strict=True
    ):
        rows = sorted(left.keys() & right.keys())
        assert change.rows == len(rows)
        if not rows:
            assert change.difference is None
            continue
        steps = [right[row] - left[row] for row in rows]
        assert change.a == float(statistics.mean(left[row] for row in rows))
        assert change.b == float(statistics.mean(right[row] for row in rows))
        mean = statistics.mean(steps)
        if abs(mean) < 1e308:
            assert change.difference == float(mean)
    rates = (_row_means(a)[0], _row_means(b)[0])
    both = rates[0].keys() & rates[1].keys()
    assert found.only_in_a == tuple(sorted(rates[0].keys() - both))
    assert found.only_in_b == tuple(sorted(rates[1].keys() - both))
    assert found.table.better == sum(rates[1][row] > rates[0][row] for row in both)
    assert found.table.worse == sum(rates[1][row] < rates[0][row] for row in both)
    half = Fraction(1, 2)
    lost = {row for row in both if rates[0][row] > half >= rates[1][row]}
    won = {row for row in both if rates[1][row] > half >= rates[0][row]}
    assert (set(found.pass_to_fail), set(found.fail_to_pass)) == (lost, won)
    assert found.table.both_pass == sum(min(rates[0][row], rates[1][row]) > half for row in both)


@given(pairs(), st.randoms(use_true_random=False))
def test_order_changes_nothing_and_changing_over_mirrors(runs_of_both, rng):
    a, b = runs_of_both
    found = compare(a, b)
    shuffled = [list(a), list(b)]
    for run in shuffled:
        rng.shuffle(run)
    assert json.dumps(compare(*shuffled).to_dict()) == json.dumps(found.to_dict())
    mirrored = compare(b, a)
    assert mirrored.pass_to_fail == found.fail_to_pass
    assert mirrored.only_in_a == found.only_in_b
    assert mirrored.sign_test_p == found.sign_test_p
    for one, other in (
        (found.pass_rate, mirrored.pass_rate),
        (found.mean_reward, mirrored.mean_reward),
    ):
        assert (one.a, one.standard_error) == (other.b, other.standard_error)
        if one.low is not None:
            assert (one.low, one.high) == (-other.high, -other.low)
            assert one.low <= one.difference <= one.high


def test_the_interval_covers_the_truth_in_19_of_20_cases():
    rng = random.Random(11)
    draws, hits = 500, 0
    for _ in range(draws):
        a, b = [], []
        for row in range(12):
            center = rng.gauss(0, 3)
            a.append(attempt(row, 0, center + rng.gauss(0, 1)))
            b.append(attempt(row, 0, center + 0.5 + rng.gauss(0, 1)))
        change = compare(a, b).mean_reward
        hits += change.low <= 0.5 <= change.high
    assert 0.92 < hits / draws < 0.98


def test_two_records_of_one_attempt_are_refused():
    with pytest.raises(EvaluationError, match="row 3, attempt 1: there are two"):
        compare([], [attempt(3, 1), attempt(3, 0), attempt(3, 1)])


def test_the_dictionary_is_plain_json():
    document = compare(table("P", "P"), table("f", "P")).to_dict()
    assert document["schema"] == "rollout-comparison/1"
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["pass_to_fail"] == [0]
    assert document["table"]["only_a"] == 1


def test_run_folders(tmp_path):
    a, b = table("P", "P", "f"), table("P", "f", "f")
    retried = attempt(2, retry=1)
    left = run_folder(tmp_path / "a", a)
    right = run_folder(
        tmp_path / "b", [*b, retried], chat={"model": "large"}, run={"pass_threshold": 0.5}
    )
    found = compare_runs(left, right)
    assert attrs.evolve(found, differences=()) == compare(a, [*b[:2], retried])
    assert found.differences == (
        "chat.model: small and large",
        "run.pass_threshold: 1.0 and 0.5",
    )
    assert found.to_dict()["differences"] == list(found.differences)


def test_rows_of_another_dataset_are_refused_unless_allowed(tmp_path):
    left = run_folder(tmp_path / "a", table("P", "P"))
    right = run_folder(tmp_path / "b", table("f"), dataset={"digest": "11"})
    with pytest.raises(EvaluationError, match=r"a.jsonl \(00 → 11\).*--allow-different-datasets"):
        compare_runs(left, right)
    found = compare_runs(left, right, allow_different_datasets=True)
    assert (found.pass_to_fail, found.only_in_a) == ((0,), (1,))
    assert found.differences == ("dataset changed: a.jsonl (00 → 11)",)


@pytest.mark.parametrize("changes", [{"selection": "0-0"}, {"limit": 1}])
def test_a_part_of_a_dataset_has_the_rows_of_the_whole(tmp_path, changes):
    left = run_folder(tmp_path / "a", table("P", "P"))
    right = run_folder(tmp_path / "b", table("f"), dataset=changes)
    found = compare_runs(left, right)
    assert (found.pass_to_fail, found.only_in_a) == ((0,), (1,))
    assert len(found.differences) == 1


def test_the_same_bytes_in_another_place_are_the_same_rows(tmp_path):
    left = run_folder(tmp_path / "a", table("P"))
    right = run_folder(tmp_path / "b", table("P"), dataset={"path": "b.jsonl"})
    assert compare_runs(left, right).table.both_pass == 1


def test_a_folder_without_a_run_is_refused(tmp_path):
    left = run_folder(tmp_path / "a", table("P"))
    with pytest.raises(EvaluationError, match="holds no evaluation"):
        compare_runs(left, tmp_path)
