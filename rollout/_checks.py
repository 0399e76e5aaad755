"""Checks of numbers, flags, choices and API keys, mostly those of settings.

Nothing is coerced: ``True`` and ``"5"`` are not numbers, ``1`` and ``"false"`` not flags. A message
names the setting and the values that it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any

from rollout.errors import BackendConfigurationError, InvalidFieldError

__all__ = [
    "backend_settings",
    "check_api_key",
    "check_choice",
    "check_flag",
    "check_number",
    "check_whole",
    "is_finite",
    "is_finite_number",
    "is_variable_name",
    "is_whole_from_one",
    "setting",
]


def is_finite(value: float) -> bool:
    """Whether a number fits a float, and is neither NaN nor infinite."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_variable_name(text: str) -> bool:
    """Whether a text can be the name of an environment variable, and is not likely to be a key."""
    return text.isascii() and text.isidentifier()


def is_finite_number(value: object) -> bool:
    """Whether a value is a finite int or float, and not a boolean."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and is_finite(value)


def is_whole_from_one(value: object) -> bool:
    """Whether a value is a whole number from 1 up, and not a boolean."""
    return not isinstance(value, bool) and isinstance(value, int) and value >= 1


def check_whole(name: str, value: Any, *, least: int | None = 1, none: bool = False) -> None:
    """Check a whole number.

    Args:
        name: The setting's name.
        value: Its value.
        least: The smallest number that it takes, if there is one.
        none: Whether it takes ``None`` too.

    Raises:
        InvalidFieldError: It is anything else.
    """
    if none and value is None:
        return
    fits = isinstance(value, int) and not isinstance(value, bool)
    if not fits or (least is not None and value < least):
        bound = "" if least is None else f" from {least} up"
        raise InvalidFieldError(name, f"must be a whole number{bound}{_or_none(none)}")


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    none: bool = False,
) -> None:
    """Check a finite number, such as one of seconds.

    Args:
        name: The setting's name.
        value: Its value.
        least: The smallest number that it takes.
        above: A number that it has to exceed.
        none: Whether it takes ``None`` too.

    Raises:
        InvalidFieldError: It is anything else.
    """
    if none and value is None:
        return
    fits = is_finite_number(value)
    bound = ""
    if least is not None:
        fits, bound = fits and value >= least, f" from {least:g} up"
    if above is not None:
        fits, bound = fits and value > above, f" above {above:g}"
    if not fits:
        raise InvalidFieldError(name, f"must be a finite number{bound}{_or_none(none)}")


def check_flag(name: str, value: Any, *, none: bool = False) -> None:
    """Check a boolean, or ``None`` if *none* says that it will do.

    Raises:
        InvalidFieldError: It is anything else.
    """
    if not isinstance(value, bool) and not (none and value is None):
        raise InvalidFieldError(name, f"must be True or False{_or_none(none)}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Check that a setting is one of a few strings.

    Raises:
        InvalidFieldError: It is anything else.
    """
    if not isinstance(value, str) or value not in choices:
        raise InvalidFieldError(name, f"must be one of {', '.join(map(repr, choices))}")


def check_api_key(api_key: str | None) -> str | None:
    """Return the key if it can be sent as a header.

    Raises:
        InvalidFieldError: It is empty or blank, or has surrounding white space, a control
            character or a character beyond ASCII, none of which arrive as they were sent.
    """
    if api_key is None:
        return None
    if not isinstance(api_key, str):
        raise InvalidFieldError("api_key", "must be a string or None", kind="type_error")
    if not api_key.strip():
        raise InvalidFieldError("api_key", "must not be empty when it is given")
    if api_key != api_key.strip():
        raise InvalidFieldError("api_key", "has white space around it (a line break, perhaps?)")
    if not api_key.isascii() or not api_key.isprintable():
        raise InvalidFieldError("api_key", "must consist of printable ASCII characters")
    return api_key


def setting(check: Callable[..., None], **rule: Any) -> Callable[[Any, Any, Any], None]:
    """Return the attrs validator that checks a field in this way."""

    def validate(_: Any, attribute: Any, value: Any) -> None:
        check(attribute.name, value, **rule)

    return validate


@contextmanager
def backend_settings() -> Generator[None, None, None]:
    """Raise what these checks refuse as `BackendConfigurationError`."""
    try:
        yield
    except InvalidFieldError as error:
        raise BackendConfigurationError(str(error)) from None


def _or_none(none: bool) -> str:
    return ", or None" if none else ""
