"""Limits of the model calls of a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import field, frozen

from rollout._checks import check_number, check_whole, setting
from rollout.errors import InvalidFieldError
from rollout.types._fields import rule

__all__ = ["Limits", "limits_object"]

_count = setting(check_whole, least=0, none=True)


@frozen(kw_only=True)
class Limits:
    """How much a rollout may ask of its model; ``None`` for as much as it likes.

    A call that is under way when a limit is reached comes to its end; the next one is refused.

    Attributes:
        calls: Calls, retries included.
        prompt_tokens: Tokens of prompts, as the endpoint counts them.
        completion_tokens: Tokens of completions.
        total_tokens: Both together.
        cost_usd: What they cost by the gateway's prices, in US dollars.

    Raises:
        InvalidFieldError: A limit is negative or not a number.
    """

    calls: int | None = field(default=None, validator=_count)
    prompt_tokens: int | None = field(default=None, validator=_count)
    completion_tokens: int | None = field(default=None, validator=_count)
    total_tokens: int | None = field(default=None, validator=_count)
    cost_usd: float | None = field(
        default=None, validator=setting(check_number, least=0, none=True)
    )

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Limits:
        """Read the limits that a request names.

        Raises:
            InvalidFieldError: A limit is refused, or has another name.
        """
        names = list(attrs.fields_dict(cls))
        for name in given or ():
            if name not in names:
                raise InvalidFieldError(name, f"is not a limit; those are {', '.join(names)}")
        return cls(**(given or {}))


@rule()
def limits_object(_: Any, attribute: Any, value: Any) -> None:
    """Validate an object of limits, or ``None``."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise InvalidFieldError(attribute.name, "must be an object or null", kind="type_error")
    try:
        Limits.of(value)
    except InvalidFieldError as error:
        raise InvalidFieldError(f"{attribute.name}.{error.field}", error.reason) from None
