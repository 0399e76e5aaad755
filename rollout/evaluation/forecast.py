"""What a run is about to take: rollouts, and by the attempts on record tokens and cost."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from attrs import frozen

from rollout.errors import EvaluationError
from rollout.evaluation.config import EvaluationConfig, PricesConfig
from rollout.evaluation.folder.journal import EVENTS, final_records

__all__ = ["Forecast", "forecast_run"]

_PRICED_TOKENS = 1_000_000


@frozen(kw_only=True)
class Forecast:
    """What a run is expected to take from here on, before it starts.

    Attributes:
        rollouts: How many rollouts it has left; fewer run if it stops early, more if setups are
            tried again.
        attempts: How many attempts on record have counts of their tokens; the forecast of tokens
            is their mean.
        prompt_tokens: Tokens of all prompts; ``None`` without such attempts.
        completion_tokens: Tokens of all completions; ``None`` without such attempts.
        cost: Their cost by the config's prices; ``None`` without tokens or prices.
        currency: The currency of the prices, if the config names one.
    """

    rollouts: int
    attempts: int = 0
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    cost: float | None = None
    currency: str | None = None


def forecast_run(config: EvaluationConfig, folder: Path, rollouts: int) -> Forecast:
    """Forecast a run by the attempts in its folder. Blocking.

    Args:
        config: The run's configuration.
        folder: Its folder; there may be no run in it yet, or one that is about to be replaced.
        rollouts: How many rollouts it has left.
    """
    counts = _token_counts(folder)
    if not counts:
        return Forecast(rollouts=rollouts)
    prompt, completion = (rollouts * fmean(each) for each in zip(*counts, strict=True))
    return Forecast(
        rollouts=rollouts,
        attempts=len(counts),
        prompt_tokens=prompt,
        completion_tokens=completion,
        cost=None if config.prices is None else _cost(config.prices, prompt, completion),
        currency=None if config.prices is None else config.prices.currency,
    )


def _token_counts(folder: Path) -> list[tuple[int, int]]:
    if not (folder / EVENTS).exists():
        return []
    try:
        return [
            (record.prompt_tokens, record.completion_tokens)
            for record in final_records(folder)
            if record.prompt_tokens is not None and record.completion_tokens is not None
        ]
    except EvaluationError:
        return []  # a damaged run is about to be replaced, or refused where it goes on


def _cost(prices: PricesConfig, prompt: float, completion: float) -> float:
    return (prompt * prices.prompt + completion * prices.completion) / _PRICED_TOKENS
