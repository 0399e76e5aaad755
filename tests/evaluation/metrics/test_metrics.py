"""The figures of a run: what counts where, exactness, order, and the way through JSON."""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import tracemalloc
from collections import Counter
from fractions import Fraction

import attrs
import pytest
from evaluation.metrics.attempts import attempt, failed, runs, table
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import EvaluationDamagedError, EvaluationError
from rollout.evaluation.intervals import wilson
from rollout.evaluation.metrics import AttemptCounts, Durations, EvaluationMetrics, compute_metrics


def metrics_of(*words: str):
    return compute_metrics(table(*words), rows=len(words), n=max(map(len, words)))


def figures(estimates):
    return [(estimate.value, estimate.rows) for estimate in estimates]


def test_a_run_by_hand():
    results = metrics_of("PPwf", "PwxP", "eeuc", "----").results
    assert results.outcomes == {"success": 8, "failure": 1, "cancelled": 1, "error": 2}
    assert results.error_categories == {"agent_error": 1, "unreachable": 2}
    assert results.attempts == AttemptCounts(
        planned=16,
        settled=11,
        cancelled=1,
        missing=4,
        counted=9,
        passed=4,
        rewarded=6,
        removed=1,
        ungraded=1,
    )
    assert results.pass_rate.value == 4 / 9
    assert (results.pass_rate.attempts, results.pass_rate.rows) == (9, 3)
    assert results.mean_reward.value == 4 / 6
    assert (results.mean_reward.attempts, results.mean_reward.rows) == (6, 2)
    assert figures(results.pass_at_k) == [
        (float((Fraction(1, 2) + Fraction(2, 3)) / 3), 3),
        (float((Fraction(5, 6) + 1) / 3), 3),
        (1.0, 2),
        (1.0, 1),
    ]
    assert figures(results.pass_hat_k) == [
        (float((Fraction(1, 2) + Fraction(2, 3)) / 3), 3),
        (float((Fraction(1, 6) + Fraction(1, 3)) / 3), 3),
        (0.0, 2),
        (0.0, 1),
    ]


def test_a_failed_attempt_is_a_failure_and_no_reward_of_zero():
    results = metrics_of("Pf", "Pf").results
    assert results.pass_rate.value == 0.5
    assert results.mean_reward.value == 1.0
    assert results.mean_reward.attempts == 2


@pytest.mark.parametrize("letter", "cxu-")
def test_what_is_no_verdict_enters_no_figure(letter):
    with_it, without = metrics_of("Pw" + letter, "wPP").results, metrics_of("Pw-", "wPP").results
    for name in ("pass_rate", "mean_reward", "pass_at_k", "pass_hat_k"):
        assert getattr(with_it, name) == getattr(without, name)


def test_what_was_superseded_has_not_ended_yet():
    waiting = failed(0, superseded=True, retry=2)
    metrics = compute_metrics([waiting, attempt(1)], rows=2, n=1)
    assert metrics.results.attempts.missing == 1
    assert metrics.results.outcomes["failure"] == 0
    assert metrics.results.error_categories == {}
    assert metrics.results.pass_rate.attempts == 1
    assert metrics.timing.retries == 2


def test_a_reward_that_does_not_belong_is_left_out():
    records = [
        failed(0),
        attempt(1, 0, 5.0, outcome="failure", passed=True),
        attempt(2, 0, 5.0, removed=True, passed=True),
        attempt(3, 0, 5.0, outcome="cancelled", passed=True),
    ]
    results = compute_metrics(records, rows=4, n=1).results
    assert results.attempts.rewarded == 0
    assert results.attempts.passed == 0
    assert (results.pass_rate.value, results.mean_reward.value) == (0.0, None)


def test_a_failure_may_lack_a_category():
    assert metrics_of("f").results.error_categories == {"agent_error": 1}
    results = compute_metrics([failed(0, category=None)], rows=1, n=1).results
    assert results.error_categories == {"unknown": 1}


def test_nothing_at_all():
    metrics = compute_metrics([], rows=0, n=2)
    assert metrics.results.pass_rate.value is None
    assert metrics.results.mean_reward.method == "none"
    assert figures(metrics.results.pass_at_k) == [(None, 0), (None, 0)]
    assert metrics.results.sample_metrics == {}
    assert metrics.results.prompt_tokens.mean is None
    assert metrics.timing.settled == metrics.timing.success == Durations(0, None, None, None, None)
    assert EvaluationMetrics.from_dict(metrics.to_dict()) == metrics


def test_one_attempt_has_figures_and_no_interval():
    results = metrics_of("P").results
    assert (results.pass_rate.value, results.pass_rate.low, results.pass_rate.high) == (
        1,
        None,
        None,
    )
    assert figures(results.pass_at_k) == figures(results.pass_hat_k) == [(1.0, 1)]


def test_rewards_of_zeros_and_ones_have_the_interval_of_a_rate():
    same = metrics_of("P", "P", "P").results.mean_reward
    assert (same.low, same.high, same.method) == (*wilson(1, 3), "wilson-rows")
    halves = [attempt(row, 0, 0.5) for row in range(3)]
    other = compute_metrics(halves, rows=3, n=1).results.mean_reward
    assert (other.value, other.low, other.high, other.method) == (0.5, None, None, "none")


def test_tokens_and_sample_metrics_say_of_how_many():
    records = [
        attempt(0, 0, prompt_tokens=10, completion_tokens=1, metrics={"b": 1, "a": 0.5}),
        attempt(0, 1, prompt_tokens=5, metrics={"a": 1.5, "text": "x", "flag": True}),
        attempt(1, 0, None, removed=True, prompt_tokens=3, metrics={"a": 100}),
        failed(1, 1, metrics={"b": 4, "big": 10**400, "nan": math.nan}),
        attempt(2, 0, None, outcome="cancelled", prompt_tokens=999, metrics={"a": 100}),
    ]
    results = compute_metrics(records, rows=3, n=2).results
    assert attrs.astuple(results.prompt_tokens) == (18, 6.0, 3)
    assert attrs.astuple(results.completion_tokens) == (1, 1.0, 1)
    assert list(results.sample_metrics) == ["a", "b"]
    assert attrs.astuple(results.sample_metrics["a"]) == (1.0, 2)
    assert attrs.astuple(results.sample_metrics["b"]) == (2.5, 2)


def test_durations_of_all_and_of_successes():
    records = [attempt(row, duration_sec=float(row)) for row in range(20)]
    records += [failed(row, 1, duration_sec=100.0) for row in range(20)]
    records += [attempt(0, 2, None, outcome="cancelled", duration_sec=1e9)]
    timing = compute_metrics(records, rows=20, n=3).timing
    assert attrs.astuple(timing.success) == (20, 9.5, 9.5, pytest.approx(18.05), 19.0)
    assert attrs.astuple(timing.settled) == (40, 54.75, 59.5, 100.0, 100.0)


def test_durations_of_many_attempts():
    rng = random.Random(3)
    values = [rng.expovariate(1) for _ in range(20_000)]
    records = [attempt(row, duration_sec=value) for row, value in enumerate(values)]
    found = compute_metrics(records, rows=len(values), n=1).timing.settled
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert (found.median, found.max) == (statistics.median(values), max(values))
    assert found.p95 == pytest.approx(cuts[18], rel=1e-12)


@pytest.mark.parametrize("rewards", [(0.0, -0.0), (-0.0, 0.0)])
def test_the_best_of_two_zeros_is_the_same_in_each_order(rewards):
    records = [attempt(row, reward=reward) for row, reward in enumerate(rewards)]
    results = compute_metrics(records, rows=2, n=1).to_dict()["results"]
    assert json.dumps(results["best_reward"]) == "0.0"


@given(runs(), st.randoms(use_true_random=False))
def test_order_and_timing_change_no_bit_of_the_results(run, rng):
    records, rows, n = run
    first = compute_metrics(records, rows=rows, n=n).to_dict()
    again = [attrs.evolve(record, duration_sec=rng.random(), retry=3) for record in records]
    rng.shuffle(again)
    second = compute_metrics(again, rows=rows, n=n).to_dict()
    assert json.dumps(first["results"]) == json.dumps(second["results"])
    shuffled = list(records)
    rng.shuffle(shuffled)
    assert json.dumps(first) == json.dumps(compute_metrics(shuffled, rows=rows, n=n).to_dict())


@given(runs())
def test_figures_are_those_of_naive_formulas(run):
    records, rows, n = run
    results = compute_metrics(records, rows=rows, n=n).results
    counted = [
        record
        for record in records
        if record.failed
        or (record.outcome == "success" and not record.removed and record.reward is not None)
    ]
    rewards = [Fraction(record.reward) for record in counted if record.reward is not None]
    passed = [record for record in counted if record.passed]
    assert results.attempts.counted == len(counted)
    assert results.pass_rate.value == (len(passed) / len(counted) if counted else None)
    assert results.pass_rate.rows == len({record.row for record in counted})
    assert results.mean_reward.value == (float(statistics.mean(rewards)) if rewards else None)
    assert results.mean_reward.attempts == len(rewards) == results.attempts.rewarded
    sizes = Counter(record.row for record in counted)
    rates = [
        Fraction(sum(record.row == row for record in passed), size) for row, size in sizes.items()
    ]
    first = float(statistics.mean(rates)) if rates else None
    assert results.pass_at_k[0].value == results.pass_hat_k[0].value == first
    attempts = results.attempts
    assert attempts.planned == rows * n == attempts.settled + attempts.cancelled + attempts.missing
    assert attempts.settled == attempts.counted + attempts.removed + attempts.ungraded
    assert sum(results.outcomes.values()) == len(records)


@given(runs())
def test_figures_stay_within_their_bounds(run):
    records, rows, n = run
    results = compute_metrics(records, rows=rows, n=n).results
    for at, hat in zip(results.pass_at_k, results.pass_hat_k, strict=True):
        assert at.rows == hat.rows
        assert at.value is None or 0 <= hat.value <= at.value <= 1
    rate = results.pass_rate
    if rate.low is not None:
        assert 0 <= rate.low <= rate.value <= rate.high <= 1
        assert rate.low < rate.high
    assert (rate.low is None) == (rate.rows < 2) == (rate.method == "none")
    mean = results.mean_reward
    if mean.low is not None:
        assert mean.low <= mean.value <= mean.high
        assert mean.rows >= 2


@given(runs())
def test_json_and_back(run):
    records, rows, n = run
    metrics = compute_metrics(records, rows=rows, n=n)
    text = json.dumps(metrics.to_dict(), allow_nan=False)
    assert EvaluationMetrics.from_dict(json.loads(text)) == metrics
    assert list(metrics.to_dict()) == ["schema", "results", "timing"]


def test_rewards_at_the_end_of_the_range_do_not_overflow():
    largest = sys.float_info.max
    records = [attempt(row, 0, largest if row % 3 else -largest) for row in range(9)]
    records += [attempt(row, 1, 5e-324) for row in range(9)]
    metrics = compute_metrics(records, rows=9, n=2)
    assert metrics.results.mean_reward.value == pytest.approx(largest / 6)
    assert EvaluationMetrics.from_dict(json.loads(json.dumps(metrics.to_dict()))) == metrics


def test_small_rewards_next_to_large_ones_are_not_lost():
    records = [attempt(0, number, reward) for number, reward in enumerate((1e16, 3.0, -1e16))]
    assert compute_metrics(records, rows=1, n=3).results.mean_reward.value == 1.0


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([attempt(4), attempt(4)], "row 4, attempt 0: there are two records"),
        ([attempt(0, 2)], "row 0 has an attempt 2, but n is 2"),
        ([attempt(0), attempt(1), attempt(9)], "records of 3 rows, but only 2"),
        ([attempt(1, 0, math.nan)], "row 1, attempt 0: the reward is not a finite number"),
        ([attempt(1, 0, math.inf)], "row 1, attempt 0: the reward is not a finite number"),
        ([attempt(1, duration_sec=math.nan)], "row 1, attempt 0: the duration is not a finite"),
    ],
)
def test_records_that_cannot_be_are_refused(records, reason):
    with pytest.raises(EvaluationError, match=reason):
        compute_metrics(records, rows=2, n=2)


def _changed(document, way, value):
    *outer, last = way.split(".")
    for step in outer:
        document = document[int(step) if step.isdigit() else step]
    if value is None:
        del document[last]
    else:
        document[last] = value


@pytest.mark.parametrize(
    ("way", "value", "reason"),
    [
        ("schema", "rollout-metrics/2", "schema rollout-metrics/1"),
        ("schema", None, "schema rollout-metrics/1"),
        ("extra", 1, "extra is unknown"),
        ("results.extra", 1, "results.extra is unknown"),
        ("results.pass_at_k.1.extra", 1, r"results.pass_at_k.1.extra is unknown"),
        ("results.sample_metrics.a.extra", 1, "results.sample_metrics.a.extra is unknown"),
        ("timing", None, "timing: is required"),
        ("results.rows", "3", "results.rows: must be a whole number"),
        ("results.rows", True, "results.rows: must be a whole number"),
        ("results.pass_rate.value", "0.5", "results.pass_rate.value: must be a number"),
        ("results.pass_rate.value", math.nan, "results.pass_rate.value: must be finite"),
        ("results.pass_at_k", 7, "results.pass_at_k"),
        ("results.pass_at_k", {}, "a field that must be a list is not one"),
        ("results.pass_hat_k", "", "a field that must be a list is not one"),
        ("results.sample_metrics", [], "results.sample_metrics"),
        ("results.outcomes", [["success", 1]], "results.outcomes"),
        ("results.outcomes.success", 1.5, "results.outcomes.success: must be a whole number"),
        ("results.pass_hat_k.0.k", None, "results.pass_hat_k.0.k: is required"),
        ("timing.success.p95", [], "timing.success.p95: must be a number"),
    ],
)
def test_a_changed_document_is_refused_by_its_field(way, value, reason):
    records = [attempt(0, metrics={"a": 1}), attempt(1, 1, 0.5)]
    document = json.loads(json.dumps(compute_metrics(records, rows=2, n=2).to_dict()))
    _changed(document, way, value)
    with pytest.raises(EvaluationDamagedError, match=reason):
        EvaluationMetrics.from_dict(document)


@pytest.mark.parametrize("document", [None, [], "x", {}])
def test_something_else_is_no_document(document):
    with pytest.raises(EvaluationDamagedError, match="does not have the schema"):
        EvaluationMetrics.from_dict(document)


def test_rows_may_lie_far_apart_and_attempts_be_many():
    records = [
        attempt(row, number, float(row > 5)) for row in (0, 7, 10**15) for number in (0, 999)
    ]
    results = compute_metrics(records, rows=3, n=1000).results
    assert results.pass_rate.value == 4 / 6
    assert figures(results.pass_at_k)[:3] == [(4 / 6, 3), (2 / 3, 3), (None, 0)]


def test_memory_is_a_few_bytes_for_each_attempt():
    # Records that exist already do not count; they are made one at a time in a run.
    one = [attempt(0, number, number / 7, duration_sec=number / 3) for number in range(4)]

    def records(rows):
        for row in range(rows):
            for record in one:
                object.__setattr__(record, "row", row)
                yield record

    rows = 5000
    tracemalloc.start()
    try:
        metrics = compute_metrics(records(rows), rows=rows, n=4)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert metrics.results.attempts.counted == 4 * rows
    assert peak < 100 * 4 * rows
