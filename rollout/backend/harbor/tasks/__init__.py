"""Which Harbor task a rollout runs, and how it gets to this machine."""

from __future__ import annotations

__all__: list[str] = []
