"""How far a run is."""

from __future__ import annotations

from collections import Counter

from attrs import define, field

from rollout.evaluation.records import AttemptOutcome, AttemptRecord

__all__ = ["EvaluationProgress"]


@define
class EvaluationProgress:
    """How far a run is, all processes that worked on it together.

    Attributes:
        total: How many attempts it has in all.
        resumed: How many of them had ended before this process took over.
        in_flight: How many run now.
        outcomes: How many ended how; `cancelled` ones run again when the run is resumed.
        rewards: How many have a reward.
        reward_sum: The sum of the rewards.
        passed: How many passed.
        retries: How many rollouts were tried again for their setup, in this process.
    """

    total: int
    resumed: int = 0
    in_flight: int = 0
    outcomes: Counter[AttemptOutcome] = field(factory=Counter)
    rewards: int = 0
    reward_sum: float = 0.0
    passed: int = 0
    retries: int = 0

    @property
    def settled(self) -> int:
        """How many attempts have ended and stay so."""
        return self.outcomes.total() - self.outcomes[AttemptOutcome.CANCELLED]

    @property
    def mean_reward(self) -> float | None:
        """The mean of the rewards so far, ``None`` without one."""
        return self.reward_sum / self.rewards if self.rewards else None

    def add(self, record: AttemptRecord) -> None:
        """Count the record of an attempt."""
        self.outcomes[record.outcome] += 1
        self.passed += record.passed
        if record.reward is not None:
            self.rewards += 1
            self.reward_sum += record.reward
