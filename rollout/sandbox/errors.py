"""What goes wrong with a sandbox of namespaces."""

from __future__ import annotations

from rollout.errors import RolloutError

__all__ = [
    "CommandTimeoutError",
    "NamespaceError",
    "NamespaceStartError",
    "TransferError",
]


class NamespaceError(RolloutError, RuntimeError):
    """A sandbox of namespaces could not do what it was asked for, or has ended."""


class NamespaceStartError(NamespaceError):
    """The namespaces could not be set up; the message says what the system lacks."""


class CommandTimeoutError(NamespaceError):
    """A command ran past its time and was killed, with all that it had started.

    Deliberately no `TimeoutError`: Harbor would take that for the timeout of the whole phase.
    """


class TransferError(NamespaceError):
    """A file or folder could not be copied into the sandbox or out of it."""
