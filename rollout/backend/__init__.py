"""Where workflows run."""

from rollout.backend.base import ExecutionBackend
from rollout.backend.local import LocalBackend

__all__ = ["ExecutionBackend", "LocalBackend"]
