"""Plain errors out of exception groups, where a caller is promised one."""

from __future__ import annotations

import trio

__all__ = ["sole_error"]


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
