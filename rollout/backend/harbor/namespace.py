"""A Harbor environment that needs no Docker: trials in Linux namespaces on this machine.

Point Harbor to it with ``import_path="rollout.backend.harbor.namespace:NamespaceEnvironment"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.errors import BackendConfigurationError
from rollout.sandbox.errors import (
    CommandTimeoutError,
    NamespaceError,
    NamespaceStartError,
    TransferError,
)

__all__ = [
    "CommandTimeoutError",
    "NamespaceEnvironment",
    "NamespaceError",
    "NamespaceStartError",
    "TransferError",
]

if TYPE_CHECKING:
    from rollout.backend.harbor._environment import NamespaceEnvironment
else:
    try:
        from rollout.backend.harbor._environment import NamespaceEnvironment
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "harbor":
            raise

        class NamespaceEnvironment:
            """Stands in for the environment where Harbor is not installed."""

            def __init__(self, *_args: Any, **_kwargs: Any) -> None:
                raise BackendConfigurationError(
                    "NamespaceEnvironment needs Harbor: pip install 'trio-rollout[harbor]'"
                )
