"""What the model calls of a rollout have used, and which limit that reaches. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import define, field, frozen

from rollout._checks import check_number, setting
from rollout.trajectory.totals import read_usage
from rollout.types.limits import Limits

__all__ = ["Price", "Used", "price_of", "tighter"]

_MILLION = 1_000_000
_price = setting(check_number, least=0)


@frozen(kw_only=True)
class Price:
    """What a model costs, in US dollars for a million tokens.

    Attributes:
        prompt: Tokens of prompts.
        completion: Tokens of completions.
        cached_prompt: Tokens of prompts that the endpoint had in its cache; ``None``: the same.

    Raises:
        InvalidFieldError: A price is negative or not a number.
    """

    prompt: float = field(validator=_price)
    completion: float = field(validator=_price)
    cached_prompt: float | None = field(
        default=None, validator=setting(check_number, least=0, none=True)
    )


def price_of(prices: Mapping[str, Price], model: str) -> Price | None:
    """Return the price of a model: by its name, else by ``"*"``."""
    return prices.get(model, prices.get("*"))


def tighter(ceiling: Limits, asked: Limits) -> Limits:
    """Return the lower one of each limit."""
    pairs = ((name, value, getattr(asked, name)) for name, value in attrs.asdict(ceiling).items())
    return Limits(
        **{
            name: min((each for each in (one, other) if each is not None), default=None)
            for name, one, other in pairs
        }
    )


@define
class Used:
    """What has been used so far; tokens are those that the endpoint has said."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0

    @property
    def total_tokens(self) -> int:
        """Tokens of prompts and completions."""
        return self.prompt_tokens + self.completion_tokens

    def add(self, usage: dict[str, Any], price: Price | None) -> None:
        """Add the usage of one call.

        Args:
            usage: As the endpoint said it.
            price: The model's; without one it costs what the endpoint says, if it does.
        """
        counted = read_usage(usage)
        prompt, completion = (
            counted.get(name, 0) for name in ("prompt_tokens", "completion_tokens")
        )
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        if price is None:
            self.cost_usd += counted.get("cost_usd", 0.0)
            return
        cached = min(counted.get("cached_tokens", 0), prompt)
        for_cached = price.prompt if price.cached_prompt is None else price.cached_prompt
        dollars = (prompt - cached) * price.prompt + cached * for_cached
        self.cost_usd += (dollars + completion * price.completion) / _MILLION

    def reached(self, limits: Limits) -> str | None:
        """Return the name of the first limit that is reached."""
        for name, limit in attrs.asdict(limits).items():
            if limit is not None and getattr(self, name) >= limit:
                return name
        return None
