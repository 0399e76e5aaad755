"""What pydantic has to say against a value, without the value. Needs no pydantic."""

from __future__ import annotations

__all__ = ["problems_of"]


def problems_of(error: ValueError) -> str:
    """Return what is wrong, part by part, out of a ``pydantic.ValidationError``.

    The values stay out of it, since one may be a secret. Another `ValueError` says what it says.
    """
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    return "; ".join(
        ": ".join(filter(None, (".".join(map(str, each["loc"])), each["msg"])))
        for each in errors(include_input=False, include_url=False)
    )
