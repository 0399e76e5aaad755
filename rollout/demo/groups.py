"""Several samples of one question: what a policy could learn from, and pass@k."""

from __future__ import annotations

from collections import Counter
from typing import Any

from attrs import define, field

from rollout.evaluation.estimators import KEstimate, curve

__all__ = ["Groups"]


@define
class Groups:
    """Adds up rewards by question; a reward of 1 is right, any other one wrong.

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
