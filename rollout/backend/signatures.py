"""The parameters of a function of the user's, whatever its annotations name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["signature_of"]


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Read how *function* is called.

    From Python 3.14 on, annotations are evaluated when someone asks for them. Those that name
    what only a type checker imports stay unresolved here, instead of raising a `NameError`.

    Raises:
        TypeError: It cannot be called.
        ValueError: It has no signature that can be read, like some functions that are not
            written in Python.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format  # noqa: PLC0415

        signature = inspect.signature(function, annotation_format=Format.FORWARDREF)
    else:
        signature = inspect.signature(function)
    return signature
