"""API keys of a rollout server, as both sides check them."""

from __future__ import annotations

from rollout.errors import InvalidFieldError

__all__ = ["check_api_key"]


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
