"""Check that Harbor is installed, and format its validation errors. Imports neither."""

from __future__ import annotations

import importlib.util
import os
import sys

from rollout.errors import BackendConfigurationError

__all__ = ["has_harbor", "problems_of", "require_harbor"]

_FROM_PYTHON = (3, 12)
_INSTALL = 'pip install "trio-rollout[harbor]"'


def has_harbor() -> bool:
    """Whether Harbor can be imported, without importing it.

    A folder that happens to be called ``harbor`` on Python's path is not taken for it.
    """
    spec = importlib.util.find_spec("harbor")
    return spec is not None and spec.origin is not None


def require_harbor() -> None:
    """Check that Harbor can be imported, without importing it, and keep it off the network.

    Raises:
        BackendConfigurationError: It is not installed, or Python is too old for it.
    """
    if sys.version_info < _FROM_PYTHON:
        raise BackendConfigurationError(
            f"HarborBackend needs Python 3.12 or newer; this is {sys.version.split()[0]}"
        )
    if not has_harbor():
        raise BackendConfigurationError(f"HarborBackend needs Harbor: {_INSTALL}")
    # Its model library would otherwise fetch a list of prices when it is imported.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


def problems_of(error: ValueError) -> str:
    """Return the problems of a ``pydantic.ValidationError`` in one line.

    The values stay out of it, since one may be a secret. Another `ValueError` says what it says.
    """
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    return "; ".join(
        ": ".join(filter(None, (".".join(map(str, each["loc"])), each["msg"])))
        for each in errors(include_input=False, include_url=False)
    )
