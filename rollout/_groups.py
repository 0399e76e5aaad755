"""Errors as callers are promised them: plain ones out of groups, and one for each caller."""

from __future__ import annotations

import copy

import trio

__all__ = ["copy_error", "sole_error"]


def sole_error(error: BaseException) -> BaseException:
    """Return the one real error of a group, or the group itself if it holds several.

    Cancellations do not count: a nursery adds them while it ends the siblings of what failed.
    """
    while isinstance(error, BaseExceptionGroup):
        _, real = error.split(trio.Cancelled)
        if real is None or len(real.exceptions) != 1:
            return error if real is None else real
        error = real.exceptions[0]
    return error


def copy_error(error: Exception) -> Exception:
    """Copy an error, so that its awaiters share no traceback, no context and no notes."""
    try:
        twin = copy.copy(error)
    except Exception:  # noqa: BLE001 - a transport of the user's own may raise what it likes
        return error
    if type(twin) is not type(error) or twin is error:
        return error
    twin.__cause__ = error.__cause__
    twin.__context__ = error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    if hasattr(error, "__notes__"):
        twin.__notes__ = list(error.__notes__)
    return twin
