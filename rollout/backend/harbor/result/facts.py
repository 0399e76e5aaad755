"""The facts of a trial in plain types, read from Harbor's result.

Everything that looks at Harbor's own objects is in one function, `facts_of`, so that the
rules in `rollout.backend.harbor.result.outcomes` are tested without Harbor, and a change of
Harbor is met in one place.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from attrs import field, frozen

from rollout._json.fit import plain_number

__all__ = ["TrialError", "TrialFacts", "facts_of"]

USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_usd")
_METRICS = {
    "prompt_tokens": "input_tokens",
    "cached_tokens": "cached_tokens",
    "completion_tokens": "output_tokens",
    "cost_usd": "cost_usd",
}
"""The usage's names in a sample's metrics, by which the official package has them."""


@frozen(kw_only=True)
class TrialError:
    """An exception that a trial recorded.

    Attributes:
        type: The bare name of its class.
        message: Its text; it may hold secrets.
        in_verifier: Whether it came while the verifier ran, rather than before.
        exception: The exception itself, if it went through code of ours: Harbor keeps its name
            and texts alone.
    """

    type: str
    message: str = ""
    in_verifier: bool = False
    exception: BaseException | None = field(default=None, repr=False)


@frozen(kw_only=True)
class TrialFacts:
    """What a trial left behind.

    Attributes:
        errors: The exceptions that it recorded, the trial's own first, then those of steps.
        rewards: What the verifier measured, by channel; ``None`` if there is nothing.
        usage: What the model calls took: ``prompt_tokens``, cached ones included,
            ``cached_tokens``, ``completion_tokens`` and ``cost_usd``; ``None`` if not counted.
        agent: The agent's name, and its version.
        timings: Seconds by phase: ``environment_setup``, ``agent_setup``,
            ``agent_execution``, ``verifier``.
    """

    errors: tuple[TrialError, ...] = ()
    rewards: dict[str, Any] | None = None
    usage: dict[str, float | None] = field(factory=dict)
    agent: tuple[str, str] | None = None
    timings: dict[str, float] = field(factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """The usage as metrics of a sample, without what was not counted."""
        found = ((name, self.usage.get(key)) for key, name in _METRICS.items())
        return {name: value for name, value in found if value is not None}


def facts_of(result: Any, raised: Iterable[BaseException] = ()) -> TrialFacts:
    """Read a ``harbor.models.trial.result.TrialResult``.

    Args:
        result: The result.
        raised: The exceptions that went through code of ours.
    """
    steps = list(getattr(result, "step_results", None) or [])
    *tokens, cost = result.compute_token_cost_totals()
    verified = result.verifier_result
    info = result.agent_info
    by_text = {(type(each).__name__, str(each)): each for each in raised}
    return TrialFacts(
        errors=tuple(
            TrialError(
                type=recorded.exception_type,
                message=recorded.exception_message,
                in_verifier=_in_verifier(part),
                exception=by_text.get((recorded.exception_type, recorded.exception_message)),
            )
            for part in (result, *steps)
            if (recorded := part.exception_info) is not None
        ),
        rewards=None if verified is None or not verified.rewards else dict(verified.rewards),
        usage=dict(zip(USAGE, (*tokens, plain_number(cost)), strict=True)),
        agent=None if info is None else (str(info.name), str(info.version)),
        timings={
            name: (timing.finished_at - timing.started_at).total_seconds()
            for name in ("environment_setup", "agent_setup", "agent_execution", "verifier")
            if (timing := getattr(result, name, None)) is not None
            and timing.started_at is not None
            and timing.finished_at is not None
        },
    )


def _in_verifier(part: Any) -> bool:
    """Whether the error of a trial, or of a step, came after its verifier had started."""
    verifier = part.verifier
    if verifier is None or verifier.started_at is None:
        return False
    return _utc(part.exception_info.occurred_at) >= _utc(verifier.started_at)


def _utc(moment: datetime) -> datetime:
    """Return a time that Harbor noted; its older versions note local ones without a zone."""
    return moment.astimezone(UTC)
