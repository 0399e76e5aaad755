"""Errors of sandboxes."""

from __future__ import annotations

from rollout.errors import RolloutError

__all__ = [
    "CommandTimeoutError",
    "NamespaceError",
    "NamespaceStartError",
    "TransferError",
]


class NamespaceError(RolloutError, RuntimeError):
    """A sandbox could not do what it was asked for, or has ended."""


class NamespaceStartError(NamespaceError):
    """A sandbox could not be started; the message says what the system lacks."""


class CommandTimeoutError(NamespaceError):
    """A command ran past its time and was killed, with all that it had started.

    Not a `TimeoutError`, which Harbor would take for the timeout of the whole phase.
    """


class TransferError(NamespaceError):
    """A file or folder could not be copied into the sandbox or out of it."""
