"""The figures of an evaluation, out of the records of its attempts. Pure.

Everything in `EvaluationResults` is the same to the last bit for the same outcomes, in
whatever order they arrive: sums are exact fractions, rounded once at the end.

An attempt that failed counts as not passed. It has no reward, so it is not in the mean reward
either: there it would be a silent 0.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any

import attrs
from attrs import define, field, frozen

from rollout._checks import check_whole, is_finite_number
from rollout.codec import structure
from rollout.errors import EvaluationDamagedError, EvaluationError, InvalidBodyError
from rollout.evaluation.estimators import KEstimate, curve, percentile
from rollout.evaluation.index import AttemptIndex, reward_of
from rollout.evaluation.intervals import ClusterSums, Estimate, cluster_mean, cluster_rate
from rollout.evaluation.records import AttemptOutcome, AttemptRecord
from rollout.evaluation.sequential import SEQUENTIAL, Stopping

__all__ = [
    "SCHEMA",
    "AttemptCounts",
    "Durations",
    "EvaluationMetrics",
    "EvaluationResults",
    "EvaluationTiming",
    "SampleMetric",
    "TokenCount",
    "compute_metrics",
    "threshold_note",
]

SCHEMA = "rollout-metrics/1"
"""What the ``schema`` of `metrics.json` says."""

UNNAMED_CATEGORY = "unknown"
"""Where a failed attempt without an error category is counted."""


@frozen
class AttemptCounts:
    """Attempts by their end.

    Attributes:
        planned: Rows times n.
        settled: Those that ended as success, failure or error.
        cancelled: Those whose last rollout was cancelled; they run again on resuming.
        missing: Those that have not ended at all.
        counted: Settled ones that enter the pass rate: all but `removed` and `ungraded`.
        passed: Counted ones that passed.
        rewarded: Counted ones that have a reward.
        removed: Successes whose sample the grader marked for removal.
        ungraded: Successes without a reward that were not marked for removal.
    """

    planned: int
    settled: int
    cancelled: int
    missing: int
    counted: int
    passed: int
    rewarded: int
    removed: int
    ungraded: int


@frozen
class TokenCount:
    """Tokens of the settled attempts that tell.

    Attributes:
        total: Their sum.
        mean: Their mean, ``None`` of nothing.
        attempts: How many attempts tell.
    """

    total: int
    mean: float | None
    attempts: int


@frozen
class SampleMetric:
    """One of the sample's own metrics, over the attempts that have it.

    Attributes:
        mean: Its mean.
        count: How many attempts have it as a finite number.
    """

    mean: float
    count: int


@frozen
class Durations:
    """How long attempts took, in seconds from request to end.

    Median and p95 are those of `rollout.evaluation.estimators.percentile`.

    Attributes:
        count: How many attempts these are.
        mean: Mean, ``None`` of nothing, as the others.
        median: Median.
        p95: 95th percentile.
        max: The longest.
    """

    count: int
    mean: float | None
    median: float | None
    p95: float | None
    max: float | None


@frozen
class EvaluationResults:
    """Figures that do not depend on order and timing.

    Attributes:
        rows: Selected rows.
        n: Attempts for each row.
        attempts: How many ended how.
        outcomes: How many attempts had which `AttemptOutcome`; all four are there.
        error_categories: How many failed attempts had which category; those that the model's
            endpoint failed are counted apart, as `rollout.types.MODEL_ENDPOINT` or `MODEL_KEY`.
        pass_rate: Passed attempts out of the counted ones, see
            `rollout.evaluation.intervals.cluster_rate`, or
            `rollout.evaluation.sequential.Stopping.estimate` for a run with ``until`` before
            all of its rows have run.
        mean_reward: Mean over the attempts that have a reward, see
            `rollout.evaluation.intervals.cluster_mean`; where all rewards are 0 or 1, the
            interval is that of a rate.
        best_reward: The highest of these rewards, ``None`` of none.
        pass_at_k: pass@k for k = 1..n, see `rollout.evaluation.estimators.pass_at_k`.
        pass_hat_k: pass^k for k = 1..n, see `rollout.evaluation.estimators.pass_hat_k`.
        prompt_tokens: Tokens of prompts.
        completion_tokens: Tokens of completions.
        sample_metrics: The sample's own metrics by name, over the counted attempts.
    """

    rows: int
    n: int
    attempts: AttemptCounts
    outcomes: dict[str, int]
    error_categories: dict[str, int]
    pass_rate: Estimate
    mean_reward: Estimate
    best_reward: float | None
    pass_at_k: tuple[KEstimate, ...]
    pass_hat_k: tuple[KEstimate, ...]
    prompt_tokens: TokenCount
    completion_tokens: TokenCount
    sample_metrics: dict[str, SampleMetric]


@frozen
class EvaluationTiming:
    """How the run went, which may differ between runs with the same results.

    Attributes:
        retries: How many records precede those that count: rollouts that were tried again,
            or were cancelled before the run was resumed.
        settled: Durations of all settled attempts.
        success: Durations of those that ended as success.
    """

    retries: int
    settled: Durations
    success: Durations


@frozen
class EvaluationMetrics:
    """All figures of an evaluation; the content of `metrics.json`.

    Attributes:
        results: Figures that do not depend on order and timing.
        timing: Those that do.
    """

    results: EvaluationResults
    timing: EvaluationTiming

    def to_dict(self) -> dict[str, Any]:
        """The figures in plain JSON types, with the keys schema, results and timing."""
        return {"schema": SCHEMA, **attrs.asdict(self, value_serializer=_plain)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> EvaluationMetrics:
        """Read what `to_dict` wrote; nothing may be missing, added or of another type.

        Raises:
            EvaluationDamagedError: It is something else; the message names the field.
        """
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise EvaluationDamagedError(f"metrics.json does not have the schema {SCHEMA}")
        try:
            metrics = structure(document, cls)
        except InvalidBodyError as error:
            raise EvaluationDamagedError(f"metrics.json is damaged: {error}") from None
        plain = metrics.to_dict()
        if extra := _extra(document, plain):
            raise EvaluationDamagedError(f"metrics.json is damaged: {extra} is unknown")
        if plain != document:
            raise EvaluationDamagedError(
                "metrics.json is damaged: a field that must be a list is not one"
            )
        return metrics


def _plain(_: Any, __: Any, value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _extra(document: Any, known: Any, way: str = "") -> str | None:
    """Name a key that reading ignored."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key not in known:
                return f"{way}{key}"
            if found := _extra(value, known[key], f"{way}{key}."):
                return found
    elif isinstance(document, list):
        for index, (value, same) in enumerate(zip(document, known, strict=True)):
            if found := _extra(value, same, f"{way}{index}."):
                return found
    return None


def threshold_note(
    passed: int | None, best_reward: float | None, threshold: float | None
) -> str | None:
    """Point out that the pass threshold is why nothing passes; ``None`` where it is not.

    Args:
        passed: How many attempts passed.
        best_reward: The highest reward. If it is 0, nothing was nearly right.
        threshold: The run's pass threshold.
    """
    if passed != 0 or not best_reward or threshold is None or best_reward >= threshold:
        return None
    return (
        f"No attempt passes: the best reward, {best_reward:.4g}, is below the pass threshold of "
        f"{threshold:.4g} (run.pass_threshold)."
    )


def stop_note(manifest: Mapping[str, Any], results: EvaluationResults) -> str | None:
    """Say that a run stopped because it knew enough; ``None`` if it did not.

    Args:
        manifest: Its manifest.
        results: Its figures.
    """
    if results.pass_rate.method != SEQUENTIAL:
        return None
    selected, until = manifest["dataset"]["selected"], manifest["run"]["until"]
    if results.rows == selected:
        return None
    return (
        f"The run stopped early: {results.rows:,} of {selected:,} rows, drawn in random order, "
        f"give the pass rate of all of them within {until:g} (run.until). Its interval holds "
        "however often one looks; the others are those of a fixed number of rows."
    )


def compute_metrics(
    records: Iterable[AttemptRecord], *, rows: int, n: int, stopping: Stopping | None = None
) -> EvaluationMetrics:
    """Work out the figures of a run.

    Memory grows by a few bytes for each attempt; records are not kept.

    Args:
        records: The record that counts of each attempt, in any order.
        rows: How many rows were selected.
        n: How many attempts each row has.
        stopping: Of a run that stops when it knows enough, where it stands (see
            `rollout.evaluation.sequential.replay`).

    Raises:
        EvaluationError: There are two records of one attempt, more attempts or rows than the
            run has, or a reward or a duration that is not a finite number.
    """
    check_whole("rows", rows, least=0)
    check_whole("n", n)
    tally = Tally(n)
    for record in records:
        tally.add(record)
    return tally.metrics(rows, stopping)


@define
class Tally:
    """The figures of a run, from its records one by one.

    Attributes:
        n: How many attempts each row has.
    """

    n: int
    index: AttemptIndex = field(factory=AttemptIndex)
    outcomes: Counter[AttemptOutcome] = field(factory=Counter)
    categories: Counter[str] = field(factory=Counter)
    retries: int = 0
    settled: int = 0
    removed: int = 0
    ungraded: int = 0
    fractional: bool = False
    best: float | None = None
    durations: array[float] = field(factory=lambda: array("d"))
    successes: array[float] = field(factory=lambda: array("d"))
    prompt: list[int] = field(factory=lambda: [0, 0])
    completion: list[int] = field(factory=lambda: [0, 0])
    sample_metrics: dict[str, array[float]] = field(factory=dict)

    def add(self, record: AttemptRecord) -> None:
        """Add the record that counts of an attempt; see `compute_metrics`."""
        if record.attempt >= self.n:
            raise EvaluationError(
                f"row {record.row} has an attempt {record.attempt}, but n is {self.n}"
            )
        self.index.add_final(record)
        self.retries += record.retry
        if not record.superseded:
            self.outcomes[record.outcome] += 1
        if not record.counts:
            return
        self.settled += 1
        self._take_duration(record)
        self._take_tokens(record)
        if record.failed:
            self.categories[record.reason or UNNAMED_CATEGORY] += 1
        elif record.removed:
            self.removed += 1
            return
        elif record.reward is None and not record.passed:
            self.ungraded += 1
            return
        reward = reward_of(record)
        self.fractional = self.fractional or reward not in {None, 0.0, 1.0}
        if reward is not None:
            # The sum makes -0.0 the 0.0 that it equals, whichever comes first.
            self.best = (reward if self.best is None else max(self.best, reward)) + 0.0
        for name, value in record.metrics.items():
            if is_finite_number(value):
                self.sample_metrics.setdefault(name, array("d")).append(value)

    def _take_tokens(self, record: AttemptRecord) -> None:
        for tokens, sums in (
            (record.prompt_tokens, self.prompt),
            (record.completion_tokens, self.completion),
        ):
            if tokens is not None:
                sums[0] += tokens
                sums[1] += 1

    def _take_duration(self, record: AttemptRecord) -> None:
        if not is_finite_number(record.duration_sec):
            raise EvaluationError(
                f"row {record.row}, attempt {record.attempt}: the duration is not a finite number"
            )
        self.durations.append(record.duration_sec)
        if record.outcome is AttemptOutcome.SUCCESS:
            self.successes.append(record.duration_sec)

    def metrics(self, rows: int, stopping: Stopping | None = None) -> EvaluationMetrics:
        """Work out the figures of a run with so many rows; see `compute_metrics`."""
        if stopping is not None:
            rows = stopping.rows
        sequential = None if stopping is None else stopping.estimate
        passes, rewards = ClusterSums(), ClusterSums()
        kinds: Counter[tuple[int, int]] = Counter()
        seen = passed = 0
        for score in self.index.rows():
            seen += 1
            passed += score.passed
            passes.add(score.passed, score.counted)
            rewards.add(score.reward_sum, len(score.rewards))
            kinds[score.counted, score.passed] += 1
        if seen > rows:
            raise EvaluationError(f"there are records of {seen} rows, but only {rows} are selected")
        planned, cancelled = rows * self.n, self.outcomes[AttemptOutcome.CANCELLED]
        results = EvaluationResults(
            rows=rows,
            n=self.n,
            attempts=AttemptCounts(
                planned=planned,
                settled=self.settled,
                cancelled=cancelled,
                missing=planned - self.settled - cancelled,
                counted=passes.count,
                passed=passed,
                rewarded=rewards.count,
                removed=self.removed,
                ungraded=self.ungraded,
            ),
            outcomes={outcome.value: self.outcomes[outcome] for outcome in AttemptOutcome},
            error_categories=dict(sorted(self.categories.items())),
            pass_rate=sequential or cluster_rate(passes),
            mean_reward=cluster_mean(rewards) if self.fractional else cluster_rate(rewards),
            best_reward=self.best,
            pass_at_k=curve(kinds, self.n),
            pass_hat_k=curve(kinds, self.n, all_pass=True),
            prompt_tokens=_tokens(*self.prompt),
            completion_tokens=_tokens(*self.completion),
            sample_metrics={
                name: SampleMetric(mean(values), len(values))
                for name, values in sorted(self.sample_metrics.items())
            },
        )
        timing = EvaluationTiming(
            self.retries, _durations(self.durations), _durations(self.successes)
        )
        return EvaluationMetrics(results, timing)


def _tokens(total: int, attempts: int) -> TokenCount:
    return TokenCount(total, total / attempts if attempts else None, attempts)


def _durations(values: array[float]) -> Durations:
    if not values:
        return Durations(0, None, None, None, None)
    ordered = sorted(values)
    return Durations(
        len(ordered),
        mean(ordered),
        percentile(ordered, 0.5),
        percentile(ordered, 0.95),
        ordered[-1],
    )
