"""What came of a run of the demo."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from attrs import define, field

from rollout.demo.groups import Groups
from rollout.types import RolloutResultResponse, RolloutStatus

__all__ = ["DemoReport", "percentile"]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which *share* of *values* lie, interpolated; ``None`` of none."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@define(kw_only=True)
class DemoReport:
    """Adds up results.

    Attributes:
        rollouts: How many were asked for.
        outcomes: How many ended in which status.
        rewards: The rewards so far, in the order of completion.
        latencies: Seconds from the request to the result, likewise.
        elapsed_sec: How long all of it took.
        problems: What failures said, and how often.
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

    def add(self, result: RolloutResultResponse, latency_sec: float, group: int = 0) -> None:
        """Count a terminal result; *group* numbers its question."""
        self.outcomes[result.status] += 1
        self.latencies.append(latency_sec)
        if result.sample is not None:
            self.completion_tokens += int(result.sample.metrics.get("completion_tokens", 0))
        if result.sample is not None and result.sample.reward is not None:
            self.rewards.append(result.sample.reward)
            if self.groups is not None:
                self.groups.add(group, result.sample.reward)
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
        """Whether every rollout ran to its end; a reward of 0 is no failure."""
        return self.outcomes[RolloutStatus.SUCCESS] == self.rollouts

    @property
    def rollouts_per_sec(self) -> float | None:
        """How many rollouts ended per second."""
        return self.finished / self.elapsed_sec if self.elapsed_sec > 0 else None

    @property
    def right(self) -> int:
        """How many answers were right."""
        return sum(reward == 1 for reward in self.rewards)

    @property
    def tokens_per_sec(self) -> float | None:
        """How many tokens the model wrote per second, for all rollouts together."""
        return self.completion_tokens / self.elapsed_sec if self.elapsed_sec > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "rollouts": self.rollouts,
            "success": self.outcomes[RolloutStatus.SUCCESS],
            "failure": self.outcomes[RolloutStatus.FAILURE],
            "cancelled": self.outcomes[RolloutStatus.CANCELLED],
            "mean_reward": self.mean_reward,
            "elapsed_sec": self.elapsed_sec,
            "latency_p50_sec": percentile(self.latencies, 0.5),
            "latency_p95_sec": percentile(self.latencies, 0.95),
            "rollouts_per_sec": self.rollouts_per_sec,
        }
