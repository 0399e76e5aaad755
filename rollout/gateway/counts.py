"""What is counted of the calls of a gateway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from attrs import define, field

from rollout._telemetry.counts import CALL_SEC, Histogram
from rollout.integrations.recording.calls import Call
from rollout.trajectory.totals import read_usage

__all__ = ["ModelCounts"]

_TOKENS = {"prompt_tokens": "input", "completion_tokens": "output"}


@define
class ModelCounts:
    """How many calls there were, and what they used.

    Attributes:
        begun: The calls of agents that were not refused for a limit.
        calls: The calls to endpoints by their end: ``complete``, ``interrupted`` or ``failed``; and
            those of agents that were ``refused`` for a limit.
        retries: How often calls were sent again.
        wait_sec: How long calls have waited for a place or a retry.
        tokens: The tokens that endpoints have named: ``input`` and ``output``.
        sec: The seconds from sending calls to the ends of their answers.
    """

    begun: int = 0
    calls: Counter[str] = field(factory=Counter)
    retries: int = 0
    wait_sec: float = 0.0
    tokens: Counter[str] = field(factory=Counter)
    sec: Histogram = field(factory=lambda: Histogram(CALL_SEC))

    def add(self, call: Call | None, outcome: str, seconds: float) -> None:
        """Count a call that was sent.

        Args:
            call: Its record; ``None`` if the endpoint has not answered.
            outcome: How it ended, then.
            seconds: How long it took.
        """
        self.calls[outcome if call is None else call.outcome] += 1
        self.sec.add(seconds)
        usage = {} if call is None or call.usage is None else read_usage(call.usage)
        for name, kind in _TOKENS.items():
            self.tokens[kind] += usage.get(name, 0)

    def state(self) -> dict[str, Any]:
        """Return what there is to see of it while its server runs, as JSON."""
        sent = sum(self.sec.counts)
        return {
            "answers": dict(self.calls),
            "tokens": dict(self.tokens),
            "latency_sec": round(self.sec.total / sent, 3) if sent else None,
        }

    @classmethod
    def of_flat(cls, numbers: Mapping[str, float]) -> ModelCounts | None:
        """Return the sum of those whose numbers these are; ``None`` if they are of none."""
        if "model_retries" not in numbers:
            return None
        counts = cls(sec=Histogram.of_flat(CALL_SEC, "model_call_sec", numbers))
        for name, count in numbers.items():
            kind, _, label = name.partition(".")
            if kind == "model_calls":
                counts.calls[label] = int(count)
            elif kind == "model_tokens":
                counts.tokens[label] = int(count)
        return counts

    def flat(self) -> dict[str, float]:
        """Return it as numbers by name, which can be added to those of other gateways."""
        return {
            **{f"model_calls.{outcome}": count for outcome, count in self.calls.items()},
            **{f"model_tokens.{kind}": count for kind, count in self.tokens.items()},
            **self.sec.flat("model_call_sec"),
            "model_retries": self.retries,
            "model_wait_sec": self.wait_sec,
        }
