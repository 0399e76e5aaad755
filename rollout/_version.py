"""The version of this package."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

__all__ = ["package_version"]


@cache
def package_version() -> str:
    """Return the version of this package, ``unknown`` where it is not installed."""
    try:
        return version("trio-rollout")
    except PackageNotFoundError:
        return "unknown"
