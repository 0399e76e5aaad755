"""The figures of a run of the demo."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from attrs import define, field

from rollout.evaluation.estimators import KEstimate, curve, percentile
from rollout.types import RolloutResultResponse, RolloutStatus

__all__ = ["DemoReport", "Groups"]


@define
class Groups:
    """The samples of each question; a reward of 1 is right, any other one wrong.

    Attributes:
        samples: How many samples of each question were asked for.
        tried: How many samples of a question have a reward, by its number.
        right: How many of them are right.
    """

    samples: int
    tried: Counter[int] = field(factory=Counter)
    right: Counter[int] = field(factory=Counter)

    def add(self, question: int, reward: float) -> None:
        """Count a sample."""
        self.tried[question] += 1
        self.right[question] += reward == 1

    @property
    def mixed(self) -> int:
        """How many questions have right and wrong samples.

        Only these carry a signal for methods that compare the samples of a question, such as
        GRPO: where all are alike, every advantage is 0.
        """
        return sum(0 < self.right[question] < tried for question, tried in self.tried.items())

    def pass_at_k(self) -> tuple[KEstimate, ...]:
        """Estimate pass@k for each k up to the number of samples."""
        kinds = Counter((tried, self.right[question]) for question, tried in self.tried.items())
        return curve(kinds, self.samples)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "samples_per_question": self.samples,
            "questions": len(self.tried),
            "mixed_groups": self.mixed,
            "pass_at_k": {str(each.k): each.value for each in self.pass_at_k()},
        }


@define(kw_only=True)
class DemoReport:
    """Sums of the results so far.

    Attributes:
        rollouts: How many were asked for.
        outcomes: How many ended in which status.
        rewards: The rewards so far, in the order of completion.
        latencies: Seconds from the request to the result, likewise.
        elapsed_sec: How long all of it took.
        problems: The messages of failures, and how often each came.
        completion_tokens: How many tokens the model wrote for the samples.
        groups: The samples of each question, where a question has several; else ``None``.
    """

    rollouts: int
    outcomes: Counter[RolloutStatus] = field(factory=Counter)
    rewards: list[float] = field(factory=list)
    latencies: list[float] = field(factory=list)
    elapsed_sec: float = 0.0
    problems: Counter[str] = field(factory=Counter)
    completion_tokens: int = 0
    groups: Groups | None = None

    def add(self, result: RolloutResultResponse, latency_sec: float, question: int = 0) -> None:
        """Count a terminal result of the question with that number."""
        self.outcomes[result.status] += 1
        self.latencies.append(latency_sec)
        if result.sample is not None:
            self.completion_tokens += int(result.sample.metrics.get("completion_tokens", 0))
        if result.sample is not None and result.sample.reward is not None:
            self.rewards.append(result.sample.reward)
            if self.groups is not None:
                self.groups.add(question, result.sample.reward)
        if result.status is not RolloutStatus.SUCCESS:
            category = "" if result.err_category is None else f"{result.err_category.value}: "
            self.problems[f"{category}{result.err_message or result.status.value}"] += 1

    @property
    def finished(self) -> int:
        """How many rollouts have ended."""
        return self.outcomes.total()

    @property
    def mean_reward(self) -> float | None:
        """The mean of the rewards, ``None`` without one."""
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def all_succeeded(self) -> bool:
        """Whether every rollout ran to its end; a reward of 0 is not a failure."""
        return self.outcomes[RolloutStatus.SUCCESS] == self.rollouts

    @property
    def right(self) -> int:
        """How many answers were right."""
        return sum(reward == 1 for reward in self.rewards)

    def latency_sec(self, share: float) -> float | None:
        """Return a percentile of the latencies, ``None`` without one; *share* is from 0 to 1."""
        return percentile(sorted(self.latencies), share) if self.latencies else None

    def per_sec(self, count: int) -> float | None:
        """Return how many of *count* came per second of the run."""
        return count / self.elapsed_sec if self.elapsed_sec > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "rollouts": self.rollouts,
            "success": self.outcomes[RolloutStatus.SUCCESS],
            "failure": self.outcomes[RolloutStatus.FAILURE],
            "cancelled": self.outcomes[RolloutStatus.CANCELLED],
            "mean_reward": self.mean_reward,
            "elapsed_sec": self.elapsed_sec,
            "latency_p50_sec": self.latency_sec(0.5),
            "latency_p95_sec": self.latency_sec(0.95),
            "rollouts_per_sec": self.per_sec(self.finished),
        }
